"""The sizes of a growing batch against a count step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.closed_forms.ramp import MAX_SIZES, num_sizes, quantum_of, ramp
from dsl.load import check, load
from dsl.rules.phases import batch_grows
from dsl.schema import Batch
from tests import copies

SPECS = Path(__file__).parents[2] / "specs"


def counted(batch: Batch, sequence: int, quantum: int, steps: int) -> list[tuple[int, int]]:
    """(batch, tokens done before) of each step, from the definition: equal increments at equal distances."""
    increments = num_sizes(batch, quantum) - 1
    num_tokens, batches = 0, []
    for _ in range(steps):
        reached = increments if num_tokens >= batch.over_tokens else num_tokens * increments // batch.over_tokens
        size = min(batch.start + reached * quantum, batch.end)
        batches.append((size, num_tokens))
        num_tokens += size * sequence
    return batches


@given(
    start=st.integers(1, 30),
    growth=st.integers(0, 40),
    over=st.integers(1, 5000),
    sequence=st.integers(1, 30),
    quantum=st.integers(1, 9),
)
def test_steps_one_by_one(start: int, growth: int, over: int, sequence: int, quantum: int) -> None:
    batch = Batch(start=start * quantum, end=(start + growth) * quantum, over_tokens=over)
    batch_ramp = ramp(batch, sequence, quantum)
    steps = counted(batch, sequence, quantum, 60)
    assert [batch_ramp.tokens_at(step) for step in range(60)] == [num_tokens for _, num_tokens in steps]
    for step, (_, num_tokens) in enumerate(steps):
        assert batch_ramp.steps_for(num_tokens) == step
        assert batch_ramp.steps_for(num_tokens + 1) == step + 1
    total = steps[-1][1]
    phases = batch_ramp.phases(total) if total else ()
    assert [size for size, count in phases for _ in range(count)] == [size for size, _ in steps[:-1]]
    ends = (batch_ramp.phases(size.first_token) for size in batch_ramp.sizes[1:])
    assert all(count > 0 for phases in ends for _, count in phases), "a size that begins at the end has no step"


@pytest.mark.parametrize("more", [0, 1])
def test_a_batch_has_as_many_sizes_as_the_bound_and_not_one_more(more: int) -> None:
    spec = load(SPECS / "tiny.dsc")
    quantum = quantum_of(spec.parallel, spec.train.micro_batch)
    batch = Batch(start=quantum, end=(MAX_SIZES + more) * quantum, over_tokens=10**6)
    assert num_sizes(batch, quantum) == MAX_SIZES + more
    findings = list(batch_grows(spec.model_copy(update={"train": spec.train.model_copy(update={"batch": batch})})))
    assert [item.code for item in findings] == ["E0706"] * more


@pytest.mark.parametrize(("sequence", "near"), [(48, 32), (33, 32), (63, 32), (31, 16), (3, 2)])
def test_sequences_of_a_phase_divide_the_longest(tmp_path: Path, sequence: int, near: int) -> None:
    """The hint gives the next shorter sequence that divides it."""
    path = tmp_path / "a.dsc"
    copies.copy(SPECS / "tiny.dsc", tmp_path)
    phases = f"phase middle {{ train {{ sequence = {sequence} }} }}\n phase long {{ train {{ sequence = 64 }} }}"
    path.write_text(f'import "tiny.dsc"\nrun a extends tiny {{ train {{ sequence = 16 }}\n {phases} }}\n', "utf-8")
    mistakes = [(mistake.code, mistake.hint, mistake.span.text) for mistake in check(path, "a") if mistake.span]
    assert mistakes == [("E0707", f"write `sequence = {near}`", str(sequence))]


def test_a_constant_batch_is_one_size() -> None:
    batch_ramp = ramp(Batch(start=16, end=16), 128, 8)
    assert batch_ramp.phases(16 * 128 * 10) == ((16, 10),)
    assert batch_ramp.phases(16 * 128 * 10 + 1) == ((16, 11),)
