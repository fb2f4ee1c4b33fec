"""The page of a plan, and its part in a build's page: it shows the plan and loads nothing."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compiler.cli.main import main
from compiler.emit.build_summary import summary
from compiler.machine.rates import shipped_table
from compiler.machine.topology.traffic import traffic
from compiler.pipeline import lower_spec
from compiler.plan.spec_files import with_rate_table
from compiler.predict.planned_step import MOST_DRAWN, Level, PlannedStep, planned_step_of
from compiler.predict.predict import memories, predict, predict_timed_plan, time_plan
from compiler.predict.prediction import Prediction, size
from compiler.predict.timed_plan import TimedPlan
from compiler.program.lower.estimate import overlaps_of, rank_times
from compiler.tools.picture.drawing import Screen
from compiler.tools.picture.geometry import Style, figure_of
from compiler.tools.report.diagrams import cluster_of, level_row, memory_curves, stage_bars, step_bars, view_of
from compiler.tools.report.page import memory_rows, report_html
from compiler.tools.report.plan_page import plan_html
from compiler.tools.report.prediction_text import NARROWEST, text
from compiler.tools.report.sections import Report, fuller_of, report_of
from compiler.tools.report.summary import PARTS
from dsl.closed_forms.memory import DeviceBytes
from dsl.load import load
from tests.compiler.tools.picture.browser import Browser, browser
from tests.compiler.tools.picture.test_palette import oklab
from tests.compiler.tools.report.test_page import Structure

ROOT = Path(__file__).parents[4]
SPECS = ROOT / "specs"
FOUR_NODES = ("cluster.nodes=4", "train.batch=64")


def plan_of(name: str, *overrides: str) -> tuple[TimedPlan, Prediction, PlannedStep]:
    timed_plan = time_plan(load(SPECS / f"{name}.dsc", overrides=overrides))
    prediction = predict_timed_plan(timed_plan, memories(timed_plan))
    return timed_plan, prediction, planned_step_of(timed_plan, prediction)


@pytest.mark.parametrize("name", ["quickstart", "llama3-8b", "moe-8gpu"])
def test_a_page_is_well_formed_self_contained_and_stable(name: str) -> None:
    timed_plan, prediction, _ = plan_of(name)
    html = plan_html(timed_plan, prediction)
    page = Structure(html)
    ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == page.tags["iframe"] == 0
    assert "://" not in html and "url(" not in html and "@import" not in html and "default-src 'none'" in html
    assert not [key for key, _ in page.attributes if key in ("src", "href") or key.startswith("on")]
    assert "prefers-color-scheme: dark" in html
    assert html == plan_html(timed_plan, prediction)
    drawn = Counter(re.findall(r'<g class="[FBIW] d[01]"><title>(\S+) on rank', html))
    assert sum(drawn.values()) == sum(len(str(step).split("|")) for row in timed_plan.schedule.actions for step in row)


@pytest.mark.parametrize(("name", "waits"), [("quickstart", False), ("llama3-8b", True)])
def test_the_bars_of_a_step_are_its_parts(name: str, waits: bool) -> None:
    """DualPipe on two ranks has no bubble, and so there is no bar for it."""
    _, prediction, planned = plan_of(name)
    bars = step_bars(planned.step.ranks)
    for index, rank in enumerate(prediction.step.ranks):
        rank_bars = [bar for bar in bars.bars if bar.y == bars.bars[0].y + index * 19]
        assert sum(bar.width for bar in rank_bars) == pytest.approx(bars.right - bars.left, abs=0.3)
        bubbles = [bar.width for bar in rank_bars if "bubble" in bar.title]
        assert len(bubbles) == waits and (rank.bubble_s > 0) == waits
        assert sum(bubbles) / (bars.right - bars.left) == pytest.approx(rank.bubble_s / rank.seconds)


def test_a_stage_is_drawn_with_all_its_segments() -> None:
    timed_plan, prediction, planned = plan_of("moe-8gpu", "parallel.pipeline=2", "parallel.expert=4")
    for stage, row in zip(planned.stages, prediction.stages, strict=True):
        exchanges = sum(part.seconds for part in stage.parts if part.kind in ("dispatch", "combine"))
        total_s = sum(part.seconds for part in stage.parts)
        assert exchanges == pytest.approx(row.exchange_s) and total_s - exchanges == pytest.approx(row.compute_s)
        names = {part.site.partition(".")[0].partition(" ")[0] for part in stage.parts}
        assert {f"L{layer}" for layer in row.layers} <= names
    output = timed_plan.plan.stages[0].output
    assert output is not None and [stage.sends for stage in planned.stages] == [output.fixed_bytes, 0]
    assert len(stage_bars(planned.stages).rows) == 2


def test_curves_stay_under_the_capacity_line_if_and_only_if_it_fits() -> None:
    _, _, planned = plan_of("moe-8gpu", "cluster.node.device.memory=16GiB")
    curves = memory_curves(planned.ranks)
    ((chart, fits),) = curves.charts
    memory, capacity = chart.curves
    points = [tuple(map(float, pair.split())) for pair in memory.path[1:].split("L")]
    (line,) = {float(pair.split()[1]) for pair in capacity.path[1:].split("L")}
    assert not fits and min(y for _, y in points) < line  # y goes down
    _, _, planned = plan_of("moe-8gpu")
    ((chart, fits),) = memory_curves(planned.ranks).charts
    (line,) = {float(pair.split()[1]) for pair in chart.curves[1].path[1:].split("L")}
    assert fits and min(float(p.split()[1]) for p in chart.curves[0].path[1:].split("L")) > line


def test_the_network_has_all_that_moves() -> None:
    timed_plan, _, planned = plan_of("deepseek-v3")
    moved = traffic(timed_plan.rates[0].fabric, timed_plan.plan, timed_plan.schedule)
    assert sum(level.total for level in planned.network.levels) == sum(
        sum(volumes.values()) for volumes in moved.values()
    )
    assert [level.name for level in planned.network.levels] == ["nvlink", "leaf", "spine"]
    assert planned.network.nodes == () and cluster_of(planned.network) is None  # too large to be drawn


def test_links_show_the_bytes_for_each_purpose() -> None:
    row = level_row(Level("leaf", 4, 1e9, 1e-6, (3 << 20, 0, 1 << 20)), 8 << 20)
    assert row.moved == ("3.00 MiB", "", "1.00 MiB") and (row.total, row.of_device) == ("4.00 MiB", "1.00 MiB")
    assert [part[1:] for part in row.parts] == [("0.00", "37.50"), ("37.50", "0.00"), ("37.50", "12.50")]


def test_a_small_cluster_is_drawn_with_its_rails() -> None:
    _, _, planned = plan_of("llama3-8b", *FOUR_NODES)
    cluster = cluster_of(planned.network)
    assert cluster is not None and planned.network.num_devices == 32 <= MOST_DRAWN
    assert [chip.label for chip in cluster.chips] == [str(device) for device in range(32)]
    assert len(cluster.frames) == 4 and len(cluster.switches) == 8  # one leaf switch a rail
    assert len(cluster.lines) == 32, "a NIC each"
    rails = Counter(switch for _, switch in planned.network.joints)
    assert set(rails.values()) == {4}
    boxes = [(chip.x, chip.y, chip.x + chip.width, chip.y + chip.height) for chip in cluster.chips]
    frames = [(f.x, f.y, f.x + f.width, f.y + f.height) for f in cluster.frames]
    for number, (left, top, right, bottom) in enumerate(frames):
        (first, y, *_), *_, (*_, last, end) = boxes[8 * number : 8 * number + 8]
        assert first - left == right - last == y - top == bottom - end > 0, "as far from each side"
        assert all(right < a or c < left or bottom < b or d < top for a, b, c, d in frames[:number]), (
            "no frame is on another"
        )
    for x, y, right, bottom in boxes:
        assert sum(a <= x and b <= y and right <= c and bottom <= d for a, b, c, d in frames) == 1
        assert right <= cluster.width and bottom <= cluster.height
    for a, b, c, d in frames:
        inside = [box for box in boxes if a <= box[0] < c and b <= box[1] < d]
        left, right = min(box[0] for box in inside) - a, c - max(box[2] for box in inside)
        assert left == right == inside[0][1] - b == d - inside[0][3], "as much space on each side"


def test_the_page_of_a_build_has_the_plan_of_that_build() -> None:
    spec = load(SPECS / "quickstart.dsc")
    report = report_of(spec, lower_spec(spec))
    timed_plan, _, planned = plan_of("quickstart")
    assert report.planned == planned
    assert report.schedule.makespan == pytest.approx(float(timed_plan.timeline.makespan))
    page = " ".join(" ".join(Structure(report_html(report)).text).split())
    assert "Over a step, as planned" in page and "4 devices." in page and view_of(planned).step_s in page


def test_page_and_commands_show_the_same_figures() -> None:
    """Memory equals `dsc plan`, including temporaries of segments; idle time is the mean over ranks."""
    spec = load(SPECS / "laptop-v32.dsc")
    lowered = lower_spec(spec)
    report = report_of(spec, lowered)
    assert report.planned is not None
    peaks = [rank.peak_bytes for rank in report.planned.ranks]
    assert [row.total for row in memory_rows(report).rows] == peaks
    assert max(peaks) > max(memory.total for memory in lowered.memories), "the proof is of what is between segments"
    idle = figure_of(report.schedule, 1.0, Style()).idle
    assert dict(report.facts)["idle in the schedule, predicted"] == idle != "0.0%"
    fullest = max(report.planned.ranks, key=lambda rank: rank.peak_bytes)
    overlaps = overlaps_of(lowered.programs, rank_times(lowered.lowering))
    last = summary(spec, lowered, overlaps, report.planned.ranks, graphs=None)
    assert last.splitlines()[-1].startswith(f"memory, planned: {size(fullest.peak_bytes)} on rank {fullest.pp_rank}, ")


def test_a_smaller_batch_that_holds_more_is_reported(quickstart_plan: PlannedStep, report: Report) -> None:
    ranks = quickstart_plan.ranks
    proven = [DeviceBytes(0, 0, 0, rank.peak_bytes + extra) for rank, extra in zip(ranks, (0, 2**20), strict=True)]
    assert fuller_of(ranks, proven[:1] * 2) is None
    assert fuller_of(ranks, proven) == (1, ranks[1].peak_bytes + 2**20)
    page = " ".join(Structure(report_html(replace(report, fuller=(1, 2**30)))).text)
    assert "Steps of a smaller batch hold more: up to 1.00 GiB on rank 1." in page


def test_a_plan_with_rates_of_another_cpu_recommends_calibration() -> None:
    """It also gives no interval; with its own table it does."""
    timed_plan, prediction, planned = plan_of("quickstart")
    table = shipped_table("cpu").model_copy(update={"name": "measured"})
    calibrated = predict(with_rate_table(timed_plan.spec, table))
    command = "dsc calibrate SPEC -o rates.json"
    printed = text(prediction, Screen(width=NARROWEST))
    for rendering in (printed, plan_html(timed_plan, prediction), " ".join(prediction.assumptions)):
        assert command in rendering
    assert command not in text(calibrated) and calibrated.calibrated and calibrated.step.interval is not None
    assert prediction.step.interval is None and not prediction.calibrated and not planned.calibrated
    assert plan_of("moe-8gpu")[1].calibrated


def test_why_and_edits_are_on_the_page_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    (folder / "a.dsc").write_text(
        (SPECS / "quickstart.dsc").read_text("utf-8").replace('import "', f'import "{"../"}'), "utf-8"
    )
    for library in ("models", "clusters", "precision"):
        (tmp_path / library).symlink_to(SPECS / library)
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "plan.html"
    spec = f"{folder.name}/a.dsc"
    assert main(["plan", spec, "-s", "cluster.node.device.memory=110MiB", "--format", "html", "-o", str(output)]) == 0
    page = Structure(output.read_text("utf-8"))
    text = " ".join(" ".join(page.text).split())
    assert page.tags["img"] == 0 and "<img src=x onerror=alert(1)>" in text
    assert "Why it does not fit" in text and "train.micro_batch = 1" in text and "18.2 MiB too much on rank 0" in text


def test_an_unwritable_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "nowhere" / "plan.html")
    assert main(["plan", str(SPECS / "quickstart.dsc"), "--format", "html", "-o", output]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """The page loads nothing, logs nothing, fits the width of the window, and has two different colour schemes."""
    timed_plan, prediction, _ = plan_of("llama3-8b", *FOUR_NODES)
    path = tmp_path / "plan.html"
    path.write_text(plan_html(timed_plan, prediction), "utf-8")
    papers = set()
    with browser(tmp_path / "profile") as page:
        for width, dark in ((1100, False), (1100, True), (420, False)):
            page.open(path, width, 900, dark)
            assert page.errors == [] and len(page.requests) == 1
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            papers.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert page.evaluate("document.querySelectorAll('.cluster g').length") == 32 + 8
    assert len(papers) == 2


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


SMALLEST, LEAST = 9.0, 0.06  # pixels of a letter; distance of two colours in OKLab
OF_TEXTS = """[...document.querySelectorAll('svg text')].map(text => {
  const svg = text.ownerSVGElement, box = svg.viewBox.baseVal;
  const scale = box && box.width ? svg.getBoundingClientRect().width / box.width : 1;
  return [text.textContent, scale * parseFloat(getComputedStyle(text).fontSize)];
})"""
OF_LEGENDS = """[...document.querySelectorAll('.legend .entry')].map(entry => {
  const [first, last] = [entry.firstElementChild, entry.lastElementChild].map(each => each.getBoundingClientRect());
  return [entry.textContent, first.right <= last.left && first.top < last.bottom && last.top < first.bottom];
})"""
OF_TABLES = """[...document.querySelectorAll('table')].map(table => {
  const around = table.parentElement.getBoundingClientRect();
  return [getComputedStyle(table.parentElement).overflowX, around.right];
})"""


def test_on_a_narrow_screen_only_tables_and_charts_scroll(
    chromium: Browser, report_of_run: Report, quickstart_plan: PlannedStep, tmp_path: Path
) -> None:
    """Letters stay readable, a legend breaks between its entries, and the page is as wide as the screen."""
    spent = {"compute": 0.5, "message": 0.1, "exchange": 0.1, "sum": 0.1, "data": 0.1, "other": 0.1}
    run = report_of_run.run
    assert run is not None
    rows = tuple({**row, "spent_s": spent} for row in run.metrics)
    report = replace(report_of_run, run=replace(run, metrics=rows), planned=quickstart_plan)
    (path := tmp_path / "report.html").write_text(report_html(report), "utf-8")
    chromium.open(path, 390, 900)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= 390
    assert [row for row in chromium.evaluate(OF_TEXTS) if row[1] < SMALLEST - 0.1] == []
    assert [entry for entry, is_whole in chromium.evaluate(OF_LEGENDS) if not is_whole] == []
    assert {(overflow, right <= 390) for overflow, right in chromium.evaluate(OF_TABLES)} == {("auto", True)}


OF_COLOUR = """(css => {
  const mark = document.createElement('i'), canvas = new OffscreenCanvas(1, 1).getContext('2d');
  mark.className = css; mark.style.background = css ? 'var(--c)' : 'var(--paper)'; document.body.append(mark);
  canvas.fillStyle = getComputedStyle(mark).backgroundColor; canvas.fillRect(0, 0, 1, 1);
  return '#' + [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)].map(c => c.toString(16).padStart(2, '0')).join('');
})"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("classes", [[css for _, css, _ in PARTS], [f"m{index}" for index in range(8)]])
def test_parts_of_a_bar_are_distinguishable(
    chromium: Browser, report: Report, tmp_path: Path, dark: bool, classes: list[str]
) -> None:
    (path := tmp_path / "report.html").write_text(report_html(report), "utf-8")
    chromium.open(path, dark=dark)
    colours = {css: oklab(chromium.evaluate(f"{OF_COLOUR}('{css}')"), "full") for css in ["", *classes]}
    assert [pair for pair in combinations(colours, 2) if math.dist(colours[pair[0]], colours[pair[1]]) < LEAST] == []
