"""Packages for a machine without network: wheels that another machine downloads, and that are copied with the tree."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.gpu.training import BUILDS, COMPILES, TRAINS, missing

WHEELS, SITE = BUILDS / "wheels", BUILDS / "site"
WANTED = ("jinja2", *COMPILES, *TRAINS)  # torch and triton come with the machine
CARRIED = ("lark", "pydantic")  # packages that a machine for torch rarely has; pip adds what they need
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def download(python: str) -> int:
    """Download wheels for Linux on x86-64 and this version of Python into build/gpu/wheels."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", python, *(word for name in PLATFORMS for word in ("--platform", name))]
    done = subprocess.run([*command, "--dest", str(WHEELS), *CARRIED], check=False)
    for wheel in sorted(WHEELS.glob("*.whl")):
        print(wheel.relative_to(BUILDS.parents[1]))
    return done.returncode


def install() -> None:
    """Install carried wheels into build/gpu/site, if packages are missing, for this process and its children."""
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if not SITE.exists() and wheels and missing(WANTED):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(SITE)]
        if subprocess.run([*command, *wheels], check=False).returncode:
            return
    if SITE.exists():
        sys.path.append(str(SITE))
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(SITE)])
