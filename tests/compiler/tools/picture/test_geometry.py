"""The geometry of all pictures against the schedules it is drawn from."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest

from compiler.schedule.simulate import simulate
from compiler.tools.picture.drawing import BoxRow, DrawnAction, Panel, Picture, StepCell
from compiler.tools.picture.geometry import DIGIT, DIGIT_OF_PAIR, HATCH, MANY, MARGIN, Figure, Style, figure_of, pixels
from compiler.tools.picture.sheet import sheet_of
from runtime.contract.actions import actions_of
from tests.compiler.tools.picture.conftest import COSTS, SIZES, make_measured, make_panel, make_picture, schedule_of


def drawn(panel: Panel) -> tuple[Figure, float]:
    unit = pixels((panel,), 820, 12_000)
    return figure_of(panel, unit, Style()), unit


@pytest.mark.parametrize(("name", "P", "N"), SIZES)
def test_boxes_have_the_row_and_width_of_their_actions(name: str, P: int, N: int) -> None:
    schedule, (figure, unit) = schedule_of(name, P, N), drawn(make_panel(name, P, N))
    timeline = simulate(schedule, COSTS)
    assert figure.width == pytest.approx(float(timeline.makespan) * unit + MARGIN)
    boxes = iter(figure.boxes)
    for rank, (steps, spans) in enumerate(zip(schedule.actions, timeline.spans, strict=True)):
        line = figure.lines[rank]
        for step, (start, end) in zip(steps, spans, strict=True):
            actions = actions_of(step)
            share = line.height / len(actions)
            for i, (action, box) in enumerate(zip(actions, boxes, strict=False)):
                assert (box.x, box.width) == pytest.approx((float(start) * unit, float(end - start) * unit - 1))
                assert (box.y, box.height) == pytest.approx((line.y + i * share, share))
                assert box.title.startswith(f"{action} on rank {rank}") and box.css.startswith(f"{action.kind} d")
                digit = DIGIT if len(actions) == 1 else DIGIT_OF_PAIR
                assert box.label == str(action.micro_batch) and len(box.label) * digit <= box.width
    assert next(boxes, None) is None


@pytest.mark.parametrize(("name", "P", "N"), SIZES)
def test_boxes_bubbles_and_curves_do_not_overlap(name: str, P: int, N: int) -> None:
    figure, _ = drawn(make_panel(name, P, N))
    places = [(b.x, b.y, b.x + b.width, b.y + b.height) for b in (*figure.boxes, *figure.bubbles)]
    for a, b in itertools.combinations(places, 2):
        assert a[2] <= b[0] + 1e-6 or b[2] <= a[0] + 1e-6 or a[3] <= b[1] + 1e-6 or b[3] <= a[1] + 1e-6, (a, b)
    for line, curve, following in itertools.zip_longest(figure.lines, figure.curves, figure.lines[1:]):
        heights = [y for _, y in curve]
        assert line.y + line.height < line.lane_y < min(heights) and max(heights) == line.floor
        assert line.floor < (following.y if following else figure.axis_y)
    assert all(0 <= x1 < x2 <= figure.width and y1 <= figure.axis_y for x1, y1, x2, _ in places for x2 in [x2])


@pytest.mark.parametrize(("name", "P", "N"), SIZES)
def test_bubbles_are_all_that_is_idle(name: str, P: int, N: int) -> None:
    figure, unit = drawn(make_panel(name, P, N))
    timeline = simulate(schedule_of(name, P, N), COSTS)
    for rank, idle in enumerate(timeline.idle):
        areas = [area for area in figure.bubbles if area.title.startswith(f"rank {rank} idle")]
        assert sum(area.width + 1 for area in areas) == pytest.approx(float(idle) * unit)
    for x1, y1, x2, y2 in figure.hatch:  # strokes rise, and stay inside of a bubble
        assert x2 - x1 == pytest.approx(y1 - y2) and (x1 + y1) % HATCH == pytest.approx(0, abs=1e-6)
        assert any(
            a.x - 1e-6 <= x1 and x2 <= a.x + a.width + 1e-6 and a.y - 1e-6 <= y2 and y1 <= a.y + a.height + 1e-6
            for a in figure.bubbles
        )


@pytest.mark.parametrize(("name", "P", "N"), SIZES)
def test_curves_follow_the_activations_that_a_rank_holds(name: str, P: int, N: int) -> None:
    panel = make_panel(name, P, N)
    timeline = simulate(schedule_of(name, P, N), COSTS)
    assert tuple(row.peak for row in panel.rows) == timeline.peak_activations
    assert all(row.live[0][0] == 0 and row.live[-1][1] == 0 for row in panel.rows)
    assert all(a[0] < b[0] and a[1] != b[1] for row in panel.rows for a, b in itertools.pairwise(row.live))
    highest = max(timeline.peak_activations)
    figure, _ = drawn(panel)
    for row, line, curve in zip(panel.rows, figure.lines, figure.curves, strict=True):
        assert line.floor - min(y for _, y in curve) == pytest.approx((Style().memory - 2) * row.peak / highest)


@pytest.mark.parametrize(("name", "P", "N"), SIZES)
def test_messages_are_drawn_where_data_crosses_ranks(name: str, P: int, N: int) -> None:
    costs = replace(COSTS, latency=Fraction(1, 4))
    panel, schedule = make_panel(name, P, N, costs), schedule_of(name, P, N)
    stages = 1 + max(a.stage for rank in schedule.actions for step in rank for a in actions_of(step))
    starts = {
        d.label[1:]: (row.rank, c.start) for row in panel.rows for c in row.cells for d in c.actions if d.kind == "F"
    }
    forward = [m for m in panel.messages if m.kind == "F"]
    hops = [(s, m) for s in range(stages - 1) for m in range(N)]
    crossing = [
        h
        for h in hops
        if schedule.stage_placement.rank_of(P, N, *h) != schedule.stage_placement.rank_of(P, N, h[0] + 1, h[1])
    ]
    assert {m.label for m in forward} == {f"F{s}.{m}" for s, m in crossing} and len(panel.messages) == 2 * len(crossing)
    for message in forward:
        stage, micro_batch = message.label[1:].split(".")
        rank, start = starts[f"{int(stage) + 1}.{micro_batch}"]
        assert rank == message.target and message.arrived <= start + 1e-9
        assert message.arrived - message.sent == pytest.approx(0.25)


def test_directions_tell_where_a_micro_batch_enters() -> None:
    panel = make_panel("dualpipe", 4, 10)
    assert {(d.micro_batch, d.direction) for cell in panel.cells for d in cell.actions} == {
        (n, int(n >= 5)) for n in range(10)
    }
    assert panel.directions == ("from the first rank on", "from the last rank back")
    assert make_panel("1f1b", 2, 4).directions == ("stage",)


def test_boxes_too_narrow_for_a_number_have_it_in_the_title() -> None:
    starts = (0.0, 1.25e-3, 3.0e-3, 3.001e-3, 5.0e-3)
    cells = [
        StepCell((DrawnAction(f"F0.{n}", "F", 0, n),), a, b) for n, (a, b) in enumerate(itertools.pairwise(starts))
    ]
    figure, _ = drawn(Panel("short", (BoxRow(0, "", tuple(cells)),), ("stage",)))
    assert [box.label for box in figure.boxes] == ["0", "1", "", "3"]
    assert "0.003 to 0.003001" in figure.boxes[2].title


def test_several_panels_share_one_axis_and_one_scale_of_memory() -> None:
    picture = make_picture(("dualpipe", 4, 10), ("1f1b", 4, 10))
    (_, _, first), (_, _, second) = sheet_of(picture).figures
    assert first.width == second.width and first.ticks == second.ticks
    starts = {box.title.split(" on ")[0]: box.x for box in second.boxes}
    unit = starts["F3.0"] / 3
    assert max(box.x + box.width for box in first.boxes) == pytest.approx(29 * unit - 1)
    heights = [line.floor - min(y for _, y in curve) for line, curve in zip(second.lines, second.curves, strict=True)]
    assert heights == pytest.approx([12 * k / 5 for k in (4, 3, 2, 1)])  # the other panel's ranks hold 5


def test_tracks_of_a_rank_stand_together() -> None:
    picture = make_measured()
    figure, _ = drawn(picture.panels[0])
    gaps = [b.y - a.floor for a, b in itertools.pairwise(figure.lines)]
    assert all((gap == 1) == (i % 2 == 0) for i, gap in enumerate(gaps))
    assert [row.name for row in figure.rows[:2]] == ["0 planned", "measured"] and figure.has_errors
    errors = [area for area in figure.lanes if area.css.startswith("error")]
    assert len(errors) == sum(len(row.cells) for row in picture.panels[0].rows) // 2


def test_a_large_schedule_is_drawn_in_bulk() -> None:
    panel = make_panel("dualpipe", 16, 120)
    assert drawn(panel)[0].detailed and len(drawn(panel)[0].boxes) <= MANY
    figure, _ = drawn(make_panel("1f1b", 64, 100))
    assert not figure.detailed and not figure.hatch and len(figure.boxes) == 2 * 64 * 100
    assert {box.title for box in figure.boxes} == {""}


def test_texts_of_a_sheet_do_not_overlap() -> None:
    for picture in (
        make_picture(("dualpipe", 8, 20)),
        make_picture(("dualpipe", 4, 10), ("zbv", 4, 10)),
        make_measured(),
    ):
        sheet = sheet_of(picture)
        places = []
        for w in sheet.words:
            width = w.width
            left = w.x - width * {"start": 0, "middle": 0.5, "end": 1}[w.anchor]
            assert left >= 0 and left + width <= sheet.width and w.y < sheet.height, w
            places.append((left, w.y - w.size * 0.75, left + width, w.y, w.text))
        for a, b in itertools.combinations(places, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)


def test_the_makespan_of_a_picture_is_that_of_its_longest_panel() -> None:
    picture = Picture("two", "units", (make_panel("dualpipe", 2, 4), make_panel("1f1b", 2, 8)))
    assert picture.makespan == max(panel.makespan for panel in picture.panels)
    assert picture.num_actions == sum(len(cell.actions) for panel in picture.panels for cell in panel.cells)
