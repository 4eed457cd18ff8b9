"""tools/setup_env.sh: what it says when something is missing, and that a second start costs nothing."""

import hashlib
import shutil
import sys
import time
from pathlib import Path

import launch
import pytest

REQUIREMENTS = ("requirements-cpu.txt", "requirements-cpu-overrides.txt")
NEEDED = "bash cat cut dirname env find flock g++ head mkdir sha256sum tail uname".split()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the set-up reads, without an environment."""
    root = tmp_path / "project"
    (root / "tools").mkdir(parents=True)
    shutil.copy(launch.ROOT / "tools/setup_env.sh", root / "tools")
    for name in REQUIREMENTS:
        shutil.copy(launch.ROOT / name, root)
    return root


def without_python(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has the tools that the set-up calls, and no Python; HOME has no pyenv."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in NEEDED:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return {"PATH": str(folder), "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path), "PYTHON": ""}


def test_finished_environment_is_reused_at_once(project: Path):
    """With the stamp of the requirements in place the set-up returns within a second and says nothing."""
    digest = hashlib.sha256(b"".join((project / name).read_bytes() for name in REQUIREMENTS)).hexdigest()
    (project / ".venv").mkdir()
    (project / ".venv/.setup-stamp").write_text(digest + "\n")
    start = time.monotonic()
    result = launch.run("bash", project / "tools/setup_env.sh", cwd=project)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert time.monotonic() - start < 1


def test_missing_python_is_named(project: Path, tmp_path: Path):
    """Without a Python 3.12 one message says what was tried and what to do; no environment is begun."""
    result = launch.run("bash", project / "tools/setup_env.sh", cwd=project, env=without_python(tmp_path))
    assert result.returncode != 0
    assert "no Python 3.12 on PATH (tried python3.12, python3, python) nor under pyenv" in result.stderr
    assert "PYTHON=/path/to/python3.12" in result.stderr
    assert not (project / ".venv/.setup-stamp").exists()


def test_wrong_python_is_named(project: Path, tmp_path: Path):
    """PYTHON= that is not a 3.12 is refused with its version."""
    wrong = tmp_path / "python-of-old"
    wrong.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.9.1;; *) exit 1;; esac\n')
    wrong.chmod(0o755)
    result = launch.run("bash", project / "tools/setup_env.sh", cwd=project, env={"PYTHON": str(wrong)})
    assert result.returncode != 0
    assert f"PYTHON={wrong} is not a Python 3.12 (Python 3.9.1)" in result.stderr


def test_python_is_found_under_pyenv(project: Path, tmp_path: Path):
    """A 3.12 that only pyenv's folder holds is found: the set-up gets as far as making the environment with it."""
    versions = tmp_path / "versions/3.12.99/bin"
    versions.mkdir(parents=True)
    # Only the version and the modules are answered: making the environment with it fails, after it has been named.
    only = versions / "python"
    only.write_text(
        f'#!/bin/sh\ncase "$1" in -c) exec {sys.executable} "$@";; --version) echo Python 3.12.99;; esac; exit 7\n'
    )
    only.chmod(0o755)
    result = launch.run("bash", project / "tools/setup_env.sh", cwd=project, env=without_python(tmp_path))
    assert f"making .venv with Python 3.12.99 ({only})" in result.stdout, result.tail
    assert (project / ".venv/.setup-stamp").read_text() == "building\n"
