"""A layer that tensor ranks split: its parts, and the rows that are put together in front of them and summed behind.

enter | gather | attention | scatter | between | gather | dense | scatter | leave
"""

from __future__ import annotations

from typing import Literal

from compiler.ir import Buffer, Communication
from compiler.layers import Place


def gather(place: Place, site: str, x: str, out: str) -> Communication:
    """The rows `x` of every tensor rank, put together as `out`."""
    return _communication(place, "gather", site, (x, out))


def scatter(place: Place, site: str, y: str, out: str) -> Communication:
    """The sum of what every tensor rank has as `y`; each gets its rows, as `out`."""
    return _communication(place, "scatter", site, (y, out))


def _communication(
    place: Place, kind: Literal["gather", "scatter"], site: str, names: tuple[str, str]
) -> Communication:
    all_rows = place.spec.train.micro_batch * place.spec.train.sequence
    counts = (place.T, all_rows) if kind == "gather" else (all_rows, place.T)
    given, taken = (Buffer(name, (count, place.D), place.dtype) for name, count in zip(names, counts, strict=True))
    return Communication(
        kind=kind,
        site=site,
        axis="tp",
        inputs=(given.name,),
        outputs=(taken,),
        sizes=(given,),
        arriving=(taken.named(f"d_{taken.name}"),),
        returned=(given.named(f"d_{given.name}"),),
    )
