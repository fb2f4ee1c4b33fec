"""What hardware achieves: rate tables, and the rates of a spec's devices that plans are timed with. Torch-free."""

from __future__ import annotations

from compiler.rates.rates import Rates
from compiler.rates.spec_rates import core_rates, rates_of, table_for
from compiler.rates.table import RateError, Table, read_table, shipped_table, shipped_tables

__all__ = [
    "RateError",
    "Rates",
    "Table",
    "core_rates",
    "rates_of",
    "read_table",
    "shipped_table",
    "shipped_tables",
    "table_for",
]
