"""The typed, frozen form of a spec. Every number has bounds; units are those of the fields' marks."""

from dsl.schema.adapter import Lora
from dsl.schema.attention import (
    AnyAttention,
    CustomAttention,
    DeltaNet,
    Gqa,
    HeadDim,
    Mla,
    SoftmaxAttention,
)
from dsl.schema.base import (
    Aliases,
    Choices,
    Derived,
    FilePath,
    Node,
    Phase,
    Quiet,
    Strict,
    Syntax,
    Unit,
    Unless,
    value_at,
)
from dsl.schema.cluster import Cluster, Device, Machine, More
from dsl.schema.compressed import Compressed, Csa, Hca
from dsl.schema.grpo import Grpo, Reward
from dsl.schema.health import Health, Spike
from dsl.schema.indexer import Indexer
from dsl.schema.metrics import Metrics
from dsl.schema.model import Balance, Clamp, Custom, Dense, LayerRange, Model, Moe, Mtp
from dsl.schema.optimizers import OPTIMIZERS, AdamW, AnyOptimizer, Muon, Optimizer, StateTensor
from dsl.schema.parallel import Parallel
from dsl.schema.precision import BUILT_IN, RECIPES, Dtype, High, Precision, Scale, Tile
from dsl.schema.residual import HyperConnections
from dsl.schema.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from dsl.schema.run import Schedule, Sm, Spec
from dsl.schema.train import Batch, Checkpoint, Ema, RatePhase, Train, Validate, Within
from dsl.schema.training_data import Chat, Data, DataSource, Filters, Prompts, TrainTokenizer

__all__ = [
    "BUILT_IN",
    "OPTIMIZERS",
    "RECIPES",
    "AdamW",
    "Aliases",
    "AnyAttention",
    "AnyOptimizer",
    "Balance",
    "Batch",
    "Chat",
    "Checkpoint",
    "Choices",
    "Clamp",
    "Cluster",
    "Compressed",
    "Csa",
    "Custom",
    "CustomAttention",
    "Data",
    "DataSource",
    "DeltaNet",
    "Dense",
    "Derived",
    "Device",
    "Dtype",
    "Ema",
    "FilePath",
    "Filters",
    "Gqa",
    "Grpo",
    "Hca",
    "HeadDim",
    "Health",
    "High",
    "HyperConnections",
    "Indexer",
    "LayerRange",
    "LinearScaling",
    "Llama3Scaling",
    "Lora",
    "Machine",
    "Metrics",
    "Mla",
    "Model",
    "Moe",
    "More",
    "Mtp",
    "Muon",
    "Node",
    "Optimizer",
    "Parallel",
    "Phase",
    "Precision",
    "Prompts",
    "Quiet",
    "RatePhase",
    "Reward",
    "Rope",
    "Scale",
    "Schedule",
    "Sm",
    "SoftmaxAttention",
    "Spec",
    "Spike",
    "StateTensor",
    "Strict",
    "Syntax",
    "Tile",
    "Train",
    "TrainTokenizer",
    "Unit",
    "Unless",
    "Validate",
    "Within",
    "YarnScaling",
    "value_at",
]
