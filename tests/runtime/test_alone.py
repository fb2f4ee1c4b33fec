"""Unit tests of parts of a rank's step, with stand-ins for their surroundings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.build import files as build_files
from runtime.build import run_copy
from runtime.checkpoint.shard_manifest import CheckpointError
from runtime.contract import NodeKind
from runtime.contract.programs import Collective
from runtime.contract.recipe import Adapter, Checkpoints
from runtime.data import __main__ as prepare
from runtime.data.__main__ import data_of_checkpoints
from runtime.data.order import Order
from runtime.data.preparation import Preparation, UsageError
from runtime.launch.heartbeat import Board
from runtime.launch.torchrun_meet import TorchrunRank
from runtime.observe import device
from runtime.observe.slots import Slots
from runtime.rl.generator import Rollouts
from runtime.rl.policy import Policy
from runtime.run import begin, evaluate, resume, starting_position, starts, train, witness
from runtime.run import loop as loop_of_ranks
from runtime.run.begin import RunOptions
from runtime.run.loop import Loop, Ranks
from runtime.run.observers import FirstLedger
from runtime.state import optimizer
from runtime.state.state import build_state
from runtime.step.executor import Executor, StepBatch
from runtime.step.trainer import Trainer
from runtime.system.outcome import EXIT_RETRY, ReportedError
from tests.runtime.plans import small_plan


class Notes(list[str]):
    """Events in order: a board, and links that record requests."""

    set_action = list[str].append

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        self.append("largest" if largest else "summed")
        tensor += 100

    def pending(self, value: Any = None) -> Any:
        def wait() -> Any:
            self.append("waited")
            return value

        return SimpleNamespace(wait=wait)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        yield


# ---------------------------------------------------------------- messages


def executor(notes: Notes, rank: int = 0) -> Executor:
    stand_ins = {"rank": rank, "board": notes, "device": torch.device("cpu"), "message": ((2,), torch.float32)}
    needed = [field.name for field in fields(Executor)][:13]
    return Executor(**{name: stand_ins.get(name, SimpleNamespace()) for name in needed})


def test_the_board_shows_what_a_rank_waits_for() -> None:
    notes = Notes()
    rank_executor, message, sent = executor(notes, 1), torch.ones(2), torch.zeros(2)
    rank_executor._posted = {(0, "F1.2"): notes.pending(message), (2, "F1.2"): notes.pending(message)}
    rank_executor.send(1, "F1", 2, sent)
    assert rank_executor.receive(1, "F1", 2) is sent and notes == [] and not rank_executor._own_messages, (
        "nothing comes from elsewhere"
    )
    assert not rank_executor._arrived_us
    assert rank_executor.receive(0, "F1", 2) is message
    assert notes == ["recv F1.2", "waited"] and [*rank_executor._posted] == [(2, "F1.2")]
    first = rank_executor._arrived_us
    assert rank_executor.receive(2, "F1", 2) is message and rank_executor._arrived_us == first > 0, (
        "the first message counts"
    )


def test_a_program_ends_once_all_is_sent() -> None:
    notes = Notes()
    rank_executor = executor(notes)
    sent = SimpleNamespace(send=lambda message, value: notes.append(f"sent {message}") or notes.pending())
    rank_executor.edges_out = {1: sent}
    rank_executor.send(1, "F0", 0, torch.ones(2))
    rank_executor.send(1, "F0", 1, torch.ones(2))
    rank_executor.execute({}, [], batch := StepBatch())
    assert batch.spans == []
    assert notes == ["sent F0.0", "sent F0.1", "send F0.0", "waited", "send F0.1", "waited"]
    rank_executor.send(0, "F0", 2, torch.ones(2))
    with pytest.raises(AssertionError, match=r"F0\.2"):
        rank_executor.execute({}, [], StepBatch())


# ---------------------------------------------------------------- sums


def test_collectives_that_a_program_lists_are_run_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    monkeypatch.setattr(optimizer, "gather_weights", lambda bucket, sums: notes.append(f"gathered {bucket.name}"))
    bucket = SimpleNamespace(shares=(), name="b")
    links = SimpleNamespace(sums=notes)
    trainer: Any = SimpleNamespace(
        buckets={"b": bucket}, board=notes, time=notes, links=links, reducing={"b": notes.pending()}
    )
    parts = {"norm": lambda: torch.ones(1), "logits": lambda: torch.zeros(2)}
    listed = [
        Collective("sum", "norm"),
        Collective("reduce", "b"),
        Collective("max", "logits"),
        Collective("gather", "b"),
        Collective("reduce", "x"),
    ]
    results = Trainer._collect(trainer, listed, parts)
    assert {name: result.tolist() for name, result in results.items()} == {"norm": [101.0], "logits": [100.0, 100.0]}
    assert notes == ["sum norm", "summed", "reduce b", "waited", "max logits", "largest", "gather b", "gathered b"]
    assert not trainer.reducing


@pytest.mark.parametrize("counts_tokens", [False, True])
def test_the_first_pipeline_rank_counts_targets(counts_tokens: bool) -> None:
    data = {
        "targets": torch.tensor([[0, 3, -1], [-1, -1, 1]]),
        "mtp_targets": torch.tensor([[0, -1, -1], [-1, -1, -1]]),
        "real": torch.tensor([[True, True, True], [True, True, False]]),
    }
    plan = SimpleNamespace(data=SimpleNamespace(pads_rows=True), indexers=("L0",) if counts_tokens else ())
    options: dict[str, Any] = {"plan": plan, "device": "cpu", "policy": None}
    for pp_rank, counts in ((0, [3, 1, 5]), (1, [0, 0, 0]), (2, [0, 0, 0])):
        trainer: Any = SimpleNamespace(pp_rank=pp_rank, rank=pp_rank, **options)
        assert Trainer._count_targets(trainer, data).tolist() == counts[: 2 + counts_tokens]
    for rank in range(3):
        trainer = SimpleNamespace(**{**options, "policy": object()}, rank=rank, pp_rank=0)
        assert Trainer._count_targets(trainer, data).tolist() == [int(rank == 0), 0]


# ---------------------------------------------------------------- a measured step


@pytest.mark.parametrize("full", [False, True])
def test_a_measured_step_has_its_completions_before(tmp_path: Path, full: bool) -> None:
    notes = Notes()

    class Ledger:
        def __enter__(self) -> Ledger:
            notes.append("begin")
            return self

        def __exit__(self, *_: object) -> None:
            notes.append("end")

        def write(self, *about: object) -> None:
            assert about == (tmp_path, 1, 7, "train_8", about[-1])
            notes.append("write")
            if full:
                raise OSError("full")

    trainer: Any = SimpleNamespace(
        roll_out=lambda: notes.append("completions"), train_step=lambda: notes.append("step") or {"loss": 1.0},
        ledger=Ledger, rank=1, step=7, batch=StepBatch(program="train_8"),
    )  # fmt: skip
    observer = FirstLedger(trainer, tmp_path, "digest")
    assert observer.train(trainer.train_step) == {"loss": 1.0}
    assert notes == ["completions", "begin", "step", "end", "write"]
    assert observer.train(trainer.train_step) == {"loss": 1.0} and notes[5:] == ["step"], "the first one alone"


# ---------------------------------------------------------------- rollouts


def test_a_completion_is_as_long_as_its_tokens() -> None:
    """Token 0 is one, as all are that a vocabulary has."""
    tokens_NC = np.array([[5, 0, 1], [0, -1, -1], [3, 0, -1]])
    assert Rollouts([], tokens_NC, np.zeros((3, 3)), np.zeros((3, 3))).lengths_N.tolist() == [3, 1, 2]


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_a_row_averages_over_the_tokens_of_a_rollout(tmp_path: Path, tokens: int) -> None:
    """Also if no token was trained on."""
    rollouts = SimpleNamespace(lengths_N=np.array([2, 4, 4, 2]), entropy_NC=np.full((4, 4), 0.75))
    sampled = SimpleNamespace(rollouts=rollouts, rewards_NR=np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 4.0], [1.0, 4.0]]))
    rewards = (SimpleNamespace(name="right"), SimpleNamespace(name="long"))
    policy: Any = SimpleNamespace(
        _current=sampled, _counted=[tokens, 3, 4.0, 2.0, 6.0], _weights_R=np.array([1.0, 0.5]),
        _grpo=SimpleNamespace(rewards=rewards, group=2, completion=4),
    )  # fmt: skip
    for reference in (None, np.zeros((4, 4))):
        sampled.reference_NC = reference
        row = Policy.row(policy)
        assert (row["rewards"], row["reward"]) == ({"right": 0.75, "long": 2.0}, 1.75)
        assert (row["reward_alike"], row["completion_tokens"], row["completion_longest"]) == (0.5, 3.0, 0.5)
        assert (row["entropy"], row["policy_kl"], row["clipped"]) == (1.0, 2 / max(1, tokens), 4 / max(1, tokens))
        assert row.get("reference_kl") == (None if reference is None else 6 / max(1, tokens))


# ---------------------------------------------------------------- a replay that is watched


def test_a_witness_records_only_the_computation_of_a_rank(tmp_path: Path) -> None:
    """Sums before and after it are not recorded. Names are only written again if they change."""
    notes = Notes()
    weight, bias = torch.ones(2), torch.tensor([float("inf")])
    calls = {name: lambda *words: words[-1] for name in (*witness.GIVES, *witness.GETS)}
    state = build_state(small_plan(), 0, torch.device("cpu"))

    def compute() -> dict[str, Tensor]:
        trainer.links.sums.all_reduce(trainer._norm())
        trainer.executor.send(1, "F0", weight)
        assert trainer.executor.receive(1, "F0", bias) is bias
        trainer.step += 1
        return {"norm": weight}

    trainer: Any = SimpleNamespace(
        executor=SimpleNamespace(**calls), links=SimpleNamespace(sums=notes), accumulate=compute,
        _norm=lambda: torch.zeros(3), rank=0, state=state, step=4, batch=StepBatch(samples=np.array([7, 9])),
        records=lambda: torch.zeros(1),
    )  # fmt: skip
    recorder = witness.Witness(trainer, tmp_path, {"device": "cpu"})
    trainer.links.sums.all_reduce(torch.zeros(1))
    written = tmp_path / "witness" / "rank_0.jsonl"
    for lines in (2, 3):
        assert trainer.accumulate() == {"norm": weight}
        trainer.executor.send(1, "F1", weight)
        assert written.read_text("utf-8").count("\n") == lines, "a rank that is killed leaves what it saw"
    recorder.close()
    place, first, second = map(json.loads, written.read_text("utf-8").splitlines())
    assert place == {"rank": 0, "device": "cpu"} and notes == ["summed"] * 3
    assert first["names"].count("> sum") == first["names"].count("< sum") == 1
    assert not any("F1" in name for name in first["names"]) and second["names"] is None
    assert len(first["prints"]) == 16 * len(first["names"]) == len(second["prints"])
    assert (first["step"], second["step"], first["last_sample"]) == (6, 7, 9)
    assert [first["names"][index].split()[0] for index in first["not_finite"]] == ["<"]


# ---------------------------------------------------------------- an evaluation


def test_an_evaluation_divides_sms_as_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples are computed, also if the last batch is partial; the first rank writes the results."""
    ids, carveouts, computed = np.array([[4, 1, 2, 3], [4, 1, -1, 3], [4, 0, 2, -1]]), list[int](), list[int]()

    def trainer(*_: object) -> Any:
        carveouts.append(torch._C._get_sm_carveout_experimental() or 0)
        return SimpleNamespace(losses_on=lambda source, batches: computed.append(batches) or {"loss": 1.5})

    monkeypatch.setattr(evaluate, "take", lambda kind, rank: torch.device(kind, rank))
    monkeypatch.setattr(evaluate, "Endpoint", lambda *_, sms: carveouts.append(sms))
    monkeypatch.setattr(evaluate, "Trainer", trainer)
    monkeypatch.setattr(evaluate, "compile_for_rank", lambda *_: None)
    build: Any = SimpleNamespace(plan=small_plan(dp=2, communication_sms=20))
    weights: Any = None
    job = evaluate.Evaluation(build, weights, "weight", evaluate.SampleRows(ids), "cuda", tmp_path / "losses.json")
    try:
        job.rank(1, 2, Board(2))
        assert not job.out.exists()
        job.rank(0, 2, Board(2))
    finally:
        torch._C._set_sm_carveout_experimental(None)
    assert carveouts == [20] * 4 and computed == [2, 2]
    assert json.loads(job.out.read_text("utf-8")) == {"loss": 1.5, "tokens": 5}


# ---------------------------------------------------------------- data of checkpoints


def test_data_of_checkpoints_is_listed_newest_first(tmp_path: Path) -> None:
    """Sorted by the newest checkpoint of each; damaged checkpoints are ignored."""
    rows: list[Any] = [(1, "a"), (7, "a"), (2, "a"), (3, "c"), (5, "b"), (4, "b"), (6, "b"), ("9", "text"), (9, 4)]
    texts = [json.dumps({"serial": serial, "meta": {"data": data}}) for serial, data in rows]
    for number, text in enumerate([*texts, "[]", "{}", "nothing", '{"meta": [], "serial": 9}']):
        (tmp_path / f"step-{number}").mkdir()
        (tmp_path / f"step-{number}" / "manifest.json").write_text(text, "utf-8")
    (tmp_path / ".purge").mkdir()
    (tmp_path / ".purge" / "manifest.json").write_text(json.dumps({"serial": 99, "meta": {"data": "gone"}}), "utf-8")
    assert data_of_checkpoints(tmp_path) == ("a", "b", "c")
    assert data_of_checkpoints(tmp_path / "none") == ()


# ---------------------------------------------------------------- start of a run


OPTIONS = RunOptions(
    run=Path("run"), data=Path(), steps=None, resume=False, hang_timeout_s=None, device="cpu", transport="auto",
    profile=None, skip_batch=False, cache=None, start_timeout_s=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "alone", "torchrun"),
    [
        ({}, "", ""),
        ({"restarts": 1}, "", "leave --restarts out"),
        ({"elastic": True}, "--elastic needs torchrun", ""),
        ({"elastic": True, "restarts": 1}, "", "leave --restarts out"),
        ({"gather_s": 5.0}, "--gather needs --elastic", "--gather needs --elastic"),
        ({"gather_s": 5.0, "elastic": True}, "--elastic needs torchrun", ""),
        ({"slots": Slots.parse("+1")}, "", "--replay belongs to dsc replay"),
        ({"profile": 2}, "", ""),
        ({"profile": 2, "steps": 3}, "leave --steps out", "leave --steps out"),
        ({"profile": 2, "restarts": 1}, "combined with --debug or --profile", "leave --restarts out"),
        ({"debug": 0, "restarts": 1}, "combined with --debug or --profile", "leave --restarts out"),
        ({"skip_batch": True}, "it needs --resume", "it needs --resume"),
        ({"skip_batch": True, "resume": True}, "", ""),
    ],
)
def test_incompatible_options_are_refused(options: dict[str, Any], alone: str, torchrun: str) -> None:
    for message, under_torchrun in ((alone, False), (torchrun, True)):
        with pytest.raises(UsageError, match=message) if message else nullcontext():
            train._check_options(replace(OPTIONS, **options), under_torchrun=under_torchrun)


def test_a_rank_checks_its_device_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does not match the plan is refused before anything is built on it."""

    def refuse(device: torch.device, planned: NodeKind, *, shared: bool) -> None:
        raise ReportedError(f"{device} {planned.devices} {shared}")

    monkeypatch.setattr(loop_of_ranks, "check", refuse)
    with pytest.raises(ReportedError, match=r"^cpu 1 False$"):
        Ranks().take(0, 1, small_plan())


def test_finding_the_text_is_signalled_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher waits for an empty line on stdout."""
    notes = prepare.Notes()
    assert capsys.readouterr().out == ""
    notes.report_found()
    notes.report_found()
    assert capsys.readouterr().out == "\n"


def test_notes_about_data_are_printed_once_after_the_compilation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compilation's lines are not interleaved with lines about data."""
    readable = list[int]()
    monkeypatch.setattr(prepare, "select", SimpleNamespace(select=lambda *_: (readable, [], [])))
    notes = prepare.Notes()
    for text in ("one", "two", "one"):
        notes.note(text)
    assert capsys.readouterr().err == ""
    readable.append(0)
    for text in ("two", "three", "one"):
        notes.note(text)
    assert capsys.readouterr().err == "data: one\ndata: two\ndata: three\n"


def test_killing_a_preparation_ends_its_process() -> None:
    """The launcher does not wait for it."""
    piped: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(["sleep", "9"], **piped) as process:
        preparation = Preparation(process)
        preparation.kill()
        with pytest.raises(UsageError, match="its process was killed") as raised:
            preparation.corpus()
    assert raised.value.code == EXIT_RETRY and process.returncode == -signal.SIGKILL


def test_the_digest_of_a_program_does_not_depend_on_the_order_of_its_files() -> None:
    files = {"segments/a.py": b"1", "stages/rank_0.py": b"2", "plan.json": b"3"}
    digest = run_copy.program_digest(files)
    assert run_copy.program_digest(dict(reversed(files.items()))) == digest
    assert (
        run_copy.program_digest(files | {"plan.json": b"4"})
        == digest
        != run_copy.program_digest({**files, "segments/a.py": b"2"})
    )


@pytest.mark.parametrize("copies", [True, False])
def test_a_run_copies_checkpoints_unless_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    """Its places are relative to the data folder."""
    monkeypatch.setattr(begin, "_start", lambda loop, *_: loop.start)
    monkeypatch.setattr(starting_position, "order_of", lambda *_: Order(1, 8, 0))
    monkeypatch.setattr(Loop, "say_rows", lambda *_: None)
    saved = Checkpoints(1, 1, 0, None, "stop", to=("local", "copies"))
    train = replace(small_plan().train, checkpoint=saved)
    build: Any = SimpleNamespace(plan=small_plan(train=train))
    options = replace(OPTIONS, run=tmp_path / "run", data=tmp_path, copies=copies)
    loop = begin.loop_of(build, options, tmp_path / "corpus", lambda text: None)
    places = loop._places()
    assert [(place.text, place.path) for place in places] == [("copies", tmp_path / "copies")] * copies
    for variant in (replace(loop, profile=3), replace(loop, ranks=replace(loop.ranks, is_debugged=True))):
        assert variant._places() == ()


def test_a_place_that_holds_an_earlier_run_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "loop_of", lambda *_: pytest.fail("the ranks start"))
    (tmp_path / "copies" / "step-00000007").mkdir(parents=True)
    saved = Checkpoints(1, 1, 0, None, "stop", to=("local", "copies"))
    build: Any = SimpleNamespace(plan=small_plan(train=replace(small_plan().train, checkpoint=saved)), files={})
    with pytest.raises(UsageError, match="holds step-00000007 of an earlier run: go on with --resume"):
        starts.train(build, replace(OPTIONS, run=tmp_path / "run", data=tmp_path), tmp_path / "corpus")


def test_a_node_that_starts_other_ranks_than_planned_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun, where the user sets the number."""
    monkeypatch.setattr(device, "choose", lambda *_: "cuda")
    build: Any = SimpleNamespace(plan=small_plan(cluster=(NodeKind(1, 8, "h100", 132, 1 << 36),)))
    torchrun_rank = TorchrunRank(
        0, 4, 0, local_world=4, agent=0, restarts=0, host="first", port=1, agent_has_store=True
    )
    with pytest.raises(UsageError, match="this node starts 4 ranks, and the build is for nodes of 8: torchrun --nproc"):
        begin.loop_of(build, OPTIONS, tmp_path, lambda text: None, torchrun_rank)


def test_adapters_resume_only_with_equal_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another factor, the weights would differ; a run without adapters says nothing about them."""
    (tmp_path / "meta.json").write_text(json.dumps({"sha256": "d", "tokenizer": {"sha256": "t"}}), "utf-8")

    def build(adapter: Adapter | None) -> Any:
        return SimpleNamespace(plan=small_plan(adapter=adapter), digest="b", files={})

    lora = Adapter("lora", 2, 1.0, ("weight",))
    meta = json.loads(json.dumps(resume.origin(build(lora), tmp_path, "cpu")))
    saved = SimpleNamespace(meta=meta, path="step-00000007", shapes={}, step=7)
    monkeypatch.setattr(resume, "load", lambda folder: saved)
    with pytest.raises(CheckpointError, match=r"holds adapters for other weights: adapter\.factor 1\.0 → 2\.5"):
        resume.find(tmp_path, build(replace(lora, factor=2.5)), tmp_path, "cpu")
    assert "adapter" not in resume.origin(build(None), tmp_path, "cpu")["plan"]


# ---------------------------------------------------------------- files of a build


def test_names_of_a_build_are_its_regular_files_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "stages/b", "stages/__pycache__/c", "stages/deep/d", "manifest.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "stages")
    top = os.open(tmp_path, os.O_RDONLY)
    try:
        for limit in (5, 6):
            monkeypatch.setattr(build_files, "MAX_FILES", limit)
            assert build_files.file_names(top) == {"a", "stages/b", "stages/deep/d", "link"}
        monkeypatch.setattr(build_files, "MAX_FILES", 4)
        with pytest.raises(OSError, match="more than 4 files"):
            build_files.file_names(top)
    finally:
        os.close(top)
