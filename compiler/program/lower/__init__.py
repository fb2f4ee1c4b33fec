"""Lower a plan and schedules to programs: bodies over two lanes, then which body each pipeline rank runs when."""

from compiler.program.lower.lowering import Lowering

__all__ = ["Lowering"]
