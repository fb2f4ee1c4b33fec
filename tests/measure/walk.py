"""The path of a spec through the compiler: `python -m tests.measure.walk [SPEC]`.

Prints the module of every function that compiler/pipeline.py calls, in order, and names those that are in an
earlier room than the previous one: there the path climbs back. Pure reads of values are left out: calls of `dsl`
and `ir`, and properties of what was lowered.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from compiler import pipeline
from compiler.emit.segment_cache import Segments
from dsl.load import load
from dsl.schema import Spec

ROOT = Path(__file__).parents[2]
VALUES = ("compiler.ir", "compiler.program.lowered")


def steps(spec: Spec, segments: Segments | None = None) -> list[str]:
    """The modules that `compile_spec` calls, in their order; several calls of one side by side are one."""
    modules: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or caller.f_code.co_filename != pipeline.__file__:
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "compiler") and path != Path(pipeline.__file__):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if modules[-1:] != [module] and not module.startswith(VALUES):
                modules.append(module)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        pipeline.compile_spec(spec, segments=segments)
    finally:
        sys.setprofile(before)
    return modules


def climbs(modules: list[str], rooms: tuple[str, ...]) -> list[str]:
    """The modules that are in an earlier room than the previous one."""
    place = [rooms.index(module.split(".")[1]) for module in modules]
    return [
        module for module, position, previous in zip(modules[1:], place[1:], place, strict=False) if position < previous
    ]


def main(words: list[str]) -> int:
    from tests.test_structure import ROOMS

    modules = steps(load(words[0] if words else str(ROOT / "specs" / "tiny.dsc")))
    back = climbs(modules, ROOMS["compiler"])
    print("\n".join(modules))
    print(f"climbs back {len(back)} times: {', '.join(back) or 'never'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
