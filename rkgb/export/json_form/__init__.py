"""Graphs as JSON, to be kept, sent, and looked at elsewhere.

A file names operations, and reading it runs nothing and imports nothing: names are looked up among the operations
that PyTorch knows. What the user's own code was (autograd functions, classes in the module's output) comes back as a
placeholder of that name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from rkgb.export.json_form.checks import check, check_constants
from rkgb.export.json_form.classes import KINDS, Graph, connect
from rkgb.export.json_form.containers import LeftOut, MissingFunction, NamedDict, NamedNamespace
from rkgb.export.json_form.errors import FunctionNotGiven, GraphFormatError, shortly
from rkgb.export.json_form.reader import Reader
from rkgb.export.json_form.writer import Writer
from rkgb.export.strict_json import parsed

__all__ = [
    "FunctionNotGiven",
    "Graph",
    "GraphFormatError",
    "LeftOut",
    "MissingFunction",
    "NamedDict",
    "NamedNamespace",
    "dumps",
    "from_json",
    "load",
    "loads",
    "save",
    "to_json",
]

FORMAT = "rkgb-graph"
VERSION = 1

Functions = Mapping[str, Callable[..., Any]]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """What is at the top of a file. The types of the graph's fields tell what the rest is."""

    format: str
    version: Annotated[int, msgspec.Meta(ge=1)]
    torch: str  # the version that wrote it
    kind: str
    graph: Any
    storages: list[Any]  # of bytes, in base64


def to_json(graph: Graph) -> dict[str, Any]:
    """A B, D, S or K graph, or all graphs of a module, as a value that `json` writes as it is.

    The same graph gives the same value. Constants are in it with all their bytes, parameters are not.
    Raises `GraphFormatError` for what has no form in JSON, naming its place, and `GraphError` for a broken graph.
    """
    kind = next((name for name, known in KINDS.items() if type(graph) is known), None)
    if kind is None:
        raise GraphFormatError(f"a {type(graph).__name__} is no graph; give one of {_class_names()}")
    if hasattr(graph, "verify"):
        graph.verify()
    writer = Writer()
    writer.place.at("graph")
    written = writer.write(graph, KINDS[kind])
    check_constants(writer.things)
    file = _File(FORMAT, VERSION, str(torch.__version__), kind, written, writer.tensors.storages())
    return msgspec.structs.asdict(file)


def dumps(graph: Graph) -> str:
    """`to_json` as text, on one line."""
    return json.dumps(to_json(graph), separators=(",", ":"), allow_nan=False) + "\n"


def save(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write `dumps` into a file."""
    Path(path).write_text(dumps(graph), encoding="utf-8")


def from_json(value: Any, functions: Functions | None = None) -> Graph:
    """The graph of which `to_json` made `value`.

    `functions` are those that the graph calls beside PyTorch's operations, by their names in the file; each that
    is not given raises `FunctionNotGiven` when it is called. Tensors of a device that this machine has not are on
    the CPU. Raises `GraphFormatError` for all that is no graph of this version, naming the place.
    """
    kind = _read_header(value)
    reader = Reader(value["storages"], functions or {})
    reader.place.at("graph")
    graph: Graph = reader.read(value["graph"], kind)
    connect(reader.things)
    check(reader.things)
    return graph


def loads(text: str, functions: Functions | None = None) -> Graph:
    """The graph of which `dumps` made `text`; else as `from_json`."""
    try:
        value = parsed(text)
    except ValueError as error:
        raise GraphFormatError(f"this is no JSON: {error}") from error
    return from_json(value, functions)


def load(path: str | os.PathLike[str], functions: Functions | None = None) -> Graph:
    """The graph in a file that `save` wrote; else as `from_json`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise GraphFormatError(f"{path} is no text in UTF-8: {error}") from error
    try:
        return loads(text, functions)
    except GraphFormatError as error:
        error.add_note(f"in the file {path}")
        raise


def _class_names() -> str:
    return ", ".join(kind.__name__ for kind in KINDS.values())


def _read_header(value: Any) -> type[Any]:
    """The class of the graph in the file."""
    if type(value) is not dict or value.get("format") != FORMAT:
        raise GraphFormatError(f'at $: this is no graph of rkgb: it does not say "format": "{FORMAT}"')
    version = value.get("version")
    if type(version) is int and version > VERSION:
        raise GraphFormatError(
            f"at $.version: the file is of version {shortly(version)}, this rkgb reads up to {VERSION}. Update rkgb."
        )
    try:
        header = msgspec.convert(value, _File)
    except msgspec.ValidationError as error:
        raise GraphFormatError(str(error).replace("`", "'")) from error
    if header.kind not in KINDS:
        raise GraphFormatError(f"at $.kind: one of {', '.join(KINDS)} is expected, not {shortly(header.kind)}")
    return KINDS[header.kind]
