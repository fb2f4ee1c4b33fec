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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
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
    "-shared",
    "-fPIC",
)
COMPILERS = ("c++", "g++", "clang++")  # tried in order if CXX is not set
LIMIT_S = 600  # for one compiler run; 25 s of a core are usual


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
    with ThreadPoolExecutor(len(missing)) as pool:  # each compiler run takes about 25 s of a core
        problems = [*filter(None, pool.map(partial(_make, compiler), missing))]
    return problems[0] if problems else None


def _make(compiler: list[str], variant: str) -> str | None:
    scratch = path(variant).with_suffix(f".{os.getpid()}")
    sources = [p.name for p in sorted(HERE.glob("*.cpp"))]
    command = [*compiler, *FLAGS, *VARIANTS[variant], f'-DDIGEST="{digest()}"', "-o", str(scratch.absolute()), *sources]
    try:
        result = subprocess.run(command, cwd=HERE, capture_output=True, errors="replace", timeout=LIMIT_S, check=False)
        if result.returncode == 0 and scratch.is_file():
            with scratch.open("ab") as file:  # written last, so a truncated file is not current
                file.write(digest().encode())
            scratch.replace(path(variant))  # processes that have loaded the old file keep it
            return None
        output = f"with exit code {result.returncode}\n{result.stderr}".strip().splitlines()
        return f"{compiler[0]} failed: {next((line for line in output if 'error' in line), output[0])[:300]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler[0]} failed: {error}"[:300]
    finally:
        with suppress(OSError):
            scratch.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
