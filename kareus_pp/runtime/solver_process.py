"""The child half of the background solver: reads requests, answers each with one JSON line."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from kareus_pp.config import PlannerConfig, ProfilingConfig
from kareus_pp.errors import KareusError
from kareus_pp.measure import ExperimentDesign, learn
from kareus_pp.measure.overlap_design import overlap_plan
from kareus_pp.measure.overlap_design import overlaps as runs_overlap
from kareus_pp.measure.runs_file import load_runs
from kareus_pp.planner import Planner, PlannerOptions, undominated
from kareus_pp.planner.splitting import without_overlap
from kareus_pp.profile import Profile
from kareus_pp.schedule import Schedule
from kareus_pp.setting import OverlapSetting
from kareus_pp.target import parse_target

_PARENT_CHECK_S = 2.0


class _Solver:
    """Answers requests; keeps the experiment design between them."""

    def __init__(self) -> None:
        self._design: ExperimentDesign | None = None

    def design(
        self, runs: str, profiling: dict[str, Any], overlaps: list[list[list[str]]]
    ) -> dict[str, Any]:
        """The next plan to try, as text, frequencies before overlap; None when enough is known."""
        recorded = load_runs(Path(runs))
        if self._design is None:
            self._design = ExperimentDesign(
                recorded.schedule,
                recorded.clocks_mhz,
                ProfilingConfig.model_validate(profiling),
                recorded.blocking_power_w,
            )
        sequential = tuple(run for run in recorded.runs if not runs_overlap(run.settings))
        settings = self._design.next_plan(recorded.with_runs(sequential))
        if settings is None:
            candidates = [
                [(OverlapSetting.parse(f), OverlapSetting.parse(b)) for f, b in row]
                for row in overlaps
            ]
            done = len(recorded.runs) - len(sequential)
            grid = self._design.grid_mhz()
            settings = overlap_plan(recorded.schedule, grid, candidates, done)
        if settings is None:
            return {"settings": None}
        return {"settings": [" ".join(map(str, row)) for row in settings]}

    def learn(self, runs: str, profile: str) -> dict[str, Any]:
        """Learn a profile from runs and write it."""
        learned = learn(load_runs(Path(runs)))
        learned.profile.save(profile)
        return {
            "supports_planning": learned.report.supports_planning,
            "reasons": list(learned.report.reasons),
        }

    def plan(
        self,
        profile: str,
        schedule: str,
        target: str,
        planner: dict[str, Any],
        plan_out: str,
        frontier_out: str,
        can_overlap: bool = True,
    ) -> dict[str, Any]:
        """Plan for a target, write the plan and a small frontier."""
        options = PlannerOptions.from_config(PlannerConfig.model_validate(planner))
        known, order = Profile.load(profile), Schedule.load(schedule)
        if not can_overlap:
            # The profile may come from a job that could; this one would run something else.
            known = without_overlap(known)
        solver = Planner(order, known, options)
        made = solver.plan(parse_target(target))
        swept = undominated(solver.sweep(int(planner["points"]), solver.least_energy_s))
        made.save(plan_out)
        swept.save(frontier_out)
        return {"time_s": made.time_s, "energy_j": made.energy_j, "gap": made.gap}


def main() -> None:
    """Serve until the parent is gone."""
    with contextlib.suppress(OSError):
        os.nice(10)
    parent = os.getppid()
    solver = _Solver()
    while os.getppid() == parent:
        # A forked data loader keeps our standard input open: its end alone is not enough.
        if not select.select([sys.stdin], [], [], _PARENT_CHECK_S)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        print(json.dumps(_answer(solver, json.loads(line))), flush=True)


def _answer(solver: _Solver, values: dict[str, Any]) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = getattr(solver, values.pop("request"))(**values)
    except KareusError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__} in the background solver: {error}"}
    return answer


if __name__ == "__main__":
    main()
