"""The least value of a small linear program, in exact rationals (the dual simplex method, Lemke 1954)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

Row = tuple[dict[int, Fraction], Fraction]  # coefficients by variable, and what their sum is at least

MOST_PIVOTS = 2000


def least(costs: Sequence[Fraction], rows: Sequence[Row]) -> Fraction | None:
    """min costs·x over x ≥ 0 with every row's sum at least its bound; None where there is no such x.

    The costs must not be negative. Each pivot's value is a lower bound already, so that stopping early, at
    MOST_PIVOTS, still gives one.
    """
    assert all(cost >= 0 for cost in costs)
    num = len(costs)
    price = {j: cost for j, cost in enumerate(costs) if cost}  # the objective in the non-basic variables
    value = Fraction(0)
    names = [num + i for i in range(len(rows))]  # basic variable of each row: at first its slack
    table = [({j: c for j, c in row.items() if c}, -bound) for row, bound in rows]
    for pivot in range(MOST_PIVOTS):
        short = [i for i, (_, constant) in enumerate(table) if constant < 0]
        if not short:
            break
        # the shortest row goes fastest; the lowest name, taken later, cannot circle (Bland)
        i = min(short, key=lambda i: (table[i][1] if pivot < MOST_PIVOTS // 2 else 0, names[i]))
        row, constant = table[i]
        ratios = [(price.get(j, Fraction(0)) / c, j) for j, c in row.items() if c > 0]
        if not ratios:
            return None
        _, entering = min(ratios)
        # row: leaving = constant + Σ row·x, solved for the entering variable
        c = row.pop(entering)
        solved = {j: -a / c for j, a in row.items()} | {names[i]: 1 / c}
        at = -constant / c
        names[i] = entering
        table[i] = (solved, at)
        for k, (other, rest) in enumerate(table):
            if k != i and (factor := other.pop(entering, None)):
                table[k] = (_added(other, factor, solved), rest + factor * at)
        if factor := price.pop(entering, None):
            price = _added(price, factor, solved)
            value += factor * at
    return value


def _added(row: dict[int, Fraction], factor: Fraction, other: dict[int, Fraction]) -> dict[int, Fraction]:
    for j, a in other.items():
        total = row.get(j, 0) + factor * a
        if total:
            row[j] = total
        else:
            row.pop(j, None)
    return row
