"""What ranks hold, in plan.json: parameters in buckets, biases, optimizer state, quantised weights."""

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
    """A state tensor of the optimizer for each parameter, of its shape. Checkpoints store it under this name."""

    name: Name
    dtype: Dtype


@dataclass(frozen=True)
class OptimizerState:
    """The state of the optimizer for each parameter, and the unit that is never split between owners.

    `rest`: state of parameters in the buckets of the rest, which may be split anywhere."""

    state: tuple[OptimizerTensor, ...]
    unit: Literal["element", "matrix"]
    rest: tuple[OptimizerTensor, ...] = ()

    def state_of(self, bucket: PlannedBucket) -> tuple[OptimizerTensor, ...]:
        """Return the state tensors for each parameter of a bucket."""
        return self.rest if bucket.rest else self.state

    def is_whole(self, bucket: PlannedBucket) -> bool:
        """Whether each parameter of a bucket has a single owner."""
        return self.unit == "matrix" and not bucket.rest


@dataclass(frozen=True)
class HeldParameter:
    """A logical parameter of `shape`, or the slice of it that the holders of its bucket have.

    `tensor`: the tensor that segments read, which stacks the experts of a rank. `matrices`: rows of each matrix in it
    that a matrix optimizer updates separately; empty if it updates the whole at once.
    """

    name: Name
    tensor: Name
    shape: Shape
    init: Annotated[float, NumberRange(0)] | None  # standard deviation; None: ones
    decay: bool
    uniform: bool = False  # initial values are uniform, else normal
    slice: Slice | None = None
    matrices: tuple[Amount, ...] = ()
    mean: float = 0.0  # of initial values, unless they are ones

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of the held slice."""
        return held_shape(self.shape, self.slice)

    @property
    def updated_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that a matrix optimizer updates separately."""
        return tuple((rows, *self.shape[1:]) for rows in self.matrices) if self.matrices else (self.held_shape,)

    @property
    def held_elements(self) -> int:
        """Elements of the held slice."""
        return held_elements(self.shape, self.slice)


@dataclass(frozen=True)
class PlannedBucket:
    """Parameters with the same holders that the same stages use: one flat buffer, one reduction.

    `owners`: for each parameter, the index of the holder with its optimizer state, if parameters are owned whole.
    `sites`: the segments that read it, if the holders in each group of columns (`Mesh.copies`) shard its gradients
    (zero = 2) and its weights (zero = 3). `rest`: whether the second kind of optimizer updates it. `still`: whether it
    is not trained in this phase of a run: it has state, but no gradients.
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
        """Name in a checkpoint."""
        return StoredName.of(BIAS, self.name)


@dataclass(frozen=True)
class ExpertTable:
    """The experts of each token of the vocabulary: a row of distinct integers below `below`."""

    name: Name
    shape: Shape
    holders: tuple[Rank, ...]
    below: Count

    @property
    def stored(self) -> StoredName:
        """Name in a checkpoint."""
        return StoredName.of(TABLE, self.name)


@dataclass(frozen=True)
class QuantisedTensor:
    """A tensor that matrix products read quantised. Ranks quantise it after each optimizer step.

    `op` quantises it; on CUDA the kernel in the file `kernel`, if there is one. The names of the results are the
    tensor's name and the `suffixes`, in the order in which the op returns them; the last may be a key of random
    numbers.
    """

    tensor: Name
    op: Name
    kernel: Name | None
    suffixes: tuple[Name, ...]


@dataclass(frozen=True)
class Host:
    """What a rank keeps in host memory.

    `offload`: offloaded optimizer state. `part`: elements that are copied at a time; `slots`: number of parts on the
    device. `memory`: predicted host bytes of a rank, by pipeline rank; empty if there are none.
    """

    offload: tuple[Literal["moments", "master"], ...] = ()
    part: Count = 1
    slots: Count = 1
    memory: tuple[Amount, ...] = ()


NO_HOST = Host()  # nothing in host memory
