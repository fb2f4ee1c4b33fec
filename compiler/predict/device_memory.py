"""What a device holds besides the tensors of a plan: contexts, libraries, the allocator, and uneven experts.

Each term is a range from public figures. How often runs lie inside is not measured. Terms are independent, so their
half-widths are added as squares. The tensors have no error: a run's ledger equals its plan. docs/published-memory.md
shows devices of Megatron-LM beside their ranges. No run of dsc on GPUs has tested them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from compiler.ir import Plan, Program
from compiler.plan.split_blocks import mixtures, planned_received_rows
from compiler.predict.memory import gib, worst_held_rows
from compiler.predict.memory_state import device_of
from compiler.predict.prediction import DeviceMemory, MemoryTerm, RankMemory, fullest
from compiler.program.lower.opening_order import opening_order
from dsl.schema import Device, Spec
from runtime.contract.mesh import Opening, columns_of_channel, most_ctas

MIB = 2**20
# A CUDA context with the kernels that ran: "around 400MB" (pytorch/pytorch issue 109888), 1,008 MiB with all kernels
# of torch loaded (issue 28394). Emitted kernels are loaded into it, too.
CONTEXT = (400 * MIB, 1008 * MIB)
# Of cuBLAS and of cuBLASLt, one each: 32 MiB from Hopper on, before that 8.1 and 4 MiB
# (pytorch/pytorch, CublasHandlePool.cpp and pull request 120925).
WORKSPACES, WORKSPACES_BEFORE_HOPPER = 64 * MIB, 12 * MIB
BEFORE_HOPPER, AMD = "a100", "mi3"  # parts of names of devices
# NVIDIA/nccl issue 964: 544 MiB for a communicator of two A100, 688 MiB for more, on 24 channels; the bytes are
# proportional to the channels (issue 986). Issue 1685: an all-to-all of 8 H100 adds 3.28 GB on 32 channels to each of 7
# peers. Issue 2363: 512 MiB for messages over the network, on 32 channels.
CHANNELS, SENDING_CHANNELS = 24, 32
PAIR, RING, PEER, NETWORK = 544 * MIB // 24, 688 * MIB // 24, 3_280_000_000 // (7 * 32), 512 * MIB // 32
NCCL_ERROR = 0.5  # assumed, as these figures are of other versions and topologies
# Reserved over allocated bytes, minus 1: at most 5.3% in 20 of the 25 runs of Hugging Face's nanotron/old_bench,
# llama-1B, in segments of fixed size. Here segments expand by 2 MiB, which loses less.
ALLOCATOR = 0.05
# The load of the fullest expert over the mean, minus 1 (MaxVio_global of arXiv 2408.15664, table 2): with the balancing
# bias, and with a loss alone.
UNEVEN_WITH_BIAS, UNEVEN_WITH_LOSS = 0.04, 0.72


def device_memories(spec: Spec, plan: Plan, program: Program, ranks: Sequence[RankMemory]) -> tuple[DeviceMemory, ...]:
    """What a device of each pipeline rank holds in a step; () on CPUs, where libraries take little, and on AMD GPUs,
    whose libraries are unknown.

    `ranks`: the memory of the plan's tensors.
    """
    if not spec.has_hosts or any(AMD in device.name.lower() for device in spec.cluster.devices):
        return ()
    openings = opening_order(plan, [program])
    return tuple(
        _device_memory(spec, device_of(spec, plan, rank.pp_rank), rank, nccl_bytes(spec, plan, rank.pp_rank, openings))
        for rank in ranks
    )


def _device_memory(spec: Spec, device: Device, rank: RankMemory, nccl: int) -> DeviceMemory:
    workspaces = WORKSPACES_BEFORE_HOPPER if BEFORE_HOPPER in device.name.lower() else WORKSPACES
    terms = (
        MemoryTerm("the CUDA context and kernels", *CONTEXT),
        MemoryTerm("workspaces of cuBLAS", workspaces, workspaces),
        MemoryTerm("NCCL", int(nccl * (1 - NCCL_ERROR)), int(nccl * (1 + NCCL_ERROR))),
        MemoryTerm("gaps of the allocator", 0, int(ALLOCATOR * rank.peak_bytes)),
        MemoryTerm("uneven experts", 0, uneven_bytes(spec, rank)),
    )
    return DeviceMemory(rank.pp_rank, device.memory, rank.peak_bytes, tuple(term for term in terms if term.high))


def device_assumptions(devices: Sequence[DeviceMemory]) -> tuple[str, ...]:
    """What the fullest device holds besides the tensors of its plan, the least certain first."""
    device = fullest(devices)
    if device is None:
        return ()
    terms = sorted(device.terms, key=lambda term: term.low - term.high)
    parts = ", ".join(map(_range_text, terms))
    return (f"memory: besides its tensors, a device of pipeline rank {device.pp_rank} holds {parts}",)


def _range_text(term: MemoryTerm) -> str:
    """The bytes of a term and its name: `1.2 to 2.4 GiB for NCCL`."""
    high = gib(term.high)
    low = "" if term.low == term.high else f"{gib(term.low)} to " if term.low else "up to "
    return f"{low}{high} for {term.name}"


def uneven_bytes(spec: Spec, rank: RankMemory) -> int:
    """Bytes of the rows that the fullest rank receives beyond its share, at most.

    The peak is a maximum of linear functions of these rows, so it lies below the line from the even to the worst case.
    """
    even, worst = planned_received_rows(spec).rows, worst_held_rows(spec)
    if worst <= even or rank.worst_bytes is None:
        return 0
    uneven = UNEVEN_WITH_BIAS if all(moe.balance.bias_rate is not None for moe in mixtures(spec)) else UNEVEN_WITH_LOSS
    return int((rank.worst_bytes - rank.peak_bytes) * min(1.0, uneven * even / (worst - even)))


def nccl_bytes(spec: Spec, plan: Plan, pp_rank: int, openings: Iterable[Opening]) -> int:
    """Bytes that the communicators of a device of a pipeline rank are expected to take."""
    return sum(_communicators(spec, plan, pp_rank, [*openings]))


def _communicators(spec: Spec, plan: Plan, pp_rank: int, openings: Sequence[Opening]) -> Iterator[int]:
    """The bytes of each communicator. A rank has one for each channel (runtime/comm/connect.py)."""
    mesh = plan.mesh
    own = [opening for opening in openings if pp_rank in opening.ranks]
    hops = max(1, sum(opening.kind == "expert" for opening in own))
    for opening in own:
        columns = columns_of_channel(0, opening.columns, mesh)
        members = len(opening.ranks) * len(columns)
        ctas = 0 if opening.kind == "world" else most_ctas(opening.kind, spec.sm.communication, hops)
        if opening.kind in ("expert", "counts"):
            on_node = [mesh.rank(pp_rank, column) // spec.cluster.node.devices for column in columns]
            near = on_node.count(on_node[0]) - 1
            channels = ctas or SENDING_CHANNELS
            yield channels * (near * PEER + (NETWORK if near + 1 < members else 0))
        elif members > 1:
            yield (ctas or CHANNELS) * (PAIR if members == 2 else RING)
