"""Programs of a build, the certificates of their proofs, and the manifest of files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from runtime.contract.mesh import Rank
from runtime.contract.names import ActionName, BodyName, MessageName, ProgramName
from runtime.contract.plan import RunPlan, demand
from runtime.contract.recipe import Amount, Count, Name, Placement
from runtime.system.strict_json import read, tree


class Collective(NamedTuple):
    """A collective call of all ranks of a group.

    sum: sum of a small tensor over the world, named targets, records or norm; max: maximum over the world, named
    logits; reduce: waits for the sums of the gradients of the bucket `name` over its holders; gather: all-gather of its
    weights, of which each holder has updated a shard.
    """

    kind: Literal["sum", "max", "reduce", "gather"]
    name: Name

    @property
    def label(self) -> str:
        """The action that a rank shows during the call."""
        return f"{self.kind} {self.name}"


class Reduction(NamedTuple):
    """After call number `after` a rank starts to sum the gradients of its buckets with exactly these stages, without
    waiting. The `reduce` of the program's epilogue waits for the sums."""

    after: Amount
    stages: tuple[Amount, ...]

    def __str__(self) -> str:
        return f"reduction of stage{'s' * (len(self.stages) > 1)} {', '.join(map(str, self.stages))}"


class Call(NamedTuple):
    """One invocation of a body, with receives to post before it and sends to release after it, by rank and message."""

    body: BodyName
    micro_batches: tuple[Amount, ...]
    posts: tuple[tuple[Rank, MessageName], ...]  # by pipeline rank
    releases: tuple[tuple[Rank, MessageName], ...]

    @property
    def label(self) -> str:
        """The call in schedule notation: F0_B1 on (3, 7) → (F0.3|B1.7)."""
        names = [f"{action}.{m}" for action, m in zip(self.body.actions, self.micro_batches, strict=True)]
        return f"({'|'.join(names)})" if len(names) > 1 else names[0]


@dataclass(frozen=True)
class RunProgram:
    """program/*.json: the calls of each pipeline rank for a number of micro-batches, and the collectives of all ranks.

    `prologue`: collectives before the first call; `epilogue`: after the last one; `update`: with the update of weights;
    `reductions`: sums that each pipeline rank starts between its calls, empty if a program does not train. `order`: for
    each position, the rank by cost of the micro-batch that runs there, the cheapest being 0; empty if micro-batches are
    in the order of the data.
    """

    schedule: str
    micro_batches: Count
    placement: Placement
    ranks: tuple[tuple[Call, ...], ...]
    prologue: tuple[Collective, ...]
    epilogue: tuple[Collective, ...]
    update: tuple[Collective, ...]
    reductions: tuple[tuple[Reduction, ...], ...]
    order: tuple[Amount, ...] = ()

    @staticmethod
    def from_json(text: str | bytes) -> RunProgram:
        """Parse the file. Raises FormError."""
        return read(RunProgram, text, "a program")

    def to_json(self) -> str:
        """Return the text of the file, with a line for each call and collective."""
        ranks = [
            ",\n".join(
                f'   ["{body}", {[*micro_batches]}, [{_messages(posts)}], [{_messages(releases)}]]'
                for body, micro_batches, posts, releases in calls
            )
            for calls in self.ranks
        ]
        rows = ",\n".join(f"  [\n{text}\n  ]" for text in ranks)
        head = f'"schedule": {json.dumps(self.schedule)}, "micro_batches": {self.micro_batches}'
        parts = [
            f" {head}",
            f' "placement": {json.dumps(self.placement)}',
            f' "ranks": [\n{rows}\n ]',
            *(_collectives_text(name, getattr(self, name)) for name in ("prologue", "epilogue", "update")),
            _reductions(self.reductions),
            *([f' "order": {json.dumps(self.order)}'] if self.order else []),
        ]
        return "{\n" + ",\n".join(parts) + "\n}\n"


def _collectives_text(name: str, collectives: Sequence[Collective]) -> str:
    rows = ",\n".join(f'  ["{kind}", "{target}"]' for kind, target in collectives)
    return f' "{name}": [\n{rows}\n ]' if rows else f' "{name}": []'


def _reductions(ranks: Sequence[Sequence[Reduction]]) -> str:
    rows = ",\n".join(f"  {json.dumps(row)}" for row in ranks)
    return f' "reductions": [\n{rows}\n ]' if rows else ' "reductions": []'


def _messages(ends: Sequence[tuple[int, str]]) -> str:
    """Return items of a JSON list. Message names need no JSON escapes."""
    return ", ".join([f'[{rank}, "{message}"]' for rank, message in ends]) if ends else ""


def check_programs(plan: RunPlan, programs: Mapping[ProgramName, RunProgram]) -> None:
    """Raise FormError unless the programs exist and match the plan. `programs`: by name, such as train_8."""
    sequences = plan.mesh.dp * plan.train.micro_batch
    for _, size in plan.batches:
        name = ProgramName.of("train", size // sequences)
        demand(name in programs, f"batches: there is no program of {size} sequences")
    largest = plan.batches[-1][1]
    for key, setting in {"validate": plan.train.validate, "grpo": plan.train.grpo}.items():
        has_program = ProgramName.of("evaluate", largest // sequences) in programs
        demand(setting is None or has_program, f"train.{key}: there is no program for it")
    for name, program in programs.items():
        fits = len(program.ranks) == plan.mesh.pp and name in ProgramName.all_of(program.micro_batches)
        demand(fits and program.placement == plan.placement, f"program/{name}.json: its sizes")
        ordered = plan.data.masks_documents and sorted(program.order) == [*range(program.micro_batches)]
        demand(ordered or not program.order, f"program/{name}.json: its order")


class Exchanged(NamedTuple):
    """A message in a body: `kind` is send or receive; `slot`: index of its micro-batch in the call."""

    kind: str
    peer: Rank
    producer: ActionName
    slot: Amount


@dataclass(frozen=True)
class Facts:
    """Counts and peaks of a proof; peaks are by pipeline rank."""

    num_ranks: Amount
    num_micro_batches: Amount
    num_actions: Amount
    num_instructions: Amount
    num_messages: Amount
    num_exchanges: Amount
    num_collectives: Amount
    peak_activations: tuple[Amount, ...]
    peak_fixed_bytes: tuple[Amount, ...]
    peak_bytes: tuple[Amount, ...]


Bodies = Mapping[str, tuple[Exchanged, ...]]  # of one pipeline rank, by name


@dataclass(frozen=True)
class Certificate:
    """certificate/*.json: the inputs and results of a proof.

    `schedule`: sha256 of the schedule's text. `files`: sha256 of plan, program and stage modules, by path. `bodies`:
    messages that each body sends and receives, by pipeline rank.
    """

    schedule: str
    files: Mapping[str, str]
    facts: Facts
    bodies: tuple[Bodies, ...]

    @staticmethod
    def from_json(text: str | bytes) -> Certificate:
        """Parse the file. Raises FormError."""
        return read(Certificate, text, "a certificate")

    def to_json(self) -> str:
        """Return the text of the file, with a line for each file, fact and body."""
        parts = [
            f' "schedule": {json.dumps(self.schedule)}',
            _lines("files", self.files),
            _lines("facts", tree(self.facts)),
            ' "bodies": [\n' + ",\n".join(map(_bodies, self.bodies)) + "\n ]",
        ]
        return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(name: str, values: Mapping[str, object]) -> str:
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    return f" {json.dumps(name)}: {{\n{rows}\n }}"


def _bodies(bodies: Bodies) -> str:
    rows = [f"   {json.dumps(name)}: {json.dumps(exchanged)}" for name, exchanged in bodies.items()]
    return "  {\n" + ",\n".join(rows) + "\n  }"


@dataclass(frozen=True)
class BuildManifest:
    """manifest.json: sha256 of every other file, and the versions of the packages that emitted them."""

    versions: Mapping[str, str]
    files: Mapping[str, str]

    @staticmethod
    def from_json(text: str | bytes) -> BuildManifest:
        """Parse the file. Raises FormError."""
        return read(BuildManifest, text, "a manifest")
