# constructed by dsc: segment head, T=256 D=192, float32
# from spec.resolved:62: vocab = 4096

from runtime.build.kernels import on_cuda
from runtime.ops import cross_entropy, cross_entropy_dgrad, linear, linear_dgrad, linear_wgrad_

cross_entropy = on_cuda(__file__, 'cross_entropy_v4096_float32', cross_entropy)
cross_entropy_dgrad = on_cuda(__file__, 'cross_entropy_v4096_float32', cross_entropy_dgrad)


def F(
    head,  # [4096, 192]
    h,  # [256, 192]
    targets,  # [256] int64
):
    """Forward: the outputs, then what the backward will read."""
    linear_0 = linear(h, head)  # [256, 4096]
    loss, cross_entropy_0_lse = cross_entropy(linear_0, targets)  # [], [256]
    return loss, linear_0, cross_entropy_0_lse


def I(
    head,  # [4096, 192]
    targets,  # [256] int64
    linear_0,  # [256, 4096]
    cross_entropy_0_lse,  # [256]
    d_loss,  # []
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_linear_0 = cross_entropy_dgrad(d_loss, linear_0, targets, cross_entropy_0_lse)  # [256, 4096]
    d_h = linear_dgrad(d_linear_0, head)  # [256, 192]
    return d_h, d_linear_0


def W(
    g_head,  # [4096, 192]
    h,  # [256, 192]
    d_linear_0,  # [256, 4096]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wgrad_(g_head, d_linear_0, h)
