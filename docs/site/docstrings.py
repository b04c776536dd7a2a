"""The reference's entries, from docstrings in the house's style and from the comments that explain fields of records.

Sections such as "Args:" are those of Google's style. A field of a record is explained by the comment on its line, or by
the comment lines right above it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

import msgspec
from sphinx.ext.napoleon import Config, GoogleDocstring

STYLE = Config(napoleon_google_docstring=True, napoleon_numpy_docstring=False, napoleon_use_rtype=False)


def read_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put a docstring into Sphinx's markup, and append an entry for each public field of a record.

    `lines` is changed in place. Docstrings of properties and of data are sentences, in which a colon has no meaning.
    """
    if what == "module":
        lines.clear()  # which is for readers of the code: the page has an introduction of its own
    if what in ("class", "exception", "function", "method"):
        lines[:] = GoogleDocstring(with_literal_blocks(lines), STYLE, app, what, name, obj, options).lines()
    if what in ("class", "exception") and is_record(obj):
        for field, annotation, comment in commented_fields(obj):
            lines += ["", f".. attribute:: {field}", f"   :type: {annotation}", ""]
            lines += [f"   {comment}", ""] if comment else []


def with_literal_blocks(lines: list[str]) -> list[str]:
    """Mark indented code after a blank line as such: the house's docstrings need no colons for it."""
    marked: list[str] = []
    text = ""  # the last line that is not empty
    for line in lines:
        after_blank = bool(marked) and not marked[-1].strip()
        if after_blank and line.startswith("    ") and text and not text.startswith((" ", "*", "-")):
            marked += ["::", ""]
        marked.append(line)
        text = line or text
    return marked


def is_record(obj: Any) -> bool:
    """Whether a class declares its fields."""
    return isinstance(obj, type) and (dataclasses.is_dataclass(obj) or issubclass(obj, msgspec.Struct))


def commented_fields(cls: type) -> list[tuple[str, str, str]]:
    """(Name, annotation, comment) of the public fields that the class's own source declares."""
    source = textwrap.dedent(inspect.getsource(cls))
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    text = source.splitlines()
    return [
        (statement.target.id, ast.unparse(statement.annotation), comment_of(statement, text))
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if not statement.target.id.startswith("_") and not is_class_variable(statement)
    ]


def is_class_variable(statement: ast.AnnAssign) -> bool:
    """Whether the annotation says that this belongs to the class, not to its records."""
    return ast.unparse(statement.annotation).startswith("ClassVar")


def comment_of(statement: ast.AnnAssign, text: list[str]) -> str:
    """The comment lines right above the field, then the comment on its last line."""
    above = []
    line = statement.lineno - 2
    while line >= 0 and text[line].strip().startswith("#"):
        above.insert(0, text[line].strip().lstrip("# "))
        line -= 1
    assert statement.end_lineno is not None
    assert statement.end_col_offset is not None
    rest = text[statement.end_lineno - 1].encode()[statement.end_col_offset :].decode()
    beside = [rest.partition("#")[2].strip()] if "#" in rest else []
    return " ".join([*above, *beside])


def setup(app: Any) -> dict[str, bool]:
    """Connect this extension to Sphinx."""
    app.connect("autodoc-process-docstring", read_docstring)
    return {"parallel_read_safe": True}
