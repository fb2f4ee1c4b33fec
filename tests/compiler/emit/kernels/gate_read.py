"""Reads compiled code: products and descriptors from Triton's own text, loads and stores from PTX, and from SASS the
instructions and resources. SASS is read with the `cuobjdump` of the Triton wheel.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import triton

PRODUCTS = re.compile(r"[A-Z]*MMA\Z")  # HMMA of 16-bit numbers, HGMMA by warpgroups, QGMMA of 8-bit ones, UTC…MMA
# If PTX has none of these, SASS need not be read: it has none of the instructions that a verdict reports (products,
# asynchronous copies, changes of the register count). Spills show without SASS, as the size of the stack.
REPORTED_IN_PTX = re.compile(r"mma|cp\.async|setmaxnreg")


@dataclass(frozen=True, slots=True)
class Product:
    """A `tl.dot`: its operands' dtype, "bf16", "f8E4M3FN" or "f32"; `depth`: number of products summed at once."""

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
    matches = re.findall(
        r"tt\.dot %\S+, %\S+, (%[\w#]+)(.*?) : tensor<\d+x(\d+)x(\w+)> \*", ttir.replace("tensor<1x", "tensor<")
    )

    def short(dtype: str, depth: int, total: str, options: str) -> bool:
        promoted = re.search(r"maxNumImpreciseAcc = (\d+)", options)
        is_one_sum = total in zeros and depth <= 128
        return dtype.startswith("f8") and not is_one_sum and not (promoted and int(promoted[1]) <= 128)

    return tuple(
        Product(dtype, int(depth), dtype == "f32" and "tf32" in options, short(dtype, int(depth), total, options))
        for total, options, depth, dtype in matches
    )


def moves(ptx: str) -> tuple[Move, ...]:
    """Every load and store of global memory, in order; of `cp.async` the loads."""
    accesses = []
    for name in re.findall(r"^\s*(?:@!?%p\d+\s+)?((?:ld|st)\.global\S*)", ptx, re.MULTILINE):
        vector, bits = re.search(r"(?:\.v(\d))?\.[bfsu](\d+)\Z", name).groups()  # type: ignore[union-attr]
        accesses.append(Move(name, int(vector or 1) * int(bits) // 8))
    for name, size in re.findall(r"(cp\.async\.c[ag]\.shared\S*) \[.*?\], \[.*?\], (\w+)", ptx):
        accesses.append(Move(name, int(size, 0)))
    return tuple(accesses)


def threads(ptx: str) -> int:
    """Threads of a program, including those of specialised warps."""
    return int(re.search(r"\.reqntid (\d+)", ptx)[1])  # type: ignore[index]


def usage_of(cubin: bytes) -> dict[str, int]:
    """The resources of a kernel by name, such as REG and STACK."""
    text = _cuobjdump("-res-usage", cubin)
    usage = {key: int(value) for key, value in re.findall(r"\b([A-Z]+)(?:\[0\])?:(\d+)", text)}
    assert {"REG", "STACK"} <= set(usage), "cuobjdump showed no kernel"
    return usage


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of SASS: address, whether a predicate guards it, name (`HGMMA.64x256x16.F32.BF16`), operands."""

    address: int
    guarded: bool
    name: str
    operands: str


@functools.cache  # 0.3 s each, and the ops of one file share kernels
def sass(cubin: bytes) -> tuple[Instruction, ...]:
    """The instructions of a kernel, by address."""
    line = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?\w+\s+)?([\w.]+)(.*?);", re.MULTILINE)
    instructions = [
        Instruction(int(address, 16), bool(guard), name, operands)
        for address, guard, name, operands in line.findall(_cuobjdump("-sass", cubin))
    ]
    assert any(instruction.name == "EXIT" for instruction in instructions), "cuobjdump showed no kernel"
    return tuple(instructions)


def names_of(instructions: Iterable[Instruction]) -> frozenset[str]:
    """Names of instructions, without suffixes."""
    return frozenset(instruction.name.partition(".")[0] for instruction in instructions)


def idle_of(instructions: Sequence[Instruction]) -> int:
    """The number of instructions a warp issues per loop iteration while no product of its warpgroup runs.

    They are between a wait for all products (`WARPGROUP.DEPBAR.LE gsb0, 0x0`) and the next product,
    also across the end of the loop. Only innermost loops with products count; the result is their maximum. Code that a
    branch may skip is not counted: a loop over tiles and their columns ends a tile in few iterations. 0: each product
    is followed by another one, or no loop has warpgroup products.
    """
    return max((_idle(loop) for loop in _loops(instructions)), default=0)


def _loops(instructions: Sequence[Instruction]) -> list[Sequence[Instruction]]:
    """Innermost loops with warpgroup products: from the target of a guarded branch back to the branch.

    An unguarded branch back ends out-of-line code that waits for a copy.
    """
    place_of = {instruction.address: place for place, instruction in enumerate(instructions)}
    spans = []
    for place, instruction in enumerate(instructions):
        start = place_of.get(_target(instruction), place)
        if instruction.guarded and start < place and any(_multiplies(inside) for inside in instructions[start:place]):
            spans.append((start, place + 1))
    inner = [
        span
        for span in spans
        if not any(span != other and span[0] <= other[0] and other[1] <= span[1] for other in spans)
    ]
    return [instructions[start:end] for start, end in inner]


def _idle(loop: Sequence[Instruction]) -> int:
    run = _shortest(loop)
    first = next(place for place, instruction in enumerate(run) if _multiplies(instruction))
    idle, waits = 0, False
    for instruction in (*run[first:], *run[:first]):
        if _multiplies(instruction):
            waits = False
        elif instruction.name.startswith("WARPGROUP.DEPBAR") and instruction.operands.split()[-1] == "0x0":
            waits = True
        elif waits and instruction.name != "NOP":
            idle += 1
    return idle


def _shortest(loop: Sequence[Instruction]) -> list[Instruction]:
    """The instructions of a round that takes every branch forward over what does not multiply."""
    place_of = {instruction.address: place for place, instruction in enumerate(loop)}
    run, place = [], 0
    while place < len(loop):
        run.append(loop[place])
        target = place_of.get(_target(loop[place]), 0)
        skips = target > place and not any(_multiplies(skipped) for skipped in loop[place:target])
        place = target if skips else place + 1
    return run


def _target(instruction: Instruction) -> int:
    """The target address of a branch; -1 if the instruction is not a branch."""
    match = re.search(r"\b0x([0-9a-f]+)\s*$", instruction.operands) if instruction.name == "BRA" else None
    return int(match[1], 16) if match else -1


def _multiplies(instruction: Instruction) -> bool:
    return "GMMA" in instruction.name


def _cuobjdump(what: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
