"""The attention of a block, of the kind the model has: a segment from the residual stream to what is added to it.

The sum is the first op of the segment that comes next, where it and that segment's norm are one kernel.
"""

from __future__ import annotations

from compiler import ir
from compiler.layers import custom, gqa, mla
from compiler.layers.builder import Place
from dsl.schema import CustomAttention, Mla

PARAMETERS = mla.PARAMETERS | gqa.PARAMETERS


def build(place: Place) -> ir.Segment:
    sizes = place.attention or place.model.attention
    if isinstance(sizes, CustomAttention):
        return custom.build_attention(place, sizes)
    return mla.build(place, sizes) if isinstance(sizes, Mla) else gqa.build(place, sizes)
