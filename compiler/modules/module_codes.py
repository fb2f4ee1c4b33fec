"""The rule behind the code of a layer of a user's own. A code is never given to another rule."""

from __future__ import annotations

CODES = {"M0101": "a module that a spec names can be traced: tensors in, one of the same shape out, nothing beside"}
MORE = {
    "M0101": '`ffn custom { module = "layers.py:Mixer" }` names a class of torch.nn.Module, made with the hidden size '
    "and called with tensors of one shape. Its shapes may not depend on numbers. Its forward may neither write into "
    "parameters nor draw random numbers, and it has no buffers. docs/custom-layers.md has an example. `dsc check` "
    "looks for the class, and runs nothing; what plans, compiles and trains runs the file.",
}
