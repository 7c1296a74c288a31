"""The GPU models of the package against the measurements they were fitted to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.fit_gpu_models import ASSUMED, FILES, fit
from kareus_pp.errors import FormatError
from kareus_pp.simulate.fit import Curve, fit_errors, fit_gpu_model, predict, read_curves
from kareus_pp.simulate.gpu_model import Work, load_gpu_model

# Mean relative errors of time and energy over all stages and kinds, with some room.
MOST = {"a100": (0.006, 0.03), "a40": (0.013, 0.02)}


@pytest.mark.parametrize("name", FILES)
def test_the_files_describe_the_measurements(name: str, shared_data: Path) -> None:
    folder = shared_data / "sosp24" / "stage_profile"
    curves = [c for file in FILES[name] for c in read_curves(folder / file)]
    errors = fit_errors(load_gpu_model(name), curves)
    assert len(errors) == 16 * len(FILES[name])
    assert np.mean([e.time_mean for e in errors]) < MOST[name][0]
    assert np.mean([e.energy_mean for e in errors]) < MOST[name][1]


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_what_the_fit_yields(name: str, shared_data: Path) -> None:
    model, _ = fit(name, shared_data / "sosp24")
    stored = load_gpu_model(name)
    assert model.clocks_mhz == stored.clocks_mhz
    work = Work(1e12, 1e9)
    for mhz in model.clocks_mhz[::5]:
        assert model.power_w(work, mhz) == pytest.approx(stored.power_w(work, mhz), rel=0.01)


def test_a_known_model_is_found_again() -> None:
    """Curves that a model made are fitted back, with works that the fit is not told."""
    true = load_gpu_model("a100")
    clocks = np.array(true.clocks_mhz, dtype=np.float64)
    curves = []
    for number, work in enumerate((Work(9e12, 5e9), Work(1.8e13, 2e10), Work(5e12, 4e10))):
        time, energy = predict(true, work, clocks)
        curves.append(Curve(str(number), clocks, time, energy))
    found = fit_gpu_model(curves, ASSUMED["a100"])
    for error in fit_errors(found, curves):
        assert error.time_max < 0.002
        assert error.energy_max < 0.005


@pytest.mark.parametrize(
    "text",
    [
        "stage,instruction,frequency,time\n0,forward,855,1.0\n",
        "stage,instruction,frequency,time,energy\n0,forward,855,-1.0,2.0\n",
        "stage,instruction,frequency,time,energy\n0,forward,855\n",
        "stage,instruction,frequency,time,energy\n0,forward,fast,1.0,1.0\n",
    ],
)
def test_malformed_measurements_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    path.write_text(text)
    with pytest.raises(FormatError, match="it needs columns"):
        read_curves(path)
