"""Placement of experts: the algorithm, its file, its command, and training with a placement."""
