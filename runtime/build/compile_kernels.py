"""Compiles the kernels of a rank before its channels open. Triton would compile each at its first launch: in the first
step, on one pipeline rank after the other, while the others wait in NCCL.

Worker processes (`python -m runtime.build.compile_kernels BUILD DIGEST TARGET`) compile the calls in launches.json into
Triton's cache, where the launches of the rank find them. TRITON_CACHE_DIR sets its folder, which machines can share: an
entry is keyed by the kernel's text, its arguments, the target and the versions.

For each compiled call, `calls/<digest>.json` in the cache lists its entries, so that a later run starts no workers. The
ranks of a machine compile each call once: they lock this file.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import ModuleType

from runtime.build.build import Build
from runtime.contract import KernelUse, LaunchList, node_kind
from runtime.system.outcome import ReportedError
from runtime.system.regular_files import open_regular, read_bytes, write
from runtime.system.strict_json import pretty
from runtime.system.workers import Answer, Task, run, serve

MODULE = "runtime.build.compile_kernels"
PACKAGES = ("torch", "triton")  # that determine what a call compiles to, and how
CALL_S = 300.0  # a call that takes longer hangs
QUIET_S = 2.0  # without a notice
LISTED, MAX_REASON = 5, 200  # kernels that an error names, and characters of the reason for each
MAX_RECORD_BYTES = 1 << 20  # of the record of a call


@dataclass(frozen=True)
class CallCache:
    """The calls that are compiled for a target, in Triton's cache at `folder`. `build`: an opened build."""

    folder: Path
    build: Build
    target: str

    def holds(self, use: KernelUse) -> bool:
        """Whether all kernels of a call are in the cache."""
        try:
            entries = json.loads(read_bytes(self._file(use), MAX_RECORD_BYTES))
            return bool(entries) and all((self.folder / Path(entry).name).is_dir() for entry in entries)
        except (OSError, ValueError, TypeError):
            return False

    def add(self, use: KernelUse, entries: Iterable[str]) -> None:
        """Record a call whose kernels are in these folders of the cache."""
        with suppress(OSError):  # the cache is read-only or full: the next run compiles the call again
            write(self._file(use), json.dumps(sorted(entries)))

    @contextmanager
    def lock(self, use: KernelUse) -> Iterator[None]:
        """Let one process of this machine at a time compile a call."""
        with ExitStack() as stack:
            with suppress(OSError):  # a file system without locks: a call may be compiled more than once
                file = self._file(use).with_suffix(".lock")
                file.parent.mkdir(parents=True, exist_ok=True)
                descriptor = open_regular(file, os.O_WRONLY | os.O_CREAT)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    def _file(self, use: KernelUse) -> Path:
        text = self.build.files[f"kernels/{use.kernel}.py"]
        versions = [f"{name} {metadata.version(name)}" for name in PACKAGES]
        key = "\n".join([pretty(use), hashlib.sha256(text).hexdigest(), self.target, *versions])
        return self.folder / "calls" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def compile_for_rank(
    build: Build, rank: int, device_type: str, set_action: Callable[[str], None], say: Callable[[str], None]
) -> None:
    """Compile the kernels that a rank launches on its current device. The ranks of its machine share the work.

    Call it before the rank connects to others. `set_action` and `say` as in `compile_kernels`.
    """
    if device_type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return
    require_packages(build)
    plan = build.plan
    pipeline_rank, _ = plan.mesh.coordinates(rank)
    uses, ranks = uses_of(build, pipeline_rank), min(plan.mesh.world, node_kind(plan.cluster, rank).devices)
    processes = max(1, len(os.sched_getaffinity(0)) // ranks)
    first = rank % ranks * len(uses) // ranks
    compile_kernels(cache_of(build), uses, processes, first=first, set_action=set_action, say=say)


def require_packages(build: Build) -> None:
    """Raise ReportedError if the kernels of a build call a library that is not installed here."""
    missing: dict[str, str] = {}  # package → the first file that imports it
    for path, text in sorted(build.files.items()):
        if Path(path).parent.name == "kernels":
            for package in _imported_packages(text):
                if importlib.util.find_spec(package) is None:
                    missing.setdefault(package, path)
    if missing:
        listed = "; ".join(f"{path} needs the package {package}" for package, path in missing.items())
        raise ReportedError(f"{listed}: install it on each machine, or name another implementation in `kernels {{ }}`")


def _imported_packages(text: bytes) -> set[str]:
    """The packages that a module imports at its top level."""
    statements = ast.parse(text).body
    names = [alias.name for statement in statements if isinstance(statement, ast.Import) for alias in statement.names]
    names += [statement.module or "" for statement in statements if isinstance(statement, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def uses_of(build: Build, pipeline_rank: int) -> tuple[KernelUse, ...]:
    """Return the calls of kernels that a pipeline rank makes."""
    stage = vars(build.module(f"stages.rank_{pipeline_rank}"))
    segments = {name for name, value in stage.items() if isinstance(value, ModuleType)}
    return tuple(use for use in _calls(build) if not use.segments or segments.intersection(use.segments))


def _calls(build: Build) -> tuple[KernelUse, ...]:
    return LaunchList.from_json(build.files["launches.json"]).calls


def compile_kernels(
    cache: CallCache,
    uses: Sequence[KernelUse],
    processes: int,
    *,
    first: int = 0,
    set_action: Callable[[str], None],
    say: Callable[[str], None],
) -> int:
    """Compile the calls that are not in the cache, and return their number. ReportedError names those that fail.

    processes: number of workers. first: the call to begin with, which should differ between the ranks of a machine.
    set_action gets the progress; say gets a notice if this takes more than two seconds.
    """
    numbers = {use: number for number, use in enumerate(_calls(cache.build))}
    start, first = time.monotonic(), first % max(1, len(uses))
    missing = {numbers[use]: use for use in (*uses[first:], *uses[:first]) if not cache.holds(use)}
    done, failures, is_quiet = 0, dict[str, str](), True

    def on_answer(task: Task, answer: Answer) -> None:
        nonlocal done, is_quiet
        done += 1
        set_action(f"compile kernels: {done} of {len(missing)} calls")
        if is_quiet and time.monotonic() - start > QUIET_S:
            is_quiet = False
            say(f"compiling kernels, {len(missing)} distinct calls, into {cache.folder}, for this and later runs")
        if "failed" in answer:
            failures.setdefault(missing[task["call"]].kernel, " ".join(answer["failed"].split())[:MAX_REASON])

    if missing:
        set_action("compile kernels")
        build = cache.build
        command = (sys.executable, "-P", "-m", MODULE, str(build.folder), build.digest, cache.target)
        run(command, [{"call": number} for number in missing], processes, CALL_S, math.inf, on_answer)
    if failures:
        texts = [f"kernels/{kernel}.py: {reason}" for kernel, reason in sorted(failures.items())]
        more = f"; and {len(texts) - LISTED} more" * (len(texts) > LISTED)
        raise ReportedError(f"kernels do not compile for {cache.target}: {'; '.join(texts[:LISTED])}{more}")
    if not is_quiet:
        say(f"compiled kernels, {len(missing)} distinct calls, in {time.monotonic() - start:.0f} s")
    return len(missing)


def cache_of(build: Build) -> CallCache:
    """Return the cache of a build's calls for the current device. Imports Triton."""
    from triton import knobs
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return CallCache(Path(knobs.cache.dir), build, f"{target.backend}:{target.arch}:{target.warp_size}")


# --- worker


def main(folder: str, digest: str, target: str) -> int:
    """Compile the calls that are asked for as {"call": N}, their number in launches.json. Answers are empty."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    from runtime.build import launches
    from runtime.build.kernels import load_kernels

    backend, arch, warp_size = target.split(":")
    launches.use_target(GPUTarget(backend, int(arch) if arch.isdecimal() else arch, int(warp_size)))
    build = Build.open(Path(folder), digest)
    cache, calls = CallCache(Path(knobs.cache.dir), build, target), _calls(build)

    def handle(task: Task) -> Answer:
        use = calls[task["call"]]
        path = build.path(f"kernels/{use.kernel}.py")
        assert path, use
        module = load_kernels(path)
        recorded = [launches.record(module, use.op, launches.arguments_of(use, n)) for n in launches.rows_of(use)]
        with cache.lock(use):
            if not cache.holds(use):
                cache.add(use, set(launches.compile_all(chain.from_iterable(recorded))))
        return {}

    return serve(handle)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
