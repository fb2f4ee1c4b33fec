"""A run with growing sequences, in real processes: it equals a plain loop in float64, and interruptions leave no trace.

Three phases of 16, 32 and 64 tokens; the second adds YaRN, the third has other degrees of parallelism.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from compiler.tools.inference.sources import find_source
from dsl.load import load
from dsl.resolve.chosen import phases_in
from dsl.schema import Spec
from runtime.build.build import Build
from runtime.checkpoint.publish import LoadedCheckpoint
from runtime.contract import EXTRA_TOKENS, RecipeRatePhase
from runtime.contract.rate import learning_rate
from runtime.data.position import Position
from runtime.data.samples import Samples
from runtime.run.starting_position import order_of
from tests import progress
from tests.reference.config import Config
from tests.reference.model import Reference
from tests.reference.training import AdamW, Recipe, balance_, clip_
from tests.runtime.processes import wait_for
from tests.runtime.run.place import ONE_RANK, TIMINGS, Place, Running, bits, rows, saved

GROW = """
import "tiny.dsc"
run grow extends tiny {
  cluster = two
  parallel { pipeline = 2 }
  train { ema { decay = 0.9 } }
  phase to_32 { model = stretched, train { sequence = 32, batch = 2, steps = 4, rate { constant at 5e-4 } } }
  phase to_64 { parallel { pipeline = 1, zero = 1 }, train { sequence = 64, steps = 2 } }
}
model stretched extends tiny {
  attention mla { rope { scaling yarn { factor = 4, original = 16, mscale = 1.0, mscale_all_dim = 1.0 } } }
}
cluster two { nodes = 1, node { devices = 2, device cpu { cores = 1, memory = 4GB } } }
"""
SETTINGS = dict(ONE_RANK, precision="fp64", batch=4, steps=4)
ENDS = (4, 8, 10)  # last steps of the phases
NAMES = ("grow", "grow.to_32", "grow.to_64")
TOLERANCE = 1e-9  # relative to the largest element of a tensor, after six steps in float64


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A folder with the spec and its phases' builds."""
    place = new_place()
    place.write(SETTINGS)
    assert _compile(place, "grow", GROW) == NAMES
    return place


def _compile(place: Place, run: str, text: str) -> tuple[str, ...]:
    """Write the spec of a run and its phases' builds, faster than `dsc train`. Returns the names of the builds."""
    path = place.folder / f"{run}.dsc"
    path.write_text(text.replace("run grow", f"run {run}"), "utf-8")
    names = phases_in(path)
    for name in names:
        write_build(place.folder / "build" / name, compile_spec(load(path, name), segments=place.segments).files)
    return names


@pytest.fixture(scope="module")
def straight(place: Place) -> Path:
    """The uninterrupted run."""
    output = place.dsc("train", "grow.dsc", "--out", "straight").stdout
    assert "phase 2 of 3 begins after step 4: train.sequence 16 → 32" in output
    assert "the rotation of positions" in output and "not bit for bit" not in output
    assert "mesh.pp 2 → 1" in output
    return place.folder / "straight"


def _samples(place: Place, run: Path, name: str) -> tuple[Samples, Position]:
    build = Build.open(place.folder / "build" / name)
    (corpus,) = (path.parent for path in (run / "data").glob("*/meta.json"))
    order = order_of(build, corpus)
    sequence = build.plan.train.sequence
    samples = Samples(corpus, "train", sequence, EXTRA_TOKENS, seed=1, order=order)
    return samples, Position(order=order, next=order.first // sequence)


def test_rows_and_checkpoints_say_their_phase(straight: Path) -> None:
    written = rows(straight)
    assert [row["step"] for row in written] == [*range(1, 11)]
    assert [row["phase"] for row in written] == [1] * 4 + [2] * 4 + [3] * 2
    assert [row["tokens"] for row in written] == np.cumsum([64] * 4 + [64] * 4 + [128] * 2).tolist()
    assert [row["rate"] for row in written][4:] == [5e-4] * 6
    for step, number in ((4, 1), (6, 2), (8, 2), (10, 3)):
        assert saved(straight, step).meta["plan"]["train"]["within"]["number"] == number


def test_phases_equal_a_plain_loop(place: Place, straight: Path) -> None:
    """From a checkpoint of the first phase on: losses, weights, both moments, averaged weights, balancing biases."""
    specs = [load(place.folder / "grow.dsc", name) for name in NAMES]
    begin = saved(straight, 3)

    weights = _held(begin, "weight") | _held(begin, "bias")
    moments, average = [_held(begin, kind) for kind in ("moment1", "moment2")], _held(begin, "ema")
    step, tokens, losses = 3, 3 * 64, []
    for chosen, name, end in zip(specs, NAMES, ENDS, strict=True):
        model = _reference(chosen)
        model.load_logical(weights)
        optimizer = AdamW(dict(model.named_parameters()), Recipe(rates=(), weight_decay=0.1, clip=1.0))
        optimizer.t, optimizer.m, optimizer.v = step, *moments
        samples, position = _samples(place, straight, name)
        position = position.after(position.draw(12), 16) if step == 3 else position
        while step < end:
            drawn = position.draw(chosen.train.batch.end)
            position = position.after(drawn, chosen.train.sequence)
            result = model.losses(torch.from_numpy(np.stack([samples.tokens(int(i)) for i in drawn])))
            model.zero_grad()
            result.total(0.3).backward()
            gradients = model.logical_gradients()
            clip_(gradients, 1.0)
            before, step = tokens, step + 1
            tokens += len(drawn) * chosen.train.sequence
            optimizer.step_(gradients, learning_rate(_rate(chosen), tokens))
            balance_(model, result.loads, before)
            losses.append(result.main.item())
            for key, weight in dict(model.named_parameters()).items():
                average[key] = 0.9 * average[key] + 0.1 * weight.detach()
        weights, moments = model.logical_parameters(), [optimizer.m, optimizer.v]
    assert [row["loss"] for row in rows(straight)][3:] == pytest.approx(losses, rel=1e-9)
    last = saved(straight, 10)
    for kind, tensors in zip(("moment1", "moment2", "ema"), (*moments, average), strict=True):
        for key, ours in _held(last, kind).items():
            _close(f"{kind} of {key}", ours, tensors[key])
    for key, ours in _held(last, "weight").items():
        _close(key, ours, weights[key])
    for key, ours in _held(last, "bias").items():
        assert ours.tolist() == weights[key].tolist(), key


def _held(checkpoint: LoadedCheckpoint, kind: str) -> dict[str, torch.Tensor]:
    """Tensors of one kind in a checkpoint, by parameter name."""
    tensors = checkpoint.read(name for name in checkpoint.shapes if name.startswith(f"{kind}/"))
    assert tensors
    return {name.removeprefix(f"{kind}/"): tensor for name, tensor in tensors.items()}


def _reference(chosen: Spec) -> Reference:
    config = chosen.model.model_dump(mode="json") | {"sequence": chosen.train.sequence}
    return Reference(Config.from_plan(config)).double()


def _rate(chosen: Spec) -> list[RecipeRatePhase]:
    return [RecipeRatePhase(p.shape, p.start, p.end, p.end_tokens) for p in chosen.train.rate]


def _close(name: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    error = (ours - expected).abs().max().item()
    assert error <= TOLERANCE * max(expected.abs().max().item(), 1e-12), f"{name}: {error}"


def test_no_token_is_read_twice(place: Place, straight: Path) -> None:
    read: list[int] = []
    for name, count in zip(NAMES, (16, 8, 4), strict=True):
        samples, position = _samples(place, straight, name)
        for index in position.draw(count).tolist():
            first = samples.window(index) * samples.sequence
            read += range(first, first + samples.sequence)
    assert len(read) == 16 * 16 + 8 * 32 + 4 * 64 and samples.order.windows > 12
    assert len({*read}) == len(read)


@pytest.mark.parametrize("breaks", [(4,), (3, 6, 9)], ids=str)
def test_a_break_leaves_no_trace(place: Place, straight: Path, breaks: tuple[int, ...]) -> None:
    """A run that ends between phases, or within each phase, is resumed in the right phase with the same bits."""
    name = f"broken at {breaks}"
    for step in breaks:
        place.dsc("train", "grow.dsc", "--out", name, "--resume", "--steps", step)
        assert rows(place.folder / name)[-1]["step"] == step
    place.dsc("train", "grow.dsc", "--out", name, "--resume")
    _assert_equal(place.folder / name, straight)


def test_a_damaged_checkpoint_leads_back_to_the_phase_before(place: Place, straight: Path) -> None:
    """The newest checkpoint, at the end of the second phase, is damaged, and so is the one at its beginning."""
    name = "damaged"
    place.dsc("train", "grow.dsc", "--out", name, "--steps", 6)
    for step in (4, 6):
        shard = next((place.folder / name / "checkpoints" / f"step-{step:08}").glob("shard.*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1])
    output = place.dsc("train", "grow.dsc", "--out", name, "--resume").stdout
    assert "going on from damaged/checkpoints/step-00000003" in output
    _assert_equal(place.folder / name, straight)


def test_a_kill_at_a_seam_leaves_no_trace(place: Place, straight: Path) -> None:
    """SIGKILL after the last save of a phase, before the first step of the next, and in the compilation between."""
    run, words = place.folder / "killed", ("train", "grow.dsc", "--out", "killed", "--resume")
    with place.started(*words) as running:
        wait_for(lambda: _newest(run) == 4, "the last save of the first phase")
        _kill(running, *running.seen())
    with place.started(*words) as running:
        wait_for(lambda: _began(run, 2), "the second phase")
        _kill(running, running.ranks(run)[1])
        assert running.process.returncode == 1 and "phase 2 of 3 begins after step 4" in running.stdout()
    with place.started(*words) as running:
        wait_for(lambda: _newest(run) == 8, "the last save of the second phase")
        _kill(running, running.process.pid)
    shutil.rmtree(place.folder / "build" / NAMES[2])
    with place.started(*words) as running:
        wait_for(lambda: _compilers(running), "the compilation of the third phase")
        _kill(running, *_compilers(running))
        assert running.process.returncode == 128 + signal.SIGKILL and not _began(run, 3)
    place.dsc(*words)
    _assert_equal(run, straight)


def test_torchrun_trains_all_phases(place: Place, straight: Path) -> None:
    """The script of `dsc launch` is stopped between phases; the same script then resumes with the next phase."""
    builds = [f"build/{name}" for name in NAMES]
    place.dsc("launch", "torchrun", *builds, "--out", "files", "--run-folder", "scripted", "--env", "OMP_NUM_THREADS=1")
    run, script = place.folder / "scripted", ("bash", "files/node.sh")
    with subprocess.Popen(script, cwd=place.folder) as process:
        wait_for(lambda: _newest(run) == 4, "the last save of the first phase")
        process.terminate()
        assert progress.end(process) == 128 + signal.SIGTERM
    assert rows(run)[-1]["step"] < 8
    done = progress.run(script, place.folder)
    output = done.stdout
    assert done.returncode == 0, done.stderr
    assert "nothing to do: phase 1 of 3 ends after 256 tokens, and scripted/checkpoints/step-0000000" in output
    _assert_equal(run, straight)


def _kill(running: Running, *pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    running.ends()


def _newest(run: Path) -> int:
    """The step of the newest checkpoint; 0 before the first."""
    latest = run / "checkpoints" / "LATEST"
    return int(latest.read_text("utf-8").strip().removeprefix("step-")) if latest.exists() else 0


def _began(run: Path, phase: int) -> bool:
    """Whether the ranks of a phase were started."""
    events = run / "events.jsonl"
    lines = events.read_text("utf-8").splitlines() if events.exists() else ()
    return any(event["event"] == "start" and event["phase"] == phase for event in map(json.loads, lines))


def _compilers(running: Running) -> list[int]:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in running.seen()}
    return [pid for pid, words in commands.items() if b"compile" in words]


def test_phases_end_by_tokens_for_any_batch(place: Place) -> None:
    """With half the batch from step 3 on, the phase ends after its 256 tokens, although the spec counts other steps."""
    place.dsc("train", "grow.dsc", "--out", "halved", "--steps", 3)
    _compile(place, "halved", GROW.replace("train { ema", "train { batch = 2, steps = 8, ema"))
    output = place.dsc("train", "halved.dsc", "--out", "halved", "--resume").stdout
    assert "phase 2 of 3 begins after step 5" in output and "phase 3 of 3 begins after step 9" in output
    written = rows(place.folder / "halved")
    assert [row["tokens"] for row in written] == np.cumsum([64] * 3 + [32] * 2 + [64] * 4 + [128] * 2).tolist()
    assert [row["phase"] for row in written] == [1] * 5 + [2] * 4 + [3] * 2


def test_extending_a_trained_phase_suggests_what_to_do(place: Place, straight: Path) -> None:
    """The newest checkpoint has the rotation of a later phase; without later checkpoints the first phase continues."""
    run = place.folder / "longer"
    shutil.copytree(straight, run)
    _compile(place, "longer", GROW.replace("train { ema", "train { steps = 16, ema"))
    output = place.dsc("train", "longer.dsc", "--out", "longer", "--resume", code=2).stderr
    assert "Phase 3 wrote it, but by the spec the run is still in phase 1" in output
    assert "move the checkpoints after phase 1 out of longer/checkpoints" in output
    for step in (6, 8, 9, 10):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08}")
    output = place.dsc("train", "longer.dsc", "--out", "longer", "--resume", "--steps", 5).stdout
    assert "going on from longer/checkpoints/step-00000004" in output and rows(run)[-1]["step"] == 5


def test_a_phase_is_added_at_the_end(place: Place, straight: Path) -> None:
    """Another phase now follows the last one. Tokens of the epoch that were read are not read again."""
    run = place.folder / "added"
    shutil.copytree(straight, run)
    _compile(place, "added", GROW.replace("steps = 2 } }\n}", "steps = 2 } }\n  phase more { train { steps = 1 } }\n}"))
    output = place.dsc("train", "added.dsc", "--out", "added", "--resume").stdout
    assert "phase 4 of 4 begins after step 10: nothing differs" in output
    assert "of the rest of epoch 1 0 tokens are skipped and 0 repeated" in output
    assert rows(run)[:10] == rows(straight) and [rows(run)[-1][key] for key in ("step", "tokens")] == [11, 896]


def _assert_equal(run: Path, straight: Path) -> None:
    ours, theirs = saved(run, 10), saved(straight, 10)
    assert bits(ours) == bits(theirs) and ours.meta["position"] == theirs.meta["position"]
    plain = [[{k: v for k, v in row.items() if k not in TIMINGS} for row in rows(folder)] for folder in (run, straight)]
    assert plain[0] == plain[1]


def test_a_later_phase_begins_with_a_checkpoint(place: Place) -> None:
    stderr = place.dsc("train", "build/grow.to_32", "--out", "alone", code=2).stderr
    assert "this is phase 2 of 3 of a run; it starts from the checkpoint that the previous phase leaves" in stderr
    assert "train that one first, into the same folder" in stderr


def test_commands_work_on_a_run_with_phases(place: Place, straight: Path) -> None:
    """A checkpoint's model is that of its phase; the plan covers all phases."""
    for step, sequence in ((4, 16), (10, 64)):
        evaluation = json.loads(place.dsc("eval", f"straight@{step}", "--format", "json").stdout)
        assert evaluation["sequence"] == sequence and evaluation["step"] == step
    assert find_source(f"{straight}@4").spec.model.attention.rope.scaling is None
    assert find_source(f"{straight}@6").spec.model.attention.rope.scaling is not None
    output = place.dsc("inspect", "straight", "--phase", 2).stdout
    assert "traced" in output and "rank 1 measured" in output
    assert "straight has not trained phase 4" in place.dsc("inspect", "straight", "--phase", 4, code=2).stderr
    assert "grow.dsc:grow.to_32, grow.dsc:grow.to_64" in place.dsc("show", "grow.dsc", "train.sequence").stderr
    place.dsc("report", "straight")
    page = (straight / "report.html").read_text("utf-8")
    assert "steps 1 to 4, loss" in page and "steps 9 to 10, loss" in page
    place.dsc("generate", "straight", "import", "--tokens", 2)
    planned = json.loads(place.dsc("plan", "grow.dsc", "--format", "json").stdout)
    assert [phase["run"] for phase in planned["phases"]] == [*NAMES]
    total = planned["total"]
    assert total["steps"] == 10 and total["tokens"] == 768 and total["fits"] and total["usd"] is None
    seconds = sum(phase["whole_run"]["seconds"] for phase in planned["phases"])
    assert total["seconds"] == pytest.approx(seconds)
    assert total["device_hours"] == pytest.approx(2 * seconds / 3600)
    text = place.dsc("plan", "grow.dsc").stdout
    assert "the run  3 phases" in text and "grow.to_64" in text
    assert "a page shows one phase" in place.dsc("plan", "grow.dsc", "--format", "html", code=2).stderr
