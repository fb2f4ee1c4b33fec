"""The rules behind the codes of a user's own code: layers and rewards. A code is never given to another rule."""

from __future__ import annotations

CODES = {
    "M0101": "a module that a spec names can be traced: tensors in, one of the same shape out, nothing beside",
    "M0102": "the file of a reward is Python, and has the function that the reward names",
}
MORE = {
    "M0101": '`ffn custom { module = "layers.py:Mixer" }` names a class of torch.nn.Module, made with the hidden size '
    "and called with tensors of one shape. Its shapes may not depend on numbers. Its forward may neither write into "
    "parameters nor draw random numbers, and it has no buffers. docs/custom-layers.md has an example. `dsc check` "
    "looks for the class, and runs nothing; what plans, compiles and trains runs the file.",
    "M0102": '`rewards { own { check = python, file = "reward.py", function = "reward" } }` names a function. '
    "`dsc check` looks for it, and runs nothing. A build has the file, and no other one beside it; it is run "
    "in a process of its own while the run trains.",
}
