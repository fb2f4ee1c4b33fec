"""The rule behind the code of a checkpoint that a run begins with. A code is never given to another rule."""

from __future__ import annotations

CODES = {"W0101": "the checkpoint that a run begins with has every parameter of the model, in its shape"}
MORE = {
    "W0101": "`train { initial = … }` names a checkpoint, the folder of checkpoints or the run folder whose newest one "
    "is meant. `dsc import hf FOLDER -o SPEC` writes one from published weights. Its weights and balancing biases are "
    "taken; the optimizer, the rate and the data begin anew. What the model does not have is left behind, and said.",
}
