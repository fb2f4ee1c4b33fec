"""kernels.json of a build: every op of every segment with its kernel, and what was fused into it."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.contract.recipe import Amount
from runtime.system.strict_json import read


@dataclass(frozen=True)
class EmittedOp:
    """One op of a function of a segment, in the order of the calls. `kernel`: the file it has, or else the `reason`.

    `of`: the ops that were fused into it, and `bytes_saved` what that saves to move.
    """

    function: str
    op: str
    kernel: str | None
    reason: str | None
    of: tuple[str, ...] = ()
    bytes_saved: int | None = None


@dataclass(frozen=True)
class SegmentKernels:
    """A segment, at its first place in the model, and how often it is used."""

    segment: str
    kind: str
    site: str
    uses: Amount
    ops: tuple[EmittedOp, ...]


@dataclass(frozen=True)
class QuantisedWeights:
    """An op that makes the weights of few bits that products read, and its kernel file, or else the `reason`.

    `calls`: one for each weight of the model, after each step of the optimizer.
    """

    op: str
    kernel: str | None
    reason: str | None
    calls: Amount


@dataclass(frozen=True)
class OptimizerStep:
    """What a step of the optimizer moves, on the pipeline rank that updates most. Without a kernel, the `reason`."""

    op: str
    kernel: str | None
    reason: str | None
    elements: Amount
    bytes: Amount


@dataclass(frozen=True)
class KernelList:
    """kernels.json. `rows`: received rows that bytes are said for. `unfused`: fusions that the spec leaves out."""

    rows: Amount
    unfused: tuple[str, ...]
    segments: tuple[SegmentKernels, ...]
    quantised: tuple[QuantisedWeights, ...]
    optimizer: OptimizerStep
    rest: OptimizerStep | None = None  # what updates parameters that are no matrices, if that is another kind

    @staticmethod
    def from_json(text: str | bytes) -> KernelList:
        """Raises FormError."""
        return read(KernelList, text, "a list of kernels")
