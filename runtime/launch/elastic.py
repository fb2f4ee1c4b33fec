"""Elastic runs: if the number of ranks changes, the run continues with a build that is compiled for the new number.

Under `dsc train` the device of a rank that fails repeatedly is left out.

torchrun restarts ranks when a machine leaves or returns, with the new number of ranks. Rank 0 compiles the spec of the
build for that number into the run folder, which all ranks share; the others wait for it. Checkpoints hold logical
tensors, so the run continues from the newest one, after the samples that were trained on.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from runtime.build.build import Build, BuildError
from runtime.data.preparation import UsageError
from runtime.launch.rank_process import die_with_parent
from runtime.launch.torchrun_meet import TorchrunRank
from runtime.system.outcome import EXIT_RETRY, EXIT_USAGE

FOLDER = "builds"  # of a run folder
SPEC = "spec.resolved"  # of a build
LOOK_S = 0.5
LONGEST_S = 1800.0  # limit for a compilation


def build_for(build: Build, place: TorchrunRank, run: Path, say: Callable[[str], None]) -> Build:
    """Return a build of the same spec for the ranks that torchrun started. UsageError if there is none."""
    nodes, remainder = divmod(place.world, place.local_world)
    if remainder:
        raise UsageError(
            f"{place.world} ranks are not {place.local_world} on each machine: --elastic needs the same number on all"
        )
    devices = f"{nodes}x{place.local_world}"
    folder = run / FOLDER / f"{build.digest[:16]}-{devices}"
    with suppress(BuildError):
        return Build.open(folder)
    if place.rank != 0:
        return _wait_for_build(folder)
    say(f"{place.world} ranks are left of {build.plan.mesh.world}: compiling the run for {devices} devices")
    _compile(build.folder / SPEC, devices, folder)
    return Build.open(folder)


def build_without(build: Build, max_devices: int, run: Path, say: Callable[[str], None]) -> Build:
    """Return a build of the same spec for as many devices of this machine as possible, at most `max_devices`.
    UsageError if there is none."""
    for devices in range(max_devices, 0, -1):
        on = f"1x{devices}"
        folder = run / FOLDER / f"{build.digest[:16]}-{on}"
        with suppress(BuildError):
            return Build.open(folder)
        say(f"compiling the run for {devices} of {build.plan.mesh.world} devices")
        try:
            _compile(build.folder / SPEC, on, folder)
        except UsageError as error:
            if devices == 1 or error.code != EXIT_USAGE:
                raise
            continue
        return Build.open(folder)
    raise UsageError("no device is left")


def _compile(spec: Path, on: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = ("compiler.cli.main", "compile", str(spec), "--on", on, "-o", str(folder))
    compilation = subprocess.run(
        (sys.executable, "-P", "-m", *words), capture_output=True, text=True, check=False, preexec_fn=die_with_parent
    )
    if code := compilation.returncode:
        message = f"the run cannot be compiled for {on} devices:\n{compilation.stderr.strip()}"
        raise UsageError(message, code if code > 0 else EXIT_RETRY)  # negative: killed


def _wait_for_build(folder: Path) -> Build:
    """Wait for the build that rank 0 compiles. If rank 0 fails, torchrun ends this rank, too."""
    until = time.monotonic() + LONGEST_S
    while True:
        try:
            return Build.open(folder)
        except BuildError as error:
            if time.monotonic() > until:
                raise UsageError(f"rank 0 has compiled no build in {LONGEST_S:,.0f} s: {error}") from None
        time.sleep(LOOK_S)
