"""Preparation: meta.json is right, and the result is the same everywhere, reused if intact, and made once."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.contract import DataRecipe, DataRequest, TrainedTokenizer
from runtime.data import tokenizer
from runtime.data.corpus import SourceFile, find
from runtime.data.encode import split
from runtime.data.files import DataError
from runtime.data.prepare import PreparedFolder, prepare
from runtime.data.readers import documents
from runtime.data.samples import Samples
from runtime.data.shards import ShardReader

Prepare = Callable[..., PreparedFolder]
ROOT = Path(__file__).parents[3]
# argv: out folder, spec folder. Prints the key and whether the data was reused.
SCRIPT = """
import sys
from pathlib import Path
from runtime.contract import DataRecipe, DataRequest, TrainedTokenizer
from runtime.data.prepare import prepare
request = DataRequest(DataRecipe("corpus/**/*.txt", TrainedTokenizer(320), 0.2), 400, 7)
found = prepare(request, Path(sys.argv[2]), Path(sys.argv[1]), lambda phase, done, total: None)
print(found.folder.name, found.reused)
"""


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _sides(spec_folder: Path) -> tuple[list[SourceFile], list[SourceFile]]:
    """The training files and the held-out files, by default."""
    files = find("corpus/**/*.txt", spec_folder).files
    divided = split(files, 0.2, 7)
    validation = [file for file in files if divided.is_held(file, "")]
    return [file for file in files if file not in validation], validation


def _process(out: Path, spec_folder: Path, hash_seed: str, cwd: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed, "LC_ALL": "C"}
    command = [sys.executable, "-c", SCRIPT, str(out), str(spec_folder)]
    return subprocess.Popen(command, env=environment, cwd=cwd, stdout=subprocess.PIPE, text=True)


def test_shards_hold_the_documents_of_their_split(prepared: Prepare, spec_folder: Path) -> None:
    data = prepared()
    bpe = tokenizer.parse(tokenizer.read(data.folder / "tokenizer.json"))
    train, validation = _sides(spec_folder)
    end = data.meta["tokenizer"]["end_of_document"]
    for name, files in (("train", train), ("validation", validation)):
        reader = ShardReader(data.folder / name)
        texts = [text for file in files for text in documents(file)]
        rows = [reader.document(i).tolist() for i in range(reader.num_documents)]
        assert all(row[-1] == end and end not in row[:-1] for row in rows)
        assert [tokenizer.decode(bpe, row[:-1]) for row in rows] == texts
        assert data.meta["splits"][name] == {
            "files": len(files),
            "documents": len(texts),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": sum(map(len, rows)),
        }
    assert data.meta["held_out"] == [file.name for file in validation]
    assert data.meta["tokenizer"]["sha256"] == tokenizer.digest(bpe)
    assert data.meta["tokenizer"]["vocab"] == 320


def test_the_tokenizer_sees_training_files_only(prepared: Prepare, spec_folder: Path) -> None:
    train, validation = _sides(spec_folder)
    texts = [text for file in train for text in documents(file)]
    assert (prepared().folder / "tokenizer.json").read_text("utf-8") == tokenizer.to_json(tokenizer.train(texts, 320))
    validation[0].path.write_text("quux " * 4000, encoding="utf-8")
    texts_changed = (prepared().folder / "tokenizer.json").read_text("utf-8")
    assert texts_changed == tokenizer.to_json(tokenizer.train(texts, 320))


def test_unigram_against_brute_force(prepared: Prepare) -> None:
    data = prepared()
    train, validation = (ShardReader(data.folder / name) for name in ("train", "validation"))
    counts = Counter(train.tokens(0, train.num_tokens).tolist())
    logs = [
        math.log((counts[token] + 1) / (train.num_tokens + 320))
        for token in validation.tokens(0, validation.num_tokens).tolist()
    ]
    assert abs(data.meta["unigram_nats"] + math.fsum(logs) / len(logs)) < 1e-12
    assert 1 < data.meta["unigram_nats"] < math.log(320)


def test_nothing_held_out(prepared: Prepare) -> None:
    data = prepared(validation=0)
    assert data.meta["unigram_nats"] is None and data.meta["splits"]["validation"]["tokens"] == 0
    assert Samples(data.folder, "train", 16, seed=1).num_windows > 0
    with pytest.raises(DataError, match="0 validation tokens"):
        Samples(data.folder, "validation", 16, seed=1)


def test_a_given_tokenizer(prepared: Prepare, spec_folder: Path) -> None:
    (spec_folder / "given.json").write_bytes((prepared().folder / "tokenizer.json").read_bytes())
    data = prepared(tokenizer="given.json")
    assert data.folder != prepared().folder
    trained, from_file = _bytes(prepared().folder), _bytes(data.folder)
    assert {name for name in trained if trained[name] != from_file[name]} == {"meta.json"}, "it says what was asked for"
    assert data.meta["sha256"] == prepared().meta["sha256"]


def test_files_beside_a_tokenizer_are_copied_with_it(prepared: Prepare, spec_folder: Path) -> None:
    """tokenizer_config.json names the end token of documents; a run keeps it, and another config gives another key."""
    bpe = tokenizer.parse((prepared().folder / "tokenizer.json").read_bytes())
    bpe.add_special_tokens(["<eos>"])
    (spec_folder / "model").mkdir()
    (spec_folder / "model/tokenizer.json").write_text(tokenizer.to_json(bpe), "utf-8")
    config = spec_folder / "model/tokenizer_config.json"
    plain = prepared(tokenizer="model/tokenizer.json")
    config.write_text(json.dumps({"eos_token": {"content": "<eos>"}}), "utf-8")
    configured = prepared(tokenizer="model/tokenizer.json")
    for data, token in ((plain, tokenizer.END), (configured, "<eos>")):
        end = bpe.token_to_id(token)
        reader = ShardReader(data.folder / "train")
        assert data.meta["tokenizer"]["end_of_document"] == end
        assert all(reader.document(i)[-1] == end for i in range(reader.num_documents))
    assert (configured.folder / config.name).read_text("utf-8") == config.read_text("utf-8")
    assert not (plain.folder / config.name).exists() and plain.folder.name != configured.folder.name
    again = prepared(tokenizer="model/tokenizer.json", validation=0.4)  # another split: nothing is encoded
    assert (again.folder / config.name).read_bytes() == config.read_bytes()
    assert again.meta["tokenizer"] == configured.meta["tokenizer"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"eos_token": "<oes>"}', "<oes>, which tokenizer_config.json has as eos_token, is not in the vocabulary"),
        ("{", "tokenizer_config.json: not JSON"),
        ("[]", "tokenizer_config.json: expected an object"),
    ],
)
def test_a_config_that_cannot_be_used(prepared: Prepare, spec_folder: Path, config: str, message: str) -> None:
    (spec_folder / "tokenizer.json").write_bytes((prepared().folder / "tokenizer.json").read_bytes())
    (spec_folder / "tokenizer_config.json").write_text(config, "utf-8")
    with pytest.raises(DataError, match=re.escape(message)):
        prepared(tokenizer="tokenizer.json")


def test_the_key_follows_every_input(prepared: Prepare, spec_folder: Path) -> None:
    keys = {prepared().folder.name, prepared(seed=8).folder.name, prepared(validation=0.3).folder.name}
    keys |= {prepared(tokenizer=TrainedTokenizer(321)).folder.name, prepared(source="corpus/*.txt").folder.name}
    (spec_folder / "corpus/text00.txt").write_text("changed " * 50)
    keys.add(prepared().folder.name)
    assert len(keys) == 6
    assert prepared(vocab=5000).reused  # the model's vocabulary changes nothing


def test_reused_when_intact_and_made_again_when_not(prepared: Prepare) -> None:
    first = prepared()
    wanted = _bytes(first.folder)
    assert not first.reused and prepared().reused
    for name in wanted:
        for content in (wanted[name][:-1], b"", wanted[name][:-1] + bytes([wanted[name][-1] ^ 1]), None):
            (first.folder / name).unlink()
            if content is not None:
                (first.folder / name).write_bytes(content)
            again = prepared()
            assert not again.reused, (name, content)
            assert _bytes(again.folder) == wanted
    (first.folder / "more").write_bytes(b"")
    assert not prepared().reused and _bytes(first.folder) == wanted
    (first.folder / "meta.json").write_text(json.dumps([1]))
    assert not prepared().reused and _bytes(first.folder) == wanted


def test_a_link_in_place_of_the_result_is_not_written_through(prepared: Prepare, tmp_path: Path) -> None:
    folder = prepared().folder
    (tmp_path / "elsewhere").mkdir()
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="a symbolic link where prepared data belongs"):
        prepared()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    lock = folder.parent / ".lock"
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere/lock")
    with pytest.raises(OSError, match="symbolic links"):
        prepared()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_failed_or_killed_build_leaves_nothing_behind(prepared: Prepare, spec_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "data"
    (spec_folder / "corpus/zbad.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"zbad\.jsonl:1"):
        prepared(source="corpus/*")
    assert [path.name for path in target.iterdir()] == [".lock"]
    (target / ".building-0123").mkdir()
    (target / ".building-0123/train.bin").write_bytes(b"half")
    folder = prepared().folder
    assert sorted(path.name for path in target.iterdir()) == [".lock", folder.name]


def test_same_bytes_under_other_hash_seeds_folders_and_locales(
    prepared: Prepare, spec_folder: Path, tmp_path: Path
) -> None:
    wanted = prepared(tmp_path / "here").folder
    for hash_seed, cwd in (("1", tmp_path), ("77", spec_folder)):
        target = tmp_path / f"out{hash_seed}"
        assert _process(target, spec_folder, hash_seed, cwd).communicate()[0].split() == [wanted.name, "False"]
        assert _bytes(target / wanted.name) == _bytes(wanted)


def test_processes_at_the_same_time_make_it_once(spec_folder: Path, tmp_path: Path) -> None:
    processes = [_process(tmp_path / "data", spec_folder, str(i), tmp_path) for i in range(4)]
    printed = [process.communicate()[0].split() for process in processes]
    assert sorted(reused for _, reused in printed) == ["False", "True", "True", "True"]
    assert len({key for key, _ in printed}) == 1


def test_progress_reaches_its_end_in_every_phase(spec_folder: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    request = DataRequest(DataRecipe("corpus/*.txt", TrainedTokenizer(300), 0.2), 300, 1)
    prepare(request, spec_folder, tmp_path / "data", lambda *call: calls.append(call))
    for phase in ("read", "tokenizer", "encode"):
        done = [(done, total) for name, done, total in calls if name == phase]
        assert done[-1][0] == done[-1][1] > 0 and done == sorted(done)


def test_the_standard_library(tmp_path: Path) -> None:
    """The quickstart's whole corpus: 3.5M tokens on CPython 3.11."""
    request = DataRequest(DataRecipe("python_stdlib", TrainedTokenizer(4096), 0.05), 4096, 1)
    data = prepare(request, tmp_path / "unused", tmp_path / "data", lambda *call: None)
    meta = data.meta
    assert meta["tokenizer"]["vocab"] == 4096
    assert meta["splits"]["train"]["tokens"] > 2_000_000 and meta["splits"]["validation"]["tokens"] > 30_000
    assert all(name.endswith(".py") and "site-packages" not in name for name in meta["held_out"])
    assert 5 < meta["unigram_nats"] < math.log(4096)
    assert meta["splits"]["train"]["bytes"] > 2.5 * meta["splits"]["train"]["tokens"]
    bpe = tokenizer.parse(tokenizer.read(data.folder / "tokenizer.json"))
    text = Path(os.__file__).read_text("utf-8")
    assert tokenizer.decode(bpe, tokenizer.encode(bpe, [text])[0]) == text
    samples = Samples(data.folder, "train", 128, seed=1)
    assert "def " in "".join(tokenizer.decode(bpe, samples.tokens(i).tolist()) for i in range(20))
