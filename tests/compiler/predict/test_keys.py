"""The sentence of a plan about exchanges of keys between context ranks, compared with the exchanges themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.predict.predict import share_of_keys, time_plan
from dsl.load import load

LLAMA = Path(__file__).parents[3] / "specs" / "llama3-8b.dsc"


@pytest.mark.parametrize(("context", "sequence"), [(2, 8192), (8, 65536)])
def test_the_time_that_a_ring_saves_is_at_most_that_of_the_exchanges(context: int, sequence: int) -> None:
    """On one pipeline rank, gathers of forwards are exposed; weight gradients may hide those of backwards."""
    words = ["parallel.pipeline=1", f"parallel.context={context}", f"train.sequence={sequence}"]
    timed_plan = time_plan(load(LLAMA, overrides=[*words, "schedule.name=1f1b"]))
    chains = timed_plan.lowering.chains(0, 0)
    forward, backward = (
        sum(node.time_ns for node in chains.chain(kind) if node.instruction.kind == exchange)
        for kind, exchange in (("F", "gather_sequences"), ("B", "scatter_sequences"))
    )
    steps = timed_plan.schedule.num_micro_batches / timed_plan.step.seconds / 1e9
    assert 0 < forward * steps <= share_of_keys(timed_plan) * (1 + 1e-9) <= (forward + backward) * steps


def test_without_context_ranks_no_keys_are_exchanged() -> None:
    assert share_of_keys(time_plan(load(LLAMA))) == 0
