"""QK-clip on the flat tensors of a rank, against the same rows multiplied as a matrix."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from runtime import contract
from runtime.contract.plan import ClippedAttention, ClippedRows
from runtime.contract.slices import Slice
from runtime.state.qk_clip import clip_rows, factors_of
from runtime.state.state import build_state
from tests.runtime.plans import small_plan

ROWS, COLUMNS = 8, 5


def test_heads_of_a_group_share_the_factor_of_their_largest_logit() -> None:
    """Four query heads on two keys: rows 2 to 9 of queries, 0 to 1 of keys. Rows between parts do not change."""
    queries = ClippedRows("query", 2, 4, ((1, 0.5), (1, 1.0)))
    more_queries = ClippedRows("query", 12, 2, ((1, 1.0),))
    block = ClippedAttention("layers.0", 4, 2, (queries, more_queries, ClippedRows("key", 0, 2, ((1, 0.5),))))
    unreached = ClippedAttention("layers.1", 2, 2, (ClippedRows("other", 0, 2, ((1, 1.0),)),))
    peaks = torch.tensor([1.0, 16.0, 4.0, 2.0, 4.0, 3.0], dtype=torch.float64)
    factors = factors_of([block, unreached], peaks, 4.0)
    assert factors.keys() == {"query", "key"}, "a logit that is at the bound is not above it"
    assert factors["query"].tolist() == [1, 1, 0.5, 0.25, 0.5, 0.25, 1, 1, 1, 1, 1, 1, 0.25, 1]
    assert factors["key"].tolist() == [0.5, 1]
    assert factors_of([block, unreached], peaks, 16.0) == {}


@pytest.mark.parametrize("parameter", ["float32", "bfloat16"])
@pytest.mark.parametrize("held", [None, Slice(0, ((1, 3), (5, 8)))])
def test_any_part_of_a_bucket_is_clipped(held: Slice | None, parameter: str) -> None:
    """A part may begin and end anywhere: within a row, at the end of one, before the parameter and after it."""
    weight = contract.HeldParameter("w", "w", (ROWS, COLUMNS), init=0.1, decay=True, slice=held)
    around = [contract.HeldParameter(name, name, (3,), init=0.1, decay=True) for name in ("before", "behind")]
    plan = small_plan(buckets=(contract.PlannedBucket("b", (0,), (0,), (around[0], weight, around[1])),))
    plan = replace(plan, precision=replace(plan.precision, parameter=parameter))
    (bucket,) = build_state(plan, 0, torch.device("cpu")).buckets
    factors = torch.tensor([0.5, 1.0, 0.25, 0.125, 2.0, 3.0], dtype=torch.float64)
    of_row = torch.cat([factors, torch.ones(ROWS - len(factors), dtype=torch.float64)])
    entry = next(candidate for candidate in bucket.entries if candidate.name == "w")
    wanted = torch.ones(bucket.size)
    wanted[entry.start : entry.end] = entry.cut(of_row[:, None].expand(-1, COLUMNS)).flatten()
    for start, end in combinations(range(bucket.size + 1), 2):
        part, master = slice(start, end), torch.ones(end - start)
        bucket.parameters.fill_(7.0)
        clip_rows(bucket, part, master, {"w": factors})
        assert torch.equal(master, wanted[part]), part
        reached = parameter == "bfloat16" and start < entry.end and end > entry.start
        assert torch.equal(
            bucket.weights_of(part), master.bfloat16() if reached else bucket.parameters.new_full((end - start,), 7.0)
        ), part
    master = torch.ones(bucket.size)
    clip_rows(bucket, slice(0, bucket.size), master, {})
    clip_rows(bucket, slice(0, bucket.size), master, {"another": factors})
    assert torch.equal(master, torch.ones(bucket.size))
