"""Channels of a rank of several machines: over memory where all members are on one machine, over gloo elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.comm.collective import CollectiveLinks
from runtime.comm.host import HostLinks
from runtime.comm.transport import Carrier, Channel, Edge, Parts, PartsKind, Shares, Sums, Swap, SwapKind, Work


class MixedLinks:
    """The channels of `host` and those of `collective`, the world's among them: some ranks share no memory."""

    def __init__(self, host: HostLinks, collective: CollectiveLinks) -> None:
        self._host, self._collective = host, collective
        self.carriers: Mapping[Channel, Carrier] = {**host.carriers, **collective.carriers}
        self.sums: Sums = MixedSums(host.sums, collective.sums, self.carriers)

    def edge(self, source: int, destination: int) -> Edge:
        return self._of("edge", (source, destination)).edge(source, destination)

    def swap(self, kind: SwapKind, members: tuple[int, ...]) -> Swap | None:
        return self._of(kind, members).swap(kind, members)

    def parts(self, kind: PartsKind, members: tuple[int, ...]) -> Parts:
        return self._of(kind, members).parts(kind, members)

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        return self._host.flat(name, elements, dtype)

    def _of(self, kind: str, ranks: tuple[int, ...]) -> HostLinks | CollectiveLinks:
        return self._host if (kind, ranks) in self._host.carriers else self._collective


@dataclass(frozen=True)
class MixedSums:
    host: Sums
    collective: Sums
    carriers: Mapping[Channel, Carrier]

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        self.collective.all_reduce(tensor, largest)

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        return self._of(holders).start_reduce(bucket, holders, flat, shares)

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        self._of(holders).gather(bucket, holders, flat, shares)

    def _of(self, holders: tuple[int, ...]) -> Sums:
        return self.host if self.carriers["reduce", holders] == "memory" else self.collective
