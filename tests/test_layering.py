"""The architecture as a test: who may import whom, what may run or print where, and how long things may get.

Only the text of the files is read, nothing is imported. Every failure names a file, a line and what to do.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOTS_OF_MODULES = (ROOT / "solvers", ROOT)  # the folders that are on the import path, innermost first
CODE_FOLDERS = ("rkgb", "solvers/rk_solvers", "rockmate", "tests", "examples", "benchmarks")
FIRST_PARTY = ("rkgb", "rk_solvers", "rockmate")

# Modules under the key import first-party modules only from under these; the longest matching key decides.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "rkgb": ("rkgb",),
    "rkgb.errors": (),
    "rk_solvers": ("rk_solvers",),
    "rockmate": ("rockmate", "rkgb", "rk_solvers"),
    "rockmate.memory": ("rockmate.memory", "rockmate.errors", "rockmate.units", "rkgb", "rk_solvers"),
    "rockmate.running": ("rockmate.running", "rockmate.errors", "rockmate.units", "rkgb", "rk_solvers"),
    "rockmate.planning": (
        "rockmate.planning",
        "rockmate.running",
        "rockmate.memory",
        "rockmate.plan",
        "rockmate.errors",
        "rockmate.units",
        "rkgb",
        "rk_solvers",
    ),
    "rockmate.plan_files": (
        "rockmate.plan_files",
        "rockmate.planning",
        "rockmate.running",
        "rockmate.memory",
        "rockmate.plan",
        "rockmate.errors",
        "rockmate.units",
        "rkgb",
        "rk_solvers",
    ),
    "rockmate.explanation": (),
    "rockmate.explain": (
        "rockmate.explanation",
        "rockmate.plan_files",
        "rockmate.planning",
        "rockmate.units",
        "rk_solvers",
    ),
    "rockmate.memory.peak": ("rkgb.measuring.memory",),
    "rockmate.rotor.models": ("rockmate.rotor.models", "rockmate.zoo"),
    "rockmate.reports": (
        "rockmate.reports",
        "rockmate.explain",
        "rockmate.explanation",
        "rockmate.plan_files",
        "rockmate.running",
        "rockmate.planning",
        "rockmate.memory",
        "rockmate.plan",
        "rockmate.errors",
        "rockmate.units",
        "rkgb",
        "rk_solvers",
    ),
    "rockmate.reports.comparison": ("rockmate.units",),
    "rockmate.units": (),
    "rockmate.zoo": ("rockmate.zoo",),
}
# Modules under the key import, of all third-party packages, none of these …
NO_THIRD_PARTY: dict[str, tuple[str, ...]] = {"rk_solvers": ("torch",), "rockmate.units": ("torch",)}
# … or none but these.
ONLY_THIRD_PARTY: dict[str, tuple[str, ...]] = {"rockmate.zoo": ("torch",)}

MAY_EXECUTE_TEXT = ("rockmate/running/codegen.py",)
MAY_PRINT = ("rkgb/show.py", "rkgb/check.py", "examples/", "benchmarks/", "tests/")
MAX_FILE_LINES = 700  # one concept, one file
MAX_FUNCTION_LINES = 60  # without the docstring
MAX_PARAMETERS = 8  # without self and cls
# Where keyword-only parameters do not count: options that users know by their names.
FACADES = {"rockmate/compat/rockmate1.py", "rockmate/inverse.py", "rockmate/module.py"}

# Written as patterns that do not match themselves: this file is checked too.
FORBIDDEN_TEXT: dict[str, str] = {
    r"(?i)pypi\.(org|python)|pythonhosted\.(org)|download\.(pytorch)|anaconda\.(org)": "name no registry",
    r"--(extra-)?index-(url)|--find-(links)": "name no registry or mirror",
    r"(?<![\w.:)}~-])/(work|opt|root|home|Users|mnt)/\w": "name no path of one machine",
}


@dataclass(frozen=True)
class Source:
    """One Python file: where it is, the name it is imported by, its text and syntax tree."""

    path: str
    module: str
    text: str
    tree: ast.Module


@cache
def sources() -> tuple[Source, ...]:
    files = sorted(file for folder in CODE_FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return tuple(read(file) for file in files)


def read(file: Path) -> Source:
    base = next(root for root in ROOTS_OF_MODULES if file.is_relative_to(root))
    parts = file.relative_to(base).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = file.read_text(encoding="utf-8")
    return Source(file.relative_to(ROOT).as_posix(), module, text, ast.parse(text))


def is_under(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever it stands; `from package import module` names the module."""
    known = {other.module for other in sources()}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level:  # relative: climb from the package that holds this file
                is_package = source.path.endswith("__init__.py")
                parts = source.module.split(".") + ([""] if is_package else [])
                name = ".".join([*parts[: len(parts) - node.level], *filter(None, [name])])
            for alias in node.names:
                full_name = f"{name}.{alias.name}"
                yield node.lineno, full_name if full_name in known else name


def longest_key(module: str, table: dict[str, tuple[str, ...]]) -> str | None:
    return max((key for key in table if is_under(module, [key])), key=len, default=None)


def library() -> list[Source]:
    return [source for source in sources() if is_under(source.module, FIRST_PARTY)]


def report(problems: list[str]) -> None:
    assert not problems, "\n".join(["", *problems])


def test_packages_import_only_downwards():
    problems = []
    for source in library():
        key = longest_key(source.module, MAY_IMPORT)
        allowed = MAY_IMPORT[key] if key else ()
        problems += [
            f"{source.path}:{line}: imports {name}; {key} may import {', '.join(allowed) or 'none of ours'}. "
            "Pass the value as an argument, or move the code to the layer above"
            for line, name in imports(source)
            if is_under(name, FIRST_PARTY) and not is_under(name, allowed) and name != key
        ]
    report(problems)


def test_third_party_packages_stay_in_their_layer():
    problems = []
    for source in library():
        banned = NO_THIRD_PARTY.get(longest_key(source.module, NO_THIRD_PARTY) or "", ())
        only = ONLY_THIRD_PARTY.get(longest_key(source.module, ONLY_THIRD_PARTY) or "")
        for line, name in imports(source):
            top = name.partition(".")[0]
            foreign = top not in sys.stdlib_module_names and top not in FIRST_PARTY
            if is_under(name, banned) or (foreign and only is not None and top not in only):
                problems.append(f"{source.path}:{line}: imports {name}; this layer must work without it")
    report(problems)


def test_no_import_cycles():
    edges = {source.module: sorted({name for _, name in imports(source)}) for source in library()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> list[str]:
        if module in path:
            cycle = " → ".join([*path[path.index(module) :], module])
            return [f"import cycle {cycle}: move what both need into a module below them"]
        if module in done:
            return []
        found = [text for name in edges[module] if name in edges for text in visit(name, (*path, module))]
        done.add(module)
        return found

    report([text for module in edges for text in visit(module, ())])


@pytest.mark.parametrize(
    ("names", "allowed", "advice"),
    [
        (
            ("exec", "eval", "compile"),
            (*MAY_EXECUTE_TEXT, "tests/"),
            "operations are data; only codegen runs text",
        ),
        (("print",), MAY_PRINT, "return text or raise a warning; only reports print"),
    ],
    ids=["execute", "print"],
)
def test_some_builtins_are_called_only_where_listed(names, allowed, advice):
    report(
        [
            f"{source.path}:{node.lineno}: calls {node.func.id}(); {advice}"
            for source in sources()
            if not source.path.startswith(allowed)
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        ]
    )


def test_nothing_imports_the_solvers_folder():
    report(
        [
            f"{source.path}:{line}: imports {name}; write rk_solvers, or every class exists twice"
            for source in sources()
            for line, name in imports(source)
            if is_under(name, ["solvers"])
        ]
    )


def test_files_and_functions_stay_short():
    problems = []
    for source in sources():
        lines = source.text.count("\n")
        if lines > MAX_FILE_LINES:
            problems.append(f"{source.path}: {lines} lines > {MAX_FILE_LINES}. Split it by subject")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                problems += [
                    f"{source.path}:{node.lineno}: {node.name} {text}"
                    for text in excesses(node, facade=str(source.path) in FACADES)
                ]
    report(problems)


def line_count(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def excesses(function: ast.FunctionDef | ast.AsyncFunctionDef, *, facade: bool) -> Iterator[str]:
    lines = line_count(function)
    if ast.get_docstring(function) is not None:
        lines -= line_count(function.body[0])
    if lines > MAX_FUNCTION_LINES:
        yield f"has {lines} lines > {MAX_FUNCTION_LINES} without its docstring. Name its parts as functions"
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *([] if facade else arguments.kwonlyargs)]
    parameters = sum(1 for argument in named if argument.arg not in ("self", "cls"))
    if parameters > MAX_PARAMETERS:
        yield f"has {parameters} parameters > {MAX_PARAMETERS}. Group those that belong together"


def test_no_bare_except():
    report(
        [
            f"{source.path}:{node.lineno}: bare except. Name the exceptions that are expected here"
            for source in sources()
            for node in ast.walk(source.tree)
            if isinstance(node, ast.ExceptHandler) and node.type is None
        ]
    )


def tracked_files() -> list[Path]:
    """Files that git tracks or would add; every file under the code folders where this is no git checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return [ROOT / source.path for source in sources()]
    return [ROOT / name for name in listed.split("\0") if name]


def test_no_text_belongs_to_one_machine_or_registry():
    problems = []
    for file in tracked_files():
        try:
            text = file.read_text(encoding="utf-8")
        except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
            continue  # deleted but not yet committed, a link to a folder, or not text
        for pattern, advice in FORBIDDEN_TEXT.items():
            for match in re.finditer(pattern, text):
                line = text.count("\n", 0, match.start()) + 1
                problems.append(f"{file.relative_to(ROOT)}:{line}: {match[0]!r}: {advice}")
    report(problems)
