"""The documentation's site is built without a warning, lists every public name, and asks nothing of the network."""

import dataclasses
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import rk_solvers
import rkgb
import rockmate
from rockmate import compat, distributed, plan_files, reports, zoo
from rockmate.compat import rotor
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (rockmate, rkgb, rk_solvers, plan_files, distributed, reports, zoo, rotor, rotor.models, compat)
WHOLE = re.MULTILINE | re.DOTALL
navigation = load_script("docs/site/navigation.py")


@pytest.fixture(scope="module")
def docstrings() -> ModuleType:
    pytest.importorskip("sphinx")
    return load_script("docs/site/docstrings.py")


def test_every_page_and_notebook_is_in_the_navigation():
    listed = [re.findall(r"</?(.+)>$", entry)[0] for page in navigation.TABLES.values() for entry in entries_of(page)]
    assert not (twice := repeated(listed)), f"listed twice: {twice}"
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb"), ROOT / "CHANGELOG.md"]
    pages += [ROOT / "solvers" / "README.md", ROOT / "benchmarks" / "README.md"]
    names = {page.relative_to(ROOT).with_suffix("").as_posix() for page in pages if "_build" not in page.parts}
    missing = names - set(listed) - {navigation.ALL_PAGES}
    assert not missing, f"give them a row in docs/index.md: {', '.join(sorted(missing))}"


def repeated(names: list[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def entries_of(page: str) -> list[str]:
    return [entry for _, entries in navigation.sections_of(page) for entry in entries]


def test_fields_of_records_are_explained_by_their_comments(docstrings):
    fields = {name: (kind, comment) for name, kind, comment in docstrings.commented_fields(rockmate.Plan)}
    assert fields["peak_bytes"] == ("int", "predicted")
    kind, comment = fields["measured_reserved_bytes"]
    assert kind == "int | None"
    assert comment.startswith("What CUDA's allocator held at most")  # the line above the field …
    assert comment.endswith("None on the CPU")  # … and the one beside it
    assert list(fields) == [field.name for field in dataclasses.fields(rockmate.Plan)]


def test_code_in_docstrings_is_marked_as_such(docstrings):
    lines = ["What it does.", "", "    x = 1", "    y = 2", "", "Args:", "    x: one", "", "        more of it"]
    marked = docstrings.with_literal_blocks(lines)
    assert marked == ["What it does.", "", "::", "", *lines[2:]]


def test_the_reference_has_every_public_name():
    listed = names_in_the_reference()
    assert not (twice := repeated(listed)), f"described twice: {twice}"
    described = {id(find(name)) for name in listed}
    missing = {
        f"{package.__name__}.{name}"
        for package in PACKAGES
        for name in package.__all__
        if id(getattr(package, name)) not in described
        if not isinstance(getattr(package, name), ModuleType)  # whose own names are what matters
    }
    assert not missing, f"put them on a page of docs/reference/: {', '.join(sorted(missing))}"


def test_what_the_reference_has_says_what_it_is():
    silent = []
    for name in names_in_the_reference():
        thing = find(name)
        if callable(thing):
            parts = vars(thing).items() if isinstance(thing, type) else ()
            methods = {f"{name}.{part}": value for part, value in parts if is_public_part(part, value)}
            silent += [place for place, value in {name: thing, **methods}.items() if not own_docstring(value)]
    assert not silent, f"without a docstring: {', '.join(silent)}"


def is_public_part(name: str, value: Any) -> bool:
    return not name.startswith("_") and isinstance(value, FunctionType | property | classmethod | staticmethod)


def own_docstring(thing: Any) -> str:
    """Not that of a parent class, nor the signature that a record without one is given."""
    if not isinstance(thing, type):
        return thing.__doc__ or ""
    text = vars(thing).get("__doc__") or ""
    return "" if text.startswith(f"{thing.__name__}(") else text


def names_in_the_reference() -> list[str]:
    names = []
    for page in sorted(ROOT.glob("docs/reference/*.md")):
        text = page.read_text("utf-8")
        names += re.findall(r"^\.\. auto(?!module)\w+:: (\S+)$", text, re.MULTILINE)
        for package, excluded in re.findall(r"^\.\. automodule:: (\S+)\n.*?:exclude-members: (.+?)$", text, WHOLE):
            own = importlib.import_module(package).__all__
            names += [f"{package}.{name}" for name in own if name not in excluded.split(", ")]
    return names


def find(name: str) -> Any:
    """The object of that dotted name, which a module has."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


# ---- the site ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, as `make docs` builds it; in a process of its own, as Sphinx changes its interpreter."""
    for package in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    [recipe] = re.findall(r"^\t\$\(BIN\)/python -m sphinx (.+) \S+$", makefile, re.MULTILINE)
    command = [sys.executable, "-m", "sphinx", *recipe.split(), "-d", str(folder / "doctrees"), str(folder / "html")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder / "html"


@pytest.mark.slow
def test_what_the_reference_pages_name_is_in_the_index_of_the_site(site):
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    found = {name for domain in inventory.data if domain.startswith("py:") for name in inventory.data[domain]}
    assert found >= set(names_in_the_reference())
    assert "rockmate.Plan.peak_bytes" in found  # a field, from its comment


@pytest.mark.slow
def test_names_on_pages_are_links_to_the_reference(site):
    page = (site / "docs" / "when_refused.html").read_text("utf-8")
    assert 'href="reference/rockmate.html#rockmate.BudgetTooSmall"' in page
    signatures = (site / "docs" / "reference" / "rockmate.html").read_text("utf-8")
    assert 'href="#rockmate.Plan"' in signatures  # of a property, whose type is that of another module
    assert 'href="rk_solvers.html#rk_solvers.Solver"' in signatures


class Resources(HTMLParser):
    """What a browser loads to show a page."""

    ATTRIBUTES = (("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "srcset"))

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.without_alternative: list[str] = []
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.loaded += [given[name] or "" for kind, name in self.ATTRIBUTES if kind == tag and name in given]
        if tag == "img" and not given.get("alt"):
            self.without_alternative.append(given.get("src") or "")


@pytest.mark.slow
def test_a_browser_needs_no_network_and_finds_every_file(site):
    pages = sorted(site.rglob("*.html"))
    assert site / "index.html" in pages
    assert site / "notebooks" / "first_steps.html" in pages
    for page in pages:
        for address in Resources(page).loaded:
            assert not re.match(r"(\w+:)?//", address), f"{page.name} loads {address}"
            if not address.startswith(("data:", "#")):
                assert (page.parent / re.split(r"[?#]", address)[0]).exists(), f"{page.name} lacks {address}"
    for sheet in site.rglob("*.css"):
        outside = re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\"')]+", sheet.read_text("utf-8"))
        assert not outside, f"{sheet.name} loads {outside}"


@pytest.mark.slow
def test_pictures_of_the_pages_say_what_they_show(site):
    for page in [site / "README.html", *site.glob("docs/**/*.html")]:
        assert not Resources(page).without_alternative, page.name
