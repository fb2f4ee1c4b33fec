"""Plan + Schedule → Program: bodies over two lanes, then per pipeline rank which body runs on which micro-batch."""

from compiler.lower.program import lower

__all__ = ["lower"]
