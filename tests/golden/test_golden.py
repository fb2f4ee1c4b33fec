"""All bytes of two builds are pinned, and the same spec gives the same bytes everywhere.

`pytest --bless tests/golden` rewrites the goldens; the diff is read before it is committed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from compiler.pipeline import compile_spec
from compiler.tools.report.page import build_pages
from compiler.emit.folder import write_build
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
    """Packages that affect the emitted text and whose versions differ from those that the goldens were made with."""
    pinned = pinned_versions()
    return [n for n in ("torch", "triton", "jinja2") if metadata.version(n).partition("+")[0] != pinned[n]]


@pytest.mark.skipif(bool(other_versions()), reason="goldens are of the versions in constraints.txt")
@pytest.mark.parametrize("name", SPECS)
def test_build_is_the_golden_one(name: str, tmp_path: Path, bless: bool) -> None:
    write_build(tmp_path / name, compile_spec(load(ROOT / "specs" / f"{name}.dsc"), pages=build_pages).files)
    if bless:
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        shutil.copytree(tmp_path / name, GOLDEN / name)
    built, golden = files(tmp_path / name), files(GOLDEN / name)
    assert built.keys() == golden.keys()
    for path, data in built.items():
        assert data.decode() == golden[path].decode(), f"{path} differs from its golden; bless it if it should"


def compiled(cwd: Path, spec: Path | str, seed: int, locale: str, zone: str, umask: int) -> dict[str, bytes]:
    """The build of a spec, compiled in a process with this environment."""
    cwd.mkdir(parents=True)
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "LC_ALL": locale, "TZ": zone, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "compiler.cli.main", "compile", str(spec), "-o", "out"]
    subprocess.run(command, cwd=cwd, env=environment, umask=umask, check=True, capture_output=True)
    return files(cwd / "out")


@pytest.mark.parametrize("seed", range(6))
def test_bytes_in_other_surroundings(tmp_path: Path, seed: int, record_property: Callable[[str, object], None]) -> None:
    cwd = tmp_path.joinpath(*["deep"] * seed, "a folder with blanks")
    locale, zone = ("C", "C.UTF-8", "POSIX")[seed % 3], ("UTC", "Asia/Tokyo", "America/Caracas")[seed // 2]
    built = compiled(cwd, ROOT / "specs" / "tiny.dsc", seed, locale, zone, umask=(0o000, 0o077)[seed % 2])
    write_build(tmp_path / "here", compile_spec(load(ROOT / "specs" / "tiny.dsc"), pages=build_pages).files)
    assert {path: data for path, data in built.items() if not path.startswith("cache/")} == files(tmp_path / "here")
    record_property("builds", 1)


def test_same_spec_same_bytes(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Hash seed, current folder, locale, time zone and umask do not affect a build."""
    builds = []
    for index, (locale, zone, umask) in enumerate([("C", "UTC", 0o022), ("C.UTF-8", "Asia/Tokyo", 0o077)]):
        cwd = tmp_path / f"somewhere {index}"
        spec = os.path.relpath(ROOT / "specs" / "quickstart.dsc", cwd) if index else ROOT / "specs" / "quickstart.dsc"
        builds.append(compiled(cwd, spec, index + 1, locale, zone, umask))
    assert builds[0] == builds[1]
    record_property("builds", 2)


def test_builds_name_no_place_and_no_time() -> None:
    """A build has nothing that differs on another machine: absolute paths, hosts, dates."""
    for name in SPECS:
        for path, data in files(GOLDEN / name).items():
            text = data.decode()
            assert str(ROOT) not in text and not re.search(r"/(home|root|tmp|usr|work)/|20\d\d-\d\d-\d\d", text), path
