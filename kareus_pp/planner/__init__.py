"""Planning: options, the integer program, bounds, frontiers, targets."""

from kareus_pp.planner.api import frontier, plan
from kareus_pp.planner.options import PlannerOptions

__all__ = ["PlannerOptions", "frontier", "plan"]
