"""Emitted bodies of valid random specs are the instructions of their programs: they are run, not read, and do each
operation in order, with its operands, and put its results where the next ones find them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from compiler.emit.emission import all_bodies
from compiler.emit.stage_modules import StageModules
from compiler.ir import Body, Instruction
from compiler.pipeline import lower_spec
from compiler.plan.plan import make_plan
from dsl.load import analyse
from dsl.messages.diagnostics import Diagnostic, Source
from dsl.schema import Spec
from dsl.text.parser import decode
from tests.fuzz.generate import Input, generated

INPUTS = 50  # seeds of a case of the test
MOST_RANKS = 64  # of a spec: its program is made in seconds
NOT_THERE = Diagnostic("E0101", "there is no such file")


class Value(str):
    """A symbolic name: `p`, `v.x`, `v.x.up`. Its attributes are symbolic names too."""

    def __getattr__(self, name: str) -> Value:
        return Value(f"{self}.{name}")


@dataclass
class Expected:
    """The expected instructions in order: each operation must be the next one."""

    left: list[Instruction]
    freed: list[str] = field(default_factory=list)  # of the `del` at hand

    def next(self, kind: str) -> Instruction:
        instruction = self.left.pop(0)
        assert instruction.kind == kind and not self.freed, (instruction, kind, self.freed)
        return instruction

    def does(self, kind: str, given: tuple[object, ...], named_by: tuple[object, ...]) -> Any:
        """Assert an operation on `given`: its `named_by`, then its operands. Returns its results."""
        instruction = self.next(kind)
        space = "vw"[instruction.slot]
        passed = () if kind == "wait" else instruction.reads  # operands of its start, which live until then
        reads = [f"{space}.{name}" for name in passed if name not in named(instruction)]
        assert [*given] == [*named_by, *reads], (instruction, given)
        results = tuple(Value(f"result {space}.{buffer.name}") for buffer in instruction.writes)
        return results[0] if len(results) == 1 else results


def named(instruction: Instruction) -> set[str]:
    return {*instruction.params_in, *instruction.weights_in}


class Namespace:
    """Values of a stage and a micro-batch: `v` and `w` of a body."""

    def __init__(self, expected: Expected, slot: int) -> None:
        self.__dict__.update(_expected=expected, _slot=slot)

    def __setattr__(self, name: str, value: Value) -> None:
        assert value == f"result {'vw'[self._slot]}.{name}", f"{value} is put into {name}"

    def __getattr__(self, name: str) -> Value:
        return Value(f"{'vw'[self._slot]}.{name}")

    def __delattr__(self, name: str) -> None:
        expected = self._expected
        expected.freed.append(name)
        (instruction, *_) = expected.left
        assert (instruction.kind, instruction.slot) == ("free", self._slot)
        assert [*instruction.reads][: len(expected.freed)] == expected.freed, instruction
        if len(instruction.reads) == len(expected.freed):
            expected.freed.clear()
            expected.next("free")


@dataclass
class Segment:
    """A segment module for `sites`."""

    expected: Expected
    name: str
    modules: dict[str, str]

    def __getattr__(self, phase: str) -> Callable[..., Any]:
        def call(*given: object) -> Any:
            (instruction, *_) = self.expected.left
            assert self.modules[instruction.site] == self.name and instruction.phase == phase, (instruction, self.name)
            space = "vw"[instruction.slot]
            first = parts("g" if phase == "W" else "p", space, instruction.params, instruction.params_in)
            named_by = first + parts("p", space, instruction.weights, instruction.weights_in)
            return self.expected.does("run", given, named_by)

        return call


def parts(of: str, space: str, names: tuple[str, ...], places: tuple[str, ...]) -> tuple[str, ...]:
    """Tensors of a segment: the rank's own (`of`), or those of values."""
    prefixes = [f"{space}.{place}" if place else of for place in places] or [of] * len(names)
    return tuple(f"{place}.{re.sub('[.]', '_', name)}" for place, name in zip(prefixes, names, strict=True))


@dataclass
class Executor:
    """`c` of a body."""

    expected: Expected
    body: Body

    def values(self, stage: int, micro_batch: str) -> Namespace:
        slot = "ab".index(micro_batch)
        assert int(self.body.actions[slot][1:]) == stage
        return Namespace(self.expected, slot)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: object) -> Any:
            (instruction, *_) = self.expected.left
            kind = "wait" if name.startswith("wait_") else name
            assert kind != "wait" or name == f"wait_{instruction.wait}", (instruction, name)
            return self.expected.does(kind, given, words_of(instruction))

        return call


def words_of(instruction: Instruction) -> tuple[object, ...]:
    """What names an operation of the executor: its site, its action and the micro-batch of its slot."""
    micro_batch, stage, of_forward = "ab"[instruction.slot], int(instruction.action[1:]), instruction.phase == "F"
    if instruction.kind in ("zeros", "constant", "record"):
        return (instruction.site,)
    if instruction.kind in ("load", "tell"):
        return (instruction.site, micro_batch)
    if instruction.kind in ("send", "receive"):
        away = 0 if instruction.kind == "send" else -1 if of_forward else 1
        return (instruction.peer, f"{'F' if of_forward else 'B'}{stage + away}", micro_batch)
    is_recomputed = of_forward and instruction.action[0] != "F"
    return (f"{'B' if is_recomputed else instruction.phase}{stage}", micro_batch, instruction.site)


def follow(source: str, bodies: list[Body], modules: dict[str, str]) -> int:
    """Run each body of an emitted module against its instructions. Returns their number."""
    functions: dict[str, Any] = {}
    exec(re.sub(r"^from \.\.segments import \w+$", "", source, flags=re.MULTILINE), functions)
    assert [*functions["BODIES"]] == [body.name for body in bodies]
    for body in bodies:
        expected = Expected([*body.instructions])
        functions.update({name: Segment(expected, name, modules) for name in modules.values()})
        functions[body.name](Executor(expected, body), Value("p"), Value("g"), *"ab"[: len(body.actions)])
        assert not expected.left, f"{body.name} lacks {expected.left[0]}"
    return sum(len(body.instructions) for body in bodies)


# ---------------------------------------------------------------- random specs


def spec_of(given: Input) -> Spec | None:
    """The spec of an input, or None if it has no run."""

    def reader(path: str) -> tuple[Source, tuple[Diagnostic, ...]]:
        name = os.path.normpath(path)
        return decode(name, given.content(name)) if name in given.files else (Source(path, ""), (NOT_THERE,))

    analysis = analyse(next(iter(given.files)), None, given.overrides, reader)
    spec = None if analysis.diagnostics else analysis.views[0].spec
    if spec is None or not hasattr(spec, "train"):
        return None
    files = spec.cluster.rates, spec.parallel.placement, spec.schedule.file
    return None if any(files) or spec.model.customs else spec


@pytest.mark.parametrize("first", range(0, 60 * INPUTS, INPUTS))
def test_emitted_bodies_are_the_program(first: int, record_property: Callable[[str, object], None]) -> None:
    tried, instructions = 0, 0
    for spec in filter(None, map(spec_of, map(generated, range(first, first + INPUTS)))):
        if make_plan(spec).mesh.world > MOST_RANKS:
            continue
        lowered = lower_spec(spec)
        modules = {use.site: f"module_{index}" for index, use in enumerate(lowered.plan.uses)}
        stages, tried = StageModules(modules), tried + 1
        for rank, bodies in enumerate(all_bodies(lowered.programs, lowered.plan.mesh.pp)):
            instructions += follow(stages.rank_module(rank, bodies), bodies, modules)
    record_property("specs", tried)
    record_property("instructions", instructions)
    assert first or tried, "none of the first inputs is a spec"
