"""Completions of the prompts of a step, on the ranks that train, by the program that evaluates.

Each column has some slots, and a slot has a sequence. A round runs one micro-batch of the program: a sequence that
begins reads its prompt, any other the token that was drawn last, and each gets its next token. When a sequence ends,
the next one that waits takes the slot (continuous batching). All ranks learn the tokens of a round by one sum, so each
of them knows what all slots have. One micro-batch has all slots, because a round takes as long as reading the weights.

Which column or slot has a sequence changes no bit of it: a row of any op has the same bits beside other rows
(next_tokens.py), and what is drawn depends on the number of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.build.build import Build
from runtime.comm.transport import Sums
from runtime.contract import Call, Mesh, RunPlan, RunProgram
from runtime.contract.names import DataName, MessageName
from runtime.ops import OPS
from runtime.ops.cross_entropy import picked
from runtime.ops.native import library
from runtime.ops.product import wide
from runtime.rl.next_tokens import Next, NextTokens, SoftmaxSampler
from runtime.step.executor import Executor, StepBatch

Ids = npt.NDArray[np.int64]

NUMBERS = 4096  # that are summed at a time: what a slot of shared memory holds of FP64


class RolloutError(RuntimeError):
    """Completions cannot be generated here."""


@dataclass(frozen=True)
class CompletionLimits:
    """Tokens of the longest completion, and the one that ends a completion; sequences of a column at a time."""

    completion: int
    end: int
    slots: int


@dataclass
class Rollouts:
    """Completions of the sequences of a step, as all ranks know them. N sequences · C tokens of the longest one."""

    prompts: Sequence[Ids]
    tokens_NC: Ids  # behind the last token of a completion −1
    logp_NC: npt.NDArray[np.float64]  # log-probabilities of the tokens as the head of generation had them
    entropy_NC: npt.NDArray[np.float64]  # of what each was drawn from, in nats
    rounds: int = 0
    routes: dict[int, Tensor] = field(default_factory=dict)  # by layer, [N, S, K]: choices that are replayed, else −1

    @property
    def lengths_N(self) -> Ids:
        """Tokens of each completion; the one that ends it counts."""
        return (self.tokens_NC >= 0).sum(axis=1)


@dataclass
class _SequenceSlot:
    """A sequence in a slot: its number in the step, and how many tokens the cache has of it."""

    sequence: int
    cached: int = 0


Slots = list[_SequenceSlot | None]  # of a column


class Generator:
    """Generates on one rank. `program`: one that evaluates, of which the first micro-batch is run."""

    def __init__(
        self,
        build: Build,
        rank: int,
        executor: Executor,
        program: RunProgram,
        sums: Sums,
        limits: CompletionLimits,
        sampler: SoftmaxSampler,
    ) -> None:
        if why := library.missing():
            raise RolloutError(f"generation and training have the same bits with the ops in C++ alone, and {why}")
        self._mesh: Mesh = build.plan.mesh
        pp_rank, self._column = self._mesh.coordinates(rank)
        self._executor, self._calls, self._sums = executor, first_alone(program.ranks[pp_rank]), sums
        self._sequence, self._replayed = build.plan.train.sequence, replayed_layers(build.plan)
        self._rows = build.plan.train.micro_batch * self._sequence
        self._limits, self._sampler = limits, sampler
        self._forward = NextTokens(build, pp_rank, limits.slots, build.plan.train.sequence)
        self._bodies = self._forward.bodies()

    def generate(self, prompts: Sequence[Ids], numbers: Sequence[int], columns: Sequence[int]) -> Rollouts:
        """Completions of prompts. `numbers`: of each sequence in the run, by which its tokens are drawn; `columns`: the
        column that computes it. All ranks call it with the same."""
        shape = len(prompts), self._limits.completion
        found = Rollouts(prompts, np.full(shape, -1, np.int64), np.zeros(shape), np.zeros(shape))
        waiting, slots = self._waiting(columns), self._free_slots()
        found.routes = self._forward.routes = self._no_routes(len(prompts))
        with self._caches():
            while self._fill(slots, waiting, prompts):
                drawn = self._drawn(found, slots, numbers)
                for of_column, tokens in zip(slots, drawn, strict=True):
                    for index, (slot, token) in enumerate(zip(of_column, tokens, strict=True)):
                        if slot:
                            self._append(found, slot, token - 1)
                            of_column[index] = None if self._ended(found, slot) else slot
                found.rounds += 1
        for each in (found.logp_NC, found.entropy_NC):  # each number is of one rank, and zero on the others
            all_reduce(self._sums, torch.from_numpy(each))
        for routes in found.routes.values():
            chosen = (routes + 1).double()  # likewise
            all_reduce(self._sums, chosen)
            routes.copy_(chosen - 1)
        self._forward.routes = None
        return found

    def log_probabilities(self, rollouts: Rollouts, columns: Sequence[int]) -> npt.NDArray[np.float64]:
        """[N, C]: those of the tokens of completions, by the weights as they are. All ranks call it with the same."""
        found_NC, lengths = np.zeros_like(rollouts.logp_NC), rollouts.lengths_N.tolist()
        texts = [
            np.concatenate([prompt, tokens_C[: length - 1]])
            for prompt, tokens_C, length in zip(rollouts.prompts, rollouts.tokens_NC, lengths, strict=True)
        ]
        whole, waiting, slots = replace(rollouts, prompts=texts), self._waiting(columns), self._free_slots()
        with self._caches():
            while self._fill(slots, waiting, texts):
                self._run(whole, slots[self._column])
                if (logits_TV := self._forward.logits) is not None:
                    end = 0
                    for each in filter(None, slots[self._column]):
                        end, length = end + len(texts[each.sequence]), lengths[each.sequence]
                        tokens = torch.from_numpy(rollouts.tokens_NC[each.sequence, :length]).to(logits_TV.device)
                        logp = log_probabilities(logits_TV[end - length : end], tokens)
                        found_NC[each.sequence, :length] = logp.cpu()
                slots = self._free_slots()
        all_reduce(self._sums, torch.from_numpy(found_NC))
        return found_NC

    def _no_routes(self, num: int) -> dict[int, Tensor]:
        """No choice of any token, by the layers that replay them."""
        return {layer: torch.full((num, self._sequence, top_k), -1) for layer, top_k in self._replayed.items()}

    # ---- who computes what

    def _waiting(self, columns: Sequence[int]) -> list[list[int]]:
        """The sequences of each column."""
        return [[i for i, of in enumerate(columns) if of == column] for column in range(self._mesh.columns)]

    def _free_slots(self) -> list[Slots]:
        return [[None] * self._limits.slots for _ in range(self._mesh.columns)]

    def _fill(self, slots: list[Slots], waiting: list[list[int]], prompts: Sequence[Ids]) -> bool:
        """Give free slots to sequences that wait, as far as a round has no more rows than a micro-batch of training.
        Whether any slot has a sequence."""
        for of_column, queue in zip(slots, waiting, strict=True):
            rows = sum(slot is not None for slot in of_column)
            for index, slot in enumerate(of_column):
                if slot is None and queue and (not rows or rows + len(prompts[queue[0]]) <= self._rows):
                    rows += len(prompts[queue[0]])
                    of_column[index] = _SequenceSlot(queue.pop(0))
        return any(slot for of_column in slots for slot in of_column)

    @contextmanager
    def _caches(self) -> Iterator[None]:
        """Keep keys and values of the sequences between rounds."""
        try:
            yield
        finally:
            self._forward.forget()

    # ---- a round

    def _drawn(self, found: Rollouts, slots: list[Slots], numbers: Sequence[int]) -> list[list[int]]:
        """Run the program once. The next token of the sequence in each slot of each column, plus 1; 0 of a free one."""
        mine = slots[self._column]
        self._run(found, mine)
        drawn = torch.zeros((len(slots), self._limits.slots), dtype=torch.float64)
        if (logits_TV := self._forward.logits) is not None:
            self._draw(found, logits_TV, mine, numbers, drawn[self._column])
        all_reduce(self._sums, drawn)
        return drawn.long().tolist()

    def _run(self, found: Rollouts, slots: Slots) -> None:
        rows = [self._next(found, index, slot) for index, slot in enumerate(slots) if slot]
        tokens_T = np.concatenate([*(tokens for _, tokens in rows), np.zeros(0 if rows else 1, np.int64)])
        self._forward.next, self._forward.logits = [at for at, _ in rows], None
        tokens = torch.from_numpy(tokens_T)[None].to(self._executor.device)
        with torch.no_grad():
            batch = StepBatch(_RoundData(tokens, self._forward), rows=len(tokens_T))
            self._executor.execute(self._bodies, self._calls, batch)

    def _next(self, found: Rollouts, index: int, slot: _SequenceSlot) -> tuple[Next, Ids]:
        prompt = found.prompts[slot.sequence]
        if not slot.cached:
            return Next(index, 0, len(prompt), slot.sequence), prompt
        last = found.tokens_NC[slot.sequence, slot.cached - len(prompt)]
        return Next(index, slot.cached, 1, slot.sequence), np.array([last])

    def _draw(self, found: Rollouts, logits_TV: Tensor, slots: Slots, numbers: Sequence[int], drawn: Tensor) -> None:
        """Draw the next token of each sequence from the logits of its last row."""
        going = [(index, slot) for index, slot in enumerate(slots) if slot]
        if not going:
            return
        ends = np.cumsum([at.count for at in self._forward.next])
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

    def _append(self, found: Rollouts, slot: _SequenceSlot, token: int) -> None:
        prompt = len(found.prompts[slot.sequence])
        slot.cached = slot.cached + 1 if slot.cached else prompt
        found.tokens_NC[slot.sequence, slot.cached - prompt] = token

    def _ended(self, found: Rollouts, slot: _SequenceSlot) -> bool:
        made = slot.cached - len(found.prompts[slot.sequence])
        return made + 1 == self._limits.completion or found.tokens_NC[slot.sequence, made] == self._limits.end


class _RoundData(Mapping[str, Tensor]):
    """What a program loads by name: the tokens of a round, none of which is padding, of routers no choices, and
    nothing of all else."""

    def __init__(self, tokens: Tensor, forward: NextTokens) -> None:
        self._tokens, self._forward = tokens, forward

    def __getitem__(self, name: str) -> Tensor:
        if router := DataName(name).router:
            return self._forward.given(router, self._tokens.shape[1], self._tokens.device)
        if name == "real":
            return torch.ones_like(self._tokens, dtype=torch.int32)
        return self._tokens if name == "tokens" else torch.zeros_like(self._tokens)

    def __iter__(self) -> Iterator[str]:
        return iter(("tokens",))

    def __len__(self) -> int:
        return 1


def replayed_layers(plan: RunPlan) -> dict[int, int]:
    """The layers whose routers replay their choices → how many of a token."""
    return {each.site.layer: each.replays for each in plan.moe_layers if each.replays and each.site.layer is not None}


def first_alone(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Calls of a rank -> those of micro-batch 0. What others post and release for it goes to the next of them, or the
    last."""
    found: list[Call] = []
    posts: list[tuple[int, MessageName]] = []
    releases: list[tuple[int, MessageName]] = []
    for call in calls:
        posts += [each for each in call.posts if each[1].micro_batch == 0]
        releases += [each for each in call.releases if each[1].micro_batch == 0]
        if call.micro_batches == (0,):
            found.append(call._replace(posts=tuple(posts), releases=tuple(releases)))
            posts, releases = [], []
    assert not posts, "what is received is read by a call of its micro-batch"
    if releases:
        found[-1] = found[-1]._replace(releases=(*found[-1].releases, *releases))
    return tuple(found)


def log_probabilities(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """logits_TV, targets_T -> logp_T, FP32 at least: of the bits that the head of training has."""
    return picked(wide(logits_TV), targets_T) - OPS["cross_entropy"](logits_TV, targets_T)[1]


def all_reduce(sums: Sums, tensor: Tensor) -> None:
    """Sum a tensor of the host over the world, in place."""
    for part in tensor.view(-1).split(NUMBERS):
        sums.all_reduce(part)
