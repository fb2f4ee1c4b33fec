"""Attention that context ranks share, against the same attention on one rank: all ranks in one process, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from compiler import ir
from compiler.model.layers import LAYERS, Place
from compiler.model.segments.torch_ops import ops
from dsl.schema import Gqa, Mla, Rope, Spec
from tests.compiler.model.segments.specs import DENSE, gqa, mla, spec
from tests.compiler.model.segments.test_cuts import parallel
from tests.compiler.model.segments.test_segments import Arguments, arguments

SEQUENCE, ROWS = 8, 2  # tokens of a sequence, sequences of a micro-batch


def outputs(segment: ir.Segment, operands: Arguments) -> dict[str, Tensor]:
    """Run the function of a layer. Returns its outputs by name."""
    params = SimpleNamespace(**{param.name: operands[param.name] for param in segment.params})
    results = segment.function(ops(), params, *(operands[argument.name] for argument in segment.inputs))
    return dict(zip((output.name for output in segment.outputs), results, strict=True))


def built(kind: str, model_spec: Spec) -> ir.Segment:
    return LAYERS[kind].build(Place(model_spec, DENSE))


@pytest.mark.parametrize(
    "attention",
    [
        gqa(),
        gqa(rope=None),
        gqa(rope=Rope(theta=100.0, width=2), output_gate=True),
        gqa(qk_norm=None, window=3, sinks=True, bias="all"),
        mla(),
        mla(query_rank=None),
    ],
    ids=["grouped", "without positions", "gate, some columns rotated", "window", "latent", "latent, queries at once"],
)
def test_context_ranks_equal_one_rank(attention: Gqa | Mla) -> None:
    """One of two ranks projects the first and last quarter of each sequence, the other the rest; keys are gathered."""
    unsplit = spec(attention=attention, sequence=SEQUENCE, micro_batch=ROWS)
    split = parallel(unsplit, expert=1, context=2)
    alone, project, attend = built("attention", unsplit), built("project", split), built("attend", split)
    operands = arguments(alone, 31)
    quarters = torch.arange(SEQUENCE).chunk(4)
    positions = [torch.cat([quarters[0], quarters[3]]), torch.cat([quarters[1], quarters[2]])]
    of_rank = [torch.cat([row * SEQUENCE + mine for row in range(ROWS)]) for mine in positions]
    places = [{"positions": mine.repeat(ROWS).int()} for mine in positions]
    projected = [
        outputs(project, operands | place | {"h": operands["h"][rows]})
        for rows, place in zip(of_rank, places, strict=True)
    ]
    keys = torch.empty(ROWS * SEQUENCE, projected[0]["keys"].shape[1], dtype=torch.float64)
    for rows, projection in zip(of_rank, projected, strict=True):
        keys[rows] = projection["keys"]
    wanted = outputs(alone, operands)["y"]
    for rows, projection, place in zip(of_rank, projected, places, strict=True):
        y = outputs(attend, operands | projection | place | {"keys": keys})["y"]
        assert (y - wanted[rows]).abs().max() < 1e-12
