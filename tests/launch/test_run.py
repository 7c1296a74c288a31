from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kareus_pp.launch._run import UsageError, parse_command

SCRIPT = """
import json, multiprocessing, os, sys

def square(x):
    return x * x

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        squares = pool.map(square, [1, 2, 3])
    import neighbour
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__,
        "main": sys.modules["__main__"].square is square, "squares": squares,
        "neighbour": neighbour.NAME,
    }))
    sys.exit(int(os.environ.get("WANTED", "0")))
"""


def launch(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kareus_pp.launch", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("words", "target", "is_module", "arguments", "config"),
    [
        ("train.py", "train.py", False, (), None),
        ("train.py --steps 3", "train.py", False, ("--steps", "3"), None),
        ("--local_rank=2 train.py -m x", "train.py", False, ("--local_rank=2", "-m", "x"), None),
        (
            "--local-rank=0 --kareus-config c.yaml t.py",
            "t.py",
            False,
            ("--local-rank=0",),
            "c.yaml",
        ),
        (
            "--kareus-config=c.json t.py --kareus-config d",
            "t.py",
            False,
            ("--kareus-config", "d"),
            "c.json",
        ),
        ("--local_rank=1 -m pkg.train --x", "pkg.train", True, ("--local_rank=1", "--x"), None),
    ],
)
def test_command_line(
    words: str, target: str, is_module: bool, arguments: tuple[str, ...], config: str | None
) -> None:
    command = parse_command(words.split())
    assert (command.target, command.is_module, command.arguments) == (target, is_module, arguments)
    assert command.config == (Path(config) if config else None)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "no training script"),
        ("--local_rank=1", "no training script"),
        ("--kareus-config", "needs the path"),
        ("--kareus-config= train.py", "needs the path"),
        ("--kareus_config c.yaml train.py", "unknown option '--kareus_config'"),
        ("-m", "needs the name of a module"),
    ],
)
def test_a_wrong_command_line_says_what_is_right(words: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        parse_command(words.split())
    assert "kareus_pp.launch [--kareus-config FILE] (SCRIPT | -m MODULE)" in str(caught.value)


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "neighbour.py").write_text("NAME = 'next door'\n")
    return folder


def test_a_script_sees_what_python_would_have_shown_it(scripts: Path, tmp_path: Path) -> None:
    done = launch("--local_rank=3", "job/train.py", "--steps", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "argv": ["job/train.py", "--local_rank=3", "--steps", "2"],
        "path": str(scripts),
        "file": str(scripts / "train.py"),
        "name": "__main__",
        "main": True,
        "squares": [1, 4, 9],
        "neighbour": "next door",
    }


def test_a_module_runs_as_well_and_the_exit_status_is_the_scripts(scripts: Path) -> None:
    done = launch("-m", "train", "--steps", "2", folder=scripts, WANTED="7")
    assert done.returncode == 7, done.stderr
    seen = json.loads(done.stdout)
    assert seen["argv"][1:] == ["--steps", "2"]
    assert (seen["main"], seen["squares"], seen["path"]) == (True, [1, 4, 9], str(scripts))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{modee: observe}", "has an unknown key 'modee'; did you mean 'mode'?"),
        ("{mode: sometimes}", "has mode = 'sometimes', which is not allowed"),
        ("[1", "is not valid YAML or JSON"),
        (None, "cannot read the config file"),
    ],
)
def test_a_wrong_config_file_ends_the_job_before_it_starts(
    scripts: Path, content: str | None, complaint: str
) -> None:
    if content is not None:
        (scripts / "kareus.yaml").write_text(content)
    done = launch("--kareus-config", "kareus.yaml", "train.py", folder=scripts)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kareus-pp: ")
    assert complaint in line


def test_a_script_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = launch("absent.py", folder=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("kareus-pp: there is no script 'absent.py'")


def test_ranks_but_the_first_leave_the_word_to_it(tmp_path: Path) -> None:
    done = launch("absent.py", folder=tmp_path, RANK="1")
    assert (done.returncode, done.stderr) == (2, "")


def test_help(tmp_path: Path) -> None:
    done = launch("--help", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")
