"""Optimizer state on the host, and the moving average of weights: what is copied and when, with which bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compiler.emit.build_files import contract_plan
from compiler.pipeline import lower_spec
from compiler.predict.memory_state import rank_states, update_scratch
from dsl.closed_forms.memory import HOST_PART, HOST_SLOTS
from dsl.schema import Spec
from runtime import contract
from runtime.build.kernels import Op
from runtime.state import optimizer
from runtime.state.average import MovingAverage
from runtime.state.offload import Staging, Update
from runtime.state.optimizers import reference_update
from runtime.state.optimizers.adamw import adamw
from runtime.state.optimizers.muon import muon
from runtime.state.state import State, build_state
from tests.gpu.pretend import DEVICE, Pretend, pretended
from tests.runtime.step.specs import spec as small_spec
from tests.runtime.step.specs import with_host_state
from tests.runtime.step.test_muon import with_muon

CPU = torch.device("cpu")
PART = 1000  # elements: buckets have some 20,000
BOTH = ("moments", "master")


def plan_of(spec: Spec, part: int = PART) -> contract.RunPlan:
    plan = contract_plan(spec, lower_spec(spec), {})
    return replace(plan, host=replace(plan.host, part=part))


def accelerated(spec: Spec) -> Spec:
    """The spec on accelerators, whose hosts have separate memory."""
    node = spec.cluster.node
    device = node.device.model_copy(update={"name": "h100", "bf16": 1e15, "hbm": 3e12})
    cluster = spec.cluster.model_copy(update={"node": node.model_copy(update={"device": device})})
    return spec.model_copy(update={"cluster": cluster})


class Copies(TorchDispatchMode):
    """Records copies between host and device, and updates, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = (isinstance(tensor, Pretend) for tensor in args[:2])
            if target != source:
                self.rows.append(("to device" if target else "to host", args[0].nbytes))
        return func(*args, **(kwargs or {}))


def trained(state: State, plan: contract.RunPlan, steps: int, *by: Op, staging: Staging | None = None) -> None:
    """Some steps with random gradients; `by`: the update of each kind of the optimizer."""
    recipe = plan.train.optimizer
    staging = staging or Staging(state, plan.host.part, plan.host.slots)
    for step in range(1, steps + 1):
        for index, bucket in enumerate(state.buckets):
            generator = torch.Generator().manual_seed(100 * step + index)
            values = torch.empty(bucket.gradients.numel()).normal_(generator=generator)
            bucket.gradients.copy_(values)
        for bucket in state.buckets:
            optimizer.update(bucket, recipe, by[bucket.is_of_rest], optimizer.Numbers(step, 1e-2, 2.0), staging)
        staging.finish()


def values_of(state: State) -> list[Tensor]:
    pieces = [(bucket, piece) for bucket in state.buckets for piece in bucket.owned]
    tensors = [t for b, piece in pieces for t in (b.parameters, piece.master, *piece.state.values())]
    return [t.inner if isinstance(t, Pretend) else t for t in tensors]


@pytest.mark.parametrize(("zero", "dp"), [(0, 1), (1, 2), (2, 2), (3, 2)])
def test_parts_come_while_others_are_updated_and_the_numbers_stay(zero: int, dp: int) -> None:
    """Every element of master weights and moments goes to the device once and back once. The copy of a part starts
    before the previous part is updated."""
    spec = small_spec(1, 1, dp, 2, zero=zero, precision="bf16")
    plain, away = plan_of(spec), plan_of(with_host_state(spec, BOTH))
    expected = build_state(plain, 0, CPU)
    trained(expected, plain, 2, reference_update("adamw"))

    with pretended(), Copies() as copies:
        state = build_state(away, 0, DEVICE)
        pieces = [piece for bucket in state.buckets for piece in bucket.owned]
        assert not any(isinstance(t, Pretend) for piece in pieces for t in (piece.master, *piece.state.values()))
        copies.rows.clear()

        def update(*arguments: Any) -> None:
            master, gradient, first, second, rounded = arguments[:5]
            assert all(isinstance(t, Pretend) for t in (master, gradient, first, second, rounded))
            assert master.numel() <= PART
            copies.rows.append(("update", master.numel()))
            reference_update("adamw")(*(t.inner for t in arguments[:5]), *arguments[5:])

        trained(state, away, 2, update)
        rows = [row for row in copies.rows if row[1] != 0]
    for mine, theirs in zip(values_of(state), values_of(expected), strict=True):
        assert torch.equal(mine, theirs)

    elements = sum(piece.master.numel() for piece in pieces)
    gradients = 2 * sum(bucket.gradients.nbytes for bucket in state.buckets)  # given by this test
    of_element = 4 + 4 + 4  # FP32 master weights and moments
    moved = {kind: sum(size for name, size in rows if name == kind) for kind in ("to device", "to host")}
    assert moved == {"to device": 2 * elements * of_element + gradients, "to host": 2 * elements * of_element}
    in_one_step = [name for name, _ in rows[: rows.index(("to host", rows[-1][1])) + 1]]
    first = in_one_step.index("update")
    assert in_one_step[first - 6 : first] == ["to device"] * 6, "the first part, and the second one ahead of its turn"
    assert in_one_step[first : first + 8] == ["update", *["to host"] * 3, *["to device"] * 3, "update"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [(), ("moments",), BOTH])
def test_host_and_device_memory_equal_the_plan(offload: tuple[str, ...], zero: int) -> None:
    """State on host and device, and buffers of parts on the device, to the byte."""
    pp, ep, dp = 2, 2, 2
    schedule = "1f1b" if zero > 1 else "dualpipe"  # which holds a stage on two ranks
    plain = small_spec(pp, ep, dp, 2 * pp, zero=zero, precision="bf16", schedule=schedule)
    spec = accelerated(with_host_state(plain, offload))
    lowered = lower_spec(spec)
    plan, states, scratch = (
        f(spec, lowered.plan) for f in (lambda *_: plan_of(spec, HOST_PART), rank_states, update_scratch)
    )
    assert plan.host.slots == HOST_SLOTS and plan.host.memory == tuple(state.host for state in states)
    assert plan.train.ema is not None
    with pretended():
        for rank in range(pp * dp):
            state = build_state(plan, rank, DEVICE)
            average = MovingAverage(state, plan.train.ema, plan.host.part, validated=True)
            pieces = [piece for bucket in state.buckets for piece in bucket.owned]
            tensors = [t for piece in pieces for t in (piece.master, *piece.state.values())]
            host = [t for t in tensors if not isinstance(t, Pretend)]
            host += [piece.average for piece in pieces if piece.average is not None] + average.weights
            host += [] if average.staged is None else [average.staged]
            planned = states[rank // dp]
            assert sum(t.nbytes for t in host) == planned.host, rank
            assert sum(t.nbytes for t in tensors if isinstance(t, Pretend)) == planned.optimizer, rank
            room = Staging(state, plan.host.part, plan.host.slots).slot_elements(is_of_rest=False)
            away = sum(t.itemsize for t in (pieces[0].master, *pieces[0].state.values()) if not isinstance(t, Pretend))
            assert HOST_SLOTS * room * away == scratch[rank // dp], rank


@pytest.mark.parametrize("offload", [("moments",), BOTH])
def test_matrices_and_other_parts_of_muon_have_separate_buffers(
    offload: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers hold a whole matrix with its momentum, then a part of the rest with two moments: the planned bytes,
    besides those of products. Results equal a device that holds everything."""
    plain = with_muon(small_spec(1, 1, 2, 2, zero=1, precision="bf16", schedule="1f1b"))
    spec = accelerated(with_host_state(plain, offload))
    monkeypatch.setattr("compiler.predict.memory_state.HOST_PART", PART)
    (scratch,), (of_products,) = (update_scratch(variant, lower_spec(variant).plan) for variant in (spec, plain))
    plan, kinds = plan_of(spec), (partial(muon, dtype=torch.bfloat16), adamw)
    rooms = {False: 0, True: 0}

    class Watched(Staging):
        def _new_room(self, like: Update, away: Sequence[int]) -> list[Tensor]:
            room = super()._new_room(like, away)
            rooms[like.bucket.is_of_rest] = max(rooms[like.bucket.is_of_rest], sum(tensor.nbytes for tensor in room))
            return room

    def on_device(by: Op) -> Op:
        return lambda *args: by(*(arg.inner if isinstance(arg, Pretend) else arg for arg in args))

    for rank in range(2):
        expected = build_state(plan_of(plain), rank, CPU)
        trained(expected, plan, 2, *kinds)
        with pretended():
            state = build_state(plan, rank, DEVICE)
            staging = Watched(state, plan.host.part, plan.host.slots)
            trained(state, plan, 2, *map(on_device, kinds), staging=staging)
        for mine, theirs in zip(values_of(state), values_of(expected), strict=True):
            assert torch.equal(mine, theirs)
    of_matrices, of_rest = (HOST_SLOTS * rooms[kind] for kind in (False, True))
    assert of_rest > 0 and scratch == max(of_products + of_matrices, of_rest)


def test_a_cpu_has_one_memory() -> None:
    """On a CPU, offloaded state and averaged weights are in the CPU's memory."""
    plain = small_spec(1, 1, 2, 2, zero=1, precision="bf16")
    spec = with_host_state(plain, BOTH)
    plan = lower_spec(spec).plan
    (state,), (before,) = rank_states(spec, plan), rank_states(plain, lower_spec(plain).plan)
    assert state.host == 0 and not any(update_scratch(spec, plan))
    owned = before.optimizer // 12
    assert state.optimizer == owned * (12 + 4 + 2), "the average in FP32, and the BF16 weights while it is validated"
    (num_bytes,) = {sum(t.nbytes for t in _all(build_state(plan_of(spec), rank, CPU))) for rank in range(2)}
    assert num_bytes == owned * (12 + 4)


def _all(state: State) -> list[Tensor]:
    pieces = [piece for bucket in state.buckets for piece in bucket.owned]
    tensors = [t for piece in pieces for t in (piece.master, *piece.state.values())]
    return tensors + [piece.average for piece in pieces if piece.average is not None]


@pytest.mark.parametrize("there", ["cpu", "device"])
@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_the_moving_average_equals_its_definition(there: str, precision: str) -> None:
    """In parts of any size, for weights on the CPU or a device. A validation leaves the segments' weights unchanged."""
    plan = plan_of(with_host_state(small_spec(1, 1, 1, 2, precision=precision), decay=0.9), part=777)
    assert plan.train.ema is not None
    make: Callable[[], State] = lambda: build_state(plan, 0, CPU if there == "cpu" else DEVICE)  # noqa: E731
    with pretended():
        state = make()
        average = MovingAverage(state, plan.train.ema, plan.host.part, validated=True)
        expected = [_number(p.master).to(p.average.dtype).clone() for p in _pieces(state) if p.average is not None]
        for step in range(3):
            for bucket in state.buckets:
                for piece in bucket.owned:
                    piece.master.add_(0.25 * (step + 1))
            average.start()
            average.wait()
            for mean, piece in zip(expected, _pieces(state), strict=True):
                new = _number(piece.master).to(mean.dtype)
                mean.copy_(mean * 0.9 + new * (1 - 0.9))
        for mean, piece in zip(expected, _pieces(state), strict=True):
            assert piece.average is not None and torch.equal(mean, piece.average)
        before = [_number(bucket.parameters).clone() for bucket in state.buckets]
        means = [mean.to(bucket.parameters.dtype) for bucket, mean in zip(state.buckets, expected, strict=True)]
        gathered = list[bool]()

        def holds(values: list[Tensor]) -> bool:
            return all(
                torch.equal(_number(b.parameters), value) for b, value in zip(state.buckets, values, strict=True)
            )

        with average.swap_into_weights(lambda: gathered.append(holds(means))):
            assert holds(means) and gathered == [True], "other ranks get the average too"
        assert holds(before) and gathered == [True, False], "and then the weights"


def _pieces(state: State) -> list[Any]:
    return [piece for bucket in state.buckets for piece in bucket.owned]


def _number(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, Pretend) else tensor


def test_a_failure_beside_a_step_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(with_host_state(small_spec(1, 1, 1, 2)))
    assert plan.train.ema is not None
    average = MovingAverage(build_state(plan, 0, CPU), plan.train.ema, plan.host.part, validated=False)

    def fail(_: Tensor) -> Tensor:
        raise OSError("no memory")

    monkeypatch.setattr(average, "_copy_to_host", fail)
    average.start()
    with pytest.raises(OSError, match="no memory"):
        average.wait()
