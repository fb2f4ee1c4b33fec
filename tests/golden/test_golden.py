"""Every byte of two builds, and that the same spec gives the same bytes anywhere.

`pytest --bless tests/golden` rewrites the goldens; the diff is read before it is committed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from compiler.build import compile_spec, write_build
from dsl.load import load

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent
SPECS = ("quickstart", "tiny")


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def pinned_versions() -> dict[str, str]:
    lines = re.findall(r"^(\w+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    return {name.lower(): version for name, version in lines}


def other_versions() -> list[str]:
    """Packages that decide what is emitted and are not of the versions the goldens were made with."""
    pinned = pinned_versions()
    return [n for n in ("torch", "triton", "jinja2") if metadata.version(n).partition("+")[0] != pinned[n]]


@pytest.mark.skipif(bool(other_versions()), reason="goldens are of the versions in constraints.txt")
@pytest.mark.parametrize("name", SPECS)
def test_build_is_the_golden_one(name: str, tmp_path: Path, bless: bool) -> None:
    write_build(tmp_path / name, compile_spec(load(ROOT / "specs" / f"{name}.dsc")).files)
    if bless:
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        shutil.copytree(tmp_path / name, GOLDEN / name)
    built, golden = files(tmp_path / name), files(GOLDEN / name)
    assert built.keys() == golden.keys()
    for path, data in built.items():
        assert data.decode() == golden[path].decode(), f"{path} differs from its golden; bless it if it should"


def test_same_spec_same_bytes(tmp_path: Path) -> None:
    """Hash seed, current folder, locale and time zone leave no trace."""
    builds = []
    for index, (seed, locale, zone) in enumerate([("1", "C", "UTC"), ("2", "C.UTF-8", "Asia/Tokyo")]):
        cwd = tmp_path / f"somewhere {index}"
        cwd.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": seed, "LC_ALL": locale, "TZ": zone, "PYTHONPATH": str(ROOT)}
        spec = os.path.relpath(ROOT / "specs" / "quickstart.dsc", cwd) if index else ROOT / "specs" / "quickstart.dsc"
        command = [sys.executable, "-P", "-m", "compiler.cli", "compile", str(spec), "-o", "out"]
        subprocess.run(command, cwd=cwd, env=environment, check=True, capture_output=True)
        builds.append(files(cwd / "out"))
    assert builds[0] == builds[1]


def test_builds_name_no_place_and_no_time() -> None:
    """What would differ on another machine: absolute paths, hosts, dates."""
    for name in SPECS:
        for path, data in files(GOLDEN / name).items():
            text = data.decode()
            assert str(ROOT) not in text and not re.search(r"/(home|root|tmp|usr|work)/|20\d\d-\d\d-\d\d", text), path
