# constructed by dsc: segment embed, T=16, float32
# from spec.resolved:50: vocab = 512

from runtime.build.kernels import on_cuda
from runtime.ops import embedding, embedding_wgrad_

embedding = on_cuda(__file__, 'embedding_d16_float32', embedding)
embedding_wgrad_ = on_cuda(__file__, 'embedding_d16_float32', embedding_wgrad_)


def F(
    table,  # [512, 16]
    tokens,  # [16] int64
):
    """Forward: the outputs, then what the backward will read."""
    y = embedding(tokens, table)  # [16, 16]
    return y


def I():
    """Backward for the inputs: their gradients, then what W will read. There are none."""


def W(
    g_table,  # [512, 16]
    tokens,  # [16] int64
    d_y,  # [16, 16]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    embedding_wgrad_(g_table, d_y, tokens)
