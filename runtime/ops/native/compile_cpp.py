"""Compiles the C++ ops into shared libraries, one per instruction set.

    python -m runtime.ops.native.compile_cpp        builds missing and outdated libraries
    python -m runtime.ops.native.compile_cpp own    only the one that this processor loads

The exit code is 1, with a reason, if it cannot. The libraries are written next to this file, or to the folder in
DSC_NATIVE for a read-only checkout.

Installing dsc runs this (hatch_build.py): it puts all libraries in a wheel, and that of the processor in a checkout.
The repository has no compiled library: without a compiler, ops run on torch.
This module imports only the standard library.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
ELSEWHERE = "DSC_NATIVE"  # environment variable: the folder of the libraries
# Flags of GCC and Clang by instruction set (runtime.ops.native.library.instructions), newest first. The library for the
# running processor is loaded: the processor that compiles may be another.
X86 = {
    "AVX512_BF16": ("-march=x86-64-v4", "-mavx512bf16"),
    "AVX512": ("-march=x86-64-v4",),
    "AVX2": ("-march=x86-64-v3",),
}
VARIANTS = X86 if platform.machine() == "x86_64" else {}
FLAGS = (
    "-std=c++17",
    "-O3",
    "-g0",
    "-fno-math-errno",
    "-fvisibility=default",
    "-Wno-psabi",
    "-fPIC",
)
COMPILERS = ("c++", "g++", "clang++")  # tried in order if CXX is not set
LIMIT_S = 600  # for one compiler run; all runs for a library take 17 to 25 s of a core


def main(words: Sequence[str]) -> int:
    variants = own() if [*words] == ["own"] else tuple(VARIANTS)
    problem = build(variants)
    if problem:
        print(f"ops will run on torch, which takes about twice as long: {problem}", file=sys.stderr)
        return 1
    print("\n".join(str(path(variant)) for variant in variants))
    return 0


def own() -> tuple[str, ...]:
    """Return the variant that this processor loads, and all of them if that is not certain before torch is there."""
    with suppress(OSError):
        flags = {*Path("/proc/cpuinfo").read_text("utf-8").split()}
        if "AVX512" in VARIANTS and {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
            return ("AVX512_BF16",) if "avx512_bf16" in flags and "amx_bf16" not in flags else ("AVX512",)
        if "AVX2" in VARIANTS and {"avx2", "fma", "bmi2"} <= flags and "avx512f" not in flags:
            return ("AVX2",)
    return tuple(VARIANTS)


def path(variant: str) -> Path:
    return Path(os.environ.get(ELSEWHERE) or HERE) / f"lib{variant.lower()}.so"


def digest() -> str:
    """Return the digest of sources and flags, in hexadecimal. A library contains it as a string."""
    sources = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])
    parts = [json.dumps([FLAGS, VARIANTS]).encode(), *(p.name.encode() + b"\0" + p.read_bytes() for p in sources)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def is_current(library: Path) -> bool:
    """Return whether a library was built from the current sources and flags."""
    return library.is_file() and library.read_bytes().endswith(digest().encode())


def build(variants: Sequence[str] = tuple(VARIANTS)) -> str | None:
    """Build those of the libraries that are missing or outdated. Return None, or in one line why it failed.

    If several processes call this, one builds and the others wait.
    """
    if not VARIANTS:
        return f"there is no C++ for {platform.machine()}"
    if all(is_current(path(variant)) for variant in variants):
        return None
    folder = path("").parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        return f"libraries cannot be kept in {folder}: {error.strerror}"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build_missing(variants)
    finally:
        os.close(lock)


def is_being_built() -> bool:
    """Return whether another process builds libraries now."""
    try:
        lock = os.open(path("").parent, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def _build_missing(variants: Sequence[str]) -> str | None:
    missing = [variant for variant in variants if not is_current(path(variant))]
    if not missing:
        return None
    try:
        compiler = shlex.split(os.environ.get("CXX", "")) or [*filter(shutil.which, COMPILERS)][:1]
    except ValueError as error:
        return f"CXX cannot be read: {error}"
    if not compiler:
        return f"no C++ compiler was found ({', '.join(COMPILERS)}, or what CXX names)"
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="dsc-cpp-") as objects, ThreadPoolExecutor(cores) as pool:
        made = {variant: _compile(compiler, variant, Path(objects), pool) for variant in missing}
        problems = [_link(compiler, variant, parts) for variant, parts in made.items()]
    return next(filter(None, problems), None)


Part = tuple[Path, "Future[str | None]"]  # an object file, and why it could not be made


def _compile(compiler: list[str], variant: str, folder: Path, pool: Executor) -> list[Part]:
    """Start to compile each source of a variant."""
    common = [*compiler, *FLAGS, *VARIANTS[variant], f'-DDIGEST="{digest()}"', "-c"]
    parts = [(source.name, folder / f"{variant}-{source.stem}.o") for source in sorted(HERE.glob("*.cpp"))]
    return [(part, pool.submit(_run, [*common, name, "-o", str(part)])) for name, part in parts]


def _link(compiler: list[str], variant: str, parts: Sequence[Part]) -> str | None:
    """Link the objects of a variant when they are made. Return None, or in one line why there is no library."""
    for _, problem in parts:
        if (found := problem.result()) is not None:
            return found
    scratch = path(variant).with_suffix(f".{os.getpid()}")
    objects = [str(part) for part, _ in parts]
    try:
        if failure := _run([*compiler, "-shared", "-o", str(scratch.absolute()), *objects]):
            return failure
        with scratch.open("ab") as file:  # written last, so a truncated file is not current
            file.write(digest().encode())
        scratch.replace(path(variant))  # processes that have loaded the old file keep it
        return None
    except OSError as error:
        return f"{compiler[0]} failed: {error}"[:300]
    finally:
        with suppress(OSError):
            scratch.unlink()


def _run(command: list[str]) -> str | None:
    """Run the compiler among the sources. Return None, or in one line why it failed."""
    try:
        result = subprocess.run(command, cwd=HERE, capture_output=True, errors="replace", timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} failed: {error}"[:300]
    if result.returncode == 0:
        return None
    output = f"with exit code {result.returncode}\n{result.stderr}".strip().splitlines()
    return f"{command[0]} failed: {next((line for line in output if 'error' in line), output[0])[:300]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
