"""Searches for the pipeline schedule that ends soonest under a cap on activations: `solve` (the schedule `auto`)."""

from __future__ import annotations

from compiler.solver.solve import Cores, Solution, default_cap, is_long, solve, solve_on

__all__ = ["Cores", "Solution", "default_cap", "is_long", "solve", "solve_on"]
