"""The documentation is true: its Python runs and prints what it shows, its links lead somewhere, its words exist.

In a page, a block marked `python` is run, top to bottom with one state per page; a comment `<!-- setup ... -->` runs
too, unseen by the reader. A block marked `text` or `py` right after a `python` block is what that block prints: `...`
stands for anything, and comments that begin with `#:` are the page's own.
"""

import contextlib
import doctest
import io
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.scripts import load_script, run_script, written_between_marks

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/**/*.md")]
)
SOURCE_FOLDERS = ("rkgb", "rockmate", "solvers", "tests", "docs", "examples", "benchmarks")
BLOCK = re.compile(
    r"^(?:```(?P<language>\w*)|<!-- (?P<setup>setup))\n(?P<text>.*?)^(?:```|-->)$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\((?!https?://)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)]+))?\)")
WORD = re.compile(r"`([A-Za-z_][A-Za-z0-9_.]*)`")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, or a hidden setup."""

    language: str
    text: str
    line: int  # of its first line, in the page
    start: int  # in characters: of its opening fence …
    end: int  # … and of what follows its closing one

    @property
    def runs(self) -> bool:
        return self.language in ("python", "setup")


def blocks_of(text: str) -> list[Block]:
    return [
        Block(
            match["language"] or match["setup"] or "",
            match["text"],
            text.count("\n", 0, match.start("text")) + 1,
            match.start(),
            match.end(),
        )
        for match in BLOCK.finditer(text)
    ]


def runs_of(text: str) -> Iterator[tuple[Block, str | None]]:
    """Blocks to run, each with what it should print, None where the page does not say."""
    blocks = blocks_of(text)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.runs:
            shown = None
            if following is not None and following.language in ("text", "py"):
                between = re.sub(r"<!--.*?-->", "", text[block.end : following.start])
                shown = following.text if not between.strip() else None
            yield block, shown


def run(block: Block, namespace: dict[str, Any]) -> str:
    """What the block prints. Its code calls itself example.py, so that the lines that it shows are its own."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.text, "example.py", "exec"), namespace)
    return printed.getvalue()


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.runs for block in blocks_of(page.read_text("utf-8")))], ids=name_of
)
def test_code_of_the_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ):  # a page may set its own
        _run_page(page)


def _run_page(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block, shown in runs_of(page.read_text("utf-8")):
        place = f"{name_of(page)}:{block.line}"
        try:
            printed = run(block, namespace)
        except Exception as error:
            error.add_note(f"in the block at {place}")
            raise
        if shown is not None:
            expected = re.sub(r" *#: .*$", "", shown, flags=re.MULTILINE)
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert doctest.OutputChecker().check_output(expected, printed, flags), (
                f"{place} does not print what the page shows, but:\n{printed}"
            )


def slugs_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as Markdown viewers make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    broken = []
    for match in LINK.finditer(page.read_text("utf-8")):
        target = page.parent / match["path"] if match["path"] else page
        if not target.exists() or (match["anchor"] and match["anchor"] not in slugs_of(target)):
            broken.append(match[0])
    assert not broken, f"{name_of(page)}: {', '.join(broken)}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_words_of_the_page_are_words_of_the_code(page):
    """Every dotted part of a name in backquotes is a word, or the suffix of a word, of the code or of a path."""
    files = [file for folder in SOURCE_FOLDERS for file in (ROOT / folder).rglob("*.py") if file != Path(__file__)]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".gitignore"]
    known = set(re.findall(r"\w+", "\n".join(file.read_text("utf-8") for file in files)))
    known |= {part for file in files for part in re.findall(r"\w+", name_of(file))}
    text = page.read_text("utf-8")
    named = {part for word in WORD.findall(BLOCK.sub("", text)) for part in word.split(".")}
    unknown = {
        part for part in named - known if not (part.startswith("_") and any(word.endswith(part) for word in known))
    }
    assert not unknown, f"{name_of(page)} names what is not in the code: {', '.join(sorted(unknown))}"


# ---- scripts -----------------------------------------------------------------------------------------


def committed_results() -> list[Path]:
    """Result files that git knows; those of a run on this machine alone are nobody's documentation."""
    command = ["git", "ls-files", "-z", "--cached", "benchmarks/results"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    return [ROOT / name for name in listed.split("\0") if name.endswith(".json")]


def test_tables_are_those_of_the_committed_results():
    tables = load_script("docs/make_tables.py")
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    steps = [path for path in committed_results() if path.match("step-*.json")]
    names = {path.name: path for path in committed_results()}
    others = [names.get(name, Path("none")) for name in tables.SECTIONS]
    assert page == tables.with_tables(page, steps, *others), "run python docs/make_tables.py"


def test_the_page_of_peers_is_that_of_the_committed_results():
    tables = load_script("docs/make_tables.py")
    page = (ROOT / "docs" / "peers.md").read_text("utf-8")
    results = [path for path in committed_results() if path.match("peers-*.json")]
    assert page == tables.peers_page(page, results), "run python docs/make_tables.py"


@pytest.mark.parametrize("name", ["offload.md", "layouts.md"])
def test_a_short_table_is_that_of_the_stored_results(name):
    tables = load_script("docs/make_tables.py")
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    report = json.loads((ROOT / "benchmarks/results" / tables.SHORT[name][0]).read_text(encoding="utf-8"))
    assert page == tables.with_short_table(name, page, report), "run python docs/make_tables.py"


def test_a_table_shows_what_the_result_file_holds(tmp_path):
    contender = {
        "label": "rockmate 0.50",
        "budget_bytes": 200 << 20,
        "predicted_peak_bytes": 199 << 20,
        "measured_peak_bytes": 198 << 20,
        "largest_gradient_difference": 0.0,
        "median_ms": 1234.5,
        "time_ratio": 1.0987,
        "planning_s": 12.5,
        "solver": "rotor",
        "step_ms": [1234.5],
    }
    result = {
        "entry": "gpt2-demo",
        "circumstances": {
            "device": "cpu",
            "torch": "2.13.0",
            "threads": 2,
            "repeats": 11,
            "gpu": None,
            "code": "c0de123",
        },
        "contenders": [contender],
        "bars": [{"label": "rockmate 0.50", "limit": 1.15, "base": "eager", "ratio": 1.0987, "met": True}],
    }
    path = tmp_path / "step-gpt2-demo-cpu.json"
    path.write_text(json.dumps(result), encoding="utf-8")
    tables = load_script("docs/make_tables.py")
    page = written_between_marks(tables.BEGIN, tables.END, lambda text: tables.with_tables(text, [path]))
    sizes = ("200 MiB", "199 MiB", "198 MiB")
    told = ("gpt2-demo", "2.13.0", "code at c0de123", "rockmate 0.50", *sizes, "1.099 ×", "12.5 s")
    for part in told:
        assert part in page
    assert tables.with_tables(page, []).count("make bench") == 1


@pytest.mark.slow
def test_figures_are_drawn(tmp_path):
    script_options = ("--entry", "gpt2-tiny", "--budgets", "0.7", "0.5", "--rounds", "1", "--output", str(tmp_path))
    run_script("docs/make_figures.py", *script_options)
    assert [path.name for path in tmp_path.iterdir()] == ["memory_gpt2.png"]


def test_the_four_graphs_are_drawn_from_the_code_of_their_page(tmp_path):
    pictures = load_script("docs/make_graph_figures.py").draw_four_graphs(tmp_path)
    page = (ROOT / "docs" / "four_graphs.md").read_text("utf-8")
    assert [f"images/{picture.name}" for picture in pictures] == re.findall(r"\((images/\S+)\)", page)
    for picture in pictures:
        assert picture.stat().st_size > 10_000
        assert (ROOT / "docs" / "images" / picture.name).exists()


@pytest.mark.ci
def test_the_small_example_trains():
    text = run_script("examples/train_with_budget_string.py", "--budget", "600 KiB")
    assert "Plan(budget 600 KiB" in text
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]
    assert losses[-1] < losses[0]


def test_every_room_is_on_the_page_of_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rooms = [
        f"{folder.name}/"
        for package in ("rkgb", "rockmate", "solvers/rk_solvers")
        for folder in sorted((ROOT / package).iterdir())
        if folder.is_dir() and (folder / "__init__.py").exists()
    ]
    missing = [room for room in rooms if f"`{room}`" not in text]
    assert not missing, f"give them a row in docs/architecture.md: {', '.join(missing)}"
