"""Plan and schedules → programs: bodies over two lanes, then per pipeline rank which body runs on which micro-batch."""

from compiler.program.lower.lowering import Lowering

__all__ = ["Lowering"]
