"""The gate: properties that a kernel's machine code must have, checked without a GPU.

A wrapper of the emitted module is called with meta tensors, its launches are recorded instead of run, and each is
compiled for a target exactly as a launch would be (Triton's own binder specialises the arguments).

On sm_90, for which launch parameters are chosen, the code must have:

- no spills: STACK:0, no LDL or STL;
- for products of 16-bit matrices HGMMA (warpgroup product), for 8-bit ones QGMMA, and never HMMA, the older one;
  for FP32 none of these, as all would round to TF32;
- sums of 8-bit products moved out of the tensor cores' short accumulator every 128;
- UTMALDG and UTMASTG, copies by the tensor memory accelerator, for loads and stores of tensor descriptors;
- USETMAXREG if warps are to be specialised, which Triton may silently leave out;
- at most 227 KiB of shared memory per block (compiling does not fail above it);
- the streaming loads and stores of the kernel's family (`STREAMS` in compiler/emit/kernels/<family>.py), as
  prefixes of PTX instructions; if rows are wide and aligned to 16 bytes, these loads are 16 bytes wide.

On sm_100 the same holds except for the last property, and products are those of its tensor memory. For sm_80 and
gfx942, which have no products of E4M3, the code must only compile; the verdict has the resources that it takes. On
gfx942 a pipeline has at most two stages: a program has 64 KiB of shared memory, and LLVM would take 17 s to compile the
seven stages of sm_90.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from compiler.emit.kernels import KERNELS
from compiler.emit.kernels.kernel import KernelFile
from runtime.build.launches import Launch, record
from tests.compiler.emit.kernels.gate_launch import has_eight_bits, load, num_descriptors, source_of, streams_rows
from tests.compiler.emit.kernels.gate_read import (
    PRODUCTS,
    REPORTED_IN_PTX,
    Move,
    idle_of,
    moves,
    names_of,
    products,
    sass,
    threads,
    usage_of,
)

Streams = Mapping[str, tuple[str, ...]]  # name of a kernel → how its streaming instructions begin


@dataclass(frozen=True, slots=True)
class Target:
    """A device to compile for. `products`: the instruction by operand dtype; if empty, products are not checked."""

    name: str
    gpu: GPUTarget
    products: tuple[tuple[str, str], ...] = ()
    eight_bits: bool = False
    strict: bool = False  # whether launches must fit the target: no spills, and no more shared memory than a block has
    shared_bytes: int = 0  # of a block
    shared_bytes_sm: int = 0  # of an SM; each block takes 1 KiB more than it asks for
    stages: int = 8  # of a pipeline, at most


SM_90 = Target(
    "sm_90",
    GPUTarget("cuda", 90, 32),
    (("bf16", "HGMMA"), ("f16", "HGMMA"), ("f8E4M3FN", "QGMMA")),
    eight_bits=True,
    strict=True,
    shared_bytes=232448,
    shared_bytes_sm=233472,
)
SM_100 = Target(
    "sm_100",
    GPUTarget("cuda", 100, 32),
    (("bf16", "UTCHMMA"), ("f16", "UTCHMMA"), ("f8E4M3FN", "UTCQMMA")),
    eight_bits=True,
    strict=True,
    shared_bytes=232448,
    shared_bytes_sm=233472,
)
SM_80 = Target(
    "sm_80",
    GPUTarget("cuda", 80, 32),
    (("bf16", "HMMA"), ("f16", "HMMA")),
    shared_bytes=166912,
    shared_bytes_sm=167936,
)
GFX942 = Target("gfx942", GPUTarget("hip", "gfx942", 64), stages=2)
TARGETS = (SM_90, SM_100, SM_80, GFX942)
SHARED_BYTES = SM_90.shared_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one kernel compiled to for one target; `failures` is empty if it passed. Of AMD only that it compiled."""

    kernel: str
    target: str
    failures: tuple[str, ...] = ()
    registers: int = 0  # of a thread
    shared_bytes: int = 0
    spilled_bytes: int = 0  # of a thread
    threads: int = 0  # of a program
    programs: int = 0  # that run on an SM at a time
    instructions: tuple[str, ...] = ()  # that multiply matrices, copy tiles, or change the number of registers
    load_bytes: int = 0  # the most that one instruction of a thread loads
    idle: int = 0  # instructions of a round while no product runs, on sm_90 (`idle_of`)


class Gate:
    """Judges the launches of kernels for one target. Equal launches are compiled once."""

    def __init__(self, target: Target = SM_90) -> None:
        self._target = target
        self._verdicts: dict[str, Verdict] = {}  # by all that a verdict follows from

    def verdicts(
        self, file: KernelFile, op: str, arguments: tuple[Any, ...], streams: Streams | None = None
    ) -> tuple[Verdict, ...]:
        """A verdict for every launch of `op(*arguments)`; tensors among the arguments are on the meta device.

        Launches with 8-bit operands have none on targets without them. `streams`: defaults to those of the op's family
        given.
        """
        target, streams = self._target, streams_of(op) if streams is None else streams
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            module = load(file, Path(folder))
            launches = [
                launch for launch in record(module, op, arguments) if target.eight_bits or not has_eight_bits(launch)
            ]
            return tuple(self._verdict(launch, streams) for launch in launches)

    def _verdict(self, launch: Launch, streams: Streams) -> Verdict:
        key = key_of(launch, self._target, streams)
        if key not in self._verdicts:
            self._verdicts[key] = judge(launch, self._target, streams)
        return self._verdicts[key]


def streams_of(op: str) -> Streams:
    """`STREAMS` of an op's family, the module with its row of KERNELS."""
    streams: Streams = vars(sys.modules[KERNELS[op].__module__]).get("STREAMS", {})
    return streams


def judge(launch: Launch, target: Target = SM_90, streams: Streams | None = None) -> Verdict:
    """Compiles one launch and reads what came out."""
    return _judged(launch, target, _streams(launch, target, streams))


def key_of(launch: Launch, target: Target, streams: Streams | None = None) -> str:
    """The inputs of a verdict, besides this module and the version of Triton."""
    source, options = _source_of(launch, target)
    held_to = _streams(launch, target, streams), streams_rows(launch)
    return f"{launch.name} {target.name} {source.hash()} {sorted(options.items())} {held_to}"


def _streams(launch: Launch, target: Target, streams: Streams | None) -> tuple[str, ...]:
    return (streams or {}).get(launch.name, ()) if target is SM_90 else ()


def _judged(launch: Launch, target: Target, streams: tuple[str, ...]) -> Verdict:
    try:
        with redirect_stdout(sys.stderr):  # Triton prints code that does not assemble
            compiled = _compile(launch, target)
    except Exception as error:  # any exception of a compiler is a failure of the kernel
        first, *_ = str(error).strip().splitlines() or [repr(error)]
        assembler = re.search(r"line \d+; error *: (.*)", str(error))
        return Verdict(launch.name, target.name, (f"does not compile: {assembler[1] if assembler else first}",))
    if target.gpu.backend != "cuda":
        return Verdict(launch.name, target.name, shared_bytes=compiled.metadata.shared)
    asm, shared = compiled.asm, compiled.metadata.shared
    usage = usage_of(asm["cubin"])
    code = sass(asm["cubin"]) if REPORTED_IN_PTX.search(asm["ptx"]) else ()
    instructions = names_of(code)
    failures = [
        *_of_products(target, asm["ttir"], instructions),
        *(_of_copies(launch, asm["ttir"], instructions) if target.strict else ()),
        *_of_streams(streams, moves(asm["ptx"]), streams_rows(launch)),
    ]
    spills = usage["STACK"] or instructions & {"LDL", "STL"}
    if target.strict and spills:
        failures.append(f"spills {usage['STACK']} bytes")
    if target.strict and shared > target.shared_bytes:
        failures.append(f"wants {shared} bytes of shared memory of {target.shared_bytes}")
    size = threads(asm["ptx"])
    return Verdict(
        kernel=launch.name,
        target=target.name,
        failures=tuple(failures),
        registers=usage["REG"],
        shared_bytes=shared,
        spilled_bytes=usage["STACK"],
        threads=size,
        programs=occupancy(target, usage["REG"], shared, size),
        instructions=tuple(sorted(name for name in instructions if PRODUCTS.match(name) or name in _REPORTED)),
        load_bytes=max((move.bytes for move in moves(asm["ptx"]) if not move.text.startswith("st")), default=0),
        idle=idle_of(code),
    )


_REPORTED = ("LDGSTS", "UTMALDG", "UTMASTG", "USETMAXREG")


def occupancy(target: Target, registers: int, shared_bytes: int, threads: int) -> int:
    """Programs that fit an SM at a time: of 64 Ki registers, 8 at a time, its shared memory, 64 warps and 32 blocks."""
    by_registers = 65536 // (threads * (-(-registers // 8) * 8))
    return min(by_registers, target.shared_bytes_sm // (shared_bytes + 1024), 2048 // threads, 32)


def _of_products(target: Target, ttir: str, instructions: frozenset[str]) -> list[str]:
    """Faults of matrix products."""
    dots = products(ttir)
    assert len(dots) == len(re.findall(r"= tt\.dot ", ttir)), "a product that was not understood"
    names = "·".join(sorted({product.dtype for product in dots}))
    failures = []
    if any(product.tf32 for product in dots):
        failures.append("multiplies f32 rounded to TF32")
    wanted = {dict(target.products)[product.dtype] for product in dots if product.dtype != "f32"}
    multiplies = {name for name in instructions if PRODUCTS.match(name)}
    if multiplies != wanted:
        failures.append(f"multiplies {names or 'nothing'} with {sorted(multiplies)}, not {sorted(wanted)}")
    if target is SM_90 and any(product.short for product in dots):
        failures.append("sums products of eight bits over more than 128 in the tensor cores")
    return failures


def _of_copies(launch: Launch, ttir: str, instructions: frozenset[str]) -> list[str]:
    """Missing features: copies by descriptor, and specialised warps."""
    instruction_of_op = {
        "tt.descriptor_load": "UTMALDG",
        "tt.descriptor_store": "UTMASTG",
        "tt.warp_specialize": "USETMAXREG",
    }
    failures = [
        f"asks for {op} and has no {name}"
        for op, name in instruction_of_op.items()
        if op in ttir and name not in instructions
    ]
    used = len(set(re.findall(r"tt\.descriptor_\w+ (%\w+)", ttir)))
    copies = num_descriptors(launch) + ttir.count("tt.make_tensor_descriptor")
    return [
        *failures,
        *([f"takes {copies} descriptors and copies by {used}"] if used < copies else []),
    ]


def _of_streams(streams: tuple[str, ...], found: tuple[Move, ...], in_rows: bool) -> list[str]:
    """Faults of loads and stores of data that is touched once."""
    failures = []
    for text in streams:
        streamed = [move for move in found if move.text.startswith(text)]
        narrow = [move for move in streamed if move.bytes < 16]
        if not streamed:
            failures.append(f"has no {text}")
        # A few bytes of statistics may be among them.
        elif in_rows and not text.startswith("st") and 8 * _bytes(narrow) > _bytes(streamed):
            failures.append(f"loads {min(move.bytes for move in narrow)} bytes at a time with {text}")
    return failures


def _bytes(found: list[Move]) -> int:
    return sum(move.bytes for move in found)


def _compile(launch: Launch, target: Target) -> Any:
    source, options = _source_of(launch, target)
    return triton.compile(source, target=target.gpu, options=options)


def _source_of(launch: Launch, target: Target) -> tuple[Any, dict[str, Any]]:
    source, options = source_of(launch, target.gpu)
    return source, options | {"num_stages": min(options["num_stages"], target.stages)}
