"""Slices of logical tensors: cut and put together, saved by any ranks, read by any others, and bit-identical."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import contract
from runtime.checkpoint.loading import cut, place
from runtime.checkpoint.publish import CheckpointError, TensorPart, load
from runtime.contract.slices import Slice, held_elements, tiling_problem
from runtime.state import snapshot
from runtime.state.state import State, build_state, initial_value
from runtime.system.strict_json import FormError, pretty
from tests.runtime.faulty_files import save_all
from tests.runtime.plans import small_plan
from tests.runtime.test_checkpoint import assert_holds, bits, rewrite

SHAPES = ((12, 6), (7,), (5, 9), (16, 4), (3, 8, 2))


def random_slices(shape: tuple[int, ...], choose: random.Random) -> list[Slice]:
    """Two or more slices that make up a tensor, each of separate ranges."""
    dimension = choose.randrange(len(shape))
    extent = shape[dimension]
    cuts = [0, *sorted(choose.sample(range(1, extent), choose.randint(1, extent - 1))), extent]
    owners = [choose.randrange(choose.randint(2, 4)) for _ in cuts[1:]]
    owners[:2] = [0, 1]
    ranges: dict[int, list[tuple[int, int]]] = {}
    for owner, (begin, end) in zip(owners, pairwise(cuts), strict=True):
        mine = ranges.setdefault(owner, [])
        if mine and mine[-1][1] == begin:
            mine[-1] = (mine[-1][0], end)
        else:
            mine.append((begin, end))
    return [Slice(dimension, tuple(owned)) for owned in ranges.values()]


def indices_of(shape: tuple[int, ...], of: Slice) -> list[int]:
    """The indices of a slice's elements in the flat tensor, one by one."""
    places = [position for begin, end in of.ranges for position in range(begin, end)]
    grid = [[position] for position in (places if of.dimension == 0 else range(shape[0]))]
    for dimension, extent in enumerate(shape[1:], 1):
        grid = [
            [*row, position] for row in grid for position in (places if of.dimension == dimension else range(extent))
        ]
    strides = torch.empty(shape).stride()
    return [sum(position * stride for position, stride in zip(row, strides, strict=True)) for row in grid]


@pytest.mark.parametrize("shape", SHAPES)
def test_slices_are_the_elements_at_their_places(shape: tuple[int, ...]) -> None:
    choose = random.Random(str(shape))
    for _ in range(20):
        full, again = torch.randn(shape), torch.full(shape, torch.nan)
        slices = random_slices(shape, choose)
        assert tiling_problem(shape, slices) == "" and all(part.fits(shape) for part in slices)
        for part in slices:
            values = cut(full, part)
            assert values.reshape(-1).tolist() == full.view(-1)[indices_of(shape, part)].tolist()
            assert values.numel() == held_elements(shape, part)
            place(again, part, values)
        assert torch.equal(again, full)


def saved_in_slices(
    tensors: Mapping[str, Tensor], world: int, choose: random.Random
) -> list[dict[str, Tensor | TensorPart]]:
    """Shards in which each tensor is in slices: on different ranks whole, or their elements in parts on all of them."""
    shards: list[dict[str, Tensor | TensorPart]] = [{} for _ in range(world)]
    for name, tensor in tensors.items():
        shape, free = tuple(tensor.shape), list(range(world))
        slices = random_slices(shape, choose)
        if len(slices) > world:
            shards[choose.randrange(world)][name] = tensor
            continue
        for number, piece in enumerate(slices):
            last = number == len(slices) - 1
            mine = [free.pop(choose.randrange(len(free))) for _ in range(len(free) if last else 1)]
            flat = cut(tensor, piece).reshape(-1)
            size = -(-flat.numel() // len(mine))
            for rank, part in zip(mine, flat.split(size), strict=False):
                start = mine.index(rank) * size
                shards[rank][name] = TensorPart(part, start, shape, piece)
    return shards


@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_checkpoint_of_slices_is_read_whole(tmp_path: Path, world: int) -> None:
    choose = random.Random(world)
    for step in range(12):
        tensors = {f"weight/t{index}": torch.randn(shape) for index, shape in enumerate(SHAPES)}
        tensors["bias/b"] = torch.randint(0, 99, (6, 3))
        assert save_all(tmp_path, step, list(saved_in_slices(tensors, world, choose))) == [None] * world
        checkpoint = load(tmp_path)
        assert_holds(checkpoint, tensors)
        assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            assert_holds(checkpoint, {name: tensor})


WRONG = {
    "dimension": ([2, [[0, 2]]], "bad slice"),
    "no range": ([0, []], "bad slice"),
    "empty range": ([0, [[0, 0]]], "bad slice"),
    "backwards": ([0, [[2, 1]]], "bad slice"),
    "touching": ([0, [[0, 1], [1, 2]]], "bad slice"),
    "beyond the end": ([0, [[3, 5]]], "bad slice"),
    "all of it": ([0, [[0, 4]]], "bad slice"),
    "of text": (["0", [[0, 2]]], "bad slice"),
    "a number": (3, "bad slice"),
    "other rows": ([0, [[1, 3]]], "0 to 1 are missing"),
    "rows twice": ([0, [[2, 4]]], "elements 0 to 4 are held twice"),
    "columns": ([1, [[0, 1]]], "several dimensions"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_slices_that_do_not_form_a_tensor_are_refused(tmp_path: Path, kind: str) -> None:
    shape = (4, 2)
    halves = [Slice(0, ((0, 2),)), Slice(0, ((2, 4),))]
    full = torch.arange(8.0).view(shape)
    shards: list[Mapping[str, Tensor | TensorPart]] = [
        {"weight/w": TensorPart(cut(full, half).reshape(-1), 0, shape, half)} for half in halves
    ]
    assert save_all(tmp_path, 1, shards) == [None, None]
    assert_holds(load(tmp_path / "step-00000001"), {"weight/w": full})
    written, message = WRONG[kind]

    def change(fields: dict[str, list[dict[str, list[list[object]]]]]) -> None:
        fields["shards"][0]["tensors"][0][5] = written

    rewrite(tmp_path / "step-00000001", change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "step-00000001")


# ---------------------------------------------------------------- states


def plan_of(choose: random.Random, zero: int, master: str, sliced: bool) -> contract.RunPlan:
    """Four ranks: parameters that all hold, and parameters in two slices, each on two of them."""
    rows = [
        contract.HeldParameter(f"p{index}", f"p{index}", shape, None if index == 1 else 0.5, index % 2 == 0)
        for index, shape in enumerate(SHAPES[:4])
    ]
    pairs = [(row, random_slices(row.shape, choose)) for row in rows] if sliced else []
    pairs = [(row, slices) for row, slices in pairs if len(slices) == 2]
    split = {row.name for row, _ in pairs}
    buckets = [contract.PlannedBucket("whole", (0, 1, 2, 3), (0,), tuple(row for row in rows if row.name not in split))]
    for index in range(2 if pairs else 0):
        members = tuple(replace(row, slice=slices[index]) for row, slices in pairs)
        buckets.append(contract.PlannedBucket(f"slices{index}", (index, index + 2), (0,), members))
    precision = replace(small_plan().precision, parameter="bfloat16" if master == "mixed" else "float32")
    filled = tuple(bucket for bucket in buckets if bucket.parameters)
    return small_plan(dp=4, buckets=filled, zero=zero, precision=precision)


def fill(state: State, values: Mapping[str, Tensor]) -> None:
    snapshot.put_state(state, lambda names: {name: values[name] for name in names})


def states_of(plan: contract.RunPlan) -> list[State]:
    return [build_state(plan, rank, torch.device("cpu")) for rank in range(plan.mesh.world)]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("master", ["same", "mixed"])
def test_any_plan_loads_any_checkpoint(tmp_path: Path, zero: int, master: str) -> None:
    choose = random.Random(f"{zero} {master}")
    values = {
        f"{kind}/p{index}": torch.randn(shape)
        for kind in ("weight", "moment1")
        for index, shape in enumerate(SHAPES[:4])
    }
    for step in range(8):
        plan = plan_of(choose, zero, master, sliced=step % 4 > 0)
        states = states_of(plan)
        for state in states:
            fill(state, values)
        assert save_all(tmp_path, step, [snapshot.take(s, plan, r) for r, s in enumerate(states)]) == [None] * 4
        assert_holds(load(tmp_path), values)
        new_plan = plan_of(choose, 1 - zero, master, sliced=step % 3 > 0)
        again = states_of(new_plan)
        for state in again:
            snapshot.put_state(state, load(tmp_path).read)
        shards = [snapshot.take(s, new_plan, r) for r, s in enumerate(again)]
        assert save_all(tmp_path / "again", step, shards) == [None] * 4
        assert_holds(load(tmp_path / "again"), values)


def test_initial_values_equal_those_of_the_logical_tensor() -> None:
    choose = random.Random(5)
    for _ in range(10):
        plan = plan_of(choose, 0, "same", sliced=True)
        for state in states_of(plan):
            values = {entry.name: tensor for _, entry, tensor in state.logical(lambda bucket: bucket.parameters)}
            for _, entry in state.entries():
                full = initial_value(plan.train.seed, entry.name, entry.shape, entry.parameter.init)
                assert bits(values[entry.name]) == bits(cut(full, entry.parameter.slice))


def _first(plan: contract.RunPlan) -> contract.RunPlan:
    """A plan of two slices of one parameter."""
    row = contract.HeldParameter("w", "w", (4, 2), None, decay=False)
    halves: Sequence[Slice] = (Slice(0, ((0, 1), (2, 3))), Slice(0, ((1, 2), (3, 4))))
    buckets = tuple(
        contract.PlannedBucket(f"w{index}", (index,), (0,), (replace(row, slice=half),))
        for index, half in enumerate(halves)
    )
    return replace(plan, buckets=buckets)


def test_a_plan_lists_its_slices() -> None:
    text = pretty(_first(small_plan(dp=2)))
    assert pretty(contract.RunPlan.from_json(text)) == text
    assert contract.RunPlan.from_json(text).parameters[1].slice == Slice(0, ((1, 2), (3, 4)))


@pytest.mark.parametrize("ranges", [[[0, 1], [3, 4]], [[1, 2]], [[1, 2], [3, 5]], [[1, 3], [2, 4]], []])
def test_a_plan_whose_slices_do_not_form_a_tensor_is_refused(ranges: list[list[int]]) -> None:
    fields = json.loads(pretty(_first(small_plan(dp=2))))
    fields["buckets"][1]["parameters"][0]["slice"]["ranges"] = ranges
    with pytest.raises(FormError, match=r"slices? of w"):
        contract.RunPlan.from_json(json.dumps(fields))
