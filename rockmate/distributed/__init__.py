"""Planned modules on many devices: one plan for all ranks."""

from rockmate.errors import PlanExchangeError, PlanExchangeWarning
from rockmate.exchange import PlanExchange, plan_alone

__all__ = ["PlanExchange", "PlanExchangeError", "PlanExchangeWarning", "plan_alone"]
