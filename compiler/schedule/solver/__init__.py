"""The search for the pipeline schedule that ends soonest under a cap on activations: `Solver` finds `auto`."""

from __future__ import annotations

from compiler.schedule.solver.offload import solve_with_copies
from compiler.schedule.solver.solve import Solution, Solver, default_cap, is_long, lower_bound_of

__all__ = ["Solution", "Solver", "default_cap", "is_long", "lower_bound_of", "solve_with_copies"]
