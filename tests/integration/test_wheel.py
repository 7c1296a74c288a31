"""A wheel, built and installed into an empty environment."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.integration.launcher import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # A build leaves files beside the sources: build a copy of what is tracked.
    source.mkdir()
    files = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "-z"]).split(b"\0")
    for name in filter(None, map(bytes.decode, files)):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The interpreter of an environment that holds the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return python


def test_the_wheel_carries_its_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "kareus_pp/py.typed" in names
    assert "kareus_pp/configs/gpu_models/a100.yaml" in names
    assert "kareus_pp/integrations/deepspeed.py" in names
    assert "kareus_pp/launch/__main__.py" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]


@pytest.mark.parametrize("package", ["kareus_pp", "kareus_pp.integrations", "kareus_pp.launch"])
def test_imports_in_an_empty_environment(empty: Path, tmp_path: Path, package: str) -> None:
    code = f"import {package}, sys; print({package}.__file__, 'torch' in sys.modules)"
    done = subprocess.run([str(empty), "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path, torch = done.stdout.split()
    assert path.startswith(str(empty.parent.parent))
    assert torch == "False"


@pytest.mark.slow
def test_works_with_its_dependencies_and_without_torch(tmp_path: Path, wheel: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    code = (
        "import importlib.util, kareus_pp.planner, kareus_pp.cli.main, kareus_pp.launch._run\n"
        "assert importlib.util.find_spec('torch') is None"
    )
    subprocess.run([python, "-c", code], check=True, cwd=tmp_path)
    command = str(tmp_path / "env" / "bin" / "kareus-pp")
    version = subprocess.check_output([command, "--version"], text=True)
    assert version.startswith("kareus-pp ")
