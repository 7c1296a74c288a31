"""Energy of steps as the coordinator reads it: every step has one, whatever runs between them."""

from __future__ import annotations

import time
from pathlib import Path

from kareus_pp.builders import build_1f1b
from tests.runtime.pipeline import make_pipeline


def test_samples_of_a_running_step_are_kept(tmp_path: Path) -> None:
    """Readings are dropped as steps are settled, and never those that a step still needs."""
    schedule = build_1f1b(1, 4)
    with make_pipeline(schedule, tmp_path, forward_s=(0.12,), mode="observe") as pipeline:
        for _ in range(4):
            pipeline.step()
        held = len(pipeline.sessions[0]._coordinator._samples)
    steps = pipeline.events(0, "step")
    assert len(steps) == 4
    assert all(step["energy_j"] is not None for step in steps[1:])
    assert held * 0.02 < 5.0


def test_a_window_does_not_reach_across_a_pause(tmp_path: Path) -> None:
    schedule = build_1f1b(1, 4)
    with make_pipeline(schedule, tmp_path, forward_s=(0.02,), mode="observe") as pipeline:
        for _ in range(8):  # one window of a second, and three steps of the next
            pipeline.step()
        time.sleep(1.5)
        for _ in range(6):
            pipeline.step()
    energies = [e["energy_j"] for e in pipeline.events(0, "step")]
    known = [energy for energy in energies if energy is not None]
    assert known
    assert max(known) < 1.25 * min(known)
