"""Measuring and learning what instructions cost."""

from kareus_pp.measure.design import ExperimentDesign
from kareus_pp.measure.learn import Learned, Prediction, learn
from kareus_pp.measure.report import FitReport
from kareus_pp.measure.runs import IterationRecord, PlanRun, Runs, validate_runs
from kareus_pp.measure.samples import WindowReading, energy_between, read_window

__all__ = [
    "ExperimentDesign",
    "FitReport",
    "IterationRecord",
    "Learned",
    "PlanRun",
    "Prediction",
    "Runs",
    "WindowReading",
    "energy_between",
    "learn",
    "read_window",
    "validate_runs",
]
