"""Build hook: `pip install` compiles the C++ ops, and the searches in C, if a compiler is available."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeOps(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the C++ ops. `version`: "editable" makes the library of this processor in the source tree, "standard"
        makes all and adds them to the wheel. An editable installation does not wait for what `make` compiles beside it:
        pip installs nothing before this has returned."""
        if version != "editable":
            os.environ.pop("DSC_NATIVE", None)  # build in the source tree, from which a wheel takes the libraries
        build = runpy.run_path(str(Path(self.root, "compiler/files/native.py")))["build"]
        for source in sorted(Path(self.root, "compiler").rglob("*.c")):
            build(source)  # else on first use
        ops = runpy.run_path(str(Path(self.root, "runtime/ops/native/compile_cpp.py")))
        if version == "editable" and ops["is_being_built"]():
            return
        problem = ops["build"](ops["own"]() if version == "editable" else tuple(ops["VARIANTS"]))
        if problem:
            self.app.display_warning(f"ops will run on torch, which takes about twice as long: {problem}")
        elif version != "editable":
            build_data["artifacts"] += ["/runtime/ops/native/*.so", "/compiler/**/*.so"]
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"  # ctypes loads the libraries, so any Python 3 works
