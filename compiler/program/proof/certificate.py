"""What a proof gives: the certificate of a program that holds, or the error that names where it does not."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.stage_placement import StagePlacement


class ProofError(Exception):
    """A program that must not run. The message begins with the rank and the action, or with the bucket reduced."""


@dataclass(frozen=True)
class ProofFacts:
    """Facts proven of every interleaving of a program. Sequences are per pipeline rank; bytes are of activations and
    messages (parameters, gradients and optimizer state are not among them)."""

    program: str
    stage_placement: StagePlacement
    num_ranks: int
    num_micro_batches: int
    num_actions: int
    num_instructions: int  # expanded over micro-batches, frees included
    num_messages: int  # between pipeline ranks
    num_exchanges: int  # counts, dispatches and combines started, summed over pipeline ranks
    num_collectives: int  # sums over the world, reductions and gathers of buckets
    peak_activations: tuple[int, ...]  # +1 at the start of an F, -1 at the end of its B or W
    peak_fixed_bytes: tuple[int, ...]  # if no rank received a row from another or itself
    peak_bytes: tuple[int, ...]  # under the rows given to `prove`

    def __str__(self) -> str:
        sizes = f"ranks={self.num_ranks} micro_batches={self.num_micro_batches} placement={self.stage_placement}"
        counts = (
            f"{self.num_actions} actions, {self.num_instructions} instructions, {self.num_messages} messages, "
            f"{self.num_exchanges} exchanges, {self.num_collectives} collectives"
        )
        rows = zip(self.peak_activations, self.peak_fixed_bytes, self.peak_bytes, strict=True)
        lines = [
            f"rank {rank}: at most {activations} activations, {peak_bytes} bytes ({fixed_bytes} without received rows)"
            for rank, (activations, fixed_bytes, peak_bytes) in enumerate(rows)
        ]
        return "\n".join([f"proven: {self.program} {sizes}", counts, *lines])
