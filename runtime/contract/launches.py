"""launches.json of a build: the calls of its kernels, so that ranks can compile them before they train."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.contract.names import KernelExtent
from runtime.contract.recipe import Amount, Dtype
from runtime.system.strict_json import read


@dataclass(frozen=True)
class TensorArgument:
    """A tensor. `strides` and `offset` are in elements; a contiguous tensor has neither."""

    dtype: Dtype
    shape: tuple[KernelExtent, ...]
    strides: tuple[KernelExtent, ...] = ()
    offset: Amount = 0


KernelArgument = TensorArgument | int | float | bool | None


@dataclass(frozen=True)
class KernelUse:
    """A call of `op` in `kernels/<kernel>.py`. Equal calls are listed once.

    `segments`: the segments that make it, or quantise their weights with it. It is empty for the optimizer, which runs
    on every rank.
    """

    kernel: str
    op: str
    arguments: tuple[KernelArgument, ...]
    segments: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchList:
    """launches.json."""

    calls: tuple[KernelUse, ...]

    @staticmethod
    def from_json(text: str | bytes) -> LaunchList:
        """Parse launches.json. Raises FormError."""
        return read(LaunchList, text, "a list of launches")
