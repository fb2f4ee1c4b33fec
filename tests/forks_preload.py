"""Imports what commands and ranks need, for the process that tests fork (tests/forks.py)."""

import gc
import pkgutil
from importlib import import_module

MODULES = (
    *(
        "torch",
        "safetensors.torch",
        "tokenizers",
        "networkx",
        "compiler.pipeline",
        "compiler.machine.topology.device_graph",
    ),
    *("runtime.launch.launcher", "runtime.run.loop", "runtime.run.starts", "runtime.checkpoint.restore"),
)

gc.disable()  # as where a run imports them (runtime/run/train.py)
for name in MODULES:
    import_module(name)
for found in pkgutil.iter_modules(import_module("compiler.cli.commands").__path__):
    if found.name != "lsp":  # asks for a package that need not be there
        import_module(f"compiler.cli.commands.{found.name}")
gc.freeze()
gc.enable()
