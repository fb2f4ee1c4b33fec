"""What the compiler writes into a build for the runtime to read: the contract between both, as frozen dataclasses.

The compiler makes these values; the runtime reads them back from the verified bytes, strictly
(runtime/system/strict_json.py), so that a file which no compilation writes, a forged one among them, is refused before
any rank starts. A key of a file is a field here, in the order of the file. No torch.

| file | value |
|---|---|
| `plan.json` | Plan |
| `program/*.json` | Program |
| `certificate/*.json` | Certificate |
| `kernels.json` | KernelList |
| `manifest.json` | Manifest |
| `watch.json` | Watch |
"""

from runtime.contract.data import (
    EXTRA_TOKENS,
    MAX_PERIOD,
    Chat,
    Data,
    DataRequest,
    Filters,
    Prompts,
    Source,
    TrainedTokenizer,
)
from runtime.contract.held import Bias, Bucket, Host, OptimizerState, Parameter, Quantised, StateTensor, Table
from runtime.contract.kernel_list import EmittedOp, KernelList, OptimizerStep, QuantisedWeights, SegmentKernels
from runtime.contract.mesh import Mesh, NodeKind, Opening, node_kind
from runtime.contract.plan import (
    BodyTimes,
    ClippedAttention,
    Indexer,
    Layers,
    Message,
    Model,
    MoeLayer,
    Overlap,
    Phase,
    Plan,
    Precision,
    ProgramTimes,
    Rows,
)
from runtime.contract.programs import (
    Call,
    Certificate,
    Collective,
    Exchanged,
    Facts,
    Manifest,
    Program,
    Reduction,
    check_programs,
)
from runtime.contract.recipe import (
    Adapter,
    Batches,
    BatchGrowth,
    Checkpoints,
    Ema,
    Grpo,
    Health,
    Initial,
    Optimizer,
    RatePhase,
    Reward,
    Spike,
    Train,
    UpdateOfRest,
    Validation,
    Within,
)
from runtime.contract.watch import Link, Metrics, Watch

__all__ = [
    "EXTRA_TOKENS",
    "MAX_PERIOD",
    "Adapter",
    "BatchGrowth",
    "Batches",
    "Bias",
    "BodyTimes",
    "Bucket",
    "Call",
    "Certificate",
    "Chat",
    "Checkpoints",
    "ClippedAttention",
    "Collective",
    "Data",
    "DataRequest",
    "Ema",
    "EmittedOp",
    "Exchanged",
    "Facts",
    "Filters",
    "Grpo",
    "Health",
    "Host",
    "Indexer",
    "Initial",
    "KernelList",
    "Layers",
    "Link",
    "Manifest",
    "Mesh",
    "Message",
    "Metrics",
    "Model",
    "MoeLayer",
    "NodeKind",
    "Opening",
    "Optimizer",
    "OptimizerState",
    "OptimizerStep",
    "Overlap",
    "Parameter",
    "Phase",
    "Plan",
    "Precision",
    "Program",
    "ProgramTimes",
    "Prompts",
    "Quantised",
    "QuantisedWeights",
    "RatePhase",
    "Reduction",
    "Reward",
    "Rows",
    "SegmentKernels",
    "Source",
    "Spike",
    "StateTensor",
    "Table",
    "Train",
    "TrainedTokenizer",
    "UpdateOfRest",
    "Validation",
    "Watch",
    "Within",
    "check_programs",
    "node_kind",
]
