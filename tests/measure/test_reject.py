from __future__ import annotations

from dataclasses import replace

import pytest

from kareus_pp.measure import Runs, learn
from kareus_pp.measure.reject import reject_outliers
from tests.measure.job import Job


def recorded() -> tuple[Job, Runs]:
    job = Job(time_noise=0.005)
    plans = (1410, 1050, 1200, 1305, 1110, 1260)
    return job, job.runs(*(job.run(job.uniform(mhz), iterations=5) for mhz in plans))


def test_outlier_iterations_change_nothing() -> None:
    _, runs = recorded()
    spoiled = runs.with_runs(
        tuple(
            replace(
                run,
                iterations=(
                    *run.iterations,
                    replace(run.iterations[0], iter_time_s=run.iterations[0].iter_time_s * 1.2),
                ),
            )
            for run in runs.runs
        )
    )
    checked, reasons = reject_outliers(spoiled)
    assert reasons == {"outlier in iteration time": 6}
    assert [r.rejected for r in checked.runs[0].iterations] == [""] * 5 + [
        "outlier in iteration time"
    ]
    clean, found = learn(runs), learn(spoiled)
    assert found.report.rejected == reasons
    assert found.profile.overhead == clean.profile.overhead


@pytest.mark.parametrize("energy", [0.0, -3.0, float("nan")])
def test_impossible_energies_are_rejected(energy: float) -> None:
    _, runs = recorded()
    bad = replace(runs.runs[0].iterations[0], energy_j=(energy, 1.0, 1.0, 1.0))
    run = replace(runs.runs[0], iterations=(bad, *runs.runs[0].iterations[1:]))
    _, reasons = reject_outliers(runs.with_runs((run, *runs.runs[1:])))
    assert reasons == {"energy is not positive": 1}


def test_a_flagged_stage_is_left_out_and_the_others_are_used() -> None:
    job, runs = recorded()
    flagged = runs.with_runs(
        tuple(
            replace(
                run,
                iterations=tuple(
                    replace(
                        i,
                        duration_s=(*i.duration_s[:3], tuple(2 * t for t in i.duration_s[3])),
                        flags=("", "", "", "throttled: thermal"),
                    )
                    if number == 0
                    else i
                    for number, i in enumerate(run.iterations)
                ),
            )
            for run in runs.runs
        )
    )
    learned = learn(flagged)
    assert learned.report.rejected == {"throttled": 6}
    for cls, options in learned.profile.options.items():
        for option in options:
            true_s = job.time_s(cls, float(option.setting.clock_mhz or 0))
            assert option.time_s == pytest.approx(true_s, rel=0.01)


def test_two_iterations_cannot_tell_which_is_the_outlier() -> None:
    _, runs = recorded()
    first = runs.runs[0].iterations[0]
    pair = replace(runs.runs[0], iterations=(first, replace(first, iter_time_s=99.0)))
    assert reject_outliers(runs.with_runs((pair,)))[1] == {}
