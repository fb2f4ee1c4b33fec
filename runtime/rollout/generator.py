"""Completions of the prompts of a step, on the ranks that train, by the program that evaluates.

Each micro-batch of the program is a lane of some slots, and a slot has a sequence. A round runs the program once: a
sequence that begins reads its prompt, any other the token that was drawn last, and each gets its next token. When a
sequence ends, the next one that waits for its column takes the slot, so lanes stay full while sequences wait
(continuous batching). All ranks learn the tokens of a round by one sum, so each of them knows what all slots have.

Which sequences a column has, and which lane or rank computes one, changes no bit of it: a row of any op has the same
bits beside other rows (next_tokens.py), and what is drawn depends on the number of the sequence (sampler.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.build import Build
from runtime.comm.transport import Sums
from runtime.contract import Mesh, Program
from runtime.executor import Executor
from runtime.native import library
from runtime.ops import OPS
from runtime.ops.cross_entropy import picked
from runtime.ops.wide import wide
from runtime.rollout.next_tokens import Next, NextTokens
from runtime.rollout.sampler import Sampler

NUMBERS = 4096  # that are summed at a time: what a slot of shared memory holds of FP64


class RolloutError(RuntimeError):
    """Completions cannot be generated here."""


@dataclass(frozen=True)
class Limits:
    """Tokens of the longest completion, and the one that ends a completion; sequences of a lane."""

    completion: int
    end: int
    slots: int


@dataclass
class Rollouts:
    """Completions of the sequences of a step, as all ranks know them. N sequences · C tokens of the longest one."""

    prompts: Sequence[npt.NDArray[np.int64]]
    tokens_NC: npt.NDArray[np.int64]  # behind the last token of a completion −1
    logp_NC: npt.NDArray[np.float64]  # log-probabilities of the tokens as the head of generation had them
    entropy_NC: npt.NDArray[np.float64]  # of what each was drawn from, in nats
    rounds: int = 0

    @property
    def lengths_N(self) -> npt.NDArray[np.int64]:
        """Tokens of each completion; the one that ends it counts."""
        return (self.tokens_NC >= 0).sum(axis=1)


@dataclass
class _Slot:
    """A sequence in a slot: its number in the step, and how many tokens the cache has of it."""

    sequence: int
    cached: int = 0


class Generator:
    """Generates on one rank. `program`: one that evaluates; `columns` share nothing but experts."""

    def __init__(
        self,
        build: Build,
        rank: int,
        executor: Executor,
        program: Program,
        sums: Sums,
        limits: Limits,
        sampler: Sampler,
    ) -> None:
        if why := library.missing():
            raise RolloutError(f"generation and training have the same bits with the ops in C++ alone, and {why}")
        self._mesh: Mesh = build.plan.mesh
        self._pp_rank, self._column = divmod(rank, self._mesh.columns)
        self._executor, self._calls, self._sums = executor, program.ranks[self._pp_rank], sums
        self._lanes, self._limits, self._sampler = program.micro_batches, limits, sampler
        self._forward = NextTokens(build, self._pp_rank, limits.slots, build.plan.train.sequence)
        self._bodies = self._forward.bodies()

    def generate(
        self, prompts: Sequence[npt.NDArray[np.int64]], numbers: Sequence[int], columns: Sequence[int]
    ) -> Rollouts:
        """Completions of prompts. `numbers`: of each sequence in the run, by which its tokens are drawn; `columns`: the
        column that computes it. All ranks call it with the same."""
        shape = len(prompts), self._limits.completion
        found = Rollouts(prompts, np.full(shape, -1, np.int64), np.zeros(shape), np.zeros(shape))
        waiting = [[i for i, of in enumerate(columns) if of == column] for column in range(self._mesh.columns)]
        slots: list[list[list[_Slot | None]]] = [
            [[None] * self._limits.slots for _ in range(self._lanes)] for _ in waiting
        ]
        message, data = self._executor.message, self._executor.data
        while True:
            for lanes, queue in zip(slots, waiting, strict=True):
                _fill(lanes, queue)
            if not any(slot for lanes in slots for lane in lanes for slot in lane):
                break
            self._round(found, slots, numbers)
            found.rounds += 1
        self._executor.message, self._executor.data, self._executor.records = message, data, {}
        self._share(found)
        return found

    def _round(self, found: Rollouts, slots: list[list[list[_Slot | None]]], numbers: Sequence[int]) -> None:
        """Run the program once, and give each sequence its next token."""
        self._run(found, slots[self._column])
        drawn = torch.zeros((len(slots), self._lanes, self._limits.slots), dtype=torch.float64)
        for lane, logits_TV in self._forward.logits.items():
            self._draw(found, lane, logits_TV, slots[self._column][lane], numbers, drawn[self._column, lane])
        all_reduce(self._sums, drawn)
        for lanes, of_column in zip(slots, drawn.long().tolist(), strict=True):
            for lane, of_lane in zip(lanes, of_column, strict=True):
                for index, (slot, token) in enumerate(zip(lane, of_lane, strict=True)):
                    if slot:
                        self._append(found, slot, token - 1)
                        lane[index] = None if self._ended(found, slot) else slot

    def _run(self, found: Rollouts, lanes: Sequence[Sequence[_Slot | None]]) -> None:
        rows = [[self._next(found, index, slot) for index, slot in enumerate(lane) if slot] for lane in lanes]
        most = max(1, *(sum(len(tokens) for _, tokens in lane) for lane in rows))
        tokens = torch.zeros((len(lanes), most), dtype=torch.int64)
        for lane, of_lane in zip(tokens, rows, strict=True):
            new = np.concatenate([np.zeros(0, np.int64), *(each for _, each in of_lane)])
            lane[: len(new)] = torch.from_numpy(new)
        self._forward.lanes = [[at for at, _ in lane] for lane in rows]
        self._forward.logits.clear()
        self._executor.data, self._executor.records = _Data(tokens.to(self._executor.device)), {}
        (_, *extents), dtype = self._executor.message
        self._executor.message = (most, *extents), dtype
        with torch.no_grad():
            self._executor.execute(self._bodies, self._calls)

    def _next(self, found: Rollouts, index: int, slot: _Slot) -> tuple[Next, npt.NDArray[np.int64]]:
        prompt = found.prompts[slot.sequence]
        if not slot.cached:
            return Next(index, 0, len(prompt)), prompt
        last = found.tokens_NC[slot.sequence, slot.cached - len(prompt)]
        return Next(index, slot.cached, 1), np.array([last])

    def _draw(
        self,
        found: Rollouts,
        lane: int,
        logits_TV: Tensor,
        slots: Sequence[_Slot | None],
        numbers: Sequence[int],
        drawn: Tensor,
    ) -> None:
        """Draw the next token of each sequence of a lane from the logits of its last row."""
        going = [(index, slot) for index, slot in enumerate(slots) if slot]
        if not going:
            return
        ends = np.cumsum([at.count for at in self._forward.lanes[lane]])
        last_NV = logits_TV[torch.from_numpy(ends - 1)]
        each_NV = last_NV.double().cpu().numpy()
        places, tokens = [], []
        for (index, slot), logits_V in zip(going, each_NV, strict=True):
            place = slot.cached and slot.cached - len(found.prompts[slot.sequence]) + 1
            token, entropy = self._sampler.draw(logits_V, numbers[slot.sequence], place)
            found.entropy_NC[slot.sequence, place] = entropy
            drawn[index] = token + 1
            places.append((slot.sequence, place))
            tokens.append(token)
        logp = log_probabilities(last_NV, torch.tensor(tokens, device=last_NV.device)).tolist()
        for (sequence, place), each in zip(places, logp, strict=True):
            found.logp_NC[sequence, place] = each

    def _append(self, found: Rollouts, slot: _Slot, token: int) -> None:
        prompt = len(found.prompts[slot.sequence])
        slot.cached = slot.cached + 1 if slot.cached else prompt
        found.tokens_NC[slot.sequence, slot.cached - prompt] = token

    def _ended(self, found: Rollouts, slot: _Slot) -> bool:
        made = slot.cached - len(found.prompts[slot.sequence])
        return made + 1 == self._limits.completion or found.tokens_NC[slot.sequence, made] == self._limits.end

    def _share(self, found: Rollouts) -> None:
        """Tell all ranks what the heads had: each number is of one rank, and zero on the others."""
        for each in (found.logp_NC, found.entropy_NC):
            all_reduce(self._sums, torch.from_numpy(each))


class _Data(Mapping[str, Tensor]):
    """What a program loads by name: the tokens of a round, and nothing of all else."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def __getitem__(self, name: str) -> Tensor:
        return self._tokens if name == "tokens" else torch.zeros_like(self._tokens)

    def __iter__(self) -> Any:
        return iter(("tokens",))

    def __len__(self) -> int:
        return 1


def log_probabilities(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """logits_TV, targets_T -> logp_T, FP32 at least: of the bits that the head of training has."""
    return picked(wide(logits_TV), targets_T) - OPS["cross_entropy"](logits_TV, targets_T)[1]


def _fill(lanes: Sequence[list[_Slot | None]], waiting: list[int]) -> None:
    """Give free slots to the sequences that wait, lane after lane, so that all lanes have as many."""
    for index in range(len(lanes[0])):
        for lane in lanes:
            if lane[index] is None and waiting:
                lane[index] = _Slot(waiting.pop(0))


def all_reduce(sums: Sums, tensor: Tensor) -> None:
    """Sum a tensor of the host over the world, in place."""
    for part in tensor.view(-1).split(NUMBERS):
        sums.all_reduce(part)
