"""Measuring and learning what instructions cost."""

from kareus_pp.measure.design import ExperimentDesign, choose_by_design
from kareus_pp.measure.holdout import choose_by_chance, hold_out
from kareus_pp.measure.isolated import Measured, WindowConfig, WindowProfiler
from kareus_pp.measure.learn import Learned, Prediction, learn
from kareus_pp.measure.merge import extend_runs, merge_profiles
from kareus_pp.measure.report import FitReport
from kareus_pp.measure.runs import IterationRecord, PlanRun, Runs, validate_runs
from kareus_pp.measure.runs_file import load_runs, save_runs
from kareus_pp.measure.samples import WindowReading, energy_between, read_window

__all__ = [
    "ExperimentDesign",
    "FitReport",
    "IterationRecord",
    "Learned",
    "Measured",
    "PlanRun",
    "Prediction",
    "Runs",
    "WindowConfig",
    "WindowProfiler",
    "WindowReading",
    "choose_by_chance",
    "choose_by_design",
    "energy_between",
    "extend_runs",
    "hold_out",
    "learn",
    "load_runs",
    "merge_profiles",
    "read_window",
    "save_runs",
    "validate_runs",
]
