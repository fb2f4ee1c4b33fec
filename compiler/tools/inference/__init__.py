"""A trained model in one process, without autograd: its loss on text, and text that it writes.

The layers are those that are trained (`compiler.model.layers`), read a third time, by the ops of `runtime.ops`.
"""
