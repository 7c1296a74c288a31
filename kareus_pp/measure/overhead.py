"""Iteration time that the dependency graph does not see: load, p2p latency, optimizer step, jitter.

Mostly constant for a job. Where the stages wait less for each other, delays of single instructions
are absorbed less, and the overhead grows; so it may be learned as a smooth function of the mean
busy share and the length of the iteration, if that predicts left-out plans better than a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from kareus_pp.measure.table import Floats

LENGTHS = (0.01, 0.02, 0.04, 0.08)
AMPLITUDES = (1.0, 2.0)
NOISES = (0.3, 0.6, 1.0)
MIN_PLANS = 6
"""With fewer plans the overhead is a constant."""
GAIN = 0.98
"""A smooth overhead must lower the mean squared leave-one-out error at least to this share."""
CONSTANT_SD = 10.0
"""Prior standard deviation of the constant, in standard deviations of the overhead."""


class OverheadModel:
    """Overhead of an iteration in seconds.

    Attributes:
        constant_s: Mean overhead.
        smooth: True where it depends on how busy the stages are.
        sd_s: Leave-one-out standard error of the overhead.
    """

    def __init__(self, features: Floats, overhead_s: Floats) -> None:
        count = len(overhead_s)
        self.constant_s = float(np.mean(overhead_s))
        self.smooth = False
        self._features = features
        self._centre = self.constant_s
        spread = float(np.std(overhead_s))
        self.sd_s = float(np.std(overhead_s, ddof=1)) if count > 1 else abs(self.constant_s)
        if count < MIN_PLANS or spread == 0.0:
            return
        centred = overhead_s - self._centre
        best = float(np.mean((centred * count / (count - 1)) ** 2)) * GAIN
        for length, amplitude, noise in product(LENGTHS, AMPLITUDES, NOISES):
            kernel = self._kernel(features, features, length, amplitude * spread, spread)
            inverse = np.linalg.inv(kernel + (noise * spread) ** 2 * np.eye(count))
            weights = inverse @ centred
            left_out = weights / np.diag(inverse)
            error = float(np.mean(left_out**2))
            if error < best:
                best = error
                self.smooth = True
                self.sd_s = float(np.sqrt(error))
                self._choice = (length, amplitude * spread, spread)
                self._weights = weights

    def __call__(self, features: Floats) -> Floats:
        """Overhead of each plan in seconds; `(plans, features)` to `(plans,)`."""
        if not self.smooth:
            return np.full(len(features), self.constant_s)
        kernel = self._kernel(features, self._features, *self._choice)
        return np.asarray(self._centre + kernel @ self._weights)

    @staticmethod
    def _kernel(a: Floats, b: Floats, length: float, amplitude: float, spread: float) -> Floats:
        square = np.sum((a[:, None, :] - b[None, :, :]) ** 2, axis=2)
        smooth = amplitude**2 * np.exp(-0.5 * square / length**2)
        return np.asarray(smooth + (CONSTANT_SD * spread) ** 2)


def features_of(busy_s: Sequence[Floats], replay_s: Floats) -> Floats:
    """Mean busy share of the stages and logarithm of the iteration; shape `(plans, 2)`.

    Args:
        busy_s: For each plan the busy seconds of every stage.
        replay_s: Iteration time of every plan without overhead.
    """
    share = np.array([float(np.mean(busy)) for busy in busy_s]) / replay_s
    return np.stack([share, np.log(replay_s)], axis=1)
