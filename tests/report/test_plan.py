"""The page of a plan, and its part of a build's page: what is drawn is what is planned, nothing is from elsewhere."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compiler.cli import main
from compiler.decide import lower_spec
from compiler.predict.predict import Timed, memories, predicted, timed
from compiler.predict.prediction import Prediction
from compiler.report.diagrams import cluster_of, memory_curves, stage_bars, step_bars, view_of
from compiler.report.page import report_html
from compiler.report.plan_page import plan_html
from compiler.report.planned import MOST_DRAWN, Planned, planned_of
from compiler.report.sections import report_of
from compiler.topology.traffic import traffic
from dsl.load import load
from tests.picture.browser import browser
from tests.report.test_page import Structure

ROOT = Path(__file__).parents[2]
SPECS = ROOT / "specs"
FOUR_NODES = ("cluster.nodes=4", "train.batch=64")


def plan_of(name: str, *overrides: str) -> tuple[Timed, Prediction, Planned]:
    found = timed(load(SPECS / f"{name}.dsc", overrides=overrides))
    prediction = predicted(found, memories(found))
    return found, prediction, planned_of(found, prediction)


@pytest.mark.parametrize("name", ["quickstart", "llama3-8b", "moe-8gpu"])
def test_a_page_is_well_formed_self_contained_and_stable(name: str) -> None:
    found, prediction, _ = plan_of(name)
    html = plan_html(found, prediction)
    page = Structure(html)
    ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == page.tags["iframe"] == 0
    assert "://" not in html and "url(" not in html and "@import" not in html and "default-src 'none'" in html
    assert not [key for key, _ in page.attributes if key in ("src", "href") or key.startswith("on")]
    assert "prefers-color-scheme: dark" in html
    assert html == plan_html(found, prediction)
    drawn = Counter(re.findall(r'<g class="[FBIW] d[01]"><title>(\S+) on rank', html))
    assert sum(drawn.values()) == sum(len(str(step).split("|")) for row in found.schedule.actions for step in row)


@pytest.mark.parametrize(("name", "waits"), [("quickstart", False), ("llama3-8b", True)])
def test_the_bars_of_a_step_are_its_parts(name: str, waits: bool) -> None:
    """DualPipe on two ranks has no bubble, and then there is no bar of one."""
    _, prediction, planned = plan_of(name)
    bars = step_bars(planned.step.ranks)
    for at, rank in enumerate(prediction.step.ranks):
        mine = [bar for bar in bars.bars if bar.y == bars.bars[0].y + at * 19]
        assert sum(bar.width for bar in mine) == pytest.approx(bars.right - bars.left, abs=0.3)
        bubbles = [bar.width for bar in mine if "bubble" in bar.title]
        assert len(bubbles) == waits and (rank.bubble_s > 0) == waits
        assert sum(bubbles) / (bars.right - bars.left) == pytest.approx(rank.bubble_s / rank.seconds)


def test_a_stage_is_drawn_with_all_its_segments() -> None:
    found, prediction, planned = plan_of("moe-8gpu", "parallel.pipeline=2", "parallel.expert=4")
    for stage, row in zip(planned.stages, prediction.stages, strict=True):
        exchanges = sum(part.seconds for part in stage.parts if part.kind in ("dispatch", "combine"))
        whole = sum(part.seconds for part in stage.parts)
        assert exchanges == pytest.approx(row.exchange_s) and whole - exchanges == pytest.approx(row.compute_s)
        names = {part.site.partition(".")[0].partition(" ")[0] for part in stage.parts}
        assert {f"L{layer}" for layer in row.layers} <= names
    output = found.plan.stages[0].output
    assert output is not None and [stage.sends for stage in planned.stages] == [output.fixed_bytes, 0]
    assert len(stage_bars(planned.stages).rows) == 2


def test_curves_stay_under_the_capacity_line_if_and_only_if_it_fits() -> None:
    _, _, planned = plan_of("moe-8gpu", "cluster.node.device.memory=16GiB")
    curves = memory_curves(planned.ranks)
    ((chart, fits),) = curves.charts
    held, capacity = chart.curves
    points = [tuple(map(float, pair.split())) for pair in held.path[1:].split("L")]
    (line,) = {float(pair.split()[1]) for pair in capacity.path[1:].split("L")}
    assert not fits and min(y for _, y in points) < line  # y goes down
    _, _, planned = plan_of("moe-8gpu")
    ((chart, fits),) = memory_curves(planned.ranks).charts
    (line,) = {float(pair.split()[1]) for pair in chart.curves[1].path[1:].split("L")}
    assert fits and min(float(p.split()[1]) for p in chart.curves[0].path[1:].split("L")) > line


def test_the_network_has_all_that_moves() -> None:
    found, _, planned = plan_of("deepseek-v3")
    moved = traffic(found.rates[0].fabric, found.plan, found.schedule)
    assert sum(level.total for level in planned.network.levels) == sum(sum(each.values()) for each in moved.values())
    assert [level.name for level in planned.network.levels] == ["nvlink", "leaf", "spine"]
    assert planned.network.nodes == () and cluster_of(planned.network) is None  # too large to be drawn


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
    for x, y, right, bottom in boxes:
        assert sum(a <= x and b <= y and right <= c and bottom <= d for a, b, c, d in frames) == 1
        assert right <= cluster.width and bottom <= cluster.height


def test_the_page_of_a_build_has_the_plan_of_that_build() -> None:
    spec = load(SPECS / "quickstart.dsc")
    report = report_of(spec, lower_spec(spec))
    found, _, planned = plan_of("quickstart")
    assert report.planned == planned
    assert report.schedule.makespan == pytest.approx(float(found.timeline.makespan))
    page = " ".join(" ".join(Structure(report_html(report)).text).split())
    assert "Over a step, as planned" in page and "4 devices." in page and view_of(planned).step_s in page


def test_why_and_edits_are_on_the_page_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    (folder / "a.dsc").write_text(
        (SPECS / "quickstart.dsc").read_text("utf-8").replace('import "', f'import "{"../"}'), "utf-8"
    )
    for library in ("models", "clusters", "precision"):
        (tmp_path / library).symlink_to(SPECS / library)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "plan.html"
    spec = f"{folder.name}/a.dsc"
    assert main(["plan", spec, "-s", "cluster.node.device.memory=110MiB", "--format", "html", "-o", str(out)]) == 0
    page = Structure(out.read_text("utf-8"))
    text = " ".join(" ".join(page.text).split())
    assert page.tags["img"] == 0 and "<img src=x onerror=alert(1)>" in text
    assert "Why it does not fit" in text and "train.micro_batch = 1" in text and "18.2 MiB too much on rank 0" in text


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "nowhere" / "plan.html")
    assert main(["plan", str(SPECS / "quickstart.dsc"), "--format", "html", "-o", out]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """The page loads nothing, logs nothing, is no wider than the window, and its two colour schemes differ."""
    found, prediction, _ = plan_of("llama3-8b", *FOUR_NODES)
    path = tmp_path / "plan.html"
    path.write_text(plan_html(found, prediction), "utf-8")
    papers = set()
    with browser(tmp_path / "profile") as page:
        for width, dark in ((1100, False), (1100, True), (420, False)):
            page.open(path, width, 900, dark)
            assert page.errors == [] and len(page.requests) == 1
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            papers.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert page.evaluate("document.querySelectorAll('.cluster g').length") == 32 + 8
    assert len(papers) == 2
