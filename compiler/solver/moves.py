"""Small changes to a row of slots; None where one does not fit. What comes of them is checked by line.py."""

from __future__ import annotations

from collections.abc import Callable

from compiler.solver.line import FIXED
from compiler.solver.tokens import B0, I0, W, pair, tokens_of

TOKENS = tuple(tokens_of(slot) if slot < FIXED else () for slot in range(2 * FIXED))
Draw = Callable[[], float]  # uniform in [0, 1)
Offered = tuple[bool, ...]
Change = tuple[list[int], int, int]  # the row's new slots, the first that differs, how many at the end do not


def change(slots: list[int], at: int, draw: Draw, offered: Offered) -> Change | None:
    """One random change at a slot: the kinds of change, and how often each."""
    kind = draw()
    if kind < 0.35:
        return shift(slots, at, draw)
    if kind < 0.8:
        return move_token(slots, at, draw, offered)
    if kind < 0.85:
        return swap_chunks(slots, at, draw, offered)
    return split(slots, at, draw) or unsplit(slots, at, draw)


def shift(slots: list[int], at: int, draw: Draw) -> Change | None:
    """Take a slot out and put it in elsewhere."""
    if slots[at] >= FIXED:
        return None
    return _put(slots, at, (), slots[at], at + _distance(draw))


def move_token(slots: list[int], at: int, draw: Draw, offered: Offered) -> Change | None:
    """Take a token out of a slot and put it in elsewhere: alone, to a lone one, or in the place of one of two."""
    tokens = TOKENS[slots[at]]
    if not tokens:
        return None
    which = int(draw() * len(tokens))
    token, rest = tokens[which], tokens[:which] + tokens[which + 1 :]
    to = at + _distance(draw)
    if draw() < 0.25:
        return _put(slots, at, rest, token, to)
    others = TOKENS[slots[to]] if 0 <= to < len(slots) and to != at else ()
    if not others:
        return None
    new = slots[:]
    if len(others) == 1:
        new[to] = pair(token, others[0])
        if not offered[new[to]]:
            return None
        new[at : at + 1] = rest
    else:
        back = int(draw() * 2)
        new[to] = pair(token, others[1 - back])
        new[at] = pair(others[back], rest[0]) if rest else others[back]
        if not offered[new[to]] or not offered[new[at]]:
            return None
    return new, min(at, to), len(slots) - 1 - max(at, to)


def swap_chunks(slots: list[int], at: int, draw: Draw, offered: Offered) -> Change | None:
    """Exchange a near and a far token of the same kind."""
    tokens = TOKENS[slots[at]]
    if not tokens:
        return None
    token = tokens[int(draw() * len(tokens))]
    step = 1 if draw() < 0.5 else -1
    to = at + step
    while 0 <= to < len(slots) and token < W:
        if token ^ 1 in TOKENS[slots[to]]:
            new = slots[:]
            for place, old, other in ((at, token, token ^ 1), (to, token ^ 1, token)):
                new[place] = _replaced(slots[place], old, other)
                if not offered[new[place]]:
                    return None
            return new, min(at, to), len(slots) - 1 - max(at, to)
        to += step
    return None


def split(slots: list[int], at: int, draw: Draw) -> Change | None:
    """Turn a B into an I and a later W."""
    tokens = TOKENS[slots[at]]
    back = next((token for token in tokens if token in (B0, B0 + 1)), None)
    if back is None:
        return None
    to = min(len(slots), at + 1 + int(draw() * draw() * len(slots)))
    if _inside(slots, to):
        return None
    new = slots[:]
    new[at] = _replaced(slots[at], back, back + 2)
    new.insert(to, W)
    return new, at, len(slots) - to


def unsplit(slots: list[int], at: int, draw: Draw) -> Change | None:
    """Turn an I into a B, without the next W."""
    tokens = TOKENS[slots[at]]
    back = next((token for token in tokens if token in (I0, I0 + 1)), None)
    if back is None:
        return None
    to = next((to for to in range(at + 1, len(slots)) if W in TOKENS[slots[to]]), None)
    if to is None:
        return None
    new = slots[:]
    new[at] = _replaced(slots[at], back, back - 2)
    rest = list(TOKENS[slots[to]])
    rest.remove(W)
    new[to : to + 1] = rest
    return new, at, len(slots) - 1 - to


def _put(slots: list[int], at: int, rest: tuple[int, ...], moved: int, gap: int) -> Change | None:
    """Leave `rest` of the slot `at` there, and put `moved` in before the slot `gap`, of the old numbers."""
    if not 0 <= gap <= len(slots) or (gap in (at, at + 1) and not rest) or _inside(slots, gap):
        return None
    new = slots[:]
    if gap > at:
        new.insert(gap, moved)
        new[at : at + 1] = rest
        return new, at, len(slots) - gap
    new[at : at + 1] = rest
    new.insert(gap, moved)
    return new, gap, len(slots) - 1 - at


def _inside(slots: list[int], gap: int) -> bool:
    return 0 < gap < len(slots) and slots[gap - 1] >= FIXED and slots[gap] >= FIXED


def _replaced(slot: int, old: int, new: int) -> int:
    """The slot with one token in place of another."""
    if slot < 8:
        return new
    first, second = TOKENS[slot]
    return pair(new, second) if first == old else pair(first, new)


def _distance(draw: Draw) -> int:
    """Mostly a few slots, at most 40, either way."""
    far = 1 + int(40 * draw() ** 5)
    return far if draw() < 0.5 else -far
