"""Which device is named: on simulated machines, and with real ranks that compute on other devices."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compiler.cli.commands.replay import third_slots
from compiler.cli.commands.replay_verdict import (
    ComputedLog,
    ComputedStep,
    Device,
    RecordedTraining,
    are_equal,
    compare_steps,
    suspects,
    verdict,
)
from runtime.observe.slots import Slots
from tests.runtime.run.sick import Fault
from tests.runtime.run.test_health import MESHES, Runs, runs

__all__ = ["runs"]  # a fixture

# ---------------------------------------------------------------- simulated machines

STEPS, ACTIONS = 3, 5


def simulated(
    world: int, slots: Slots, devices: list[Device], faulty: Device | None, seed: int, *, wild: bool = False
) -> RecordedTraining:
    """Ranks that compute on inputs from random other ranks, in rounds; a faulty device gives other results."""
    logs: dict[int, list[ComputedStep]] = {rank: [] for rank in range(world)}
    values = [seed * 1000 + rank for rank in range(world)]
    draws = random.Random(seed)
    for step in range(1, STEPS + 1):
        entries: dict[int, list[tuple[str, int, bool]]] = {rank: [] for rank in range(world)}
        for action in range(ACTIONS):
            sources = [draws.randrange(world) for _ in range(world)]
            sensitive = [draws.random() < 0.6 for _ in range(world)]
            outputs = []
            for rank in range(world):
                value = hash((rank, action, values[rank])) & (1 << 63) - 1
                errs = devices[slots.device_of(rank, world)] == faulty and sensitive[rank] and step > 1
                outputs.append(value ^ errs)
                entries[rank].append((f"> send {action}", outputs[-1], errs and wild))
            for rank, source in enumerate(sources):
                entries[rank].append((f"< receive {action}", outputs[source], False))
            values = [hash((outputs[rank], outputs[source])) & (1 << 63) - 1 for rank, source in enumerate(sources)]
        for rank, records in entries.items():
            names, prints, flags = zip(*records, strict=True)
            not_finite = frozenset(index for index, flag in enumerate(flags) if flag)
            digits = "".join(f"{n:016x}" for n in prints)
            logs[rank].append(ComputedStep(step, 8 * step, digits[-16:], names, digits, not_finite))
    return RecordedTraining(
        {}, (), {rank: ComputedLog(devices[slots.device_of(rank, world)], tuple(steps)) for rank, steps in logs.items()}
    )


@pytest.mark.parametrize("swap", ["+1", "pair"])
def test_the_faulty_device_is_named(swap: str) -> None:
    """Two trainings narrow it down to at most two devices; a third, or a non-finite value, to one. No device is named
    if none errs."""
    draws = random.Random(5)
    alone_in_two = 0
    for seed in range(300):
        world = draws.randint(3, 8)
        devices = [("node", f"device {n}") for n in range(world)]
        first, second = draws.sample(range(world), 2)
        bad = draws.randrange(world) if swap == "+1" else draws.choice((first, second))
        texts = ["+0", "+1" if swap == "+1" else f"{first},{second}"]
        trainings = [simulated(world, Slots.parse(text), devices, devices[bad], seed) for text in texts]
        if are_equal(*trainings):  # it did not err in these trainings
            continue
        suspected = suspects(trainings)
        assert 1 <= len(suspected) <= 2 and devices[bad] in [suspect.device for suspect in suspected]
        alone_in_two += len(suspected) == 1
        third = third_slots(texts[1], trainings)
        assert third or len(suspected) == 1
        trainings += [simulated(world, Slots.parse(third), devices, devices[bad], seed)] if third else []
        (suspect,) = suspects(trainings)
        assert (suspect.device, suspect.run_rank) == (devices[bad], bad)
        wild = [simulated(world, Slots.parse(text), devices, devices[bad], seed, wild=True) for text in texts]
        assert [suspect.device for suspect in suspects(wild)] == [devices[bad]]
        sound = [simulated(world, Slots.parse(text), devices, None, seed) for text in texts]
        assert are_equal(sound[0], sound[1]) and suspects(sound) == []
    assert alone_in_two > 100 if swap == "+1" else alone_in_two == 0


def test_slots() -> None:
    for text in ("+0", "+3", "0,2", "2,0", "any"):
        slots = Slots.parse(text)
        assert str(slots) == text
        devices = [slots.device_of(rank, 4) for rank in range(4)]
        assert sorted(devices) == [0, 1, 2, 3] and [slots.rank_on(device, 4) for device in devices] == [0, 1, 2, 3]
    assert [Slots.parse("1,9").device_of(rank, 4) for rank in range(4)] == [0, 9, 2, 3], "a device of no rank"
    for text in ("", "1", "1,", "-1,2", "1,2,3", "+", "+-1", "all", "0x1,2", "١,٢"):
        with pytest.raises(ValueError, match="is not A,B"):
            Slots.parse(text)


@pytest.mark.parametrize(
    ("text", "kind", "devices", "reason"),
    [
        ("any", "cpu", 1, ""),
        ("+0", "shared", 1, ""),
        ("0,1", "cpu", 2, ""),
        ("1,0", "cuda", 4, ""),
        ("+1", "cpu", 2, ""),
        ("1,5", "cuda", 8, ""),
        ("4,9", "cpu", 64, "there is no rank 4: the run has ranks 0 to 3"),
        ("0,4", "cuda", 4, "no rank and no device is numbered 4: this machine has 4 devices, the run 4 ranks"),
        ("0,2", "cpu", 2, "ranks 0 and 2 have the same core here: this process may use only 2"),
        ("+1", "cpu", 1, "ranks 0 and 1 have the same core here: this process may use only 1"),
        ("0,1", "shared", 1, "all ranks compute on one device here: there is none to exchange it with"),
    ],
)
def test_invalid_exchanges_of_devices_are_refused(text: str, kind: str, devices: int, reason: str) -> None:
    assert Slots.parse(text).refusal(4, kind, devices) == reason


def training(loss: float, *, numbers: str = "a", sample: int = 39, **bad: Any) -> RecordedTraining:
    """A training of step 5 on two ranks with its row or, with `bad`, its event."""
    event = {"event": "bad_step", "step": 5, "loss": loss, "grad_norm": 1.0, "samples": [32, sample], **bad}
    logs = {
        rank: ComputedLog(("node", f"{rank}"), (ComputedStep(5, sample, numbers, (), "", frozenset()),))
        for rank in (0, 1)
    }
    return RecordedTraining(
        {} if bad else {5: {"step": 5, "loss": loss, "grad_norm": 1.0}}, [event] if bad else [], logs
    )


def test_verdicts() -> None:
    """Each combination of agreement between a run and two trainings."""
    good, second, third = training(1.0), training(2.0, numbers="b"), training(3.0, numbers="c")
    assert verdict(good, [good, good], 5, comparable=True) == ("real", [])
    assert verdict(good, [second, second], 5, comparable=True) == ("transient", [])
    assert verdict(good, [second, second], 5, comparable=False) == ("unknown", [])
    assert verdict(good, [second, good], 5, comparable=True) == ("transient", [])
    assert verdict(good, [second, third], 5, comparable=True) == ("unknown", [])
    step = ComputedStep(5, 39, "a", ("> send",), "1" * 16, frozenset())
    logs = good.logs | {1: ComputedLog(("node", "1"), (step,))}
    odd = logs | {1: ComputedLog(("node", "0"), (replace(step, prints="2" * 16),))}
    outcome, blamed = verdict(good, [replace(good, logs=logs), replace(good, logs=odd)], 5, comparable=True)
    assert outcome == "device" and [suspect.device for suspect in blamed] == [("node", "0"), ("node", "1")]


def test_differing_inputs_or_missing_results_blame_no_device() -> None:
    """A rank with other inputs, or with fewer results than another, says nothing about its device."""

    def of(*names: str, prints: str) -> ComputedStep:
        return ComputedStep(5, 39, prints, names, "".join(16 * digit for digit in prints), frozenset())

    def named(one: ComputedStep, other: ComputedStep) -> list[tuple[str, int, str]]:
        logs = [{0: ComputedLog(("node", device), (step,))} for device, step in (("0", one), ("1", other))]
        suspected = suspects([RecordedTraining({}, (), log) for log in logs])
        return [(suspect.device[1], suspect.step, suspect.output) for suspect in suspected]

    step = of("< weights", "> send 1", prints="aa")
    assert named(step, step) == []
    assert named(step, of("< weights", "> send 1", prints="ba")) == [], "it got something else"
    blamed = [("0", 5, "send 1"), ("1", 5, "send 1")]
    assert named(step, of("< weights", "> send 1", prints="ab")) == blamed
    assert named(of("> send 1", prints="a"), of("> send 1", prints="b")) == blamed
    shorter = of("< weights", prints="a")
    assert named(shorter, step) == [], "the first made nothing there"
    assert named(step, shorter) == blamed


def test_a_bad_step_is_compared_with_its_event() -> None:
    """With its numbers, and those of each rank that the run recorded; never with a row of other samples."""
    bad = training(9.0, action="stop", to=None, prints=["a", "a"])
    assert compare_steps(bad, bad, 5) == ([], [])
    assert compare_steps(bad, training(9.0), 5) == ([], []), "it was no spike there, and has the same numbers"
    assert compare_steps(bad, training(8.0, numbers="b"), 5)[1] == [0, 1]
    (differs,), _ = compare_steps(bad, training(8.0, numbers="b"), 5)
    assert differs == {"step": 5, "keys": {"loss": {"run": 9.0, "replay": 8.0}}}
    retrained = replace(bad, rows={5: {"step": 5, "loss": 1.0, "grad_norm": 1.0}})
    assert compare_steps(retrained, training(1.0, sample=47), 5) == ([], []), "the run went on with other samples"
    assert compare_steps(retrained, bad, 5) == ([], [])


# ---------------------------------------------------------------- real ranks


def product_of(rank: int, samples: set[int]) -> Fault:
    """A rank has one changed bit in a product of each step with these samples."""

    def fault(trainer: Any) -> None:
        real = trainer.accumulate

        def accumulate() -> Any:
            weight = trainer.state.buckets[-1].parameters
            errs = trainer.rank == rank and samples & {*trainer._draw(trainer.position).tolist()}
            was = weight.clone()
            if errs:
                weight.mul_(1 + 2**-6)
                trainer.quantised_at = -1
            try:
                return real()
            finally:
                weight.copy_(was)
                trainer.quantised_at = -1 if errs else trainer.quantised_at

        trainer.accumulate = accumulate

    return fault


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_that_computes_something_else_is_found(runs: Runs, mesh: str) -> None:
    """Two trainings leave identical fingerprints. If one rank's numbers differ in a step, that rank is the first with
    other results for the same inputs."""
    build, last = runs.build(MESHES[mesh], ""), MESHES[mesh]["devices"] - 1
    trainings = {
        name: RecordedTraining.read(runs.train(build, name, *faults, steps=4, slots=Slots.parse(slots)))
        for name, slots, *faults in (("one", "any"), ("two", "+0"), ("odd", "any", product_of(last, {17})))
    }
    assert {*trainings["one"].logs} == {*range(last + 1)}
    assert are_equal(trainings["one"], trainings["two"])
    assert not any(compare_steps(trainings["one"], trainings["two"], 4))
    suspected = suspects([trainings["one"], trainings["odd"]])
    assert {suspect.rank for suspect in suspected} == {last} and {suspect.step for suspect in suspected} == {3}
    assert not (Path(runs.place.folder) / f"{build.name}-one" / "checkpoints").exists()


def test_the_third_device_is_one_that_no_suspect_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another rank's device, or an untried core on which no rank computes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(4)})

    def third(kind: str, world: int, swap: str) -> str | None:
        devices = [("node", f"{kind} {n}") for n in range(4)]
        plain, swapped = (simulated(world, Slots.parse(slots), devices, devices[0], 3) for slots in ("+0", swap))
        assert len(suspects([plain, swapped])) == 2
        return third_slots(swap, [plain, swapped])

    assert third("device", 3, "0,1") == third("core", 3, "0,1") == "0,2"
    assert third("device", 2, "0,1") is None
    assert third("core", 2, "0,2") == "0,1"
    assert third("core", 1, "0,1") == "0,2" and third("core", 1, "0,2") == "0,1"
