"""Weights of published models: how their tensors map to those of a checkpoint, and how to publish a model."""
