# constructed by dsc: segment head, T=16 D=16, float32
# from spec.resolved:50: vocab = 512

from runtime.build.kernels import on_cuda
from runtime.ops import cross_entropy, cross_entropy_dgrad, linear, linear_dgrad, linear_wgrad_

cross_entropy = on_cuda(__file__, 'cross_entropy_v512_float32', cross_entropy)
cross_entropy_dgrad = on_cuda(__file__, 'cross_entropy_v512_float32', cross_entropy_dgrad)


def F(
    head,  # [512, 16]
    h,  # [16, 16]
    targets,  # [16] int64
):
    """Forward: the outputs, then what the backward will read."""
    linear_0 = linear(h, head)  # [16, 512]
    loss, cross_entropy_0_lse = cross_entropy(linear_0, targets)  # [], [16]
    return loss, linear_0, cross_entropy_0_lse


def I(
    head,  # [512, 16]
    targets,  # [16] int64
    linear_0,  # [16, 512]
    cross_entropy_0_lse,  # [16]
    d_loss,  # []
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_linear_0 = cross_entropy_dgrad(d_loss, linear_0, targets, cross_entropy_0_lse)  # [16, 512]
    d_h = linear_dgrad(d_linear_0, head)  # [16, 16]
    return d_h, d_linear_0


def W(
    g_head,  # [512, 16]
    h,  # [16, 16]
    d_linear_0,  # [16, 512]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wgrad_(g_head, d_linear_0, h)
