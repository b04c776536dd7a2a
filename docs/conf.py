"""How Sphinx makes the documentation's site: `make docs`.

The source folder is the repository itself, so that the links between README, docs/, solvers/ and notebooks/ lead to the
same files here, on a code host and in an editor. Nothing is run: notebooks are shown as they are stored, and the
tests run the pages' code.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "solvers"), str(HERE / "site")]

project = "Rockmate"
author = "The Rockmate authors"
project_copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "navigation", "docstrings", "references"]  # the last three are ours

# ---- pages --------------------------------------------------------------------------------------------

root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "docs/**.md", "solvers/README.md", "benchmarks/README.md"]
include_patterns += ["notebooks/*.ipynb"]
exclude_patterns = ["docs/_build"]
smartquotes_action = "D"  # dashes alone: "step" is a value
myst_heading_anchors = 4  # the anchors that code hosts make of headings
nb_execution_mode = "off"
nb_merge_streams = True
# Two packages have a `Chain`: a link to either will do.
suppress_warnings = ["myst.xref_ambiguous", "ref.python"]

# ---- reference ----------------------------------------------------------------------------------------

default_role = "py:obj"  # docstrings name things in single backquotes: a link where the reference has them
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
nitpicky = True
# A word in backquotes may be anything; types of other projects are not looked up, since building needs no network.
nitpick_ignore_regex = [("py:(obj|class|exc)", ".*")]

# ---- looks --------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = "Rockmate"
html_static_path = ["site/static"]
templates_path = ["site/templates"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_front_page.html"}
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
