"""The problem on plain numbers: forward operations, backward operations, and the data between them.

A training step computes every forward operation once in order, then every backward operation once in order.
Between, just before a backward operation, forward operations may be computed again. What is computed again,
and when, is the only freedom; `Problem.options` has what each way costs, and `liveness` what is alive when.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

Recompute = tuple[tuple[int, ...], ...]
"""One sorted tuple of forward indices per backward operation: what is recomputed just before it (see `groups`)."""

JSON_VERSION = 1
MOST = 2**53  # numbers of a file are at most this


@dataclass(frozen=True, slots=True)
class Data:
    """Something with bytes: the storage that a forward operation fills, or a tensor that it saves."""

    name: str  # unique among data, no white space
    size_bytes: int
    producer: int  # index in Problem.forward
    kind: str = "data"  # "data", or "phantom": saved by its producer for the backward only


@dataclass(frozen=True, slots=True)
class ForwardOp:
    """One forward operation: reads data of earlier operations, fills its outputs."""

    name: str  # unique among forward operations, no white space
    time_ms: float
    inputs: tuple[int, ...]  # indices of Data read; model inputs and parameters are not Data
    outputs: tuple[int, ...]  # indices of Data produced (phantoms included); may be empty
    workspace_bytes: int = 0  # highest extra bytes while it runs, beyond its inputs and all its outputs
    recomputable: bool = True  # False: must never be computed a second time
    replay_bytes: int = 0  # bytes resident from its first to its last computation, if it is ever recomputed
    repeat_ms: float | None = None  # time of computing it again; None: `time_ms`

    @property
    def recompute_ms(self) -> float:
        """Time of computing it again, in milliseconds: what it makes may be had more cheaply than the first time."""
        return self.time_ms if self.repeat_ms is None else self.repeat_ms


@dataclass(frozen=True, slots=True)
class Option:
    """One way to have a data where it is used after its first computation."""

    name: str  # "kept", or "recomputed": with all else that its producer makes, for one cost
    kept_bytes: int  # resident for it from its first computation to the last time that it is had
    costs: Mapping[str, float]  # of having it once more, by resource: milliseconds of "compute"


@dataclass(frozen=True, slots=True)
class BackwardOp:
    """One backward operation; gradients are not Data, their lifetimes are given by the two byte counts."""

    name: str  # unique among backward operations, no white space
    time_ms: float
    needs: tuple[int, ...]  # Data that must be alive
    resident_bytes: int  # gradients alive when it starts, hence also during the recomputations just before it
    peak_bytes: int  # highest bytes of gradients and workspace while it runs (>= resident_bytes)
    op: str = ""  # the call in the model that it is the backward of; "" where it is of none, as the loss is


@dataclass(frozen=True, slots=True)
class Problem:
    """A whole training step.

    Raises `ValueError`, naming the operation or data, if the numbers do not describe a step.
    """

    data: tuple[Data, ...]
    forward: tuple[ForwardOp, ...]  # in execution order
    backward: tuple[BackwardOp, ...]  # in execution order; the first ones usually are the user's loss
    held: frozenset[int] = frozenset()  # Data held by the user from their computation to the end of the step
    base_bytes: int = 0  # resident throughout the step

    def __post_init__(self) -> None:
        _check_names("data", [item.name for item in self.data])
        _check_names("forward operation", [op.name for op in self.forward])
        _check_names("backward operation", [op.name for op in self.backward])
        _check_data(self)
        _check_forward(self)
        _check_backward(self)
        for index in self.held:
            if not 0 <= index < len(self.data):
                raise ValueError(f"held: there is no data {index}; give indices below {len(self.data)}")
        if self.base_bytes < 0:
            raise ValueError(f"base_bytes is {self.base_bytes}; it must not be negative")

    @property
    def keep_all_time_ms(self) -> float:
        """Time of the step without any recomputation, in milliseconds."""
        return math.fsum(op.time_ms for op in self.forward) + math.fsum(op.time_ms for op in self.backward)

    @property
    def no_recompute(self) -> Recompute:
        """The plan that recomputes nothing (keep-all)."""
        return ((),) * len(self.backward)

    @property
    def options(self) -> tuple[tuple[Option, ...], ...]:
        """For each data the ways to have it where it is used later, keeping it the first of them."""
        again = [self.recomputed(index) for index in range(len(self.forward))]
        found: list[tuple[Option, ...]] = []
        for number, item in enumerate(self.data):
            kept = Option("kept", item.size_bytes, {})
            may = number not in self.held and self.forward[item.producer].recomputable
            found.append((kept, again[item.producer]) if may else (kept,))
        return tuple(found)

    def recomputed(self, index: int) -> Option:
        """What computing forward operation `index` again takes, where that is allowed."""
        op = self.forward[index]
        return Option("recomputed", op.replay_bytes, {"compute": op.recompute_ms})

    def forward_users(self) -> list[list[int]]:
        """For each data, the forward operations that read it, in order."""
        users: list[list[int]] = [[] for _ in self.data]
        for index, op in enumerate(self.forward):
            for item in op.inputs:
                users[item].append(index)
        return users

    def backward_users(self) -> list[list[int]]:
        """For each data, the backward operations that need it, in order."""
        users: list[list[int]] = [[] for _ in self.data]
        for index, op in enumerate(self.backward):
            for item in op.needs:
                users[item].append(index)
        return users

    def renewed(self, index: int) -> tuple[int, ...]:
        """Outputs of forward operation `index` that a recomputation makes anew (not the held ones)."""
        return tuple(item for item in self.forward[index].outputs if item not in self.held)

    def to_json(self) -> str:
        """The problem as versioned JSON text; `Problem.from_json` reads it back."""
        return json.dumps(self._content())

    def _content(self) -> dict[str, Any]:
        content = msgspec.to_builtins(self)
        content["held"] = sorted(self.held)
        return {"version": JSON_VERSION, **content}

    @staticmethod
    def from_json(text: str) -> Problem:
        """Read what `to_json` wrote, or the problem of a file that has a chain too.

        Raises `ValueError`, naming the field, on anything else and on numbers of no step.
        """
        return problem_from_json(text)[0]

    def __str__(self) -> str:
        total = sum(item.size_bytes for item in self.data)
        return (
            f"Problem({len(self.forward)} forward, {len(self.backward)} backward, {len(self.data)} data of "
            f"{total / 2**20:.1f} MiB, {self.keep_all_time_ms:.2f} ms)"
        )


@dataclass(frozen=True, slots=True)
class Chain:
    """A partition of a problem into a sequence of blocks, for solvers that work along a chain.

    Raises `ValueError` if the blocks are not contiguous or the backward operations do not go back through
    them.
    """

    blocks: tuple[range, ...]  # contiguous ranges of forward indices that cover all of them in order
    backward_block: tuple[int, ...]  # block of each backward operation; len(blocks) for those of the loss

    def __post_init__(self) -> None:
        expected = 0
        for index, block in enumerate(self.blocks):
            if block.start != expected or block.step != 1 or len(block) == 0:
                raise ValueError(f"block {index} is {block}; it must start at {expected} and must not be empty")
            expected = block.stop
        previous = len(self.blocks)
        for stage, index in enumerate(self.backward_block):
            if not 0 <= index <= previous:
                raise ValueError(
                    f"backward operation {stage} is in block {index} after one in block {previous}; "
                    "the backward must go back through the blocks"
                )
            previous = index

    def check(self, problem: Problem) -> None:
        """Raise `ValueError` unless this chain partitions `problem`."""
        covered = self.blocks[-1].stop if self.blocks else 0
        if covered != len(problem.forward):
            raise ValueError(f"the blocks cover {covered} forward operations of {len(problem.forward)}")
        if len(self.backward_block) != len(problem.backward):
            raise ValueError(
                f"backward_block has {len(self.backward_block)} entries for {len(problem.backward)} backward operations"
            )


def problem_to_json(problem: Problem, chain: Chain | None = None) -> str:
    """A problem, with its chain if there is one, as the JSON text that `problem_from_json` reads.

    Without a chain it is an object of the fields of `Problem`, `Data`, `ForwardOp` and `BackwardOp`, and a `version`.
    With one it is an object of a `version`, that `problem`, `blocks` (a pair per block: its first forward index and the
    one after its last) and `backward_block` (see `Chain`). Raises `ValueError` if `chain` is not one of the problem.
    """
    if chain is None:
        return problem.to_json()
    chain.check(problem)
    content = {
        "version": JSON_VERSION,
        "problem": problem._content(),
        "blocks": [[block.start, block.stop] for block in chain.blocks],
        "backward_block": list(chain.backward_block),
    }
    return json.dumps(content)


def problem_from_json(text: str) -> tuple[Problem, Chain | None]:
    """Read what `problem_to_json` wrote; the chain is None where the text has none.

    Fields that have a default may be left out, and so may the outer of the two versions of a text with a chain. Raises
    `ValueError`, naming the field, on other text: no JSON, another version, fields that are missing, unknown or of
    another type, numbers of no step or of no chain.
    """
    try:
        content = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"this is not JSON: {error}") from None
    if not isinstance(content, dict) or "problem" not in content:
        return _read_problem("the file", content), None
    if "version" in content:
        _check_version("the file", content["version"])
    problem = _read_problem("problem", content["problem"])
    rest = {name: value for name, value in content.items() if name not in ("version", "problem")}
    if not rest:
        return problem, None
    record = _read("the chain", rest, _ChainRecord)
    chain = Chain(tuple(range(*block) for block in record.blocks), record.backward_block)
    chain.check(problem)
    return problem, chain


def _check_names(what: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not name or name.split() != [name]:
            raise ValueError(f"{what} is named {name!r}; names must be non-empty words without white space")
        if name in seen:
            raise ValueError(f"two {what}s are named {name}; names must be unique")
        seen.add(name)


def _check_data(problem: Problem) -> None:
    for index, item in enumerate(problem.data):
        if item.size_bytes < 0:
            raise ValueError(f"data {item.name} has {item.size_bytes} bytes; sizes must not be negative")
        if not 0 <= item.producer < len(problem.forward):
            raise ValueError(f"data {item.name} has producer {item.producer}, which is no forward operation")
        if index not in problem.forward[item.producer].outputs:
            producer = problem.forward[item.producer].name
            raise ValueError(f"data {item.name} is not among the outputs of its producer {producer}")


def _check_time(name: str, time_ms: float) -> None:
    if not (math.isfinite(time_ms) and time_ms >= 0):
        raise ValueError(f"{name} takes {time_ms} ms; times must be finite and not negative")


def _check_indices(problem: Problem, name: str, what: str, indices: tuple[int, ...]) -> None:
    if len(set(indices)) != len(indices):
        raise ValueError(f"{name} lists a data twice in its {what} {indices}")
    for item in indices:
        if not 0 <= item < len(problem.data):
            raise ValueError(f"{name}: there is no data {item}, listed in its {what}")


def _check_forward(problem: Problem) -> None:
    for index, op in enumerate(problem.forward):
        _check_time(op.name, op.time_ms)
        _check_time(op.name, op.recompute_ms)
        _check_indices(problem, op.name, "inputs", op.inputs)
        _check_indices(problem, op.name, "outputs", op.outputs)
        if op.workspace_bytes < 0 or op.replay_bytes < 0:
            raise ValueError(f"{op.name} has negative workspace_bytes or replay_bytes")
        for item in op.inputs:
            if problem.data[item].producer >= index:
                raise ValueError(f"{op.name} reads {problem.data[item].name} before it is produced")
        for item in op.outputs:
            if problem.data[item].producer != index:
                raise ValueError(f"{op.name} outputs {problem.data[item].name}, which names another producer")


def _check_backward(problem: Problem) -> None:
    for op in problem.backward:
        _check_time(op.name, op.time_ms)
        _check_indices(problem, op.name, "needs", op.needs)
        if not 0 <= op.resident_bytes <= op.peak_bytes:
            raise ValueError(
                f"{op.name} has resident_bytes {op.resident_bytes} and peak_bytes {op.peak_bytes}; "
                "they must satisfy 0 <= resident_bytes <= peak_bytes"
            )


# ---- reading JSON ------------------------------------------------------------------------------------

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class _ChainRecord:
    """A chain as a file has it."""

    blocks: tuple[tuple[int, int], ...]  # first forward index, and the one after the last
    backward_block: tuple[int, ...]


def _check_version(where: str, version: object) -> None:
    if version != JSON_VERSION or isinstance(version, bool):
        raise ValueError(f"{where} has version {version!r}; this code reads version {JSON_VERSION}")


def _read_problem(where: str, content: object) -> Problem:
    if isinstance(content, dict):
        _check_version(where, content.get("version"))
        content = {name: value for name, value in content.items() if name != "version"}
    return _read(where, content, Problem)


def _read(where: str, content: object, kind: type[Record]) -> Record:
    """A record of this kind; `where` it is in the file is said in errors."""
    try:
        found = msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None
    _check_known(where, content, msgspec.to_builtins(found))
    return found


def _check_known(where: str, given: object, known: object) -> None:
    """Refuse fields that the record `known` does not have, and numbers that other readers of JSON round."""
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{where} has an unknown field {name!r}; there are {', '.join(known)}")
            _check_known(f"{where}.{name}", value, known[name])
    elif isinstance(given, list) and isinstance(known, list | tuple):
        for index, (value, other) in enumerate(zip(given, known, strict=False)):
            _check_known(f"{where}[{index}]", value, other)
    elif isinstance(given, int | float) and abs(given) > MOST:
        raise ValueError(f"{where} is {given}; it must be at most {MOST}, beyond which other readers of JSON round")
