"""Links to the reference: of types in signatures, wherever they are defined, and of names in backquotes on any page."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.util.nodes import make_refnode

# In prose a single word in backquotes is often a parameter: only these kinds of objects are meant by their bare names.
KINDS_OF_BARE_NAMES = ("class", "exception", "function", "data", "type")


def find_public_name(app: Any, env: Any, node: Any, content: nodes.Element) -> nodes.Element | None:
    """A link to the one public object that the name can mean: `rk_solvers.problem.Chain` is `rk_solvers.Chain`."""
    if node.get("refdomain") != "py":
        return None
    return link_to(app, node["refdoc"], node["reftarget"], content)


def link_names(app: Any, doctree: nodes.document, page: str) -> None:
    """Make links of the literals of a page that name something of the reference: `rockmate.Plan`, `BudgetTooSmall`."""
    for literal in list(doctree.findall(nodes.literal)):
        text = literal.astext().removesuffix("()")
        is_name = all(part.isidentifier() for part in text.split(".")) and ("." in text or text[0].isupper())
        if is_name and not isinstance(literal.parent, nodes.reference | nodes.title):
            link = link_to(app, page, text, literal.deepcopy())
            if link is not None:
                literal.replace_self(link)


def link_to(app: Any, page: str, target: str, content: nodes.Element) -> nodes.Element | None:
    """A link from a page to the one object that the target can mean; None where it can mean none, or several."""
    found = candidates(target, app.env.get_domain("py").objects)
    depth = min((name.count(".") for name in found), default=0)
    nearest = [name for name in found if name.count(".") == depth]
    if len(nearest) != 1:
        return None
    entry = found[nearest[0]]
    return make_refnode(app.builder, page, entry.docname, entry.node_id, content, nearest[0])


def candidates(target: str, objects: dict[str, Any]) -> dict[str, Any]:
    """Objects that end in the target; where there is none, those of its package that end in its last part."""
    package, _, last = target.rpartition(".")
    whole = {name: entry for name, entry in objects.items() if f".{name}".endswith(f".{target}")}
    if package:
        if whole or package.partition(".")[0] not in ("rkgb", "rockmate", "rk_solvers"):
            return whole
        return {
            name: entry
            for name, entry in objects.items()
            if name.partition(".")[::2] == (package.partition(".")[0], last)
        }
    return {name: entry for name, entry in whole.items() if entry.objtype in KINDS_OF_BARE_NAMES}


def setup(app: Any) -> dict[str, bool]:
    """Connect this extension to Sphinx."""
    app.connect("missing-reference", find_public_name)
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True}
