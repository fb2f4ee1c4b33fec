"""The public Python API, as `import dsc_trainer as dsc`. See compiler/api.py."""

from compiler.api import (
    Compiled,
    Loaded,
    Planned,
    RunError,
    SpecError,
    Trained,
    check,
    compile,
    load,
    plan,
    train,
)

__all__ = [
    "Compiled",
    "Loaded",
    "Planned",
    "RunError",
    "SpecError",
    "Trained",
    "check",
    "compile",
    "load",
    "plan",
    "train",
]
