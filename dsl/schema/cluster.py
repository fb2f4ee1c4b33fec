"""The machines: nodes of equal devices, their memory, and the peak rates a plan starts from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dsl.schema.base import Node, Syntax, Unit

ByteRate = Annotated[float | None, Field(gt=0, le=1e18), Unit("byte/s")]
FlopRate = Annotated[float | None, Field(gt=0, le=1e21), Unit("flop/s")]


class Device(Node):
    """One accelerator, or one share of a CPU. Rates are peaks, without sparsity."""

    name: Annotated[str, Syntax("label"), Field(description="name of the device")]
    sms: Annotated[
        int | None, Field(ge=1, le=4096, description="streaming multiprocessors", examples=["sms = 132"])
    ] = None
    memory: Annotated[int, Field(ge=1, le=2**60, description="usable memory", examples=["memory = 80GB"]), Unit("byte")]
    hbm: Annotated[ByteRate, Field(description="peak memory bandwidth", examples=["hbm = 3.35TB/s"])] = None
    bf16: Annotated[FlopRate, Field(description="peak dense BF16 rate", examples=["bf16 = 989TFLOPS"])] = None
    fp8: Annotated[FlopRate, Field(description="peak dense FP8 rate", examples=["fp8 = 1979TFLOPS"])] = None
    cores: Annotated[
        int | None, Field(ge=1, le=65536, description="CPU cores of this device", examples=["cores = 1"])
    ] = None
    price: Annotated[
        float | None, Field(ge=0, le=1e6, description="price of an hour", examples=["price = 2USD/h"]), Unit("USD/h")
    ] = None


class Machine(Node):
    """One node: equal devices, joined by NVLink or what takes its place, and to other nodes by one NIC each."""

    devices: Annotated[int, Field(ge=1, le=65536, description="devices of a node", examples=["devices = 8"])]
    device: Annotated[Device, Field(description="each of them", examples=["device h800 { memory = 79.1GiB }"])]
    nvlink: Annotated[
        ByteRate,
        Field(description="peak bandwidth between devices of a node, per direction", examples=["nvlink = 200GB/s"]),
    ] = None
    nic: Annotated[ByteRate, Field(description="peak network bandwidth of one device", examples=["nic = 50GB/s"])] = (
        None
    )


class Cluster(Node):
    """Equal nodes. One rank runs on each of their devices."""

    name: Annotated[str, Syntax("label"), Field(description="name of the cluster")]
    nodes: Annotated[int, Field(ge=1, le=1_000_000, description="number of nodes", examples=["nodes = 1"])]
    node: Annotated[
        Machine, Field(description="each of them", examples=["node { devices = 8, device h800 { memory = 79.1GiB } }"])
    ]

    @property
    def world(self) -> int:
        """Devices of the whole cluster; one rank runs on each."""
        return self.nodes * self.node.devices
