"""Rate tables, and the achieved rates of hardware that the times of plans are computed with. Imports no torch."""

from __future__ import annotations

from compiler.machine.rates.rates import Rates
from compiler.machine.rates.table import RateError, RateTable, read_table, shipped_table, shipped_table_names

__all__ = [
    "RateError",
    "RateTable",
    "Rates",
    "read_table",
    "shipped_table",
    "shipped_table_names",
]
