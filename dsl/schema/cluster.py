"""The machines: nodes of equal devices, their memory, and the peak rates a plan starts from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dsl.schema.base import Node, Syntax, Unit

ByteRate = Annotated[float | None, Field(gt=0, le=1e18), Unit("byte/s")]
FlopRate = Annotated[float | None, Field(gt=0, le=1e21), Unit("flop/s")]


class Device(Node):
    """One accelerator, or one share of a CPU."""

    name: Annotated[str, Syntax("label")]
    sms: Annotated[int | None, Field(ge=1, le=4096, description="streaming multiprocessors")] = None
    memory: Annotated[int, Field(ge=1, le=2**60, description="usable memory", examples=["memory = 80GB"]), Unit("byte")]
    hbm: Annotated[ByteRate, Field(description="peak memory bandwidth")] = None
    bf16: Annotated[FlopRate, Field(description="peak dense BF16 rate")] = None
    fp8: Annotated[FlopRate, Field(description="peak dense FP8 rate")] = None
    cores: Annotated[int | None, Field(ge=1, le=65536, description="CPU cores of this device")] = None
    price: Annotated[float | None, Field(ge=0, le=1e6, description="price of an hour"), Unit("USD/h")] = None


class Machine(Node):
    """One node."""

    devices: Annotated[int, Field(ge=1, le=65536, description="devices of a node", examples=["devices = 8"])]
    device: Annotated[Device, Field(examples=["device h800 { memory = 79.1GiB }"])]
    nvlink: Annotated[ByteRate, Field(description="peak bandwidth between devices of a node, per direction")] = None
    nic: Annotated[ByteRate, Field(description="peak network bandwidth of one device")] = None


class Cluster(Node):
    """`nodes` equal nodes."""

    name: Annotated[str, Syntax("label")]
    nodes: Annotated[int, Field(ge=1, le=1_000_000, description="number of nodes", examples=["nodes = 1"])]
    node: Annotated[Machine, Field(examples=["node { devices = 8, device h800 { memory = 79.1GiB } }"])]

    @property
    def world(self) -> int:
        """Devices of the whole cluster; one rank runs on each."""
        return self.nodes * self.node.devices
