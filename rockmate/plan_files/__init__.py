"""Plans as files: what a plan is made of, written down, checked, read again and run."""

from rockmate.plan_files import cache, zoo
from rockmate.plan_files.content import PlanFile
from rockmate.plan_files.files import dumps, load, loads, save

__all__ = ["PlanFile", "cache", "dumps", "load", "loads", "save", "zoo"]
