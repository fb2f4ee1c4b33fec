"""Generates completions for the prompts of a step, on the training ranks, with the evaluation program.

Each column has a number of slots, with one sequence per slot. A round runs one micro-batch of the program: a new
sequence processes its prompt, any other its last token, and each gets its next token. When a sequence ends, a waiting
one takes its slot (continuous batching). One all-reduce distributes the tokens of a round, so every rank knows the
contents of all slots. One micro-batch has all slots, because the time of a round is that of reading the weights.

A sequence is bit-identical in any column and slot: a row of any op does not depend on other rows (next_tokens.py), and
the drawn tokens depend on the number of the sequence.
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
from runtime.ops.cross_entropy import logits_at_targets
from runtime.ops.native import library
from runtime.ops.product import wide
from runtime.rl.next_tokens import Next, NextTokens, SoftmaxSampler
from runtime.step.executor import Executor, StepBatch

Ids = npt.NDArray[np.int64]

NUMBERS = 4096  # summed at a time: the FP64 numbers in a slot of shared memory


class RolloutError(RuntimeError):
    """Completions cannot be generated, or differ from training."""


@dataclass(frozen=True)
class CompletionLimits:
    """Most tokens of a completion, the token that ends a completion, and concurrent sequences of a column."""

    completion: int
    end: int
    slots: int


@dataclass
class Rollouts:
    """Completions of the sequences of a step, equal on all ranks. N sequences · C tokens of the longest one."""

    prompts: Sequence[Ids]
    tokens_NC: Ids  # −1 after the last token of a completion
    logp_NC: npt.NDArray[np.float64]  # log-probabilities of the tokens during generation
    entropy_NC: npt.NDArray[np.float64]  # entropy of the distribution of each token, in nats
    rounds: int = 0
    routes: dict[int, Tensor] = field(default_factory=dict)  # by layer, [N, S, K]: experts to replay, else −1

    @property
    def lengths_N(self) -> Ids:
        """Tokens of each completion, including the one that ends it."""
        return (self.tokens_NC >= 0).sum(axis=1)


@dataclass
class _SequenceSlot:
    """A sequence in a slot: its number in the step, its number of cached tokens, those of its prompt, and the last
    token."""

    sequence: int
    prompt: int
    cached: int = 0
    last: int = -1

    @property
    def place(self) -> int:
        """The place in the completion of the token that is drawn next."""
        return self.cached - self.prompt + 1 if self.cached else 0


Slots = list[_SequenceSlot | None]  # of a column


class Generator:
    """Generates on one rank. `program`: an evaluation program, whose first micro-batch is run."""

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
            raise RolloutError(f"generation is bit-identical to training only with the C++ ops: {why}")
        self._mesh: Mesh = build.plan.mesh
        pp_rank, self._column = self._mesh.coordinates(rank)
        self._executor, self._calls, self._sums = executor, calls_of_first_micro_batch(program.ranks[pp_rank]), sums
        self._sequence, self._replayed = build.plan.train.sequence, replayed_layers(build.plan)
        self._rows = build.plan.train.micro_batch * self._sequence
        self._limits, self._sampler = limits, sampler
        self._forward = NextTokens(build, pp_rank, limits.slots, build.plan.train.sequence)
        self._bodies = self._forward.bodies()

    def generate(self, prompts: Sequence[Ids], numbers: Sequence[int], columns: Sequence[int]) -> Rollouts:
        """Return completions of prompts. `numbers`: the number of each sequence in the run, for its random draws;
        `columns`: the column that computes it. All ranks pass the same arguments."""
        shape = len(prompts), self._limits.completion
        rollouts = Rollouts(prompts, np.full(shape, -1, np.int64), np.zeros(shape), np.zeros(shape))
        waiting, slots = self._waiting_sequences(columns), self._free_slots()
        rollouts.routes = self._forward.routes = self._no_routes(len(prompts))
        with self._caches():
            while self._fill(slots, waiting, prompts):
                drawn = self._draw_tokens(rollouts, slots, numbers)
                for of_column, tokens in zip(slots, drawn, strict=True):
                    for index, (slot, token) in enumerate(zip(of_column, tokens, strict=True)):
                        if slot and self._append(rollouts, slot, token - 1):
                            of_column[index] = None
                rollouts.rounds += 1
        for array in (rollouts.logp_NC, rollouts.entropy_NC):  # each number is set on one rank, and zero on the others
            all_reduce(self._sums, torch.from_numpy(array))
        for routes in rollouts.routes.values():
            chosen = (routes + 1).double()  # likewise
            all_reduce(self._sums, chosen)
            routes.copy_(chosen - 1)
        self._forward.routes = None
        return rollouts

    def log_probabilities(self, rollouts: Rollouts, columns: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the log-probabilities [N, C] of completions under the current weights. All ranks pass the same
        arguments."""
        logp_NC, lengths = np.zeros_like(rollouts.logp_NC), rollouts.lengths_N.tolist()
        texts = [
            np.concatenate([prompt, tokens_C[: length - 1]])
            for prompt, tokens_C, length in zip(rollouts.prompts, rollouts.tokens_NC, lengths, strict=True)
        ]
        as_prompts, waiting, slots = (
            replace(rollouts, prompts=texts),
            self._waiting_sequences(columns),
            self._free_slots(),
        )
        with self._caches():
            while self._fill(slots, waiting, texts):
                self._run(as_prompts, slots[self._column])
                if (logits_TV := self._forward.logits) is not None:
                    end = 0
                    for slot in filter(None, slots[self._column]):
                        end, length = end + len(texts[slot.sequence]), lengths[slot.sequence]
                        tokens = torch.from_numpy(rollouts.tokens_NC[slot.sequence, :length]).to(logits_TV.device)
                        logp = log_probabilities(logits_TV[end - length : end], tokens)
                        logp_NC[slot.sequence, :length] = logp.cpu()
                slots = self._free_slots()
        all_reduce(self._sums, torch.from_numpy(logp_NC))
        return logp_NC

    def _no_routes(self, num: int) -> dict[int, Tensor]:
        """Return empty choices for each layer that replays them."""
        return {layer: torch.full((num, self._sequence, top_k), -1) for layer, top_k in self._replayed.items()}

    # ---- assignment of sequences

    def _waiting_sequences(self, columns: Sequence[int]) -> list[list[int]]:
        """Return the sequences of each column."""
        return [[i for i, owner in enumerate(columns) if owner == column] for column in range(self._mesh.columns)]

    def _free_slots(self) -> list[Slots]:
        return [[None] * self._limits.slots for _ in range(self._mesh.columns)]

    def _fill(self, slots: list[Slots], waiting: list[list[int]], prompts: Sequence[Ids]) -> bool:
        """Assign waiting sequences to free slots, while a round has no more rows than a training micro-batch. Return
        whether any slot has a sequence."""
        for of_column, queue in zip(slots, waiting, strict=True):
            rows = sum(slot is not None for slot in of_column)
            for index, slot in enumerate(of_column):
                if slot is None and queue and (not rows or rows + len(prompts[queue[0]]) <= self._rows):
                    rows += len(prompts[queue[0]])
                    of_column[index] = _SequenceSlot(queue[0], len(prompts[queue.pop(0)]))
        return any(slot for of_column in slots for slot in of_column)

    @contextmanager
    def _caches(self) -> Iterator[None]:
        """Keep the key-value caches of sequences between rounds, and free them at the end."""
        try:
            yield
        finally:
            self._forward.forget()

    # ---- a round

    def _draw_tokens(self, rollouts: Rollouts, slots: list[Slots], numbers: Sequence[int]) -> list[list[int]]:
        """Run the program once. Return the next token of each slot of each column, plus 1; 0 for a free slot."""
        mine = slots[self._column]
        self._run(rollouts, mine)
        drawn = torch.zeros((len(slots), self._limits.slots), dtype=torch.float64)
        if (logits_TV := self._forward.logits) is not None:
            self._draw(rollouts, logits_TV, mine, numbers, drawn[self._column])
        all_reduce(self._sums, drawn)
        return drawn.long().tolist()

    def _run(self, rollouts: Rollouts, slots: Slots) -> None:
        spans, rows = list[Next](), list[int]()
        for index, slot in enumerate(slots):
            if slot and slot.cached:
                spans.append(Next(index, slot.cached, 1, slot.sequence))
                rows.append(slot.last)
            elif slot:
                spans.append(Next(index, 0, slot.prompt, slot.sequence))
                rows += rollouts.prompts[slot.sequence].tolist()
        tokens_T = np.array(rows or [0], np.int64)
        self._forward.next, self._forward.logits = spans, None
        tokens = torch.from_numpy(tokens_T)[None].to(self._executor.device)
        with torch.no_grad():
            batch = StepBatch(_RoundData(tokens, self._forward), rows=len(tokens_T))
            self._executor.execute(self._bodies, self._calls, batch)

    def _draw(self, rollouts: Rollouts, logits_TV: Tensor, slots: Slots, numbers: Sequence[int], drawn: Tensor) -> None:
        """Draw the next token of each sequence from its last logits."""
        going = [(index, slot) for index, slot in enumerate(slots) if slot]
        if not going:
            return
        ends = np.cumsum([span.count for span in self._forward.next])
        last_NV = logits_TV[torch.from_numpy(ends - 1)]
        sequence_N = np.array([slot.sequence for _, slot in going])
        place_N = np.array([slot.place for _, slot in going])
        number_N = np.array([numbers[sequence] for sequence in sequence_N])
        tokens_N, entropy_N = self._sampler.draw(last_NV.double().cpu().numpy(), number_N, place_N)
        tokens = torch.from_numpy(tokens_N)
        drawn[[index for index, _ in going]] = (tokens + 1).double()
        rollouts.entropy_NC[sequence_N, place_N] = entropy_N
        rollouts.logp_NC[sequence_N, place_N] = log_probabilities(last_NV, tokens.to(last_NV.device)).cpu()

    def _append(self, rollouts: Rollouts, slot: _SequenceSlot, token: int) -> bool:
        """Append a token to its sequence. Return whether the sequence has ended."""
        place = slot.place
        rollouts.tokens_NC[slot.sequence, place] = slot.last = token
        slot.cached = slot.prompt + place
        return place + 1 == self._limits.completion or token == self._limits.end


class _RoundData(Mapping[str, Tensor]):
    """The data that a program loads by name: the tokens of a round (none is padding), no choices for routers, and zeros
    for other names."""

    def __init__(self, tokens: Tensor, forward: NextTokens) -> None:
        self._tokens, self._forward = tokens, forward

    def __getitem__(self, name: str) -> Tensor:
        if router := DataName(name).router:
            return self._forward.no_choices(router, self._tokens.shape[1], self._tokens.device)
        if name == "real":
            return torch.ones_like(self._tokens, dtype=torch.int32)
        return self._tokens if name == "tokens" else torch.zeros_like(self._tokens)

    def __iter__(self) -> Iterator[str]:
        return iter(("tokens",))

    def __len__(self) -> int:
        return 1


def replayed_layers(plan: RunPlan) -> dict[int, int]:
    """Return layer → number of experts per token, for layers whose routers replay choices."""
    return {
        layer.site.layer: layer.replays for layer in plan.moe_layers if layer.replays and layer.site.layer is not None
    }


def calls_of_first_micro_batch(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Return the calls of micro-batch 0. Its posts and releases in other calls move to the next of these, or the
    last."""
    first_calls: list[Call] = []
    posts: list[tuple[int, MessageName]] = []
    releases: list[tuple[int, MessageName]] = []
    for call in calls:
        posts += [post for post in call.posts if post[1].micro_batch == 0]
        releases += [release for release in call.releases if release[1].micro_batch == 0]
        if call.micro_batches == (0,):
            first_calls.append(call._replace(posts=tuple(posts), releases=tuple(releases)))
            posts, releases = [], []
    assert not posts, "a call of its micro-batch reads each received message"
    if releases:
        first_calls[-1] = first_calls[-1]._replace(releases=(*first_calls[-1].releases, *releases))
    return tuple(first_calls)


def log_probabilities(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """logits_TV, targets_T -> logp_T, FP32 or wider: bit-identical to the head in training."""
    return logits_at_targets(wide(logits_TV), targets_T) - OPS["cross_entropy"](logits_TV, targets_T)[1]


def all_reduce(sums: Sums, tensor: Tensor) -> None:
    """Sum a host tensor over the world, in place."""
    for part in tensor.view(-1).split(NUMBERS):
        sums.all_reduce(part)
