"""Weights of published models → checkpoints, and back."""
