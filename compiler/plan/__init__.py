"""Spec → Plan: mesh, stages, and the replica table that says who holds every logical parameter."""

from compiler.plan.plan import Owners, make_plan

__all__ = ["Owners", "make_plan"]
