"""Planning: options, the integer program, bounds, frontiers, targets."""

from kareus_pp.planner.api import Planner, frontier, plan, undominated
from kareus_pp.planner.options import PlannerOptions

__all__ = ["Planner", "PlannerOptions", "frontier", "plan", "undominated"]
