"""Inference with a trained model in one process, without autograd: evaluation and text generation.

It runs the layers that are trained (`compiler.model.layers`) with the ops of `runtime.ops`.
"""
