"""The result of a proof: the certificate of a program, or an error that names the place of the fault."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.stage_placement import StagePlacement


class ProofError(Exception):
    """A program that must not run. The message begins with the rank and the action, or with the collective."""


@dataclass(frozen=True)
class ProofFacts:
    """Facts that are proven for every interleaving of a program.

    Sequences have one entry per pipeline rank. Bytes count activations and messages, but not parameters, gradients or
    optimizer state.
    """

    program: str
    stage_placement: StagePlacement
    num_ranks: int
    num_micro_batches: int
    num_actions: int
    num_instructions: int  # over all micro-batches, with frees
    num_messages: int  # between pipeline ranks
    num_exchanges: int  # counts, dispatches and combines started, summed over pipeline ranks
    num_collectives: int  # sums over the world, and reductions and gathers of buckets
    peak_activations: tuple[int, ...]  # +1 at the start of an F, -1 at the end of its B or W
    peak_fixed_bytes: tuple[int, ...]  # if no rank receives a row, not even from itself
    peak_bytes: tuple[int, ...]  # with the rows that `prove` was called with

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
