"""What the command line lets `auto` try."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule import AUTO

MAX_CHUNKS = 64


@dataclass(frozen=True)
class TriedSettings:
    """What `auto` may try: so many stages a rank, or some numbers of them; copies of a stage; one placement, or all."""

    chunks: int | None = None
    copies: int = 2
    placement: StagePlacement | None = None

    def takes(self, placement: StagePlacement, num_ranks: int) -> bool:
        """Whether a schedule on these stages may be the answer."""
        held = self.placement is None or self.placement.supports(placement, num_ranks)
        return held and placement.copies <= self.copies


ANYTHING = TriedSettings()


def tried_of(args: argparse.Namespace, names: Sequence[str]) -> TriedSettings:
    """--copies and --placement, which go with `auto`. ValueError says what to change."""
    if args.copies is None and args.placement is None:
        return TriedSettings(args.chunks)
    if AUTO not in names:
        option = "--copies" if args.placement is None else "--placement"
        raise ValueError(f"{option} is for {AUTO}: the other schedules have theirs")
    placement = None
    if args.placement is not None:
        try:
            placement = StagePlacement.parse(args.placement)
            placement.num_stages(args.ranks)
        except ValueError as error:
            raise ValueError(f"--placement: {error}") from None
        if placement.stages_per_rank > MAX_CHUNKS:
            raise ValueError(f"--placement {placement} is out of bounds: use at most loop({MAX_CHUNKS})")
        if placement.copies > (args.copies or 2):
            raise ValueError(f"{placement} has {placement.copies} copies: leave --copies out, or use v")
        if args.chunks is not None:
            raise ValueError("--placement says how many stages a rank has: leave --chunks out")
    return TriedSettings(args.chunks, args.copies or 2, placement)
