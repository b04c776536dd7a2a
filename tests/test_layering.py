"""The architecture as a test: who may import whom, what may run or print where, and how long things may get.

Only the text of the files is read, nothing is imported. Every failure names a file, a line and what to do.
"""

import ast
import gc
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

# The rooms of each package, from the lowest to the highest, with the rooms of the same package that each imports.
# A room is a folder, or a file at the top of its package.
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "rkgb": {
        "errors": (),
        "tree": (),
        "source": (),
        "sizes": (),
        "torch_private": (),
        "process": ("torch_private",),
        "devices": ("torch_private", "process"),
        "state": ("errors", "tree", "source", "torch_private", "process", "devices"),
        "kernels": ("torch_private", "devices"),
        "ir": ("errors", "tree", "sizes", "torch_private", "process", "devices", "state", "kernels"),
        "shapes": ("errors", "tree", "torch_private", "process", "devices", "state", "ir"),
        "restore": ("errors", "tree", "torch_private", "devices", "ir"),
        "passes": ("errors", "tree", "torch_private", "process", "devices", "state", "ir", "restore"),
        "recording": ("errors", "tree", "source", "torch_private", "process", "state", "ir", "passes"),
        "opaque": ("errors", "tree", "torch_private", "process", "devices", "state", "ir", "passes", "recording"),
        "capture": (
            "errors", "tree", "source", "sizes", "torch_private", "process", "state", "ir", "recording", "opaque",
        ),
        "replay": (
            "errors", "tree", "source", "torch_private", "process", "devices", "state", "ir", "passes", "recording",
            "capture",
        ),
        "profile": ("errors", "torch_private", "process", "devices", "state", "ir", "restore", "passes"),
        "pipeline": (
            "errors", "tree", "process", "devices", "state", "ir", "passes", "capture", "replay", "profile",
        ),
        "export": (
            "errors", "tree", "torch_private", "process", "devices", "state", "ir", "restore", "passes", "recording",
            "pipeline",
        ),
        "stages": ("state", "ir", "passes", "capture", "profile", "pipeline"),
        "show": ("errors", "export", "pipeline"),
        "check": ("devices", "state", "ir", "recording", "capture", "replay", "pipeline", "export"),
        "": ("errors", "ir", "passes", "capture", "pipeline", "export", "stages", "show", "check"),
    },
    "rk_solvers": {
        "problem": (),
        "schedule": (),
        "links": (),
        "groups": ("problem",),
        "liveness": ("problem", "schedule", "groups"),
        "replay": ("problem", "schedule", "links", "liveness"),
        "solver": ("problem", "schedule", "links", "groups", "liveness"),
        "limits": (),
        "milp": (),
        "side_process": (),
        "baselines": ("problem", "groups", "liveness", "solver"),
        "local": ("problem", "schedule", "groups", "liveness", "solver", "baselines"),
        "exact": ("problem", "groups", "liveness", "solver", "milp", "local"),
        "bounds": ("problem", "groups", "liveness", "limits", "milp", "exact"),
        "chain": ("problem", "groups", "liveness", "solver", "local", "exact"),
        "transfers": (
            "problem", "schedule", "groups", "links", "liveness", "solver", "milp", "side_process", "bounds", "chain",
        ),
        "intervals": (
            "problem", "groups", "liveness", "solver", "milp", "side_process", "baselines", "local", "chain",
        ),
        "anytime": (
            "problem", "schedule", "groups", "liveness", "solver", "limits", "milp", "side_process", "bounds",
            "baselines", "local", "exact", "chain",
        ),
        "registry": ("problem", "limits", "solver", "baselines", "local", "exact", "chain", "intervals", "anytime"),
        "__main__": ("problem", "liveness", "replay", "schedule", "solver", "limits", "milp", "registry"),
        "": (
            "problem", "schedule", "links", "liveness", "replay", "solver", "limits", "milp", "bounds",
            "baselines", "local", "exact", "chain", "intervals", "anytime", "registry",
        ),
    },
    "rockmate": {
        "moved": (),
        "errors": (),
        "units": (),
        "progress": (),
        "zoo": (),
        "proxy": (),
        "nn": ("errors",),
        "division": (),
        "regions": ("errors", "units", "progress", "division"),
        "kernels": ("errors", "progress", "regions"),
        "memory": ("errors", "units"),
        "guards": ("errors",),
        "layouts": ("errors",),
        "offload": ("errors", "units"),
        "resting": ("errors", "memory", "offload"),
        "runtime": ("errors", "guards", "offload", "resting"),
        "planning": (
            "errors", "units", "progress", "nn", "regions", "kernels", "memory", "guards", "layouts", "offload",
            "resting", "runtime",
        ),
        "options": ("errors", "progress", "nn", "kernels", "memory", "layouts", "offload", "planning"),
        "plan_files": ("errors", "units", "regions", "kernels", "memory", "guards", "layouts", "offload", "planning"),
        "choices": ("errors", "nn", "regions", "kernels", "layouts", "planning", "plan_files"),
        "reports": ("errors", "units", "memory", "guards", "planning", "plan_files"),
        "families": ("errors", "regions", "guards", "resting", "planning", "runtime", "plan_files"),
        "calls": (
            "errors", "units", "progress", "regions", "memory", "guards", "offload", "resting", "runtime", "planning",
            "options", "plan_files", "choices", "families",
        ),
        "module": (
            "errors", "progress", "proxy", "nn", "kernels", "memory", "layouts", "offload", "planning", "options",
            "plan_files", "reports", "calls",
        ),
        "queries": (
            "errors", "units", "progress", "regions", "kernels", "nn", "memory", "layouts", "offload", "runtime",
            "planning", "options", "plan_files", "choices", "calls", "module",
        ),
        "forecast": ("errors", "units", "memory", "planning", "options", "offload", "queries"),
        "observing": ("errors", "units", "forecast"),
        "distributed": ("errors", "units", "memory", "guards", "planning", "options", "plan_files", "module"),
        "compile": ("errors", "units", "division", "memory", "planning"),
        "integrations": ("errors", "memory", "options", "module", "queries"),
        "compat": (
            "errors", "units", "zoo", "memory", "offload", "planning", "options", "plan_files", "module", "queries",
        ),
        "cli": (
            "errors", "units", "progress", "zoo", "kernels", "memory", "layouts", "offload", "planning", "options",
            "plan_files", "reports", "module", "observing", "queries", "forecast",
        ),
        "__main__": ("cli",),
        "": (
            "moved", "errors", "memory", "offload", "resting", "planning", "options", "plan_files", "calls", "module",
            "observing", "queries", "forecast", "distributed",
        ),
    },
}  # fmt: skip
# What rockmate may use of the other two packages, beside what their own `__init__` offers.
ROCKMATE_MAY_USE = (
    "rkgb.errors",
    "rkgb.sizes",
    "rkgb.tree",
    "rkgb.torch_private",
    "rkgb.process",
    "rkgb.devices",
    "rkgb.state",
    "rkgb.kernels",
    "rkgb.ir",
    "rkgb.shapes",
    "rkgb.restore",
    "rkgb.passes",
    "rkgb.recording",
    "rkgb.replay",
    "rkgb.profile",
    "rkgb.pipeline",
    "rkgb.export",
    "rk_solvers.problem",
    "rk_solvers.liveness",
    "rk_solvers.links",
    "rk_solvers.schedule",
    "rk_solvers.solver",
    "rk_solvers.limits",
    "rk_solvers.side_process",
    "rk_solvers.bounds",
    "rk_solvers.local",
    "rk_solvers.baselines",
    "rk_solvers.chain",
    "rk_solvers.transfers",
)
# These know less than the rest of their room may.
NARROWER: dict[str, tuple[str, ...]] = {
    "rockmate.errors": ("rkgb.errors",),
    "rockmate.reports.explanation": (),
    "rockmate.reports.comparison": ("rockmate.units",),
    "rockmate.memory.peak": ("rkgb.devices",),
    "rockmate.compat.rotor.models": ("rockmate.zoo", "rockmate.compat.rotor.models"),
    "rockmate.zoo": ("rockmate.zoo",),
    "rockmate.units": (),
    # Two readings of what is alive when, which check that of `rk_solvers.liveness`, and so know nothing of it.
    "rk_solvers.replay.checker": ("rk_solvers.problem", "rk_solvers.schedule", "rk_solvers.links"),
    "rk_solvers.exact.oracle": ("rk_solvers.problem", "rk_solvers.groups", "rk_solvers.solver"),
}
MAX_FILES = 12  # of one folder, its `__init__.py` left out
# Modules under the key import, of all third-party packages, none of these …
NO_THIRD_PARTY: dict[str, tuple[str, ...]] = {"rk_solvers": ("torch",), "rockmate.units": ("torch",)}
# … or none but these.
ONLY_THIRD_PARTY: dict[str, tuple[str, ...]] = {"rockmate.zoo": ("torch",)}

MAY_USE_PRIVATE_NAMES = ("rkgb.torch_private",)  # of PyTorch
OF_PYTHON = ("_fields", "_getframe", "_replace")  # what is called so by Python itself is offered to all
MAY_EXECUTE_TEXT = ("rockmate/runtime/codegen.py",)
MAY_PRINT = ("rkgb/show.py", "rkgb/check.py", "examples/", "benchmarks/", "tests/")
MAX_FILE_LINES = 700  # one concept, one file
MAX_FUNCTION_LINES = 60  # without the docstring
MAX_PARAMETERS = 8  # without self and cls
# Where keyword-only parameters do not count: options that users know by their names.
FACADES = {
    "rockmate/compat/rockmate1.py",
    "rockmate/queries/max_batch.py",
    "rockmate/queries/min_budget.py",
    "rockmate/queries/sweep.py",
    "rockmate/forecast/estimate.py",
    "rockmate/module.py",
}

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
    gc.disable()  # a million nodes of syntax, none of which is garbage: looking for some takes four fifths of the time
    try:
        return tuple(read(file) for file in files)
    finally:
        gc.enable()


def read(file: Path) -> Source:
    base = next(root for root in ROOTS_OF_MODULES if file.is_relative_to(root))
    parts = file.relative_to(base).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = file.read_text(encoding="utf-8")
    return Source(file.relative_to(ROOT).as_posix(), module, text, ast.parse(text))


def is_under(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@cache
def imports(source: Source) -> tuple[tuple[int, str], ...]:
    """(line, module) of every import, wherever it stands; `from package import module` names the module."""
    return tuple(_imports(source, {other.module for other in sources()}))


def _imports(source: Source, known: set[str]) -> Iterator[tuple[int, str]]:
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


def room_of(module: str) -> tuple[str, str]:
    """The package of a module, and the room in it: the empty one is that of the package's own `__init__`."""
    package, _, rest = module.partition(".")
    return package, rest.partition(".")[0]


def may_import(importer: str, imported: str) -> bool:
    """Whether a module may import another one of ours, by the rooms that both are in."""
    narrow = max((key for key in NARROWER if is_under(importer, [key])), key=len, default=None)
    if narrow is not None:
        return is_under(imported, NARROWER[narrow])
    (package, room), (other_package, other_room) = room_of(importer), room_of(imported)
    if other_package == package:
        return room == other_room or other_room in ROOMS[package][room]
    return package == "rockmate" and (other_room == "" or is_under(imported, ROCKMATE_MAY_USE))


def test_rooms_are_listed_from_the_lowest_to_the_highest():
    problems = []
    for package, rooms in ROOMS.items():
        found = {room_of(source.module)[1] for source in library() if room_of(source.module)[0] == package}
        problems += [f"{package}.{room}: no row in ROOMS; say what it may import" for room in found - rooms.keys()]
        problems += [f"{package}.{room}: a row in ROOMS, but no such room" for room in rooms.keys() - found]
        names = list(rooms)
        problems += [
            f"{package}.{room} may import {below}, which is not below it"
            for place, (room, allowed) in enumerate(rooms.items())
            for below in allowed
            if below not in names[:place]
        ]
    report(problems)


def test_rooms_import_one_way():
    report(
        [
            f"{source.path}:{line}: imports {name}, which is not below {'.'.join(room_of(source.module))}. "
            "Pass the value as an argument, or move the code to a room above"
            for source in library()
            for line, name in imports(source)
            if is_under(name, FIRST_PARTY) and not may_import(source.module, name)
        ]
    )


def test_rows_name_nothing_that_is_not_used():
    by_rockmate = used_by_rockmate()
    used = {(room_of(source.module), room_of(name)) for source in library() for _, name in imports(source)}
    report(
        [
            f"{package}.{room} does not import {below}: take it out of its row"
            for package, rooms in ROOMS.items()
            for room, allowed in rooms.items()
            for below in allowed
            if ((package, room), (package, below)) not in used
        ]
        + [
            f"rockmate does not use {name}: take it out of ROCKMATE_MAY_USE"
            for name in ROCKMATE_MAY_USE
            if not any(is_under(used_name, [name]) for used_name in by_rockmate)
        ]
    )


def used_by_rockmate() -> set[str]:
    return {name for source in library() if is_under(source.module, ["rockmate"]) for _, name in imports(source)}


def test_folders_stay_small():
    folders: dict[str, int] = {}
    for source in library():
        if not source.path.endswith("__init__.py"):
            folder = source.path.rpartition("/")[0]
            folders[folder] = folders.get(folder, 0) + 1
    report(
        [
            f"{folder}: {count} files > {MAX_FILES}. Give a part of them a room of its own"
            for folder, count in folders.items()
            if count > MAX_FILES
        ]
    )


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


def test_kinds_of_devices_are_told_apart_in_one_room():
    pattern = re.compile(
        r"device\.type\b|\.is_(?:cuda|cpu|mps|xpu)\b|torch\.(?:cuda|mps|xpu|mtia)\b|default_generators"
    )
    report(
        [
            f"{source.path}:{number}: {match[0]}: ask `rkgb.devices.registry.device_of`; what its kind is to "
            "answer is a method of `Device`"
            for source in library()
            if not is_under(source.module, ["rkgb.devices"])
            for number, line in enumerate(source.text.splitlines(), 1)
            for match in pattern.finditer(line)
        ]
    )


# ---- private names of PyTorch -------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not name.endswith("__")


def test_private_names_of_torch_are_used_in_one_package():
    report(
        [
            f"{source.path}:{line}: {name} is private to PyTorch: give it a plain name in rkgb/torch_private/, with "
            "what it gives and why nothing public does, and a test in tests/graph/test_torch_private.py"
            for source in library()
            if not is_under(source.module, MAY_USE_PRIVATE_NAMES)
            for line, name in sorted(set(names_of_torch(source.tree)))
            if any(is_private(part) for part in name.split("."))
        ]
    )


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo.config",
        "from torch._ops import OpOverload",
        "from torch.overrides import _push_mode",
        "import torch\ndef f(): return torch._C._is_tracing()",
        "from torch.nn.utils import parametrize\ncached = parametrize._cache",
        "import torch.nn.modules.module as calls\nhooks = calls._global_forward_hooks",
        "import torch\nset_to = getattr(torch.backends, '_get_flag', None)",
        "import sys\ncompiler = sys.modules.get('torch._dynamo')",
    ],
)
def test_private_names_of_torch_are_found(code):
    *_, last = sorted(set(names_of_torch(ast.parse(code))))
    assert any(map(is_private, last[1].split(".")))


def names_of_torch(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, full name) of all that is imported from torch, taken from what was, or told in a text of its own."""
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(alias.name, alias.asname) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        for name, bound in found:
            if is_under(name, ["torch"]):
                yield node.lineno, name
                known |= {bound: name} if bound else {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := full_name(node, known)):
            yield node.lineno, name
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            yield node.lineno, str(node.value)
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            # getattr(torch.…, "name"), and its like
            if holder := full_name(node.args[0], known):
                yield node.lineno, f"{holder}.{node.args[1].value}"


def full_name(node: ast.expr, known: dict[str, str]) -> str | None:
    """The dotted name of what is read, if it begins with a name that is known."""
    if isinstance(node, ast.Attribute):
        holder = full_name(node.value, known)
        return holder and f"{holder}.{node.attr}"
    return known.get(node.id) if isinstance(node, ast.Name) else None


def test_private_attributes_are_our_own_or_listed():
    known = {name for source in library() for name in attributes_of_our_own(source.tree)}
    listed = next(source for source in sources() if source.path == "rkgb/torch_private/attributes.py")
    known |= {node.value for node in ast.walk(listed.tree) if isinstance(node, ast.Constant)}
    report(
        [
            f"{source.path}:{node.lineno}: {ast.unparse(node)} is private to somebody else: list it in {listed.path}, "
            "if PyTorch has it"
            for source in library()
            if not is_under(source.module, MAY_USE_PRIVATE_NAMES)
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in (*known, *OF_PYTHON)
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        ]
    )


def attributes_of_our_own(tree: ast.Module) -> Iterator[str]:
    """Names that classes and functions here give to what is theirs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr


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
