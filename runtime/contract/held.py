"""What ranks hold, as plan.json says it: parameters in buckets, biases, state of the optimizer, quantised weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from runtime.contract.mesh import Rank
from runtime.contract.names import BIAS, TABLE, StoredName
from runtime.contract.recipe import Amount, Count, Dtype, Name, Shape
from runtime.contract.slices import Slice, held_elements, held_shape
from runtime.system.strict_json import NumberRange


@dataclass(frozen=True)
class OptimizerTensor:
    """A tensor that the optimizer keeps of each parameter, of its shape; checkpoints have it under its name."""

    name: Name
    dtype: Dtype


@dataclass(frozen=True)
class OptimizerState:
    """What the optimizer keeps of each parameter, and what an owner of it has whole.

    `rest`: what it keeps of parameters in the buckets of the rest, which owners cut anywhere."""

    state: tuple[OptimizerTensor, ...]
    unit: Literal["element", "matrix"]
    rest: tuple[OptimizerTensor, ...] = ()

    def state_of(self, bucket: PlannedBucket) -> tuple[OptimizerTensor, ...]:
        """What is kept of each parameter of a bucket."""
        return self.rest if bucket.rest else self.state

    def is_whole(self, bucket: PlannedBucket) -> bool:
        """Whether an owner of a parameter of a bucket has all of it."""
        return self.unit == "matrix" and not bucket.rest


@dataclass(frozen=True)
class HeldParameter:
    """A logical parameter of `shape`, or the slice of it that the holders of its bucket have.

    `tensor` is what segments take, with the experts of a rank stacked in it. `matrices`: rows of each matrix in it that
    an optimizer of matrices updates apart; nothing where it updates all at once.
    """

    name: Name
    tensor: Name
    shape: Shape
    init: Annotated[float, NumberRange(0)] | None  # standard deviation; None: ones
    decay: bool
    uniform: bool = False  # whether first values are even between two bounds, or else normal
    slice: Slice | None = None
    matrices: tuple[Amount, ...] = ()
    mean: float = 0.0  # of first values, unless they are ones

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of what its holders have of it."""
        return held_shape(self.shape, self.slice)

    @property
    def updated_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what an optimizer of matrices updates apart."""
        return tuple((rows, *self.shape[1:]) for rows in self.matrices) if self.matrices else (self.held_shape,)

    @property
    def held_elements(self) -> int:
        """Elements that its holders have of it."""
        return held_elements(self.shape, self.slice)


@dataclass(frozen=True)
class PlannedBucket:
    """Parameters with the same holders that the same stages use: one flat buffer, one reduction.

    `owners`: for each parameter, which of the holders has its optimizer state, where each is owned whole. `sites`: the
    segments that read it, where the holders of each pipeline rank divide its gradients (zero = 2), and its weights
    (zero = 3). `rest`: whether the second kind of the optimizer updates it. `still`: whether nothing does, in this
    phase of a run: it has state, and no gradients.
    """

    name: Name
    holders: tuple[Rank, ...]
    stages: tuple[Amount, ...]  # ascending
    parameters: tuple[HeldParameter, ...]
    owners: tuple[Rank, ...] = ()
    sites: tuple[Name, ...] = ()
    rest: bool = False
    still: bool = False


@dataclass(frozen=True)
class Bias:
    """A balancing bias of a router."""

    name: Name
    shape: Shape
    holders: tuple[Rank, ...]

    @property
    def stored(self) -> StoredName:
        """Its name in a checkpoint."""
        return StoredName.of(BIAS, self.name)


@dataclass(frozen=True)
class ExpertTable:
    """The experts that each token of the vocabulary goes to: a row of different whole numbers below `below`."""

    name: Name
    shape: Shape
    holders: tuple[Rank, ...]
    below: Count

    @property
    def stored(self) -> StoredName:
        """Its name in a checkpoint."""
        return StoredName.of(TABLE, self.name)


@dataclass(frozen=True)
class QuantisedTensor:
    """A tensor that products read in few bits, of which a rank holds a copy of them after each step of the optimizer.

    `op` makes it, on CUDA the kernel in the file `kernel`, if there is one. The names of its tensors are that of the
    tensor and the `suffixes`, in the order in which the op returns them; the last may be a key of random numbers.
    """

    tensor: Name
    op: Name
    kernel: Name | None
    suffixes: tuple[Name, ...]


@dataclass(frozen=True)
class Host:
    """What lies in the memory of a rank's host beside its device.

    `offload`: state of the optimizer. `part`: elements that move between device and host at a time, and `slots`: such
    parts on the device. `memory`: predicted bytes of a rank, by pipeline rank; empty where there are none.
    """

    offload: tuple[Literal["moments", "master"], ...] = ()
    part: Count = 1
    slots: Count = 1
    memory: tuple[Amount, ...] = ()


NO_HOST = Host()  # where nothing lies beside the device
