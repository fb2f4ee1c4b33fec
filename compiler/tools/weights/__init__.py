"""Weights of published models: which of their tensors are which of a checkpoint's, and how a model is published."""
