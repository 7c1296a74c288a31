"""The leader, on rank 0: builds the schedule, chooses frequency plans, has the plan made, watches.

It runs on the coordinator's thread and never waits: every turn looks whether what it needs has
come. Heavy work is done by the background solver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum

from kareus_pp.config import KareusConfig
from kareus_pp.errors import KareusError
from kareus_pp.measure.runs import IterationRecord, PlanRun, Runs
from kareus_pp.measure.runs_file import save_runs
from kareus_pp.plan import Plan, Settings
from kareus_pp.profile import Profile, Source
from kareus_pp.runtime.drift import DriftWatch
from kareus_pp.runtime.events import EventLog
from kareus_pp.runtime.gathering import (
    Gathered,
    described,
    gather_records,
    gather_schedule,
    profile_misfit,
)
from kareus_pp.runtime.messages import APPLY, DOWN_KEY, PROFILE
from kareus_pp.runtime.publisher import Publisher
from kareus_pp.runtime.solver import BackgroundSolver
from kareus_pp.runtime.store import Store
from kareus_pp.runtime.topology import Topology
from kareus_pp.setting import Setting

# A frequency plan is given up after this many times its iterations, if records keep being rejected.
_PATIENCE = 4


class _State(Enum):
    OBSERVE = "observe"
    DESIGN = "design"
    TRY = "try"
    LEARN = "learn"
    PLAN = "plan"
    WATCH = "watch"
    DONE = "done"


class Leader:
    """Decides for all ranks; they follow what it publishes as numbered assignments.

    Raises:
        KareusError: A plan or profile file that the configuration names is malformed.
    """

    def __init__(
        self,
        config: KareusConfig,
        topology: Topology,
        store: Store,
        fingerprint: Mapping[str, str],
        events: EventLog,
        logger: logging.Logger,
    ) -> None:
        self._config = config
        self._topology = topology
        self._store = store
        self._fingerprint = dict(fingerprint)
        self._events = events
        self._log = logger
        self._solver = BackgroundSolver()
        self._state = _State.OBSERVE
        self._given_plan = Plan.load(config.plan) if config.plan is not None else None
        self._profile = Profile.load(config.profile) if config.profile is not None else None
        self._observed: list[str] = []
        self._schedules: dict[str, Gathered] = {}
        self._key = ""
        self._planned: set[str] = set()
        self._publisher = Publisher(store)
        self._runs: Runs | None = None
        self._trying: Settings = ()
        self._records: list[IterationRecord] = []
        self._rejections: list[str] = []
        self._read_step = 0
        self._drift: DriftWatch | None = None
        self._profile_step = self._plan_step = 0
        self._stopped = False
        self._actions: Mapping[_State, Callable[[], None]] = {
            _State.OBSERVE: self._begin,
            _State.DESIGN: self._await_design,
            _State.TRY: self._await_records,
            _State.LEARN: self._await_profile,
            _State.PLAN: self._await_plan,
            _State.WATCH: self._watch,
        }

    def step_done(self, step: int, window_s: float) -> None:
        """The leader's own rank has finished a step."""
        self._publisher.step = max(self._publisher.step, step)
        self._publisher.step_s = window_s

    def observed(self, key: str) -> None:
        """The leader's own rank has published the stream of steps of a key."""
        self._observed.append(key)

    def close(self) -> None:
        """End the background solver."""
        self._solver.close()

    def tick(self) -> None:
        """Do whatever can be done now."""
        if self._stopped:
            return
        reason = self._store.get(DOWN_KEY)
        if reason is not None:
            self._stop(reason)
            return
        try:
            self._gather_schedules()
            action = self._actions.get(self._state)
            if action is not None:
                action()
        except KareusError as error:
            self._stop(str(error))

    # Observing.

    def _gather_schedules(self) -> None:
        for key in self._observed:
            if key in self._schedules:
                continue
            gathered = gather_schedule(self._store, self._topology, key)
            if gathered is None:
                continue
            self._schedules[key] = gathered
            schedule = gathered.schedule
            self._log.info(
                "kareus-pp: observed a schedule of %d stages and %d microbatches (signature %s)",
                schedule.stages,
                schedule.microbatches,
                schedule.signature,
            )
            if gathered.warning:
                self._log.warning(
                    "kareus-pp: %s; iterations may take longer than predicted", gathered.warning
                )
            self._events.write(
                "schedule", key=key, signature=schedule.signature, device=gathered.device
            )
            schedule.save(self._config.output / f"schedule-{schedule.signature}.json")

    def _begin(self) -> None:
        """The first schedule is known: go where the configuration leads."""
        if not self._schedules:
            return
        self._key = next(iter(self._schedules))
        gathered = self._schedules[self._key]
        misfit = ""
        if self._profile is not None:
            reason = profile_misfit(self._profile, gathered, self._fingerprint)
            misfit = f"the profile {str(self._config.profile)!r} {reason}" if reason else ""
        if self._config.mode == "observe":
            self._state = _State.DONE
        elif self._given_plan is not None:
            self._apply_given(self._given_plan)
        elif not gathered.clocks_mhz:
            self._log.warning(
                "kareus-pp: the device %s has no clocks to choose from: the schedule is recorded, "
                "nothing is profiled, planned or set",
                gathered.device,
            )
            self._state = _State.DONE
        elif self._profile is not None and not misfit:
            self._request_plan(self._key)
        elif self._config.mode == "apply":
            self._warn(misfit)
            self._state = _State.DONE
        else:
            if misfit:
                self._log.warning("kareus-pp: %s; profiling anew", misfit)
            self._begin_profile(gathered)

    def _apply_given(self, plan: Plan) -> None:
        for key, gathered in self._schedules.items():
            if gathered.schedule.signature == plan.schedule.signature:
                self._publish_plan(key, plan, "given")
                return
        here = self._schedules[self._key].schedule
        self._warn(
            f"the plan {str(self._config.plan)!r} is for a schedule of "
            f"{described(plan.schedule)} and this job runs {described(here)}"
        )
        self._state = _State.DONE

    # Profiling.

    def _begin_profile(self, gathered: Gathered) -> None:
        self._profile_step = self._publisher.step
        self._runs = Runs(
            schedule=gathered.schedule,
            runs=(),
            clocks_mhz=gathered.clocks_mhz,
            source=gathered.source,
            scope=gathered.scope,
            facts={**self._fingerprint, "gpu": gathered.device},
        )
        self._request_design()

    def _request_design(self) -> None:
        assert self._runs is not None
        path = self._config.output / "runs.json"
        save_runs(self._runs, path)
        self._solver.submit(
            "design",
            runs=str(path),
            profiling=self._config.profiling.model_dump(mode="json"),
            overlaps=self._schedules[self._key].overlaps,
        )
        self._state = _State.DESIGN

    def _await_design(self) -> None:
        answer = self._solver.poll()
        if answer is None:
            return
        rows = answer["settings"]
        if rows is None:
            self._solver.submit(
                "learn",
                runs=str(self._config.output / "runs.json"),
                profile=str(self._config.output / "profile.json"),
            )
            self._state = _State.LEARN
            return
        assert self._runs is not None
        self._trying = tuple(tuple(Setting.parse(text) for text in row.split()) for row in rows)
        self._records, self._rejections = [], []
        assignment = self._publisher.publish(
            PROFILE, self._key, f"profile-{len(self._runs.runs)}", self._trying
        )
        self._read_step = assignment.first_step
        self._state = _State.TRY

    def _await_records(self) -> None:
        """Collect the iterations of the frequency plan under way, then ask for the next one."""
        assert self._runs is not None
        wanted = self._config.profiling.iterations_per_plan
        for record in self._new_records():
            if record.rejected:
                self._rejections.append(record.rejected)
            else:
                self._records.append(record)
        seen = len(self._records) + len(self._rejections)
        if len(self._records) < wanted and seen < wanted * _PATIENCE:
            return
        name = self._publisher.last.name
        if self._rejections:
            self._events.write("rejected", plan=name, reasons=self._rejections)
        self._runs = self._runs.with_runs(
            (*self._runs.runs, PlanRun(self._trying, tuple(self._records[:wanted]), name))
        )
        self._request_design()

    def _new_records(self) -> list[IterationRecord]:
        """The iterations that all ranks have reported since the last call, in order.

        A rank that took an assignment up late has not reported its first steps: they are passed
        over as soon as a later step is complete.
        """
        schedule = self._schedules[self._key].schedule
        assignment = self._publisher.last
        found = []
        for step in range(self._read_step, self._publisher.step + 1, assignment.report_every):
            record = gather_records(self._store, self._topology, step, assignment, schedule)
            if record is not None:
                found.append(record)
                self._read_step = step + assignment.report_every
        return found

    def _await_profile(self) -> None:
        answer = self._solver.poll()
        if answer is None:
            return
        path = self._config.output / "profile.json"
        self._profile = Profile.load(path)
        self._events.write("profile", path=str(path), **answer)
        if not answer["supports_planning"]:
            self._warn(f"the profile does not support a plan: {'; '.join(answer['reasons'])}")
            self._publish_default()
        elif self._config.mode == "profile":
            self._log.info("kareus-pp: the profile is written to %s", path)
            self._publish_default()
        else:
            self._log.info("kareus-pp: the profile is written to %s; planning", path)
            self._request_plan(self._key)

    # Planning and applying.

    def _request_plan(self, key: str) -> None:
        gathered = self._schedules[key]
        output = self._config.output
        profile_path = output / "profile.json"
        assert self._profile is not None
        self._profile.save(profile_path)
        planner = self._config.planner.model_dump(mode="json")
        self._solver.submit(
            "plan",
            profile=str(profile_path),
            schedule=str(output / f"schedule-{gathered.schedule.signature}.json"),
            target=self._config.target,
            planner=planner,
            plan_out=str(output / f"plan-{gathered.schedule.signature}.json"),
            frontier_out=str(output / f"frontier-{gathered.schedule.signature}.json"),
            can_overlap=any(gathered.overlaps),
        )
        self._planned.add(key)
        self._key = key
        self._state = _State.PLAN

    def _await_plan(self) -> None:
        answer = self._solver.poll()
        if answer is None:
            return
        signature = self._schedules[self._key].schedule.signature
        plan = Plan.load(self._config.output / f"plan-{signature}.json")
        self._events.write("plan", key=self._key, target=self._config.target, **answer)
        self._publish_plan(self._key, plan, self._config.target)

    def _publish_plan(self, key: str, plan: Plan, name: str) -> None:
        self._key = key
        self._planned.add(key)
        assignment = self._publisher.publish(
            APPLY, key, name, plan.settings, plan.time_s, plan.energy_j
        )
        self._read_step = assignment.first_step + -assignment.first_step % assignment.report_every
        self._plan_step = assignment.first_step
        self._drift = DriftWatch(plan.time_s)
        self._log.info(
            "kareus-pp: applying the plan %s from step %d: predicted %s s and %s J an iteration%s",
            name,
            assignment.first_step,
            "unknown" if plan.time_s is None else f"{plan.time_s:.4f}",
            "unknown" if plan.energy_j is None else f"{plan.energy_j:.1f}",
            " (emulated)" if plan.source is Source.EMULATED else "",
        )
        self._state = _State.WATCH

    def _publish_default(self) -> None:
        """Default clocks from now on, the session goes on observing."""
        schedule = self._schedules[self._key].schedule
        default = tuple(tuple(Setting() for _ in row) for row in schedule.order)
        self._publisher.publish(APPLY, self._key, "default", default, report_every=0)
        self._state = _State.DONE

    # Watching.

    def _watch(self) -> None:
        """Compare measured with planned; plan for schedules that appear later."""
        for record in self._new_records():
            warning = self._drift.add(record.iter_time_s) if self._drift is not None else ""
            if warning:
                self._replan(warning)
                return
        if self._profile is None:
            return
        for key, gathered in self._schedules.items():
            known = all(cls in self._profile.options for cls in gathered.schedule.classes)
            if key not in self._planned and known:
                self._request_plan(key)
                return

    def _replan(self, reason: str) -> None:
        """The plan does not hold: profile and plan again where that pays, or stand down.

        It pays where the plan held for longer than it took to find.
        """
        assert self._drift is not None
        took = self._plan_step - self._profile_step
        held = self._drift.held * self._publisher.last.report_every
        if self._config.mode != "auto" or self._given_plan is not None or held < took:
            self._stop(reason)
            return
        self._log.warning("kareus-pp: %s any more; profiling and planning again", reason)
        self._events.write("replan", reason=reason)
        self._planned.clear()
        self._begin_profile(self._schedules[self._key])

    def _stop(self, reason: str) -> None:
        """All ranks stand down at a named step."""
        self._stopped = True
        self._publisher.stop(self._key, reason)

    def _warn(self, text: str) -> None:
        self._log.warning("kareus-pp: %s; training goes on at default clocks", text)
        self._events.write("warning", text=text)
