"""The data of runs: encoded once for all runs, complete in each, and every wait for it is reported."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.load import load
from tests.runtime.processes import wait_for
from tests.runtime.run.place import ONE_RANK, Place, bits, saved, spec_text, untimed

ENCODED = "data: encode text\n"
OWN = "data: from broken/data, verified; the text is not read again\n"


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A compiled spec, and `straight`, an undisturbed run of it."""
    place = new_place()
    place.compile(ONE_RANK)
    done = place.dsc("train", "--out", "straight")
    assert done.stderr.count(ENCODED) == 1
    return place


def shards(run: Path) -> dict[str, int]:
    """The data files of a run, and their inodes."""
    (meta,) = (run / "data").glob("*/meta.json")
    return {path.name: path.stat().st_ino for path in meta.parent.iterdir() if path != meta}


def test_a_run_resumes_without_its_text(place: Place) -> None:
    """Without the text and the cache, the run continues as it would have."""
    place.dsc("train", "--out", "broken", "--steps", 3)
    cache = place.folder / "build" / ".data"
    (place.folder / "corpus").rename(place.folder / "gone")
    cache.rename(place.folder / "no cache")
    try:
        done = place.dsc("train", "--out", "broken", "--resume")
        assert OWN in done.stderr and ENCODED not in done.stderr
        assert "not bit for bit" not in done.stdout + done.stderr
        assert untimed(place.folder / "broken") == untimed(place.folder / "straight")
        assert bits(saved(place.folder / "broken", 6)) == bits(saved(place.folder / "straight", 6))
        refused = place.dsc("train", "--out", "broken", "--resume", "--steps", 7, "-s", "data.validation=20%", code=2)
        assert "error: data source 'corpus/*.py': no " in refused.stderr, "another data block needs the text"
    finally:
        shutil.rmtree(cache, ignore_errors=True)
        (place.folder / "gone").rename(place.folder / "corpus")
        (place.folder / "no cache").rename(cache)
    place.compile(ONE_RANK)


def test_changed_text_does_not_affect_a_run_and_a_changed_data_block_does(place: Place) -> None:
    place.dsc("train", "--out", "changed", "--steps", 3)
    shutil.copytree(place.folder / "corpus", place.folder / "before")
    try:
        for path in (place.folder / "corpus").iterdir():
            path.write_text(path.read_text("utf-8") + "\nmore = 1\n", "utf-8")
        place.dsc("train", "--out", "changed", "--resume")
        assert untimed(place.folder / "changed") == untimed(place.folder / "straight")
        words = ("--resume", "--steps", 7, "-s", "data.validation=20%", "-s", "data.tokenizer=train(299)")
        refused = place.dsc("train", "--out", "changed", *words, code=2)
        assert refused.stderr.count(ENCODED) == 1 and "the tokens of another tokenizer" in refused.stderr
    finally:
        shutil.rmtree(place.folder / "corpus")
        (place.folder / "before").rename(place.folder / "corpus")
    place.compile(ONE_RANK)


def test_runs_at_once_encode_a_text_once(place: Place) -> None:
    """Of two commands that begin together, one encodes; both have the same files, and neither needs the cache."""
    text = (place.folder / "corpus" / "copy.py").read_text("utf-8")
    (place.folder / "two").mkdir()
    lines = "".join(json.dumps({"text": part}) + "\n" for part in text.split("\n\n"))
    (place.folder / "two" / "lines.jsonl").write_text(lines, "utf-8")
    settings = dict(ONE_RANK, source="two/lines.jsonl")
    for name in ("left", "right"):
        (place.folder / f"{name}.dsc").write_text(spec_text(dict(settings, name=name)), "utf-8")
    runs = place.at_once(*(("train", f"{name}.dsc", "--steps", 2) for name in ("left", "right")))
    assert [run.returncode for run in runs] == [0, 0], runs
    assert "".join(run.stderr for run in runs).count(ENCODED) == 1, runs
    left, right = (place.folder / "runs" / name for name in ("left", "right"))
    assert shards(left) == shards(right)
    shutil.rmtree(place.folder / "build" / ".data")
    place.dsc("train", "left.dsc", "--resume", "--steps", 3)


def test_a_cache_elsewhere_and_a_build_from_elsewhere(place: Place, tmp_path: Path) -> None:
    """--cache names the folder; a build outside ./build has no cache beside it."""
    place.dsc("train", "tiny.dsc", "--out", "cached", "--steps", 1, "--cache", tmp_path / "cache")
    (entry,) = (tmp_path / "cache" / "data").glob("*/meta.json")
    assert (entry.parent / "train.bin").stat().st_ino == shards(place.folder / "cached")["train.bin"]
    folder = tmp_path / "else"
    folder.mkdir()
    words = ("train", place.folder / "build" / "tiny", "--data", place.folder, "--steps", 1)
    place.dsc(*words, cwd=folder)
    assert [path.name for path in folder.iterdir()] == ["runs"]


def test_a_held_lock_is_reported_and_can_be_interrupted(place: Place) -> None:
    run = place.folder / "held"
    (run / "data").mkdir(parents=True)
    with (run / "data" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 7, which prepares data for runs/other")
        lock.flush()
        with place.started("train", "tiny.dsc", "--out", run) as running:
            line = f"data: waiting for process 7, which prepares data for runs/other (lock: {run}/data/.lock)\n"
            wait_for(lambda: line in running.stderr(), "what is waited for")
            running.seen()
            running.process.send_signal(signal.SIGINT)
            assert running.ends() == 130
            assert running.stderr() == f"data: find text\n{line}", "said once"


def test_a_failing_tokenizer_gives_a_one_line_error(place: Place) -> None:
    """A tokenizer that panics within the library, on a file whose name has an escape sequence, gives one line."""
    run = place.folder / "panicked"
    (meta,) = (place.folder / "straight" / "data").glob("*/meta.json")
    bpe = Tokenizer.from_file(str(meta.parent / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.save(str(place.folder / "own.json"))
    folder = place.folder / "bad"
    folder.mkdir()
    for name in ("a.txt", "b.txt", "\x1b[2Jc.txt"):
        (folder / name).write_text("x" * 60 if "c" in name else name * 90)
    (place.folder / "bad.dsc").write_text(spec_text(dict(ONE_RANK, name="bad", source="bad/*.txt")), "utf-8")
    words = ("train", "bad.dsc", "--out", run, "-s", 'data.tokenizer="own.json"')
    done = place.dsc(*words, code=2)
    (message,) = (line for line in done.stderr.splitlines() if "error" in line)
    assert message.startswith(
        f"error: {place.folder}/own.json: cannot encode {folder}/\\x1b[2Jc.txt: ".replace(f"{place.folder}/", "")
    )
    assert "panicked" not in done.stderr and "Traceback" not in done.stderr
    os.mkfifo(place.folder / "pipe.json")
    done = place.dsc("train", "bad.dsc", "--out", run, "-s", 'data.tokenizer="pipe.json"', code=2)
    assert done.stderr.endswith("pipe.json: not a regular file\n")


SHORT = """
import "tiny.dsc"
run {name} extends tiny {{
  train {{ sequence = {sequence} }}
  data {{ {data}, tokenizer = train(258) }}
}}
"""
TWO = 'sources { code { files = "corpus/*.py", weight = 9 }, tiny { files = "small/?.txt", weight = 1 } }'
TOO_SHORT = {  # settings, and the splits that are too short for a sample of 66 tokens
    "one": ('source = "small/?.txt"', {"it has to train on", "it has held out"}),
    "held": ('source = "small/*.txt"', {"it has held out"}),
    "blend": (TWO, {"tiny has to train on", "tiny has held out"}),
}


@pytest.mark.parametrize("name", TOO_SHORT)
def test_a_text_shorter_than_a_sample_is_one_error_before_the_first_step(place: Place, name: str) -> None:
    """All splits of all sources that are too short are named at once; `dsc data prepare` warns about the same."""
    data, wanted = TOO_SHORT[name]
    (place.folder / "small").mkdir(exist_ok=True)
    for file, text in (("a", "abc"), ("b", "def"), ("long", "xyz " * 40)):
        (place.folder / "small" / f"{file}.txt").write_text(text)
    path = place.folder / f"{name}.dsc"
    path.write_text(SHORT.format(name=name, sequence=64, data=data), "utf-8")
    write_build(place.folder / "build" / name, compile_spec(load(path, name), segments=place.segments).files)
    warned = place.dsc("data", "prepare", path, "--jobs", 1)
    done = place.dsc("train", path, code=2)
    (message,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    reason = message.removeprefix("error: the text is too short: ")
    short_splits = re.findall(r"(\w+ has) \d tokens ([ a-z]+), and a sample takes 66\b", reason)
    assert {" ".join(words) for words in short_splits} == wanted
    assert f"warning: `dsc train` will refuse this data: the text is too short: {reason}" in warned.stderr
    assert not (place.folder / "runs" / name / "metrics.jsonl").exists()


def test_data_too_short_for_a_later_phase_is_reported_at_the_start(place: Place) -> None:
    """One text of 41 tokens is held out: enough for a sample of 16 tokens, not for one of 64."""
    (place.folder / "many").mkdir()
    for number in range(12):
        (place.folder / "many" / f"{number:02}.txt").write_text("abcd" * 10)
    data = 'source = "many/*.txt", validation = 1%'
    text = SHORT.format(name="growing", sequence=16, data=data).replace("train(258)", "train(257)")
    text = text.rstrip().removesuffix("}") + "  phase last { train { sequence = 64, batch = 2, steps = 1 } }\n}\n"
    path = place.folder / "growing.dsc"
    path.write_text(text, "utf-8")
    write_build(place.folder / "build" / "growing", compile_spec(load(path, "growing"), segments=place.segments).files)
    done = place.dsc("train", path, "--steps", 1)
    message = "a phase of longer sequences cannot validate: the text is too short: it has 41 tokens held out"
    assert f"data: warning: {message}, and a sample takes 66" in done.stdout + done.stderr
