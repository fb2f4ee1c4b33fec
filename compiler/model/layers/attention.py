"""The attention of a block, of any kind: a segment from the residual stream to the value that is added to it.

The sum is the first op of the next segment, where it is fused with that segment's norm.
"""

from __future__ import annotations

from compiler import ir
from compiler.model.layers import compressed, custom, deltanet, gqa, hyper, mla
from compiler.model.layers.builder import Place
from dsl.schema import Compressed, CustomAttention, DeltaNet, Gqa, Mla, SoftmaxAttention

OF_KINDS = mla.PARAMETERS | gqa.PARAMETERS | compressed.PARAMETERS | deltanet.PARAMETERS
PARAMETERS = OF_KINDS | hyper.paths("attention")


def build_products(place: Place) -> ir.Segment:
    """The segment before attention whose heads are normed together: queries, keys, values and their squares."""
    sizes = _sizes(place)
    assert isinstance(sizes, Gqa), "only grouped-query heads are normed together"
    return gqa.build_products(place, sizes)


def norms_across_ranks(place: Place) -> bool:
    """Whether heads that are normed together are spread over several ranks."""
    sizes = place.attention or place.model.attention
    return isinstance(sizes, Gqa) and gqa.norms_across_ranks(place, sizes)


def build_project(place: Place) -> ir.Segment:
    """The first attention segment under context parallelism: to queries, and to keys and values or their latents."""
    sizes = _sizes(place)
    plain = mla.build_project(place, sizes) if isinstance(sizes, Mla) else gqa.build_project(place, sizes)
    return hyper.around(place, plain)


def build_attend(place: Place) -> ir.Segment:
    """The second attention segment under context parallelism: from queries, and keys and values of whole sequences, to
    the value that is added to the residual stream."""
    sizes = _sizes(place)
    return mla.build_attend(place, sizes) if isinstance(sizes, Mla) else gqa.build_attend(place, sizes)


def is_gated(place: Place) -> bool:
    """Whether the output of attention is gated before the output projection."""
    sizes = place.attention or place.model.attention
    return isinstance(sizes, DeltaNet) or (isinstance(sizes, Gqa) and sizes.output_gate)


def _sizes(place: Place) -> SoftmaxAttention:
    sizes = place.attention or place.model.attention
    assert isinstance(sizes, Mla | Gqa), "only MLA and GQA support context parallelism"
    return sizes


def build(place: Place) -> ir.Segment:
    """Attention of any kind as one segment. With several residual streams it reads their mix."""
    return hyper.around(place, _build(place))


def _build(place: Place) -> ir.Segment:
    sizes = place.attention or place.model.attention
    if isinstance(sizes, CustomAttention):
        return custom.build_attention(place, sizes)
    if isinstance(sizes, Compressed):
        return compressed.build(place, sizes)
    if isinstance(sizes, DeltaNet):
        return deltanet.build(place, sizes)
    return mla.build(place, sizes) if isinstance(sizes, Mla) else gqa.build(place, sizes)
