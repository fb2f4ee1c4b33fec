"""The page as a whole: well-formed, self-contained, byte-stable, every text escaped, every action drawn once."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compiler.files.text import TextFileError, read_form
from compiler.predict.planned_step import PlannedStep
from compiler.schedule import SCHEDULES
from compiler.tools.report.page import measured_step, report_html
from compiler.tools.report.run_page import LoadForm
from compiler.tools.report.sections import ExpertRow, RankRow, Report, StageLine
from runtime.contract.actions import actions_of
from tests.compiler.tools.report.conftest import make_report, make_run

ROOT = Path(__file__).parents[4]
VOID = {"meta", "br", "hr", "img", "link", "input"}
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "{{ 7*7 }}{% raw %}",
    "</style><style>@import url(//evil)",
    "\x00\x1b[2J\u202e\ud800]]>",
)


class Structure(HTMLParser):
    """Checks nesting; collects tags, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _hostile(text: str) -> Report:
    """A report with `text` in every text field."""
    report, run = make_report("dualpipe", 2, 4), make_run(20, 5)
    return replace(
        report,
        name=text,
        subtitle=text,
        facts=((text, text),),
        schedule=replace(report.schedule, name=text, directions=(text, text)),
        time_unit=text,
        stages=(StageLine(0, (text,), (0, 1), 1), StageLine(1, (text,), (1, 0), 1)),
        ranks=(RankRow(0, (0, 1), (0, 1), 1, ((text, 5),)),),
        experts=(ExpertRow(0, 0, 7, (0,)),),
        moe_layers=(text,) * 4,
        assumptions=(text,),
        run=replace(
            run,
            data={
                **run.data,
                "source": text,
                "held_out": [text],
                "skipped": {text: 1},
                "splits": {text: run.data["splits"]["train"]},
            },
        ),
    )


@pytest.mark.parametrize("with_run", [False, True])
@pytest.mark.parametrize(("name", "P", "N"), [("dualpipe", 4, 10), ("1f1b", 1, 3)])
def test_well_formed_as_html_and_as_xml(name: str, P: int, N: int, with_run: bool) -> None:
    html = report_html(replace(make_report(name, P, N), run=make_run() if with_run else None))
    page = Structure(html)
    assert page.tags["svg"] >= (3 + 8 if with_run else 3)
    ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))
    ids = [value for attribute, value in page.attributes if attribute == "id"]
    assert len(ids) == len(set(ids))


def test_the_page_counts_filtered_documents(report_of_run: Report) -> None:
    counts = {"documents": 5000, "kept": 4000, "left_out": {"near": 1000, "shortest": 0}}
    assert report_of_run.run is not None
    for names, labels in (([""], ["filters"]), (["web", "code"], ["filters web", "filters code"])):
        data = {**report_of_run.run.data, "filters": dict.fromkeys(names, counts)}
        text = Structure(report_html(replace(report_of_run, run=replace(report_of_run.run, data=data)))).text
        sentence = "4,000 of 5,000 documents pass the filters; left out: shortest 0, near 1,000"
        assert [text[index - 1] for index, part in enumerate(text) if part == sentence] == labels
    assert "documents pass" not in report_html(report_of_run)


def test_self_contained_without_script(report_of_run: Report) -> None:
    html = report_html(report_of_run)
    page = Structure(html)
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == page.tags["iframe"] == 0
    assert "://" not in html and "url(" not in html and "@import" not in html
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html


@pytest.mark.parametrize(("name", "P", "N"), [("dualpipe", 2, 4), ("dualpipe", 6, 14), ("1f1b", 3, 7)])
def test_every_action_is_drawn_exactly_once(name: str, P: int, N: int) -> None:
    html = report_html(make_report(name, P, N))
    drawn = re.findall(r'<g class="([FBIW]) d[01]"><title>(\S+) on rank (\d+)[^<]*</title><rect [^>]*/>', html)
    schedule = SCHEDULES[name].generate(P, N)
    wanted = [
        (action.kind, str(action), str(rank))
        for rank, steps in enumerate(schedule.actions)
        for step in steps
        for action in actions_of(step)
    ]
    assert Counter(drawn) == Counter(wanted)
    assert max(Counter(wanted).values()) == 1
    assert html.count(", overlapped with ") == 2 * sum(len(actions_of(s)) == 2 for r in schedule.actions for s in r)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text: str) -> None:
    """The page has the tags and attributes it has for a harmless text, and shows the hostile one."""
    hostile, harmless = Structure(report_html(_hostile(text))), Structure(report_html(_hostile("harmless")))
    assert hostile.tags == harmless.tags
    assert [name for name, _ in hostile.attributes] == [name for name, _ in harmless.attributes]
    visible = text.translate(dict.fromkeys([0, 0x1B, 0x202E, 0xD800], "\ufffd"))
    assert sum(visible in data for data in hostile.text) == sum("harmless" in data for data in harmless.text) > 15
    html = report_html(_hostile(text))
    html.encode("utf-8")
    ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))


def test_the_page_shows_the_values_of_the_report(report_of_run: Report) -> None:
    page = " ".join(" ".join(Structure(report_html(report_of_run)).text).split())
    for words in (
        *("quickstart", "8.23M", "dualpipe, 4 ranks, 10 micro-batches", "stage 3 layer 3, mtp, head", "0–7", "8–15"),
        *(
            "unigram 6.57",
            "validation below unigram +2.0",
            "700 files, 3.37M tokens, 11.2 MiB",
            "argparse.py · json/decoder.py",
        ),
        *("L1", "mtp", "4,096 tokens", "A device has 3.73 GiB", "links take no time", "Learning rate"),
    ):
        assert words in page, words


def test_a_run_without_data_load_or_metrics(report: Report) -> None:
    run = replace(make_run(), metrics=(), data={}, load={})
    page = Structure(report_html(replace(report, run=run)))
    assert "Run" in page.text and not any("Expert load" in data or "held out" in data for data in page.text)


def _words(report: Report) -> str:
    return " ".join(" ".join(Structure(report_html(report)).text).split())


def test_the_measured_step_stands_beside_the_planned_one(report: Report, quickstart_plan: PlannedStep) -> None:
    rows = [{"step": s, "tokens_per_s": 2048 / t, "step_s": t} for s, t in ((1, 9.0), (2, 0.5), (3, 0.5), (4, 0.7))]
    short = [{"step": 5, "tokens_per_s": 1024 / 0.2, "step_s": 0.2}]  # of a smaller batch
    run = replace(make_run(), metrics=(*rows, *short))
    planned = replace(quickstart_plan, step=replace(quickstart_plan.step, seconds=0.4), calibrated=True)
    page = _words(replace(report, run=run, planned=planned))
    assert "step, measured 600 ms step, planned 400 ms" in page.replace("600.0", "600").replace("400.0", "400")
    assert "(+50%), the median of the last 4 steps of the largest batch." in page
    assert "Measured:" not in _words(replace(report, planned=planned)) and "not calibrated" not in page
    page = _words(replace(report, run=run, planned=replace(planned, calibrated=False)))
    assert "step, planned but not calibrated for this machine" in page and "dsc calibrate SPEC" in page
    assert measured_step(()) is None and measured_step(({"step": 1, "loss": 2.0},)) is None


def test_captions_mention_only_drawn_lines(report_of_run: Report, quickstart_plan: PlannedStep) -> None:
    assert report_of_run.run is not None
    loss, memory = "The dashed line is the cross-entropy", "The dashed line is the capacity"
    assert loss in _words(report_of_run)
    run = replace(report_of_run.run, data={**report_of_run.run.data, "unigram_nats": None})
    assert loss not in _words(replace(report_of_run, run=run))
    for times, drawn in ((2, True), (100, False)):
        ranks = tuple(replace(rank, capacity_bytes=rank.peak_bytes * times) for rank in quickstart_plan.ranks)
        page = _words(replace(report_of_run, planned=replace(quickstart_plan, ranks=ranks)))
        assert (memory in page) == drawn and "is not drawn" not in page
    first, *other_ranks = quickstart_plan.ranks
    ranks = (
        replace(first, capacity_bytes=first.peak_bytes * 2),
        *(replace(r, capacity_bytes=10**15) for r in other_ranks),
    )
    assert other_ranks and "is not drawn" in _words(
        replace(report_of_run, planned=replace(quickstart_plan, ranks=ranks))
    )


def test_damaged_rows_are_counted(report_of_run: Report) -> None:
    assert report_of_run.run is not None
    words = "damaged lines of metrics.jsonl, left out 3"
    assert words in _words(replace(report_of_run, run=replace(report_of_run.run, damaged_rows=3)))
    assert "damaged lines" not in _words(report_of_run)


def test_wrong_numbers_and_faults_of_devices_are_counted(report_of_run: Report) -> None:
    assert report_of_run.run is not None
    assert "device faults" not in _words(report_of_run)
    skips = [{"event": "bad_step", "action": "skip", "step": step, "reason": "the loss is nan"} for step in (3, 1200)]
    fault = {"event": "fault", "step": 7, "reason": "an ECC error"}
    slow = {"event": "straggler", "step": 9, "reason": "rank 3 on node7 computes 1.31 times as long"}
    for faults, words in (((), False), ((fault, slow), True)):
        events = (*skips, *faults, {"event": "start", "step": 8})
        page = _words(replace(report_of_run, run=replace(report_of_run.run, events=events)))
        assert "batches skipped 2, the last at step 1,200: the loss is nan" in page
        assert ("device faults 1, the last at step 7: an ECC error" in page) == words
        assert ("slow ranks 1, the last at step 9: rank 3 on node7 computes 1.31 times as long" in page) == words
        assert ("device faults" in page) == words and "rollbacks" not in page


SCRIPT = """
import hashlib, sys
from dataclasses import replace
from compiler.tools.report.page import report_html
from tests.compiler.tools.report.conftest import make_report, make_run
html = report_html(replace(make_report(), run=make_run()))
print(hashlib.sha256(html.encode()).hexdigest(), "torch" in sys.modules)
"""


def test_same_values_same_bytes_in_any_process(report_of_run: Report, tmp_path: Path) -> None:
    html = report_html(report_of_run)
    assert html == report_html(report_of_run) and html.endswith("</html>\n")
    wanted = hashlib.sha256(html.encode()).hexdigest()
    for seed in ("1", "99"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SCRIPT]
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert completed.stdout.split() == [wanted, "False"]  # the same bytes, and torch was not needed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"load": [[1, -1], ["x"]]}', "`load.0.1`: Input should be greater than or equal to 0"),
        ('{"load": 1}', "`load`: Input should be a valid list"),
        ("[]", "Input should be a valid dictionary or instance of LoadForm"),
        ('{"load": [NaN]}', "NaN is not a JSON number"),
    ],
)
def test_an_invalid_file_of_a_run_is_refused_with_the_first_wrong_place(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    file.write_text(text)
    with pytest.raises(TextFileError) as raised:
        read_form(file, 1000, LoadForm)
    assert str(raised.value).startswith(f"{file}:") and str(raised.value).endswith(said)
