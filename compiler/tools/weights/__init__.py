"""Weights of published models: the mapping of their tensors to those of a checkpoint, and the export of a model."""
