"""Elastic runs: if the number of ranks changes, the run continues with a build that is compiled for the new number.

Under `dsc train` the device of a rank that fails repeatedly is left out.

torchrun restarts ranks when a machine leaves or returns, with the new number of ranks. Rank 0 compiles the spec of the
build for that number into the run folder, which all ranks share; the others wait for it. Checkpoints hold logical
tensors, so the run continues from the newest one, after the samples that were trained on.
"""

from __future__ import annotations

import os
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
    folder = _folder(build, run, nodes, place.local_world)
    with suppress(BuildError):
        return Build.open(folder)
    if place.rank != 0:
        return _wait_for_build(folder)
    say(f"{place.world} ranks are left of {build.plan.mesh.world}: compiling the run for {devices} devices")
    _compile(build.folder / SPEC, devices, folder)
    return Build.open(folder)


def wait_for_machines(
    build: Build, place: TorchrunRank, metrics: Path, timeout_s: float, say: Callable[[str], None]
) -> None:
    """Wait for missing ranks until `timeout_s` after the start of torchrun, which ends this process when they come.

    A run that has trained since then is not held up: it has lost a machine, or a machine returns to it. `metrics`: the
    file that each step of it changes.
    """
    age_s = _age_s(place.agent_pid)
    with suppress(OSError):
        if time.time() - metrics.stat().st_mtime < age_s:
            return
    if place.world < build.plan.mesh.world and age_s < timeout_s:
        say(
            f"{place.world} of {build.plan.mesh.world} ranks are there: waiting {timeout_s - age_s:,.0f} s for the rest"
        )
        time.sleep(timeout_s - age_s)


def compile_ahead(build: Build, place: TorchrunRank, run: Path) -> None:
    """Start to compile, on rank 0, the build that is needed if a machine is lost, at the lowest priority.

    If that fails, the reason is said when the build is needed. `build`: of all machines.
    """
    nodes = place.world // place.local_world - 1
    if place.rank or not nodes:
        return
    folder = _folder(build, run, nodes, place.local_world)
    with suppress(BuildError):
        Build.open(folder)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.Popen(
        _command(build.folder / SPEC, f"{nodes}x{place.local_world}", folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_be_idle,
    )


def _be_idle() -> None:
    die_with_parent()
    os.nice(19)


def _age_s(pid: int) -> float:
    """Return how long a process has run."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _folder(build: Build, run: Path, nodes: int, ranks_per_node: int) -> Path:
    return run / FOLDER / f"{build.digest[:16]}-{nodes}x{ranks_per_node}"


def build_without(build: Build, max_devices: int, run: Path, say: Callable[[str], None]) -> Build:
    """Return a build of the same spec for as many devices of this machine as possible, at most `max_devices`.
    UsageError if there is none."""
    for devices in range(max_devices, 0, -1):
        on = f"1x{devices}"
        folder = _folder(build, run, 1, devices)
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
    compilation = subprocess.run(
        _command(spec, on, folder), capture_output=True, text=True, check=False, preexec_fn=die_with_parent
    )
    if code := compilation.returncode:
        message = f"the run cannot be compiled for {on} devices:\n{compilation.stderr.strip()}"
        raise UsageError(message, code if code > 0 else EXIT_RETRY)  # negative: killed


def _command(spec: Path, on: str, folder: Path) -> tuple[str, ...]:
    words = ("compiler.cli.main", "compile", str(spec), "--on", on, "-o", str(folder))
    return sys.executable, "-P", "-m", *words


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
