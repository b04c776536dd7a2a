"""Pictures and tables of graphs.

structure → parts → picture → layout → page → file: each step is a module, and only the last three know fonts and files.
"""

from rkgb.errors import RenderError

__all__ = ["RenderError"]
