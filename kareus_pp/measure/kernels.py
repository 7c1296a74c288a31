"""Gaussian-process pieces shared by the time and the energy model.

Classes of one kind on different stages run the same kind of work on the same kind of GPU: their
curves over the clock have a part in common (by group) and a part of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.linalg import cho_solve, cholesky

from kareus_pp.measure.table import CostKey, Floats, Ints


def groups_of(keys: Sequence[CostKey]) -> Ints:
    """Group number of every cost key: same kind, communication and overlap on all stages."""
    names = [(key.cls.kind, key.cls.communicates, key.overlap) for key in keys]
    order = list(dict.fromkeys(names))
    return np.array([order.index(name) for name in names], dtype=np.intp)


def matern(x: Floats, y: Floats, length: float) -> Floats:
    """Matern kernel of smoothness 3/2 (Rasmussen and Williams, 2006, eq. 4.17)."""
    scaled = np.sqrt(3.0) * np.abs(x[:, None] - y[None, :]) / length
    return np.asarray((1 + scaled) * np.exp(-scaled))


def same(a: Ints, b: Ints) -> Floats:
    """1 where equal, else 0; shape `(len(a), len(b))`."""
    return np.asarray(a[:, None] == b[None, :], dtype=float)


class Conditioned:
    """A zero-mean Gaussian vector conditioned on noisy observations of it.

    Args:
        covariance: Prior covariance of the observations, noise included.
        observed: The observations.
    """

    def __init__(self, covariance: Floats, observed: Floats) -> None:
        self._root = cholesky(covariance, lower=True)
        self.weights: Floats = np.asarray(cho_solve((self._root, True), observed))
        self.log_likelihood = float(
            -0.5 * observed @ self.weights - np.sum(np.log(np.diag(self._root)))
        )

    def solve(self, right: Floats) -> Floats:
        """The inverse of the covariance times `right`."""
        return np.asarray(cho_solve((self._root, True), right))
