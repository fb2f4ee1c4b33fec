"""A layout decides which layers are on which stage, and the one that is printed gives the same stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.ir import Use
from compiler.plan.plan import make_plan
from dsl.load import resolve

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "specs" / "quickstart.dsc")


def layers(*overrides: str) -> list[list[int]]:
    """The layers that each stage holds."""
    plan = make_plan(resolve(QUICKSTART, overrides=overrides).spec)
    return [
        sorted({int(u.site[1 : u.site.index(".")]) for u in stage.steps if isinstance(u, Use) and u.site[0] == "L"})
        for stage in plan.stages
    ]


@pytest.mark.parametrize(
    ("layout", "schedule", "expected"),
    [
        ("Etttt|mL", "dualpipe", [[0, 1, 2, 3], []]),
        ("E|t*4 m L", "dualpipe", [[], [0, 1, 2, 3]]),
        ("E(t|)*3tmL", "zbv", [[0], [1], [2], [3]]),
        ("Et|(t|)*2,tmL", "interleaved", [[0], [1], [2], [3]]),
    ],
)
def test_stages_follow_the_layout(layout: str, schedule: str, expected: list[list[int]]) -> None:
    assert layers(f'parallel.layout="{layout}"', f"schedule.name={schedule}") == expected


@pytest.mark.parametrize("schedule", ["dualpipe", "1f1b", "zbv", "dualpipev", "interleaved"])
def test_the_printed_layout_gives_the_same_stages(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"schedule.name={schedule}"
    assert main(["schedule", QUICKSTART, "-s", name, "--format", "megatron-layout"]) == 0
    printed = capsys.readouterr().out.strip()
    assert layers(name, f'parallel.layout="{printed}"') == layers(name)


def test_a_layout_needs_a_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["schedule", "--name", "zbv", "--ranks", "2", "--micro-batches", "4", "--format", "megatron-layout"]) == 2
    )
    assert "name a SPEC" in capsys.readouterr().err
