"""Plans of small models, and a browser, for all tests of reports."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rockmate import Rockmate, zoo
from rockmate.plan_files import PlanFile
from tests.module.steps import FEW_ROUNDS
from tests.reports.synthetic import plan_file_of_layers

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HOSTILE = """</script><script>window.harmed = 1</script><img src=x onerror="window.harmed = 2"> "quoted" & 'more' $x$"""


@pytest.fixture(scope="session")
def planned() -> Rockmate:
    entry = zoo.get("gpt2-tiny")
    return Rockmate(entry.model, entry.sample, 0.6, loss=entry.loss, solver="greedy", limits=FEW_ROUNDS)


@pytest.fixture(scope="session")
def plan_file(planned: Rockmate) -> PlanFile:
    return planned.plan_file()


@pytest.fixture(scope="session")
def hostile_file() -> PlanFile:
    """Names that would be markup, script or formulas, if anything took them for such."""
    return plan_file_of_layers(12, model=HOSTILE)


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """Headless Chromium of the system. No longer than a module of tests: playwright's loop would be in others' way."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)} is on the path")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=options)
        yield found
        found.close()


@pytest.fixture
def page_of(browser, tmp_path):
    """Opens a file in a page that may not reach any network, and fails where it complains or tries."""
    complaints: list[str] = []
    contexts = []

    def open_page(path: Path, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))

        def guard(route):
            if route.request.url != path.as_uri():
                complaints.append(f"request: {route.request.url}")
                route.abort()
            else:
                route.continue_()

        context.route("**/*", guard)
        page.goto(path.as_uri())
        page.wait_for_selector("#chart svg")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints
