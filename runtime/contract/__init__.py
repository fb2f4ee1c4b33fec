"""The contract between compiler and runtime: the contents of a build's files, as frozen dataclasses.

The compiler writes these values; the runtime parses the verified bytes strictly (runtime/system/strict_json.py), so
that a file that no compilation writes, for example a forged one, is refused before any rank starts. A key of a file is
a field here, in the order of the file. No torch.

| file | value |
|---|---|
| `plan.json` | Plan |
| `program/*.json` | Program |
| `certificate/*.json` | Certificate |
| `kernels.json` | KernelList |
| `launches.json` | LaunchList |
| `manifest.json` | Manifest |
| `watch.json` | Watch |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.contract.data import (
        EXTRA_TOKENS,
        MAX_PERIOD,
        BlendSource,
        ChatRecipe,
        DataRecipe,
        DataRequest,
        FiltersRecipe,
        PromptsRecipe,
        TrainedTokenizer,
    )
    from runtime.contract.held import (
        Bias,
        ExpertTable,
        HeldParameter,
        Host,
        OptimizerState,
        OptimizerTensor,
        PlannedBucket,
        QuantisedTensor,
    )
    from runtime.contract.kernel_list import (
        EmittedOp,
        GraphCalls,
        KernelList,
        OptimizerStep,
        PlainCalls,
        QuantisedWeights,
        SegmentKernels,
    )
    from runtime.contract.launches import KernelArgument, KernelUse, LaunchList, TensorArgument
    from runtime.contract.mesh import Mesh, NodeKind, Opening, node_kind
    from runtime.contract.plan import (
        BodyTimes,
        ClippedAttention,
        ClippedRows,
        MoeLayer,
        OverlapTimes,
        PlannedIndexer,
        PlannedLayers,
        PlannedModel,
        PlannedPhase,
        PlannedPrecision,
        ProgramTimes,
        RunPlan,
        StageMessage,
    )
    from runtime.contract.programs import (
        BuildManifest,
        Call,
        Certificate,
        Collective,
        Exchanged,
        Facts,
        Reduction,
        RunProgram,
        check_programs,
    )
    from runtime.contract.recipe import (
        Adapter,
        Batches,
        BatchGrowth,
        Checkpoints,
        EmaRecipe,
        GrpoRecipe,
        HealthRecipe,
        Initial,
        OptimizerRecipe,
        PhaseSteps,
        RecipeRatePhase,
        RewardRecipe,
        SpikeRecipe,
        TrainRecipe,
        UpdateOfRest,
        Validation,
    )
    from runtime.contract.watch import LinkTraffic, MetricsSinks, WatchFacts

MODULES = (
    "recipe",
    "data",
    "mesh",
    "held",
    "plan",
    "programs",
    "kernel_list",
    "launches",
    "watch",
)  # later ones import earlier


__all__ = [
    "EXTRA_TOKENS",
    "MAX_PERIOD",
    "Adapter",
    "BatchGrowth",
    "Batches",
    "Bias",
    "BlendSource",
    "BodyTimes",
    "BuildManifest",
    "Call",
    "Certificate",
    "ChatRecipe",
    "Checkpoints",
    "ClippedAttention",
    "ClippedRows",
    "Collective",
    "DataRecipe",
    "DataRequest",
    "EmaRecipe",
    "EmittedOp",
    "Exchanged",
    "ExpertTable",
    "Facts",
    "FiltersRecipe",
    "GraphCalls",
    "GrpoRecipe",
    "HealthRecipe",
    "HeldParameter",
    "Host",
    "Initial",
    "KernelArgument",
    "KernelList",
    "KernelUse",
    "LaunchList",
    "LinkTraffic",
    "Mesh",
    "MetricsSinks",
    "MoeLayer",
    "NodeKind",
    "Opening",
    "OptimizerRecipe",
    "OptimizerState",
    "OptimizerStep",
    "OptimizerTensor",
    "OverlapTimes",
    "PhaseSteps",
    "PlainCalls",
    "PlannedBucket",
    "PlannedIndexer",
    "PlannedLayers",
    "PlannedModel",
    "PlannedPhase",
    "PlannedPrecision",
    "ProgramTimes",
    "PromptsRecipe",
    "QuantisedTensor",
    "QuantisedWeights",
    "RecipeRatePhase",
    "Reduction",
    "RewardRecipe",
    "RunPlan",
    "RunProgram",
    "SegmentKernels",
    "SpikeRecipe",
    "StageMessage",
    "TensorArgument",
    "TrainRecipe",
    "TrainedTokenizer",
    "UpdateOfRest",
    "Validation",
    "WatchFacts",
    "check_programs",
    "node_kind",
]


def __getattr__(name: str) -> Any:
    """Import a class when it is first used (PEP 562): to make all of them takes a sixth of `dsc check`."""
    if name in __all__:
        for module in MODULES:
            found = vars(import_module(f"{__name__}.{module}"))
            if name in found:
                globals()[name] = found[name]
                return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
