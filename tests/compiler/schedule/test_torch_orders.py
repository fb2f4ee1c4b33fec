"""Orders on every rank equal those of torch.distributed.pipelining, wherever it has the schedule and the size.

Torch's generators are called on an object without stages, with the sizes they read. Torch lacks
interleaved if N // P does not divide N, 1f1b if N < P - 1, and dualpipe. One difference: torch's table of 1f1b (a
table only; other code runs it) counts the forwards of the last rank from 1.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from compiler.schedule import SCHEDULES
from compiler.schedule.schedule import Schedule


def text_of(action: Any) -> str:
    if action.sub_actions is not None:
        return f"({'|'.join(text_of(sub_action) for sub_action in action.sub_actions)})"
    return f"{action.computation_type.value}{action.stage_index}.{action.microbatch_index}"


def order_of(name: str, ranks: int, micro_batches: int, chunks: int) -> list[str]:
    """A row per rank, without torch's steps in which a rank waits or reduces its gradients at the end."""
    cls: Any = getattr(torch_schedules, name)
    instance = object.__new__(cls)
    instance.pp_group_size, instance._n_microbatches = ranks, micro_batches
    instance.n_local_stages, instance.num_stages, instance._num_stages = chunks, chunks * ranks, chunks * ranks
    instance.number_of_rounds = max(1, micro_batches // ranks)
    instance.microbatches_per_round = micro_batches // instance.number_of_rounds
    if hasattr(instance, "_calculate_single_rank_operations"):
        rows = [instance._calculate_single_rank_operations(rank) for rank in range(ranks)]
    else:
        rows = [*instance._get_pipeline_order().values()]
    computes = ("F", "I", "W", "B", "OVERLAP_F_B")
    return [" ".join(text_of(a) for a in row if a is not None and a.computation_type.value in computes) for row in rows]


def lines(schedule: Schedule) -> list[str]:
    return schedule.to_text().splitlines()[1:]


ROWS = [  # our name, torch's, chunks, micro-batches for P ranks
    ("gpipe", "ScheduleGPipe", 1, lambda P: (1, P, 2 * P + 1)),
    ("1f1b", "Schedule1F1B", 1, lambda P: (P, P + 1, 3 * P)),
    ("zb1p", "ScheduleInterleavedZeroBubble", 1, lambda P: (1, P, 2 * P, 5 * P)),
    ("interleaved", "ScheduleInterleaved1F1B", 2, lambda P: (1, max(1, P - 1), P, P + 1, 2 * P, 2 * P + 2, 5 * P)),
    ("interleaved", "ScheduleInterleaved1F1B", 3, lambda P: (1, max(1, P - 1), P, P + 1, 2 * P, 2 * P + 2, 5 * P)),
    ("zbv", "ScheduleZBVZeroBubble", 2, lambda P: (1, P, 2 * P - 1, 2 * P, 3 * P + 1)),
    ("dualpipev", "ScheduleDualPipeV", 2, lambda P: (2 * P, 2 * P + 1, 3 * P + 1)),
]


@pytest.mark.parametrize(("name", "torch_name", "chunks", "sizes"), ROWS)
def test_order(name: str, torch_name: str, chunks: int, sizes: Any) -> None:
    compared = 0
    for ranks in range(1, 9):
        for micro_batches in sizes(ranks):
            if torch_name == "ScheduleInterleaved1F1B" and micro_batches % max(1, micro_batches // ranks):
                continue
            ours = SCHEDULES[name].generate(ranks, micro_batches, chunks)
            theirs = order_of(torch_name, ranks, micro_batches, chunks)
            if name == "1f1b":
                theirs[-1] = re.sub(r"F(\d+)\.(\d+)", lambda f: f"F{f[1]}.{int(f[2]) - 1}", theirs[-1])
            assert lines(ours) == theirs, (ranks, micro_batches)
            compared += 1
    assert compared >= 20
