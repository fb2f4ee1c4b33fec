"""Megatron's layout strings: their meaning, and which are refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.facts.layout import LayoutError, expand_layout, layout_of, stages_of_layout


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    sizes[0] -= draw(st.integers(0, 1))  # the first and last stage may have no layers
    sizes[-1] -= draw(st.integers(0, min(1, sizes[-1])))
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return list(itertools.pairwise(ends)), draw(st.integers(0, 2))


@given(runs())
def test_a_layout_reads_back(case: tuple[list[tuple[int, int]], int]) -> None:
    stages, mtp = case
    text = layout_of(stages, mtp)
    assert stages_of_layout(text, stages[-1][1], mtp) == tuple(stages)
    assert text.count("|") <= len(stages) - 1


def test_the_published_example_has_61_layers_on_32_stages() -> None:
    """Megatron-Core's example for DeepSeek-V3, with MTP on a separate stage."""
    stages = expand_layout("Et*3|(tt|)*29,m|L").split("|")
    assert len(stages) == 32 and [len(s) for s in stages[:3]] == [4, 2, 2] and stages[-2:] == ["m", "L"]
    assert sum(s.count("t") for s in stages) == 61
    with pytest.raises(LayoutError, match="MTP reads the head"):
        stages_of_layout("Et*3|(tt|)*29,m|L", 61, 1)
    assert stages_of_layout("Et*3|(tt|)*28,tt,mL", 61, 1)[-1] == (59, 61)
    assert len(stages_of_layout("Et*3|(tt|)*29mL", 61, 1)) == 31
    assert expand_layout("Et*1*3|L") == "Ettt|L"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et|tL", "the layout has 2 layers (t), but the model has 3"),
        ("tt|tL", "must begin with E"),
        ("Et|tt", "must end with L"),
        ("Ettt|mL", "has 1 MTP blocks (m), but the model has 0"),
        ("Et||ttL", "stage 1 of 3 is empty"),
        ("E(t|*3L", "`(` at character 2 is never closed"),
        ("Et)*3|L", "`)` at character 3 closes nothing"),
        ("Et|ttL|", "must end with L, not with `|`"),
        ("Et*3|x", "`x` at character 6 is not one of"),
        ("E" + "(" * 40 + "t" + ")" * 40, "nested more than 16 deep"),
        ("E((((t*99999)*99999)*99999)*99999)L", "at most 10,000 letters"),
        ("E(t)*99999|L", "at most 10,000 letters"),
        ("", "must begin with E"),
    ],
)
def test_invalid_layouts_of_three_layers(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        stages_of_layout(text, 3, 0)
    assert message in str(error.value)
