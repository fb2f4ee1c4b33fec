"""Spec → Plan: mesh, stages, and the replica table that says who holds every logical parameter."""
