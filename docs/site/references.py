"""Links for names that are written as the code writes them, without the package from which they are public."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.util.nodes import make_refnode

# In prose a single word in backquotes is often a parameter: only these kinds of objects are meant by their bare names.
KINDS_OF_BARE_NAMES = ("class", "exception", "function", "data", "type")


def find_public_name(app: Any, env: Any, node: Any, content: nodes.Element) -> nodes.Node | None:
    """A link to the one public object that the name can mean: `rk_solvers.problem.Chain` is `rk_solvers.Chain`."""
    if node.get("refdomain") != "py":
        return None
    found = candidates(node["reftarget"], env.get_domain("py").objects)
    if len(found) != 1:
        return None
    [(full_name, entry)] = found.items()
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, full_name)


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
    return {"parallel_read_safe": True}
