"""Planned modules on many devices: one plan for all ranks, and planned blocks under FSDP2."""

from rockmate.distributed.block_plans import BlockPlans, apply, plan_blocks
from rockmate.errors import PlanExchangeError, PlanExchangeWarning
from rockmate.plan_files.rank_agreement import RankAgreement, plan_alone

__all__ = [
    "BlockPlans",
    "PlanExchangeError",
    "PlanExchangeWarning",
    "RankAgreement",
    "apply",
    "plan_alone",
    "plan_blocks",
]
