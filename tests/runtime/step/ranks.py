"""Ranks of a differential test: `python -m tests.runtime.step.ranks FOLDER WORLD TRANSPORT` trains every build in
FOLDER/builds.

Each rank writes FOLDER/out/<build>/rank_<r>.safetensors: all logical gradients after the first backward, all logical
weights, moments and biases after the last step, and the losses and norms of all steps. For the first forward and
backward, also the bytes it sent of sharded state, of rows and of messages between stages, and the rows that it sent to
and received from experts on other ranks. Its trace is beside this file, as in a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.build import run_copy
from runtime.build.build import Build
from runtime.comm.connect import Endpoint, Transport
from runtime.comm.exchange import RankExchange, RankRoute
from runtime.comm.host import HostParts, HostSwap
from runtime.comm.memory import PipeWriter
from runtime.comm.transport import Edge, Pending
from runtime.contract.names import ExchangeName
from runtime.contract.rate import batch_at
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.state.state import FlatBucket
from runtime.step.trace import Trace
from runtime.step.trainer import Trainer
from tests.runtime.step.recorded import Recorded, nothing_else
from tests.runtime.step.samples import RandomSamples, num_held_out, table, weight


def logical(trainer: Trainer, prefix: str, flat: str) -> dict[str, Tensor]:
    return {
        f"{prefix}/{entry.name}": value.clone()
        for _, entry, value in trainer.state.logical(lambda bucket: whole(trainer, bucket, getattr(bucket, flat)))
    }


def whole(trainer: Trainer, bucket: FlatBucket, kept: Tensor) -> Tensor:
    """A whole bucket. If its holders shard it, the shards are gathered."""
    if kept.numel() == bucket.padded:
        return kept
    flat = kept.new_zeros(bucket.padded)
    if bucket.is_still:  # it has no gradients
        return flat
    flat[bucket.kept_span] = kept
    trainer.executor.sharding.parts[bucket.dividers].gather(bucket.name, flat).wait()
    return flat


@dataclass
class CountedWriter:
    """The writing end of a pipe to another holder. Counts its bytes."""

    writer: PipeWriter
    sent: int = 0

    def write(self, pieces: Sequence[Tensor], stamp: int) -> None:
        self.sent += sum(piece.nbytes for piece in pieces)
        self.writer.write(pieces, stamp)


def counted(trainer: Trainer) -> list[CountedWriter]:
    """Count the bytes of every pipe for shards of gradients or weights to other holders, or for rows to other tensor
    ranks."""
    writers: list[CountedWriter] = []
    split = trainer.executor.tensor_rows, trainer.executor.sequences, trainer.executor.choices
    for parts in (*trainer.executor.sharding.parts.values(), *(exchange.parts for exchange in split)):
        if isinstance(parts, HostParts):
            parts.writers = [CountedWriter(pipe) if pipe else None for pipe in parts.writers]  # type: ignore[misc]
            writers += [writer for writer in parts.writers if isinstance(writer, CountedWriter)]
    return writers


@dataclass
class CountedMessages:
    """The channel to a neighbouring pipeline rank. Counts the bytes of sent messages."""

    edge: Edge
    sent: int = 0

    def send(self, name: str, tensor: Tensor) -> Pending:
        self.sent += tensor.nbytes
        return self.edge.send(name, tensor)

    def post(self, name: str, buffer: Tensor) -> Pending:
        return self.edge.post(name, buffer)


def counted_messages(trainer: Trainer) -> list[CountedMessages]:
    """Count the bytes of every channel to a neighbouring pipeline rank."""
    channels = {peer: CountedMessages(edge) for peer, edge in trainer.executor.edges_out.items()}
    trainer.executor.edges_out = channels
    return list(channels.values())


@dataclass
class Routed:
    """A rank's exchange. Records the rows sent to and received from other ranks by layer, and the bytes sent."""

    exchange: RankExchange
    wait: Callable[[str], tuple[RankRoute, Tensor]]
    writers: list[CountedWriter]
    rows: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def watched(trainer: Trainer) -> Routed | None:
        """Returns None if no rows go to other ranks, or if they go through nodes."""
        exchange = trainer.executor.exchange
        if not isinstance(exchange, RankExchange) or not isinstance(exchange.rows, HostSwap):
            return None
        writers = [CountedWriter(writer) if writer else None for writer in exchange.rows.writers]
        exchange.rows.writers = writers  # type: ignore[assignment]
        routed = Routed(exchange, exchange.wait_counts, [writer for writer in writers if writer])
        exchange.wait_counts = routed.wait_counts  # type: ignore[method-assign]
        return routed

    def wait_counts(self, name: ExchangeName) -> tuple[RankRoute, Tensor]:
        route, ends = self.wait(name)
        site, own_index = name.site, self.exchange.rows.index  # type: ignore[attr-defined]
        directions = route.sent, route.received.of_members
        if name.action.kind == "F":  # a backward may count them again
            moved = torch.tensor([sum(counts) - counts[own_index] for counts in directions])
            self.rows[site] = self.rows.get(site, torch.zeros_like(moved)) + moved
        return route, ends


def owned_everywhere(trainer: Trainer) -> None:
    """Give every rank the gradient sums that other holders own."""
    recorded = trainer.links.sums
    assert isinstance(recorded, Recorded)
    for bucket in trainer.state.buckets:
        if bucket.shares and bucket.is_reduced:
            recorded.sums.gather(bucket.gradients_name, bucket.peers, bucket.gradients, bucket.shares_of_peers)


def give_weights(trainer: Trainer) -> None:
    """Give a rank the weights and biases of its reference."""
    for bucket in trainer.state.all_buckets:
        for entry in bucket.entries:
            bucket.set_weight(entry, torch.from_numpy(weight(entry.name, entry.shape)))
    for name, bias in trainer.state.biases.items():
        bias.copy_(torch.from_numpy(weight(name, tuple(bias.shape))))


def train(build: Build, rank: int, board: Board, trace: Trace, transport: Transport) -> dict[str, Tensor]:
    plan = build.plan
    samples = RandomSamples(plan.model.vocab, plan.train.sequence)
    samples.num_windows = num_held_out(plan.batches[-1][1])
    trainer = Trainer(build, rank, samples, samples, board, Endpoint(transport=transport, checked=True))
    Recorded(trainer)
    give_weights(trainer)
    for planned in plan.tables:
        if (mine := trainer.state.tables.get(planned.name)) is not None:
            mine.copy_(torch.from_numpy(table(planned.name, planned.shape, planned.below)))
    result: dict[str, Tensor] = {}
    rows, index, logits, routed = [], [], list[list[float]](), Routed.watched(trainer)
    writers, messages = counted(trainer), counted_messages(trainer)
    for step in range(plan.steps):
        batch = batch_at(plan.batches, plan.train.sequence, trainer.position.tokens)
        count = batch // (plan.mesh.dp * plan.train.micro_batch)
        with nothing_else(trainer, f"train_{count}"):
            sums = trainer.accumulate()
            trace.write(step + 1, trainer.batch.program, trainer.batch.spans)
            if step == 0:
                result["sent"] = torch.tensor([writer.sent for writer in writers], dtype=torch.int64).sum()
                result["messages"] = torch.tensor(sum(channel.sent for channel in messages))
                if routed is not None:
                    result["exchanged"] = torch.tensor(sum(writer.sent for writer in routed.writers))
                    result |= {f"routed/{site}": moved for site, moved in routed.rows.items()}
                owned_everywhere(trainer)
                result |= logical(trainer, "gradient", "gradients")
                result |= {f"load/{name}": sums[f"load {name}"].clone() for name in trainer.loads}
            row = trainer.apply(sums)
        rows.append([row.get(k, 0.0) for k in ("loss", "mtp_loss", "sequence_loss", "grad_norm")])
        index.append(row.get("index_loss", 0.0))
        logits.append([row[k] for k in ("largest_logit", "clipped_heads") if k in row])
    result["read"] = torch.tensor(sum(index < trainer.position.next for index in samples.read))
    assert plan.train.validate is not None
    with nothing_else(trainer, f"evaluate_{count}", plan.train.validate.batches):
        validation = trainer.evaluate()
    result |= logical(trainer, "weight", "parameters")
    for bucket in trainer.state.frozen:
        result |= {
            f"frozen/{e.name}": bucket.parameters[e.start : e.end].view(e.parameter.held_shape).clone()
            for e in bucket.entries
        }
    result |= {f"bias/{name}": bias.clone() for name, bias in trainer.state.biases.items()}
    result["rows"] = torch.tensor(rows, dtype=torch.float64)
    result["index"] = torch.tensor(index, dtype=torch.float64)
    if plan.clipped:
        result["logits"] = torch.tensor(logits, dtype=torch.float64)
    losses = [validation["validation_loss"], validation.get("validation_mtp_loss", 0.0)]
    result["validation"] = torch.tensor(losses, dtype=torch.float64)
    return result


def main(folder: Path, world: int, transport: Transport) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        for path in sorted((folder / "builds").iterdir()):
            results = folder / "out" / path.name
            results.mkdir(parents=True, exist_ok=True)
            build = Build.open(path)
            result = train(build, rank, board, Trace(results, rank, 0, run_copy.program_digest(build.files)), transport)
            save_file(result, results / f"rank_{rank}.safetensors")

    outcome = launch(target, world, folder=folder)
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    chosen: Transport = "gloo" if sys.argv[3] == "gloo" else "memory"
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), chosen))
