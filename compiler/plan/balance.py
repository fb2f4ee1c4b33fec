"""Layers to pipeline stages: the exact min-max partition, knowing which stages share a rank and what devices hold.

A rank's load comes first because a rank runs all its stages on every micro-batch, and the most loaded one sets the
rhythm; of a slow stage only the filling and draining suffer. Under `bidirectional` each of the two copies of a stage
runs half of the micro-batches, so a rank's load is the mean of its two stages.

Loads come from rates, which are known to some percent: a split whose most loaded rank takes `1 / NEAR` more than the
least there is cannot be told from it by a measurement. Of all these near ties the best is, in this order, the one with
the least on the fullest device; the least load; the fastest slowest stage; the least sum of the squares of the stages'
times. Layers of one kind cannot be near ties by their number, whose errors cancel: only unlike ones can, as a layer of
experts and a dense one, whose rates are of different kernels.

How: every split within limits is followed (split_search.py); where layers are alike, how many each stage has is enough
(alike_layers.py).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from compiler.ir.stage_placement import ONE_STAGE
from compiler.plan.alike_layers import search_of
from compiler.plan.layer_runs import Blocks, Pipeline, Split
from compiler.plan.split_search import TooLongError


def partition(pipeline: Pipeline) -> Split:
    """The best split. The first and the last stage may be without layers, the others not.

    Of chunked placements with more steps than `MOST_STEPS`, the fastest found by then; or, if even that is not found,
    the one whose slowest stage takes the least. Without `pipeline.holding` nothing is a near tie.
    """
    assert pipeline.num_stages <= pipeline.num_layers + 2, "more stages than can be filled"
    try:
        limits, runs = search_of(replace(pipeline, holding=None)).fastest()
    except TooLongError:
        single = Pipeline(ONE_STAGE, tuple(_slowest(pipeline, s) for s in range(pipeline.num_stages)))
        return pipeline.split_of(search_of(single).fastest()[1])
    if pipeline.holding is not None:
        with suppress(TooLongError):
            runs = search_of(pipeline).fullest_least(limits, pipeline.held(runs))
    return pipeline.split_of(runs)


def _slowest(pipeline: Pipeline, stage: int) -> Blocks:
    return max(pipeline.kinds_of[stage], key=lambda blocks: sum(lane[-1] for lane in blocks.before))
