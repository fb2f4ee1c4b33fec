"""What hardware achieves: rate tables, and the rates that plans are timed with. Torch-free."""

from __future__ import annotations

from compiler.machine.rates.rates import Rates
from compiler.machine.rates.table import RateError, RateTable, read_table, shipped_table, shipped_tables

__all__ = [
    "RateError",
    "RateTable",
    "Rates",
    "read_table",
    "shipped_table",
    "shipped_tables",
]
