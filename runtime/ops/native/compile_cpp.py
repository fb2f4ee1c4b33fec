"""Compiles the C++ ops into shared libraries, one per instruction set.

    python -m runtime.ops.native.compile_cpp    builds missing and outdated libraries; exit code 1 and a reason if it
                                                cannot

The libraries are written next to this file, or to the folder in DSC_NATIVE for a read-only checkout.

Installing dsc runs this (hatch_build.py). The project ships no compiled library: without a compiler, ops run on torch.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
ELSEWHERE = "DSC_NATIVE"  # environment variable: the folder of the libraries
# Flags of GCC and Clang by instruction set (runtime.ops.native.library.instructions). All libraries are built, and the
# one for the running processor is loaded: the processor that compiles may be another.
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


def main() -> int:
    problem = build()
    if problem:
        print(f"ops will run on torch, which takes about twice as long: {problem}", file=sys.stderr)
        return 1
    print("\n".join(str(path(variant)) for variant in VARIANTS))
    return 0


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


def build() -> str | None:
    """Build the libraries that are missing or outdated. Return None, or in one line why it failed.

    If several processes call this, one builds and the others wait.
    """
    if not VARIANTS:
        return f"there is no C++ for {platform.machine()}"
    if all(is_current(path(variant)) for variant in VARIANTS):
        return None
    folder = path("").parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        return f"libraries cannot be kept in {folder}: {error.strerror}"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build_missing()
    finally:
        os.close(lock)


def _build_missing() -> str | None:
    missing = [variant for variant in VARIANTS if not is_current(path(variant))]
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
    sys.exit(main())
