"""The alphabet's text form and its exact inverse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.contract.actions import KINDS, Action, Pair, actions_of, parse_step

NUMBERS = st.integers(0, 10_000)
ACTIONS = st.builds(Action, st.sampled_from(KINDS), NUMBERS, NUMBERS)
STEPS = st.one_of(ACTIONS, st.builds(Pair, ACTIONS, ACTIONS))


@given(STEPS)
def test_parse_inverts_str(step: Action | Pair) -> None:
    assert parse_step(str(step)) == step
    assert "".join(str(action) for action in actions_of(step)) == str(step).strip("()").replace("|", "")


@given(st.text("FBIW0123.|() x", max_size=14))
def test_whatever_parses_prints_back_unchanged(text: str) -> None:
    try:
        step = parse_step(text)
    except ValueError as error:
        assert "write" in str(error)
    else:
        assert str(step) == text


def test_forms() -> None:
    pair = Pair(Action("F", 3, 7), Action("B", 4, 2))
    assert (str(pair), pair.body, pair.first.body) == ("(F3.7|B4.2)", "F3_B4", "F3")


@pytest.mark.parametrize(
    "text",
    [
        *("", "F3", "F3.", "F.0", "f3.0", "G3.0", "F03.0", "F3.00", "F-1.0", " F3.0", "F3.0 ", "F3.0\n", "F٣.0"),
        *("(F3.7)", "(F3.7|B4.2", "F3.7|B4.2", "(F3.7|B4.2|W0.0)", "((F3.7|B4.2)|W0.0)", "(|)", "(", "(F3.7 | B4.2)"),
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_step(text)


@pytest.mark.parametrize(("kind", "stage", "micro_batch"), [("E", 0, 0), ("F", -1, 0), ("F", 0, -1)])
def test_no_such_action(kind: str, stage: int, micro_batch: int) -> None:
    with pytest.raises(ValueError, match=r"unknown action kind|count from 0"):
        Action(kind, stage, micro_batch)  # type: ignore[arg-type]
