"""`python -m tests.gpu.compile_calls BUILD CALLS TARGET` compiles the calls in a file of the form of launches.json."""

from __future__ import annotations

import sys
from pathlib import Path

from triton.backends.compiler import GPUTarget

from runtime.build import launches
from runtime.build.kernels import load_kernels
from runtime.contract import LaunchList


def main(build: Path, calls: Path, target: str) -> None:
    backend, arch, warp_size = target.split(":")
    launches.use_target(GPUTarget(backend, int(arch), int(warp_size)))
    for use in LaunchList.from_json(calls.read_bytes()).calls:
        module = load_kernels((build / "kernels" / f"{use.kernel}.py").absolute())
        recorded = launches.record(module, use.op, launches.arguments_of(use, 0))
        print(use.op, *launches.compile_all(recorded))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
