"""Sets up what the tests need besides Python, a C++ compiler and Chromium: `python3 -m tests.tools`, the first step of
`make test`.

As root, if there is apt-get, it installs what is missing. Otherwise, or if that fails, it prints in a line what to
install. Without a compiler it ends with exit code 2. Without Chromium the tests that look at pages are skipped, except
if CI is set: then it also ends with 2. It needs no package, and runs on any Python that make finds.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

# By its path: the package of the ops imports torch, which may not be there yet.
COMPILERS = runpy.run_path(str(Path(__file__).parents[1] / "runtime/ops/native/compile_cpp.py"))["COMPILERS"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")


def main() -> int:
    packages = missing()
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"installing {' and '.join(packages)} for the tests", flush=True)
        install(packages)
        packages = missing()
    if packages == ["chromium"] and "CI" not in os.environ:
        print("left out, for this machine has no Chromium: tests of pages in a browser (apt-get install chromium)")
        return 0
    if not packages:
        return 0
    print(
        "the tests hold the ops in C++ to their bounds and look at pages in a browser; this machine lacks "
        f"{' and '.join(packages)}: apt-get install {' '.join(packages)}, as root, or what your system calls them",
        file=sys.stderr,
    )
    return 2


def missing() -> list[str]:
    """The Debian packages of missing tools."""
    is_present = {
        "g++": any(map(shutil.which, shlex.split(os.environ.get("CXX", ""))[:1] or COMPILERS)),
        "chromium": "CHROMIUM" in os.environ or any(map(shutil.which, BROWSERS)),
    }
    return [package for package, is_there in is_present.items() if not is_there]


def install(packages: list[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        subprocess.run(["apt-get", *words], env=environment, stdout=sys.stderr, check=False)


if __name__ == "__main__":
    sys.exit(main())
