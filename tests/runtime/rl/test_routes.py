"""The experts of each token: routers choose the same in generation and in the training forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from runtime.build.build import Build
from runtime.launch.heartbeat import Board
from runtime.ops import OPS
from runtime.rl.next_tokens import replace_ops
from tests.runtime.rl.learning import learning
from tests.runtime.rl.test_policy import rewarded
from tests.traced import SharedSegments as Segments

ROUTES = ("route", "route_scores", "route_permute")


@pytest.mark.parametrize("of", ["v3", "qwen", "plain"])
def test_routers_choose_the_same(tmp_path: Path, segments: Segments, of: str) -> None:
    write_build(tmp_path / "build", compile_spec(rewarded(of), segments=segments).files)
    trainer = learning(Build.open(tmp_path / "build"), 0, Board(1).bind(0))
    policy = trainer.policy
    assert policy is not None
    forward, chosen = policy.generator._forward, list[Tensor]()

    def kept(name: str) -> Callable[..., Any]:
        def op(*args: Any) -> Any:
            outputs = OPS[name](*args)
            chosen.append(experts_of(outputs))
            return outputs

        return op

    module = trainer.build.import_changed_module("stages.rank_0", lambda segment: replace_ops(segment, by_id(kept)))
    functions = forward._functions()
    forward._functions = lambda: functions | {name: kept(name) for name in ROUTES if name in OPS}  # type: ignore[method-assign]
    policy.generator._bodies = forward.bodies()
    written: dict[tuple[int, int], list[Tensor]] = {}
    run = policy.generator._run

    def noted(found: Any, slots: Any) -> None:
        chosen.clear()
        run(found, slots)
        row = 0
        sequences = [slot.sequence for slot in slots if slot]
        for span, sequence in zip(forward.next, sequences, strict=True):
            for position in range(span.start, span.start + span.count):
                written[sequence, position] = [experts_TK[row] for experts_TK in chosen]
                row += 1

    policy.generator._run = noted  # type: ignore[method-assign]
    trainer.roll_out()
    assert written and all(written.values())
    chosen.clear()
    trainer.bodies = module.BODIES
    trainer.accumulate()
    layers = len(next(iter(written.values())))
    size, S = trainer.plan.train.micro_batch, trainer.sequence
    trained = [torch.stack(chosen[i : i + layers]) for i in range(0, len(chosen), layers)]  # of each micro-batch
    differ = [
        (sequence, position)
        for (sequence, position), of_layers in written.items()
        if not torch.stack(of_layers).equal(trained[sequence // size][:, sequence % size * S + position])
    ]
    assert len(written) > 100 and not differ


def experts_of(found: Any) -> Tensor:
    """The [T, K] integer tensor among the results of an op."""
    (experts_TK,) = [output for output in found if output.dtype == torch.int64 and output.dim() == 2]
    return experts_TK


def by_id(kept: Callable[[str], Callable[..., Any]]) -> dict[int, Callable[..., Any]]:
    return {id(OPS[name]): kept(name) for name in ROUTES if name in OPS}


@pytest.mark.parametrize("of", ["v3", "plain"])
def test_choices_are_replayed(tmp_path: Path, segments: Segments, of: str) -> None:
    """In the second step on the same completions, whose routers have negated weights and would choose others."""
    write_build(tmp_path / "build", compile_spec(rewarded(of, iterations=2), segments=segments).files)
    trainer = learning(Build.open(tmp_path / "build"), 0, Board(1).bind(0))
    chosen, replayed = list[Tensor](), list[Tensor]()

    def noted(expert_TK: Tensor, given_TK: Tensor) -> Tensor:
        choices_TK = OPS["replay_choices"](expert_TK, given_TK)
        chosen.append(expert_TK[given_TK[:, 0] >= 0])
        replayed.append(choices_TK[given_TK[:, 0] >= 0])
        return choices_TK

    changes = {id(OPS["replay_choices"]): noted}
    trainer.bodies = trainer.build.import_changed_module(
        "stages.rank_0", lambda segment: replace_ops(segment, changes)
    ).BODIES
    trainer.train_step()
    assert all(map(torch.equal, chosen, replayed)) and sum(map(len, chosen)) > 100
    first = [*replayed]
    chosen.clear()
    replayed.clear()
    for bucket, entry, value in trainer.state.logical(lambda bucket: bucket.parameters):
        if entry.name.endswith("router.weight"):
            bucket.set_weight(entry, -value)
    trainer.train_step()
    assert all(map(torch.equal, first, replayed)) and len(first) == len(replayed)
    assert not any(map(torch.equal, chosen, replayed))
