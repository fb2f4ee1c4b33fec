"""Placement of experts: the algorithm, its file, its command, and what trains with it."""
