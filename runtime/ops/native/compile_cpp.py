"""Makes the shared libraries of the C++, one for each set of instructions, with a C++ compiler.

    python -m runtime.ops.native.compile_cpp    makes what is not there of these sources; exit code 1: it cannot, says
    why

They lie beside this file, or in the folder that DSC_NATIVE names, for a checkout that may not be written to.

Installing dsc does it (hatch_build.py). No library is part of the project: without a compiler there is none, and ops
run on torch. Nothing but the standard library is imported here.
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
ELSEWHERE = "DSC_NATIVE"  # a folder of libraries
# By the instructions of a processor (runtime.ops.native.library.instructions), flags of GCC and Clang. All libraries
# are made, and that of the processor is loaded: it need not be the processor that compiled.
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
COMPILERS = ("c++", "g++", "clang++")  # where CXX names none
LIMIT_S = 600  # of a compiler; 25 s of a core are usual


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
    """The digest of sources and flags, in hexadecimal. A library holds it as a string."""
    sources = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])
    parts = [json.dumps([FLAGS, VARIANTS]).encode(), *(p.name.encode() + b"\0" + p.read_bytes() for p in sources)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def is_current(library: Path) -> bool:
    """Whether a library was made from the sources that are here."""
    return library.is_file() and library.read_bytes().endswith(digest().encode())


def build() -> str | None:
    """Makes the libraries that are not current. None, or why there are none, in a line.

    Of several processes one makes them, and the others wait for it.
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
    with ThreadPoolExecutor(len(missing)) as pool:  # each compiler takes some 25 s of a core
        problems = [*filter(None, pool.map(partial(_make, compiler), missing))]
    return problems[0] if problems else None


def _make(compiler: list[str], variant: str) -> str | None:
    scratch = path(variant).with_suffix(f".{os.getpid()}")
    sources = [p.name for p in sorted(HERE.glob("*.cpp"))]
    command = [*compiler, *FLAGS, *VARIANTS[variant], f'-DDIGEST="{digest()}"', "-o", str(scratch.absolute()), *sources]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, errors="replace", timeout=LIMIT_S, check=False)
        if done.returncode == 0 and scratch.is_file():
            with scratch.open("ab") as file:  # the last bytes: a file that was cut off is not current
                file.write(digest().encode())
            scratch.replace(path(variant))  # whoever has loaded the old one keeps it
            return None
        said = f"with exit code {done.returncode}\n{done.stderr}".strip().splitlines()
        return f"{compiler[0]} failed: {next((line for line in said if 'error' in line), said[0])[:300]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler[0]} failed: {error}"[:300]
    finally:
        with suppress(OSError):
            scratch.unlink()


if __name__ == "__main__":
    sys.exit(main())
