"""The same jobs under older DeepSpeed releases, each in an environment of its own."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.integration import test_deepspeed_engine as engine
from tests.integration import test_deepspeed_launcher as launcher

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["0.14.4", "0.16.9"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that finds this release before the packages of the running one."""
    folder = tmp_path_factory.mktemp(f"deepspeed-{request.param}")
    venv.create(folder, with_pip=True)
    found = str(folder / "bin" / "python")
    (site,) = folder.glob("lib/python*/site-packages")
    running = sysconfig.get_path("purelib")
    (site / "running.pth").write_text(f"import site; site.addsitedir({running!r})\n")
    pip = [found, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, f"deepspeed=={request.param}"], check=True)
    version = subprocess.check_output(
        [found, "-c", "import importlib.metadata as m; print(m.version('deepspeed'))"], text=True
    )
    assert version.strip() == request.param
    return found


def test_engines(python: str, tmp_path: Path) -> None:
    engine.check(engine.Cases(tmp_path, python))


def test_jobs_under_the_launcher(python: str, tmp_path: Path) -> None:
    launcher.check_calls(launcher.Lifecycle(tmp_path, python))
