"""What `make test` does on a machine without a C++ compiler or Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BOTH = "g++ chromium"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The one folder of PATH, with nothing in it."""
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def program(machine: Path, name: str, text: str = "") -> None:
    (machine / name).write_text(f"#!/bin/sh\n{text}\n")
    (machine / name).chmod(0o755)


def set_up(machine: Path, user: int, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"import os, sys; os.geteuid = lambda: {user}; from tests.tools import main; sys.exit(main())"
    bare = {name: value for name, value in os.environ.items() if name not in ("CXX", "CI", "CHROMIUM")}
    env = bare | environment | {"PATH": str(machine)}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def apt_get(machine: Path, *installed: str) -> Path:
    """A stand-in for apt-get that installs `installed`, whatever is requested, and records the request."""
    log = machine.parent / "log"
    copies = "\n".join(f"/bin/cp {machine}/apt-get {machine}/{name}" for name in installed)
    program(machine, "apt-get", f'echo "$@" >> {log}\ncase "$1" in install) {copies or ":"};; esac')
    return log


def test_make_reports_missing_tools_at_once(machine: Path) -> None:
    """The message is printed before anything is installed or run: no other command is started."""
    make = shutil.which("make")
    assert make
    of_make = ("MAKEFLAGS", "MAKELEVEL")  # set if make runs the tests: the make below would print its folder
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", *of_make)}
    command = [make, "test", f"PYTHON={sys.executable}"]
    environment |= {"PATH": str(machine), "CI": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert process.stdout == ""
    message, *rest = process.stderr.splitlines()
    assert message.endswith(
        f"this machine lacks g++ and chromium: apt-get install {BOTH}, as root, or what your system calls them"
    )
    assert [line.partition(" ")[0] for line in rest] == ["make:"]


def test_missing_tools_are_installed_as_root(machine: Path) -> None:
    log = apt_get(machine, "g++", "chromium")
    process = set_up(machine, user=0)
    assert (process.returncode, process.stdout, process.stderr) == (
        0,
        "installing g++ and chromium for the tests\n",
        "",
    )
    assert log.read_text() == f"update -qq\ninstall -y -qq --no-install-recommends {BOTH}\n"
    assert set_up(machine, user=0).stdout == ""


@pytest.mark.parametrize(("present", "asked"), [("clang++", "chromium"), ("google-chrome", "g++")])
def test_only_missing_tools_are_installed(machine: Path, present: str, asked: str) -> None:
    program(machine, present)
    log = apt_get(machine, asked)
    assert set_up(machine, user=0).returncode == 0
    assert log.read_text().splitlines()[1].endswith(f"recommends {asked}")


def test_other_users_are_told_what_to_install(machine: Path) -> None:
    log = apt_get(machine, "g++", "chromium")
    process = set_up(machine, user=1000)
    assert process.returncode == 2 and f"apt-get install {BOTH}," in process.stderr
    assert not log.exists()


def test_without_chromium_its_tests_are_left_out_except_in_ci(machine: Path) -> None:
    apt_get(machine, "g++")  # the other one would need a network
    process = set_up(machine, user=0)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.splitlines()[1:] == [
        "left out, for this machine has no Chromium: tests of pages in a browser (apt-get install chromium)"
    ]
    process = set_up(machine, user=0, CI="1")
    assert process.returncode == 2 and "this machine lacks chromium: apt-get install chromium," in process.stderr


def test_a_failed_installation_is_reported(machine: Path) -> None:
    apt_get(machine, "chromium")
    process = set_up(machine, user=0)
    assert process.returncode == 2 and "this machine lacks g++: apt-get install g++," in process.stderr


def test_a_compiler_may_be_named(machine: Path) -> None:
    program(machine, "chromium")
    assert set_up(machine, user=1000, CXX=f"{sys.executable} -O1").returncode == 0
    assert set_up(machine, user=1000, CXX="/nowhere/c++").returncode == 2
