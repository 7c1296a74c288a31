"""Is the energy counter to be believed? Checks each reading against those before it."""

from __future__ import annotations

import dataclasses

from kareus_pp.device.base import Sample
from kareus_pp.device.errors import CounterError

STUCK_AFTER_S = 1.0
"""The counter moves about every 100 ms; ten of those without a move is standing still."""
PLAUSIBLE_W = 3000.0
"""More average power than any one GPU or module draws; a larger step is not energy."""
_TICK_S = 0.2
_REMEDY = "energy cannot be planned from it; run kareus-pp doctor, or set device to 'dry-run'"


class CounterWatch:
    """Drops impossible energy readings, and raises when the counter itself is broken.

    One impossible reading is a glitch and is dropped (its energy becomes None). A second one in a
    row, a counter that stands still while power is drawn, or no counter at all is a fault.
    """

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._energy_j: float | None = None
        self._at_s = 0.0
        self._moved_s = 0.0
        self._dropped = 0

    def check(self, sample: Sample) -> Sample:
        """The sample, with its energy dropped where it is impossible.

        Raises:
            CounterError: The counter is absent, stands still or does not add up.
        """
        energy_j = sample.energy_j
        if energy_j is None:
            raise CounterError(f"{self._gpu} has no energy counter", _REMEDY)
        if self._energy_j is None:
            self._energy_j, self._at_s, self._moved_s = energy_j, sample.at_s, sample.at_s
            return sample
        step_j = energy_j - self._energy_j
        # Visible energy moves in ticks: a step may carry the energy of one tick more.
        most_j = PLAUSIBLE_W * (sample.at_s - self._at_s + _TICK_S)
        if step_j < 0 or step_j > most_j:
            self._dropped += 1
            if self._dropped > 1:
                way = "jumped back" if step_j < 0 else "jumped ahead"
                raise CounterError(
                    f"the energy counter of {self._gpu} {way} by {abs(step_j):.1f} J", _REMEDY
                )
            return dataclasses.replace(sample, energy_j=None)
        self._dropped = 0
        if step_j > 0:
            self._moved_s = sample.at_s
        elif sample.at_s - self._moved_s > STUCK_AFTER_S and (sample.power_w or 1.0) > 0:
            raise CounterError(
                f"the energy counter of {self._gpu} has stood still for "
                f"{sample.at_s - self._moved_s:.1f} s",
                _REMEDY,
            )
        self._energy_j, self._at_s = energy_j, sample.at_s
        return sample
