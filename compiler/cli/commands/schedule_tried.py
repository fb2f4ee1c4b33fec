"""The options that restrict what `auto` tries."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule import AUTO

MAX_CHUNKS = 64


@dataclass(frozen=True)
class TriedSettings:
    """Limits of the search for `auto`.

    `chunks`: stages per rank, None for several; `copies`: maximum copies of a stage; `placement`: a single placement,
    None for all.
    """

    chunks: int | None = None
    copies: int = 2
    placement: StagePlacement | None = None

    def allows(self, placement: StagePlacement, num_ranks: int) -> bool:
        """Whether `auto` may choose a schedule with this placement."""
        is_supported = self.placement is None or self.placement.supports(placement, num_ranks)
        return is_supported and placement.copies <= self.copies


ANYTHING = TriedSettings()


def settings_of(args: argparse.Namespace, names: Sequence[str]) -> TriedSettings:
    """The settings of --chunks, --copies and --placement. Raises ValueError with what to change."""
    if args.copies is None and args.placement is None:
        return TriedSettings(args.chunks)
    if AUTO not in names:
        option = "--copies" if args.placement is None else "--placement"
        raise ValueError(f"{option} is only for {AUTO}")
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
            raise ValueError("--placement fixes the stages per rank: leave --chunks out")
    return TriedSettings(args.chunks, args.copies or 2, placement)
