"""What compiled code shows: of Triton's own text which products and descriptors were meant, of PTX how it loads and
stores, of SASS the instructions and what they take. SASS is read with the `cuobjdump` of the Triton wheel.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass

import triton

PRODUCTS = re.compile(r"[A-Z]*MMA\Z")  # HMMA of 16-bit numbers, HGMMA by warpgroups, QGMMA of 8-bit ones, UTC…MMA
# Where PTX has none of these, SASS has nothing that a verdict tells of: no products, no asynchronous copies, no change
# of registers. Spills are seen without it, as a stack.
REPORTED_IN_PTX = re.compile(r"mma|cp\.async|setmaxnreg")


@dataclass(frozen=True, slots=True)
class Product:
    """A `tl.dot`: its operands, "bf16", "f8E4M3FN" or "f32"; `depth` of each: how many products are summed at once."""

    dtype: str
    depth: int
    tf32: bool  # FP32 operands are rounded to TF32
    short: bool  # of eight bits, more than 128 are summed in the tensor cores' short accumulator


@dataclass(frozen=True, slots=True)
class Move:
    """A load or store of global memory: how its PTX begins (`ld.global.L1::evict_first`), and bytes of a thread."""

    text: str
    bytes: int


def products(ttir: str) -> tuple[Product, ...]:
    """Every product of a kernel, in order."""
    zeros = set(re.findall(r"(%\w+) = arith\.constant dense<0\.0+e\+00>", ttir))
    found = re.findall(
        r"tt\.dot %\S+, %\S+, (%[\w#]+)(.*?) : tensor<\d+x(\d+)x(\w+)> \*", ttir.replace("tensor<1x", "tensor<")
    )

    def short(dtype: str, depth: int, total: str, options: str) -> bool:
        promoted = re.search(r"maxNumImpreciseAcc = (\d+)", options)
        whole = total in zeros and depth <= 128
        return dtype.startswith("f8") and not whole and not (promoted and int(promoted[1]) <= 128)

    return tuple(
        Product(dtype, int(depth), dtype == "f32" and "tf32" in options, short(dtype, int(depth), total, options))
        for total, options, depth, dtype in found
    )


def moves(ptx: str) -> tuple[Move, ...]:
    """Every load and store of global memory, in order; of `cp.async` the loads."""
    found = []
    for name in re.findall(r"^\s*(?:@!?%p\d+\s+)?((?:ld|st)\.global\S*)", ptx, re.MULTILINE):
        vector, bits = re.search(r"(?:\.v(\d))?\.[bfsu](\d+)\Z", name).groups()  # type: ignore[union-attr]
        found.append(Move(name, int(vector or 1) * int(bits) // 8))
    for name, size in re.findall(r"(cp\.async\.c[ag]\.shared\S*) \[.*?\], \[.*?\], (\w+)", ptx):
        found.append(Move(name, int(size, 0)))
    return tuple(found)


def threads(ptx: str) -> int:
    """Threads of a program, including those of specialised warps."""
    return int(re.search(r"\.reqntid (\d+)", ptx)[1])  # type: ignore[index]


def usage_of(cubin: bytes) -> dict[str, int]:
    """What its kernel takes, such as REG and STACK."""
    text = _cuobjdump("-res-usage", cubin)
    usage = {key: int(value) for key, value in re.findall(r"\b([A-Z]+)(?:\[0\])?:(\d+)", text)}
    assert {"REG", "STACK"} <= set(usage), "cuobjdump showed no kernel"
    return usage


@functools.cache  # 0.3 s each, and the ops of one file share kernels
def instructions_of(cubin: bytes) -> frozenset[str]:
    """Names of the instructions that occur in a kernel."""
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(\w+)", _cuobjdump("-sass", cubin), re.MULTILINE)
    assert "EXIT" in names, "cuobjdump showed no kernel"
    return frozenset(names)


def _cuobjdump(what: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
