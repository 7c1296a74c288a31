"""GPU models: physics that must hold at every clock, and files that users write."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kareus_pp.errors import ConfigError
from kareus_pp.simulate.gpu_model import (
    GpuModel,
    Work,
    gpu_model_names,
    load_gpu_model,
    parse_gpu_model,
)

ROOT = Path(__file__).resolve().parents[2]
MODELS = st.sampled_from(["a100", "a40"]).map(load_gpu_model)
WORKS = st.builds(Work, st.floats(1e9, 1e14), st.floats(0, 1e11))


def values(name: str = "a100") -> dict:
    return load_gpu_model(name).model_dump(mode="json")


@given(MODELS, WORKS)
def test_time_falls_and_power_rises_with_the_clock(model: GpuModel, work: Work) -> None:
    times = [model.time_s(work, mhz) for mhz in model.clocks_mhz]
    assert times == sorted(times, reverse=True)
    dynamic = [model.phi(mhz) for mhz in model.clocks_mhz]
    assert dynamic == sorted(dynamic)
    powers = [model.power_w(work, mhz) for mhz in model.clocks_mhz]
    assert powers == sorted(powers)
    waiting = [model.waiting_power_w(mhz) for mhz in model.clocks_mhz]
    assert waiting == sorted(waiting)
    assert min(waiting) >= model.power.static_w > 0


@given(MODELS, WORKS, st.floats(0.1, 10))
def test_energy_is_positive_and_grows_with_the_work(
    model: GpuModel, work: Work, factor: float
) -> None:
    for mhz in (model.clocks_mhz[0], model.top_mhz):
        energy = model.energy_j(work, mhz)
        assert energy > 0
        assert model.energy_j(factor * work, mhz) == pytest.approx(factor * energy)


def test_memory_bound_work_does_not_feel_the_clock() -> None:
    model, work = load_gpu_model("a100"), Work(0.0, 1e9)
    assert model.time_s(work, 855) == model.time_s(work, 1410) == 1e9 / model.rates.bytes_per_s
    assert model.power_w(work, 855) < model.power_w(work, 1410), "but its SMs are clocked"


def test_compute_bound_work_follows_the_effective_clock() -> None:
    model, work = load_gpu_model("a100"), Work(1e12, 0.0)
    assert model.time_s(work, 855) == pytest.approx(1e12 / model.rates.flops_per_s_per_mhz / 855)
    assert model.effective_mhz(1410) < 1380, "the power limit of the data is gone"
    unlimited = model.model_copy(update={"throttle": None})
    assert unlimited.effective_mhz(1410) == 1410


@pytest.mark.parametrize(("name", "blocking_w"), [("a100", 83.64), ("a40", 70.38)])
def test_waiting_at_the_top_clock_draws_the_measured_blocking_power(
    name: str, blocking_w: float
) -> None:
    model = load_gpu_model(name)
    assert model.waiting_power_w(model.top_mhz) == blocking_w
    assert model.waiting_power_w(model.clocks_mhz[0]) < blocking_w


def test_scaled_work_is_that_of_a_larger_model_and_microbatch() -> None:
    tokens, width = 10, 20
    work = Work(2 * tokens * width**2, width**2 + 2 * tokens * width)
    larger = Work(2 * 80 * 160**2, 160**2 + 2 * 80 * 160)
    assert work.scaled(8**3).flops == pytest.approx(larger.flops)
    assert work.scaled(8**3).bytes == pytest.approx(larger.bytes)
    assert work.scaled(1.0) == work


@pytest.mark.parametrize("bad", [(-1.0, 0.0), (0.0, float("nan")), (float("inf"), 0.0)])
def test_impossible_work_is_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        Work(*bad)


@pytest.mark.parametrize("name", ["a100", "a40"])
def test_a_file_reads_back_equal(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values(name)))
    assert load_gpu_model(path) == load_gpu_model(name)
    assert name in gpu_model_names()


def test_an_unknown_name_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'h900'.*a100, a40"):
        load_gpu_model("h900")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clocks_mhz": [1410, 855]}, "clocks_mhz = .*must ascend"),
        ({"clocks_mhz": []}, "at least one"),
        ({"power": {"static_w": -1}}, r"power\.static_w = -1.*greater than 0"),
        ({"power": {"waiting_w": 1.0}}, "waiting_w 1.0 is below static_w"),
        ({"power": {"statc_w": 1.0}}, r"unknown key 'power\.statc_w'"),
        ({"thermal": {"leakage_w_per_c": 10.0, "resistance_c_per_w": 1.0}}, "below 0.5"),
        ({"rates": {"bytes_per_s": float("inf")}}, "finite number"),
        ({"version": 2}, "version = 2"),
        ({"colour": "green"}, "unknown key 'colour'"),
    ],
)
def test_a_wrong_file_ends_in_one_sentence(change: dict, message: str) -> None:
    body = values()
    for key, value in change.items():
        body[key] = {**body[key], **value} if isinstance(value, dict) else value
    with pytest.raises(ConfigError, match=message) as caught:
        parse_gpu_model(yaml.safe_dump(body), "mine.yaml")
    assert "\n" not in str(caught.value)
    assert "mine.yaml" in str(caught.value)


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "power: 3"])
def test_text_that_is_no_model_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_gpu_model(text)


def test_a_missing_key_is_named() -> None:
    body = values()
    del body["power"]["compute_w"]
    with pytest.raises(ConfigError, match=r"misses the key 'power\.compute_w'"):
        parse_gpu_model(yaml.safe_dump(body))


def test_only_the_emulator_reads_gpu_models() -> None:
    """The rest of the program must learn from readings, not look up the truth."""
    allowed = {"kareus_pp/device/emulated.py"}
    words = ("load_gpu_model", "parse_gpu_model", "gpu_models", "GpuModel")
    readers = set()
    for folder in ("kareus_pp", "integrations", "launch", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("kareus_pp/simulate/") and any(
                word in path.read_text(encoding="utf-8") for word in words
            ):
                readers.add(name)
    assert readers == allowed


def test_only_the_emulator_reads_its_hidden_configuration() -> None:
    words = ("time_factors", "power_factors")
    readers = {
        path.relative_to(ROOT).as_posix()
        for folder in ("kareus_pp", "integrations", "launch")
        for path in (ROOT / folder).rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in words)
    }
    assert readers == {"kareus_pp/config.py", "kareus_pp/device/emulated.py"}
