"""Segments that all tests of a session share: one process traces them, the others read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compiler.emit.kernels import KernelTarget
from compiler.emit.segment_cache import Segments
from compiler.files.cache import store
from compiler.ir import Segment, SegmentCode


class SharedSegments(Segments):
    """Segments, each of which is stored in `folder` when it is first requested."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.shared_folder = folder

    def code(self, segment: Segment, target: KernelTarget, progress: Callable[[str], None]) -> SegmentCode:
        is_new = (segment.key, target) not in self._codes
        segment_code = super().code(segment, target, progress)
        if is_new:
            store(self.shared_folder, self.entries([segment], target).items())
        return segment_code
