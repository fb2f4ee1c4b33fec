"""Converts weights of published models to checkpoints, and back."""
