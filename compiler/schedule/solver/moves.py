"""Small changes to a row of slots; None where one does not fit. What comes of them is checked by line.py."""

from __future__ import annotations

from collections.abc import Callable

from compiler.schedule.solver.line import FIXED
from compiler.schedule.solver.tokens import MOST_CHUNKS, NUM_TOKENS, B, I, W, pair, tokens_of

TOKENS = tuple(tokens_of(slot) if slot < FIXED else () for slot in range(2 * FIXED))
Draw = Callable[[], float]  # uniform in [0, 1)
Offered = frozenset[int]
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
        if new[to] not in offered:
            return None
        new[at : at + 1] = rest
    else:
        back = int(draw() * 2)
        new[to] = pair(token, others[1 - back])
        new[at] = pair(others[back], rest[0]) if rest else others[back]
        if new[to] not in offered or new[at] not in offered:
            return None
    return new, min(at, to), len(slots) - 1 - max(at, to)


def swap_chunks(slots: list[int], at: int, draw: Draw, offered: Offered) -> Change | None:
    """Exchange a token and the next one of the same kind and another chunk."""
    tokens = TOKENS[slots[at]]
    if not tokens:
        return None
    token = tokens[int(draw() * len(tokens))]
    kind = token // MOST_CHUNKS
    step = 1 if draw() < 0.5 else -1
    to = at + step
    while 0 <= to < len(slots) and token < W:
        other = next((each for each in TOKENS[slots[to]] if each != token and each // MOST_CHUNKS == kind), None)
        if other is not None:
            new = slots[:]
            for place, old, put in ((at, token, other), (to, other, token)):
                new[place] = _replaced(slots[place], old, put)
                if new[place] not in offered:
                    return None
            return new, min(at, to), len(slots) - 1 - max(at, to)
        to += step
    return None


def split(slots: list[int], at: int, draw: Draw) -> Change | None:
    """Turn a B into an I and a later W."""
    tokens = TOKENS[slots[at]]
    back = next((token for token in tokens if B <= token < I), None)
    if back is None:
        return None
    to = min(len(slots), at + 1 + int(draw() * draw() * len(slots)))
    if _inside(slots, to):
        return None
    new = slots[:]
    new[at] = _replaced(slots[at], back, back + MOST_CHUNKS)
    new.insert(to, W)
    return new, at, len(slots) - to


def unsplit(slots: list[int], at: int, draw: Draw) -> Change | None:
    """Turn an I into a B, without the next W."""
    tokens = TOKENS[slots[at]]
    back = next((token for token in tokens if I <= token < W), None)
    if back is None:
        return None
    to = next((to for to in range(at + 1, len(slots)) if W in TOKENS[slots[to]]), None)
    if to is None:
        return None
    new = slots[:]
    new[at] = _replaced(slots[at], back, back - MOST_CHUNKS)
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
    if slot < NUM_TOKENS:
        return new
    first, second = TOKENS[slot]
    return pair(new, second) if first == old else pair(first, new)


def _distance(draw: Draw) -> int:
    """Mostly a few slots, at most 40, either way."""
    far = 1 + int(40 * draw() ** 5)
    return far if draw() < 0.5 else -far
