"""`auto` chooses the best plan, which is checked by trying every plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.ir.stage_placement import ONE_STAGE, StagePlacement, V
from compiler.plan.blocks import cut_model
from compiler.plan.layer_runs import Holding, stage_placement_of_spec
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates
from compiler.plan.split_blocks import balanced_rows
from compiler.plan.splitting import Splitting
from compiler.predict.floor import least_step_s
from compiler.predict.memory_state import _CellBytes, _fullest, missing_anywhere
from compiler.predict.predict import memories, predict, time_plan, time_schedule
from compiler.predict.search import Candidate, Outline, Ranking, SharedParts, cut_of, document, search, table
from compiler.program.lower import Lowering
from compiler.program.lower.scheduler import QUICK_EFFORT, Scheduler
from compiler.schedule.schedule import Schedule
from dsl.closed_forms.stragglers import slowest_factor
from dsl.load import alternatives, check, load, resolve
from dsl.schema import choices
from dsl.schema.choices import Choice
from tests.compiler.cli.forms import parsed

SPECS = Path(__file__).resolve().parents[3] / "specs"
SMALL = ("parallel.pipeline", "parallel.expert", "train.micro_batch", "recompute")


def searched(file: str, opened: tuple[str, ...], *overrides: str) -> Ranking:
    overrides = (*(f"{path}=auto" for path in opened), *overrides)
    resolved = resolve(SPECS / file, overrides=overrides)
    return search(resolved.spec, resolved.opened, alternatives(SPECS / file, overrides=overrides))


def written(path: str, value: object) -> str:
    return f"{path}=[{', '.join(value)}]" if isinstance(value, tuple) else f"{path}={value}"


@pytest.mark.parametrize(
    ("file", "opened", "given"),
    [
        ("quickstart.dsc", SMALL[:3], ("cluster.node.device.memory=0.09GB", "schedule.name=1f1b")),
        ("quickstart.dsc", SMALL, ()),
        ("moe-8gpu.dsc", ("parallel.expert", "recompute"), ("train.batch=64", "cluster.node.device.memory=70GiB")),
        ("moe-8gpu.dsc", ("parallel.tensor", "parallel.context"), ("train.batch=16", "train.sequence=8192")),
    ],
)
def test_the_choice_equals_the_best_of_all_plans(file: str, opened: tuple[str, ...], given: tuple[str, ...]) -> None:
    spec = load(SPECS / file, overrides=given)
    fitting = {}
    for values in product(*(choices.values(spec, path) for path in opened)):
        overrides = (*(written(*setting) for setting in zip(opened, values, strict=True)), *given)
        if not check(SPECS / file, overrides=overrides):
            prediction = predict(load(SPECS / file, overrides=overrides))
            if prediction.fits:
                fitting[values] = prediction.step.seconds
    assert fitting, "the case has something to choose"
    ranking = searched(file, opened, *given)
    best = ranking.best
    assert best.fits and best.seconds == min(fitting.values())
    assert fitting[tuple(best.choice[path] for path in opened)] == best.seconds
    for candidate in ranking.candidates:  # and what is reported about the others is correct
        seconds = fitting.get(tuple(candidate.choice[path] for path in opened))
        assert candidate.seconds is None or seconds in (None, candidate.seconds)
        assert not candidate.fits or seconds is not None
        assert seconds is None or not candidate.missing_bytes
        assert seconds is None or candidate.bound_s <= seconds


def test_a_search_that_is_over_has_the_first_plan_that_fits() -> None:
    opened, best = SMALL[:3], list[Candidate]()
    overrides = [f"{path}=auto" for path in opened]
    whole = searched("quickstart.dsc", opened)
    resolved = resolve(SPECS / "quickstart.dsc", overrides=overrides)
    ranking = search(
        resolved.spec,
        resolved.opened,
        alternatives(SPECS / "quickstart.dsc", overrides=overrides),
        report=lambda share, candidate: best.append(candidate) if candidate else None,
        is_over=lambda: True,
    )
    assert best == [ranking.best] and ranking.best.fits
    assert ranking.is_cut and not ranking.is_interrupted and ranking.unexamined
    assert len(ranking.candidates) < len(whole.candidates)
    assert not whole.is_cut and not whole.unexamined and cut_of(whole) == ""
    assert cut_of(ranking) == f"the search was cut: {ranking.unexamined} plans not examined"


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("fits", [True, False])
def test_an_interrupted_search_keeps_a_plan_that_fits(keeps: bool, fits: bool) -> None:
    overrides = [f"{path}=auto" for path in SMALL[:3]]
    resolved = resolve(SPECS / "quickstart.dsc", overrides=overrides)

    def interrupt(share: float, best: Candidate | None) -> None:
        if fits == (best is not None):
            raise KeyboardInterrupt

    def interrupted() -> Ranking:
        plans = alternatives(SPECS / "quickstart.dsc", overrides=overrides)
        return search(resolved.spec, resolved.opened, plans, interrupt, keeps_on_interrupt=keeps)

    if keeps and fits:
        ranking = interrupted()
        assert ranking.is_interrupted and ranking.is_cut and ranking.best.fits
    else:
        with pytest.raises(KeyboardInterrupt):
            interrupted()


def test_a_budget_and_ctrl_c_end_the_search_of_a_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", str(SPECS / "quickstart.dsc"), *(f"-s{path}=auto" for path in SMALL[:2])]
    assert main([*command, "--budget", "0s"]) == 0
    out, err = capsys.readouterr()
    assert "the search was cut: " in out and "the search was cut: " in err
    lines = []

    def progress(command: str) -> Callable[[str], None]:
        def tell(text: str) -> None:
            lines.append(text)
            if "so far" in text:
                raise KeyboardInterrupt

        return tell

    monkeypatch.setattr("compiler.cli.commands.common.progress", progress)
    assert main([*command, "--format", "json"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["unexamined"] and "the search was interrupted: " in err
    assert any(" s with pipeline " in line for line in lines)
    assert (
        main(["compile", *command[1:], "-o", "unused"]) == 130
    )  # a build of the best so far is not what was asked for
    assert not Path("unused").exists()


@pytest.mark.parametrize("text", ["60", "-1s", "1parsec", "s", "1e400s"])
def test_a_budget_is_a_time(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", str(SPECS / "quickstart.dsc"), f"--budget={text}"])
    assert "is not a time, as in `60s` or `5min`" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["deepseek-v3.dsc", "moe-8gpu.dsc", "qwen3-30b-a3b.dsc", "llama3-8b.dsc"])
@pytest.mark.parametrize("recompute", ["[]", "[rmsnorm, swiglu]"])
def test_lacking_memory_is_bounded_from_below(file: str, recompute: str) -> None:
    spec = load(SPECS / file, overrides=(f"recompute={recompute}",))
    outline = Outline(spec, SharedParts())
    missing, rank = outline.missing_as_split
    placement = stage_placement_of_spec(spec)
    splitting = Splitting(outline.model, placement.num_stages(spec.parallel.pipeline), placement)
    ranks = memories(time_plan(spec))
    assert missing_anywhere(splitting.least_holding, splitting.placement) <= missing
    assert missing <= max(memory.peak_bytes - memory.capacity_bytes for memory in ranks)
    assert missing <= ranks[rank].peak_bytes - ranks[rank].capacity_bytes
    assert missing > max(
        memory.weights + memory.gradients + memory.optimizer - memory.capacity_bytes for memory in ranks
    )
    assert balanced_rows(spec) >= 0


@pytest.mark.parametrize(
    ("file", "schedule", "near"),
    [
        ("deepseek-v3.dsc", "dualpipe", 0.75),
        ("deepseek-v3.dsc", "interleaved", 0.75),
        ("qwen3-30b-a3b.dsc", "interleaved", 0.8),
        ("llama3-8b.dsc", "1f1b", 0.6),  # eight micro-batches on four ranks: a third of the step is the bubble
        ("quickstart.dsc", "zb1p", 0.6),
        ("moe-8gpu.dsc", "1f1b", 0.9),  # one rank: nothing is missing but the update
    ],
)
def test_no_split_is_faster_than_the_floor(file: str, schedule: str, near: float) -> None:
    """The lower bound of a step over all splits is at most the planned step, and close to it."""
    spec = load(SPECS / file, overrides=(f"schedule.name={schedule}",))
    lowering = Lowering(make_plan(spec), rank_rates(spec))
    least = time_schedule(spec, lowering, Scheduler(spec, lowering).largest(), least=True).step.seconds
    assert near * least <= least_step_s(cut_model(spec)) <= least


def test_the_degrees_that_deepseek_v3_was_trained_with() -> None:
    """The search over all pipeline and expert degrees on 2,048 devices finds those of arXiv 2412.19437, §3.1."""
    best = searched("deepseek-v3.dsc", ("parallel.pipeline", "parallel.expert")).best
    assert best.fits and best.choice == {"parallel.pipeline": 16, "parallel.expert": 64}


def test_if_nothing_fits_the_plan_that_lacks_least_is_chosen() -> None:
    ranking = searched("deepseek-v3.dsc", ("train.micro_batch",), "cluster.node.device.memory=40GiB", "recompute=[]")
    assert not ranking.best.fits and ranking.why(ranking.best) == "lacks the least memory"
    lacks = {}
    for candidate in ranking.candidates:
        ranks = predict(candidate.spec).ranks
        lacks[candidate.choice["train.micro_batch"]] = max(
            memory.peak_bytes - memory.capacity_bytes for memory in ranks
        )
    assert ranking.best.missing_bytes == min(lacks.values()) and len(lacks) > 1


def test_tables_give_the_reason_for_each_plan() -> None:
    ranking = searched("quickstart.dsc", ("parallel.pipeline", "parallel.expert"))
    heads, first, *rest = table(ranking)
    assert heads[:2] == ("pipeline", "expert") and first[-1] == "the fastest that fits"
    assert all(row[-1].endswith(("slower", "no faster")) for row in rest) and rest
    rows = json.loads(json.dumps(document(ranking)))
    assert [row["why"] for row in rows[: len(rest) + 1]] == [first[-1], *(row[-1] for row in rest)]


def test_commands_use_the_chosen_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A build holds numbers in place of `auto`; a plan of the same spec has the same numbers."""
    spec = str(SPECS / "tiny.dsc")
    opened = ["-s", "parallel.pipeline=auto", "-s", "parallel.expert=auto", "-s", "schedule.name=1f1b"]
    assert main(["show", spec, *opened, "parallel"]) == 0
    output = capsys.readouterr().out
    assert main(["compile", spec, *opened, "-o", str(tmp_path / "build")]) == 0
    resolved = load(tmp_path / "build" / "spec.resolved")
    assert f"parallel.pipeline = {resolved.parallel.pipeline}\n" in output
    assert f"parallel.expert = {resolved.parallel.expert}\n" in output


def test_a_schedule_of_a_file_leaves_no_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (SPECS / "tiny.dsc").read_text("utf-8")
    before, _, tail = text.partition("schedule {")
    text = f'{before}schedule {{ file = "mine.schedule" }}{tail.partition("}")[2]}'
    (tmp_path / "mine.dsc").write_text(text, "utf-8")
    assert main(["plan", str(tmp_path / "mine.dsc"), "-s", "parallel.pipeline=auto"]) == 2
    assert "a schedule file is for one size" in capsys.readouterr().err


def test_json_lists_the_tried_plans(capsys: pytest.CaptureFixture[str]) -> None:
    opened = ["-s", "parallel.pipeline=auto", "-s", "parallel.expert=auto"]
    assert main(["plan", str(SPECS / "quickstart.dsc"), *opened, "--format", "json"]) == 0
    plan = parsed(capsys.readouterr().out, "plan")
    best = plan["choices"][0]
    assert best["fits"] and best["seconds"] == plan["step"]["seconds"]
    assert best["values"]["parallel.pipeline"] == plan["parallel"]["pipeline"]


def test_layers_are_added_to_the_cell_that_then_holds_least() -> None:
    """By hand: layers of a kind together with the kinds that add at least as much to every cell."""
    small, wide, large = (1, 0, 0), (2, 0, 0), (3, 0, 0)
    kinds = {small: 2, wide: 3, large: 1}
    cells = [_CellBytes(0.0, {small: 1, wide: 2, large: 3}), _CellBytes(0.0, {small: 2, wide: 1, large: 3})]
    assert _fullest(cells, small, kinds) == 2, "three layers, of 1 to the first, and of 2 to the second"
    assert _fullest(cells, wide, kinds) == 3, "four: three to the second, of 1, and one of 2 to the first"
    assert _fullest(cells, large, kinds) == 3
    assert _fullest([*cells, _CellBytes(9.0, cells[0].adds)], large, kinds) == 9, "one that is full already"
    alike = [_CellBytes(0.0, {small: 1, wide: 1, large: 3})] * 2
    assert _fullest(alike, small, kinds) == _fullest(alike, wide, kinds) == 3


@pytest.mark.parametrize(
    ("placement", "room", "first", "missing"),
    [
        (ONE_STAGE, (100, 100, 100), 5, 50 - 100),  # the last rank has the head: layers go to the others
        (ONE_STAGE, (100, 100, 45), 5, 105 - 100),  # and less memory
        (ONE_STAGE, (100, 100, 100), 70, 70 - 100),
        (V, (100, 100), 5, 52 - 100),  # the first rank has both ends, and their shared bytes once
        (V, (100, 100), 0, 47 - 100),
        (V, (100, 80), 0, 57 - 100),  # the other has 20 less room: a fourth layer is better here
    ],
)
def test_lacking_memory_of_the_best_split_by_hand(
    placement: StagePlacement, room: tuple[int, ...], first: int, missing: int
) -> None:
    """Four layers of 10 bytes, a head of 50; the ends share 3. All bytes are held all the time."""
    stages_of_rank = placement.num_stages(len(room)) // len(room)
    moments = (((1, 0, 0),) * stages_of_rank,)
    holding = Holding(((10, 0, 0),) * 4, (first, 0, 0), (50, 0, 0), 3, (moments,) * len(room), room)
    assert missing_anywhere(holding, placement) == missing


def test_a_layer_counts_in_the_stage_that_holds_it_least() -> None:
    """By hand: one rank holds its first stage once and its second three times, and all four layers may be in the
    first."""
    moment = ((1, 0, 0), (3, 0, 0))
    holding = Holding(((10, 0, 0),) * 4, (0, 0, 0), (0, 0, 0), 0, ((moment,),), (100,))
    assert missing_anywhere(holding, V) == 4 * 10 - 100


@pytest.mark.parametrize(
    ("file", "given", "near"),
    [
        ("quickstart.dsc", (), 0.6),
        ("quickstart.dsc", ("train.batch=32", "schedule.cap=2"), 0.6),
        ("moe-8gpu.dsc", ("parallel.pipeline=4", "parallel.data=auto", "parallel.expert=2", "train.batch=64"), 0.8),
        ("deepseek-v3.dsc", (), 0.9),
        ("deepseek-v3.dsc", ("schedule.deferred=3",), 0.8),
    ],
)
def test_no_searched_schedule_is_faster_than_the_bound(file: str, given: tuple[str, ...], near: float) -> None:
    spec = load(SPECS / file, overrides=("schedule.name=auto", *given))
    lowering = Lowering(make_plan(spec), rank_rates(spec))
    scheduler = Scheduler(spec, lowering, effort=QUICK_EFFORT)
    seconds = time_schedule(spec, lowering, scheduler.largest()).step.seconds
    assert near * seconds < scheduler.least_searched_s(max(1.0, slowest_factor(spec.cluster))) <= seconds


def test_a_schedule_is_searched_only_for_plans_that_may_be_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is that of a search for every plan, and most plans need none."""
    opened, searches = SMALL[:3], list[Choice]()
    overrides = ("schedule.name=auto", "train.batch=32", *(f"{path}=auto" for path in opened))
    plans = [*alternatives(SPECS / "quickstart.dsc", overrides=overrides)]
    fitting = []
    for choice, spec in plans:
        lowering = Lowering(make_plan(spec), rank_rates(spec))
        timed = time_schedule(spec, lowering, Scheduler(spec, lowering, effort=QUICK_EFFORT).largest())
        if all(rank.fits for rank in memories(timed)):
            fitting.append((timed.step.seconds, choice))
    find = Scheduler._search_schedule

    def counted(self: Scheduler, num_micro_batches: int) -> Schedule:
        searches.append({"parallel.pipeline": self._spec.parallel.pipeline})
        return find(self, num_micro_batches)

    monkeypatch.setattr(Scheduler, "_search_schedule", counted)
    ranking = searched("quickstart.dsc", opened, "schedule.name=auto", "train.batch=32")
    assert (ranking.best.seconds, ranking.best.choice) == min(fitting, key=lambda entry: entry[0])
    assert 0 < len(searches) < len(fitting)
