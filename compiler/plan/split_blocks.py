"""What tensor ranks split: its parts, and the rows that are put together in front of them and summed behind.

Of a layer: enter | gather | attention | scatter | between | gather | dense | scatter | leave. Of the ends:
embed | scatter, and final_norm | gather | head | scatter | loss.
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


def scatter_parts(place: Place, site: str, y: str, out: str) -> Communication:
    """The parts of the cross entropy that every tensor rank has as `y`, side by side; each gets its rows, as `out`."""
    return _communication(place, "scatter", site, (y, out), place.spec.parallel.tensor + 1, place.wide_dtype)


def _communication(
    place: Place,
    kind: Literal["gather", "scatter"],
    site: str,
    names: tuple[str, str],
    columns: int = 0,
    dtype: str = "",
) -> Communication:
    """An exchange of rows, of `columns` numbers of a dtype; if none are said, rows of the residual stream."""
    width, each = columns or place.D, dtype or place.dtype
    all_rows = place.spec.train.micro_batch * place.spec.train.sequence
    counts = (place.T, all_rows) if kind == "gather" else (all_rows, place.T)
    given, taken = (Buffer(name, (count, width), each) for name, count in zip(names, counts, strict=True))
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
