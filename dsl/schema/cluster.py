"""The cluster: nodes of equal devices, their memory, and the peak rates that plans start from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dsl.schema.base import DerivedDefault, FilePath, Node, QuietField, StoredUnit, Syntax

ByteRate = Annotated[float | None, Field(ge=1, le=1e18), StoredUnit("byte/s")]
FlopRate = Annotated[float | None, Field(ge=1, le=1e21), StoredUnit("flop/s")]
OF_DATA_SHEET = DerivedDefault(
    "from the data sheet for a100, b200, b300, gb200, gb300, h100, h200, h800 and mi300x, else none"
)  # dsl/facts/devices.py


# Llama 3: 419 unexpected interruptions in 54 days on 16,384 H100, one per 50,677 device hours (arXiv 2407.21783,
# section 3.3.4).
MTBF_S = 50_000 * 3600.0


# A CUDA context with cuBLAS takes some 1 GiB, and NCCL 1 to 2 for the communicators of a run; rows of experts change
# their sizes from step to step, so that the allocator loses some percent even with expandable segments.
CONTEXTS = 4 * 2**30
FRAGMENTS_PERCENT = 2


class Device(Node):
    """One accelerator, or one share of a CPU: a device with `cores`, or with "cpu" in its name. Rates are peaks without
    sparsity; those of a100, b200, b300, gb200, gb300, h100, h200, h800 and mi300x are known and need not be written."""

    name: Annotated[str, Syntax("label"), Field(description="name of the device")]
    sms: Annotated[
        int | None,
        OF_DATA_SHEET,
        Field(ge=1, le=4096, description="streaming multiprocessors", examples=["sms = 132"]),
    ] = None
    memory: Annotated[
        int,
        Field(ge=1, le=2**60, description="memory of the device", examples=["memory = 80GB"]),
        StoredUnit("byte"),
    ]
    reserve: Annotated[
        int | None,
        Field(
            ge=0,
            le=2**60,
            description="memory that plans leave to CUDA contexts, NCCL, cuBLAS and fragmentation; default: 4 GiB and "
            "2% of the memory for accelerators, else 0",
            examples=["reserve = 6GiB"],
        ),
        StoredUnit("byte"),
    ] = None
    hbm: Annotated[ByteRate, OF_DATA_SHEET, Field(description="peak memory bandwidth", examples=["hbm = 3.35TB/s"])] = (
        None
    )
    bf16: Annotated[
        FlopRate, OF_DATA_SHEET, Field(description="peak dense BF16 rate", examples=["bf16 = 989TFLOPS"])
    ] = None
    fp8: Annotated[FlopRate, OF_DATA_SHEET, Field(description="peak dense FP8 rate", examples=["fp8 = 1979TFLOPS"])] = (
        None
    )
    fp4: Annotated[FlopRate, OF_DATA_SHEET, Field(description="peak dense FP4 rate", examples=["fp4 = 9PFLOPS"])] = None
    cores: Annotated[
        int | None, Field(ge=1, le=65536, description="CPU cores of this device", examples=["cores = 1"])
    ] = None
    price: Annotated[
        float | None,
        Field(ge=0, le=1e6, description="price per hour", examples=["price = 2USD/h"]),
        StoredUnit("USD/h"),
    ] = None

    @property
    def reserved_bytes(self) -> int:
        """Bytes that plans leave free: `reserve`, or its default."""
        if self.reserve is not None:
            return self.reserve
        return CONTEXTS + self.memory * FRAGMENTS_PERCENT // 100 if self.bf16 is not None else 0

    @property
    def room(self) -> int:
        """Bytes that a run may hold: the memory without what is reserved."""
        return max(0, self.memory - self.reserved_bytes)

    def memory_for(self, room: int) -> int:
        """The least memory of such a device with room for `room` bytes."""
        if self.reserve is not None:
            return room + self.reserve
        return -(-(room + CONTEXTS) * 100 // (100 - FRAGMENTS_PERCENT)) if self.bf16 is not None else room


class Machine(Node):
    """One node: equal devices, joined by NVLink or a similar link, each with a NIC of its own."""

    devices: Annotated[int, Field(ge=1, le=65536, description="devices per node", examples=["devices = 8"])]
    device: Annotated[
        Device, Field(description="configuration of each device", examples=["device h800 { memory = 79.1GiB }"])
    ]
    nvlink: Annotated[
        ByteRate,
        Field(description="peak bandwidth between devices of a node, in each direction", examples=["nvlink = 200GB/s"]),
    ] = None
    nic: Annotated[ByteRate, Field(description="peak network bandwidth per device", examples=["nic = 50GB/s"])] = None


class MoreNodes(Node):
    """More nodes of a cluster, of another kind; a `more` inside it adds a third kind. Their ranks come after those of
    the nodes before."""

    nodes: Annotated[int, Field(ge=1, le=1_000_000, description="number of nodes", examples=["nodes = 2"])]
    node: Annotated[
        Machine,
        Field(
            description="configuration of each node",
            examples=["node { devices = 8, device a100 { memory = 79.1GiB } }"],
        ),
    ]
    more: Annotated[
        MoreNodes | None,
        Field(
            description="nodes of a further kind",
            examples=["more { nodes = 2, node { devices = 8, device a100 { memory = 79.1GiB } } }"],
        ),
    ] = None


class Failures(Node):
    """How often devices fail and how long a restart takes; from them `dsc plan` predicts the lost time and the best
    interval between checkpoints."""

    mtbf: Annotated[
        float,
        Field(
            ge=1,
            le=1e12,
            description="mean time between failures of one device, including its share of host and network",
            examples=["mtbf = 50_000h"],
        ),
        StoredUnit("s"),
    ] = MTBF_S
    restart: Annotated[
        float,
        Field(
            ge=0,
            le=1e9,
            description="time from a failure to the next step, including reading the checkpoint",
            examples=["restart = 10min"],
        ),
        StoredUnit("s"),
    ] = 600.0
    store: Annotated[
        float,
        Field(ge=1, le=1e18, description="rate at which a node writes a checkpoint", examples=["store = 2GB/s"]),
        StoredUnit("byte/s"),
    ] = 2e9


class Scale(Node):
    """What many devices cost beyond what a node shows: waiting for the slowest one, and crowded links above the leaf
    switches."""

    spread: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="standard deviation of the time that equal devices take for the same work",
            examples=["spread = 1.75%"],
        ),
    ] = 0.0175
    slow: Annotated[
        float, Field(ge=0, lt=1, description="share of devices that are slow all the time", examples=["slow = 0.5%"])
    ] = 0.0
    slowdown: Annotated[
        float, Field(ge=0, le=100, description="how much longer a slow device takes", examples=["slowdown = 10%"])
    ] = 0.1
    congestion: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="share of the bandwidth that is lost at each layer of switches above the leaf",
            examples=["congestion = 10%"],
        ),
    ] = 0.1


class Cluster(Node):
    """Nodes of one kind, or of several kinds with `more`. One rank runs on each device."""

    name: Annotated[str, Syntax("label"), Field(description="name of the cluster")]
    nodes: Annotated[int, Field(ge=1, le=1_000_000, description="number of nodes", examples=["nodes = 1"])]
    node: Annotated[
        Machine,
        Field(
            description="configuration of each node",
            examples=["node { devices = 8, device h800 { memory = 79.1GiB } }"],
        ),
    ]
    more: Annotated[
        MoreNodes | None,
        Field(
            description="nodes of another kind, after these",
            examples=["more { nodes = 2, node { devices = 8, device a100 { memory = 79.1GiB } } }"],
        ),
    ] = None

    rates: Annotated[
        str | None,
        FilePath(),
        Field(
            min_length=1,
            max_length=4096,
            description="a rate table from `dsc calibrate` that plans use; relative to the spec",
            examples=['rates = "rates.json"'],
        ),
    ] = None

    scale: Annotated[
        Scale | None,
        Field(
            description="what many devices cost; default, for accelerators: what large clusters published",
            examples=["scale { spread = 1.75%, congestion = 10% }"],
        ),
        QuietField(),
    ] = None
    failures: Annotated[
        Failures | None,
        Field(
            description="failures and restarts; default, for accelerators: the rates that large runs published",
            examples=["failures { mtbf = 50_000h, restart = 10min, store = 2GB/s }"],
        ),
        QuietField(),
    ] = None

    @property
    def parts(self) -> tuple[tuple[int, Machine], ...]:
        """(number of nodes, node) of each kind, in the order of their ranks."""
        parts, more_nodes = [(self.nodes, self.node)], self.more
        while more_nodes is not None:
            parts.append((more_nodes.nodes, more_nodes.node))
            more_nodes = more_nodes.more
        return tuple(parts)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each kind of node, in the order of `parts`."""
        devices, more_nodes = [self.node.device], self.more  # not from `parts`, which reads the numbers of nodes
        while more_nodes is not None:
            devices.append(more_nodes.node.device)
            more_nodes = more_nodes.more
        return tuple(devices)

    @property
    def num_nodes(self) -> int:
        """Nodes of all kinds."""
        return sum(nodes for nodes, _ in self.parts)

    def part_of(self, rank: int) -> int:
        """The index in `parts` of the nodes that hold a world rank. Raises IndexError beyond the last rank."""
        for index, (nodes, node) in enumerate(self.parts):
            rank -= nodes * node.devices
            if rank < 0:
                return index
        raise IndexError("the cluster has no such rank")

    @property
    def world(self) -> int:
        """Devices of the whole cluster; one rank runs on each."""
        return sum(nodes * node.devices for nodes, node in self.parts)
