"""`dualpipe` and `dualpipev` against the published table of the eight steps, transcribed here independently, as text.

P ranks, N micro-batches of both directions, n = N/2, H = P/2, h = min(r, P-1-r). DualPipeV is the same table with
H → P, h → r, n → N, and P → 2P in step 4; its last rank corresponds to the two middle ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compiler.schedule.dualpipe import dualpipe, dualpipev, eight_steps
from runtime.contract.actions import Action, Pair, Step, actions_of

TABLE = [  # step, how often, what: 0 is the near direction, 1 the far one
    (1, "2*(H-h-1)", "F0"),
    (2, "h+1", "F0 F1"),
    (3, "H-h-1", "I1 W F1"),
    (4, "n-P+h+1", "(F0|B1) (F1|B0)"),
    (5, "H-h-1", "B1 (F1|B0)"),
    (6, "h+1", "B1 B0"),
    (7, "H-h-1", "W I0"),
    (8, "h+1", "W"),
]
COUNTS = {  # the second column, as functions
    "2*(H-h-1)": lambda P, H, n, h: 2 * (H - h - 1),
    "h+1": lambda P, H, n, h: h + 1,
    "H-h-1": lambda P, H, n, h: H - h - 1,
    "n-P+h+1": lambda P, H, n, h: n - P + h + 1,
}


def tokens(P: int, H: int, n: int, h: int) -> Iterator[str]:
    """The tokens of one rank: F0, B1, I0, W, (F0|B1)."""
    for step, count, pattern in TABLE:
        for i in range(COUNTS[count](P, H, n, h)):
            text = pattern
            if step == 4 and i == 0 and h == H - 1:
                text = "F0 B1 (F1|B0)"
            if step == 6 and i > (h + 1) // 2:
                text = "I1 I0"
            if step == 6 and i == (h + 1) // 2:
                text = "I1 I0" if h % 2 else "B1 I0"
            yield from text.split()


def line(found: Iterator[str], stages: tuple[int, int], first: tuple[int, int]) -> str:
    """The tokens with stages and micro-batches, each kind and direction counted separately; W takes the oldest."""
    forwards, backwards = list(first), list(first)
    owed: list[str] = []
    written = []
    for token in found:
        parts = []
        for part in token.strip("()").split("|"):
            if part == "W":
                parts.append("W" + owed.pop(0))
                continue
            direction = int(part[1])
            counts = forwards if part[0] == "F" else backwards
            name = f"{stages[direction]}.{counts[direction]}"
            counts[direction] += 1
            owed += [name] * (part[0] == "I")
            parts.append(part[0] + name)
        written.append(f"({'|'.join(parts)})" if len(parts) == 2 else parts[0])
    assert not owed
    return " ".join(written)


@pytest.mark.parametrize("ranks", range(2, 17, 2))
@pytest.mark.parametrize("more", [0, 2, 6])
def test_dualpipe_matches_the_published_table(ranks: int, more: int) -> None:
    P, N = ranks, 2 * ranks + more
    half = N // 2
    expected = []
    for r in range(P):
        h = min(r, P - 1 - r)
        first = (0, half) if r < P // 2 else (half, 0)
        expected.append(line(tokens(P, P // 2, half, h), (h, P - 1 - h), first))
    assert dualpipe(P, N).to_text().splitlines()[1:] == expected


@pytest.mark.parametrize("ranks", range(1, 17))
@pytest.mark.parametrize("more", [0, 1, 2, 7])
def test_dualpipev_matches_the_published_table(ranks: int, more: int) -> None:
    P, N = ranks, 2 * ranks + more
    expected = [line(tokens(2 * P, P, N, r), (r, 2 * P - 1 - r), (0, 0)) for r in range(P)]
    assert dualpipev(P, N).to_text().splitlines()[1:] == expected


@pytest.mark.parametrize("ranks", range(2, 17, 2))
@pytest.mark.parametrize("more", [0, 2, 10])
def test_dualpipe_folds_onto_dualpipev(ranks: int, more: int) -> None:
    """Rank r and its mirror both run rank min(r, P-1-r) of the V, action for action."""
    P, N = ranks, 2 * ranks + more
    unfolded, folded = dualpipe(P, N), dualpipev(P // 2, N // 2)

    def turned(action: Action) -> Action:
        return Action(action.kind, action.stage, action.micro_batch % (N // 2))

    def fold(step: Step) -> Step:
        return Pair(turned(step.first), turned(step.second)) if isinstance(step, Pair) else turned(step)

    for r, steps in enumerate(unfolded.actions):
        assert tuple(map(fold, steps)) == folded.actions[min(r, P - 1 - r)]


def test_only_the_turn_is_unpaired() -> None:
    """The first F0 and B1 of the steady state are lone on the last rank of a V, where the directions meet."""
    for rank in range(4):
        lone = ("F", 0), ("B", 1)
        slots = eight_steps(4, 12, rank)
        unpaired = [slots[i] + slots[i + 1] for i in range(len(slots) - 1) if len(slots[i]) == len(slots[i + 1]) == 1]
        assert (lone in unpaired) == (rank == 3)
        pairs = [actions_of(step) for step in dualpipev(4, 12).actions[rank] if isinstance(step, Pair)]
        assert {f"{f.kind}{b.kind}" for f, b in pairs} == {"FB"}
