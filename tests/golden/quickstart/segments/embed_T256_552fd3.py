# constructed by dsc: segment embed, T=256, float32
# from spec.resolved:62: vocab = 4096

from runtime.build.kernels import on_cuda
from runtime.ops import embedding, embedding_wgrad_

embedding = on_cuda(__file__, 'embedding_d192_float32', embedding)
embedding_wgrad_ = on_cuda(__file__, 'embedding_d192_float32', embedding_wgrad_)


def F(
    table,  # [4096, 192]
    tokens,  # [256] int64
):
    """Forward: the outputs, then what the backward will read."""
    y = embedding(tokens, table)  # [256, 192]
    return y


def I():
    """Backward for the inputs: their gradients, then what W will read. There are none."""


def W(
    g_table,  # [4096, 192]
    tokens,  # [256] int64
    d_y,  # [256, 192]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    embedding_wgrad_(g_table, d_y, tokens)
