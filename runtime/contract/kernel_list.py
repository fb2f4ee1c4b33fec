"""kernels.json of a build: every op of every segment with its kernel and the ops fused into it."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.contract.recipe import Amount
from runtime.system.strict_json import read


@dataclass(frozen=True)
class EmittedOp:
    """One op of a segment's function, in the order of calls. `kernel`: its file, or None with a `reason`.

    `of`: the ops that were fused into it. `bytes_saved`: memory traffic saved by the fusion.
    """

    function: str
    op: str
    kernel: str | None
    reason: str | None
    of: tuple[str, ...] = ()
    bytes_saved: int | None = None


@dataclass(frozen=True)
class SegmentKernels:
    """A segment, its first site in the model, and its number of uses."""

    segment: str
    kind: str
    site: str
    uses: Amount
    ops: tuple[EmittedOp, ...]


@dataclass(frozen=True)
class QuantisedWeights:
    """An op that quantises weights, and its kernel file, or None with a `reason`.

    `calls`: one for each weight of the model, after each optimizer step.
    """

    op: str
    kernel: str | None
    reason: str | None
    calls: Amount


@dataclass(frozen=True)
class OptimizerStep:
    """Elements and bytes of an optimizer step, on the pipeline rank that updates most. Without a kernel, a `reason`."""

    op: str
    kernel: str | None
    reason: str | None
    elements: Amount
    bytes: Amount


@dataclass(frozen=True)
class PlainCalls:
    """Calls of segments whose kernels are launched one by one, with the reason."""

    reason: str
    calls: Amount


@dataclass(frozen=True)
class GraphCalls:
    """Calls of segments in a step of the largest batch, on all pipeline ranks of a column: how many are replayed as
    CUDA graphs, and the others."""

    replayed: Amount
    others: tuple[PlainCalls, ...]

    @property
    def sentence(self) -> str:
        """A sentence for the user, with the reasons."""
        total = self.replayed + sum(plain.calls for plain in self.others)
        why = "".join(f"; {plain.calls:,} launch kernel by kernel: {plain.reason}" for plain in self.others)
        return f"{self.replayed:,} of {total:,} calls of segments in a step are replayed from the third step on{why}"


@dataclass(frozen=True)
class KernelList:
    """kernels.json. `rows`: number of received rows for which bytes are given. `unfused`: fusions disabled by the
    spec."""

    rows: Amount
    unfused: tuple[str, ...]
    segments: tuple[SegmentKernels, ...]
    quantised: tuple[QuantisedWeights, ...]
    optimizer: OptimizerStep
    rest: OptimizerStep | None = None  # for parameters that are no matrices, if that is another kind
    graphs: GraphCalls | None = None  # if the run has `kernels { graphs = true }`

    @staticmethod
    def from_json(text: str | bytes) -> KernelList:
        """Parse kernels.json. Raises FormError."""
        return read(KernelList, text, "a list of kernels")
