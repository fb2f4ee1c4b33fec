"""The values that are passed between the compiler's stages. Frozen, tuples only, no torch.

Segment --cut--> Cut        what F saves for I and W, what I defers to W      (compiler/model/segments/interpret.py)
Spec    --plan-> Plan       mesh, stages, cuts, replica table                 (compiler/plan)
Plan + Schedule --lower--> Program    what each pipeline rank executes        (compiler/program/lower)

The schedule itself is in compiler/schedule/schedule.py, its alphabet in runtime/contract/actions.py.
"""

from compiler.ir.plan import (
    Bucket,
    Communication,
    Plan,
    Replica,
    Role,
    ShardedTensors,
    Stage,
    StageStep,
    Use,
)
from compiler.ir.program import (
    Body,
    BucketCollective,
    Instruction,
    Invocation,
    Kind,
    Message,
    Program,
)
from compiler.ir.segment import (
    Buffer,
    Cost,
    Cut,
    EmittedCall,
    Input,
    Inside,
    KernelWork,
    Output,
    Param,
    QuantisedParameter,
    RecomputedValue,
    Segment,
    SegmentCode,
    Signature,
    TensorSplit,
    TorchWork,
)

__all__ = [
    "Body",
    "Bucket",
    "BucketCollective",
    "Buffer",
    "Communication",
    "Cost",
    "Cut",
    "EmittedCall",
    "Input",
    "Inside",
    "Instruction",
    "Invocation",
    "KernelWork",
    "Kind",
    "Message",
    "Output",
    "Param",
    "Plan",
    "Program",
    "QuantisedParameter",
    "RecomputedValue",
    "Replica",
    "Role",
    "Segment",
    "SegmentCode",
    "ShardedTensors",
    "Signature",
    "Stage",
    "StageStep",
    "TensorSplit",
    "TorchWork",
    "Use",
]
