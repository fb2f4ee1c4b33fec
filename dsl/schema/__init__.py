"""The typed, frozen form of a spec. Every number has bounds; units are those of the fields' marks."""

from dsl.schema.base import Choices, Derived, Node, Phase, Syntax, Unit, value_at
from dsl.schema.cluster import Cluster, Device, Machine
from dsl.schema.model import Balance, Dense, Gqa, HeadDim, LayerRange, Mla, Model, Moe, Mtp, Rope
from dsl.schema.precision import BUILT_IN, Dtype, Precision, Tile
from dsl.schema.run import (
    AdamW,
    Batch,
    Checkpoint,
    Data,
    Parallel,
    RatePhase,
    Schedule,
    Sm,
    Spec,
    Train,
    TrainTokenizer,
    Validate,
)

__all__ = [
    "BUILT_IN",
    "AdamW",
    "Balance",
    "Batch",
    "Checkpoint",
    "Choices",
    "Cluster",
    "Data",
    "Dense",
    "Derived",
    "Device",
    "Dtype",
    "Gqa",
    "HeadDim",
    "LayerRange",
    "Machine",
    "Mla",
    "Model",
    "Moe",
    "Mtp",
    "Node",
    "Parallel",
    "Phase",
    "Precision",
    "RatePhase",
    "Rope",
    "Schedule",
    "Sm",
    "Spec",
    "Syntax",
    "Tile",
    "Train",
    "TrainTokenizer",
    "Unit",
    "Validate",
    "value_at",
]
