"""What `pip install` does beside copying: it compiles the C++ of the ops, where there is a compiler."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeOps(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version`: "editable", of a tree that keeps its libraries, or "standard", a wheel that takes them along."""
        if version != "editable":
            os.environ.pop("DSC_NATIVE", None)  # a wheel takes them from the tree
        problem = runpy.run_path(str(Path(self.root, "runtime/ops/native/compile_cpp.py")))["build"]()
        if problem:
            self.app.display_warning(f"ops will run on torch, which takes about twice as long: {problem}")
        elif version != "editable":
            build_data["artifacts"].append("/runtime/ops/native/*.so")
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"  # ctypes loads them: no Python is asked for
