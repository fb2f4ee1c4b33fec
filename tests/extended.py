"""Checks of the examples of docs/extending.md, run where these are written: `python -m tests.extended shared_kv`."""

from __future__ import annotations

import sys

from compiler.model.segments.interpret import interpret
from dsl.closed_forms.counts import parameters
from tests.compiler.model.segments.specs import gqa, spec
from tests.compiler.model.segments.test_segments import check, segment_of
from tests.specs.counted import flops_of


def shared_kv() -> None:
    """Gradients of the segment in float64, its parameters, and the FLOPs of a token."""
    for qk_norm in (None, "head", "width"):
        with_it, without = (spec(attention=gqa(qk_norm=qk_norm, shared_kv=shared)) for shared in (True, False))
        segment = segment_of("attention", with_it)
        check(segment)
        width, heads, layers = 4, 2, len(with_it.model.layers)
        saved = with_it.model.hidden * width * heads  # the columns of the values
        assert segment_of("attention", without).params[1].shape[0] - segment.params[1].shape[0] == width * heads
        counts = parameters(with_it.model), parameters(without.model)
        assert counts[1].attention - counts[0].attention == saved
        assert counts[1].active - counts[0].active == layers * saved
        assert flops_of(without).causal - flops_of(with_it).causal == 6 * layers * saved


def squared_relu() -> None:
    """Check gradients of a traced and checked segment that calls the op against autograd over a separate formula."""
    segment = segment_of("attention", spec(attention=gqa(shared_kv=True)))
    assert {"squared_relu", "squared_relu_dgrad"} < {node.op for node in interpret(segment).nodes}
    check(segment)


if __name__ == "__main__":
    {"shared_kv": shared_kv, "squared_relu": squared_relu}[sys.argv[1]]()
