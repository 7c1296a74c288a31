from __future__ import annotations

from dataclasses import replace

import pytest

from kareus_pp.errors import ProfileError
from kareus_pp.measure import extend_runs, learn, merge_profiles
from kareus_pp.profile import DeviceFacts, Option, Origin, Profile, Source
from kareus_pp.schedule import InstructionClass
from kareus_pp.setting import Setting
from tests.measure.job import Job

F, B = InstructionClass.parse("0F"), InstructionClass.parse("0B")


def profile(*options: Option, cls: InstructionClass = F, **changes: object) -> Profile:
    made = Profile(
        {cls: options},
        (80.0,),
        device=DeviceFacts("A", (1200, 1410), Source.COUNTER, "gpu"),
        fingerprint={"model": "m"},
        provenance={"job": str(changes.pop("job", "1"))},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def option(mhz: int, energy: float, sd: float | None, origin: Origin = Origin.MEASURED) -> Option:
    return Option(Setting(mhz), 1.0, energy, 0.01, sd, origin)


def test_replicas_share_the_work() -> None:
    merged = merge_profiles(
        [
            profile(option(1200, 100, 1.0), option(1410, 150, 1.0)),
            profile(option(1200, 103, 2.0), job="2", blocking_power_w=(82.0,)),
            profile(option(1200, 50, 9.0), cls=B),
        ]
    )
    first, second = merged.options[F]
    assert first.energy_j == pytest.approx((100 / 1 + 103 / 4) / (1 + 1 / 4))
    assert first.energy_sd_j == pytest.approx(1.5)  # the two disagree by more than they claim
    assert second.energy_j == 150
    assert merged.options[B][0].energy_j == 50
    assert merged.blocking_power_w == (pytest.approx(242 / 3),)
    assert merged.provenance["job"] == "1; 2"
    assert merged.provenance["merged"] == "from 3 profiles"


def test_measured_goes_before_predicted_and_unknown_deviation_stays_unknown() -> None:
    predicted = option(1200, 90, 0.1, Origin.PREDICTED)
    merged = merge_profiles([profile(predicted), profile(option(1200, 100, 5.0))])
    assert merged.options[F][0].energy_j == 100
    merged = merge_profiles([profile(option(1200, 90, None)), profile(option(1200, 100, 5.0))])
    assert merged.options[F][0].energy_j == 95
    assert merged.options[F][0].energy_sd_j is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fingerprint": {"model": "other"}}, "fingerprint 'model'"),
        ({"fingerprint": {}}, "fingerprint 'model'"),
        ({"device": DeviceFacts("A", (1200,), Source.EMULATED, "gpu")}, "energy source"),
        ({"device": DeviceFacts("A", (1200,), Source.COUNTER, "module")}, "scope"),
        ({"device": DeviceFacts("B", (1200,), Source.COUNTER, "gpu")}, "device"),
        ({"blocking_power_w": (1.0, 2.0)}, "number of stages"),
    ],
)
def test_what_does_not_belong_together_is_refused(change: dict[str, object], word: str) -> None:
    with pytest.raises(ProfileError, match=word) as caught:
        merge_profiles([profile(option(1200, 1, 1)), profile(option(1200, 1, 1), **change)])
    assert "\n" not in str(caught.value)


def test_nothing_to_merge() -> None:
    with pytest.raises(ProfileError, match="no profile"):
        merge_profiles([])


def test_runs_of_two_jobs_are_learned_from_together() -> None:
    job = Job()
    first = job.runs(*(job.run(job.uniform(mhz)) for mhz in (1410, 1300)))
    second = job.runs(*(job.run(job.uniform(mhz)) for mhz in (1200, 1050)))
    both = extend_runs(first, second)
    assert len(both.runs) == 4
    assert learn(both).report.unknown_classes == ()
    with pytest.raises(ProfileError, match="energy source"):
        extend_runs(first, replace(second, source=Source.COUNTER))
