"""`dsc data prepare`: the same bytes for any number of processes and after any kill, which `dsc train` finds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from compiler.cli.commands import data_prepare
from compiler.cli.main import main
from runtime.contract import BlendSource, DataRequest
from runtime.data import encode, pieces, readers, store
from runtime.data.blended import prepare_data, prepare_shared
from runtime.data.files import DataError
from runtime.data.given import GivenTokenizer
from runtime.data.prepare import PreparedFolder
from tests.compiler.cli.forms import parsed
from tests.runtime.data.conftest import CORPUS
from tests.runtime.processes import wait_for

ROOT = Path(__file__).parents[3]
BLEND: dict[str, Any] = {
    "source": None,
    "sources": (BlendSource("flat", "corpus/*.txt", 1), BlendSource("deep", "corpus/deep/*.txt", 2)),
}


def prepared(folder: Path, cache: Path, jobs: int = 1, **data: Any) -> PreparedFolder:
    request = DataRequest(replace(CORPUS, **data), 400, 7)
    return prepare_shared(request, folder, cache, lambda *_: None, lambda _: None, jobs)


def contents(folder: Path) -> dict[str, bytes]:
    """All files, without what meta.json says about the caller."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BATCH_BYTES", 2000)


@pytest.mark.parametrize("data", [{}, BLEND], ids=["one", "blend"])
def test_any_number_of_processes_gives_the_same_bytes(data: Any, spec_folder: Path, tmp_path: Path) -> None:
    wanted = prepared(spec_folder, tmp_path / "one", 1, **data)
    result = prepared(spec_folder, tmp_path / "three", 3, **data)
    assert contents(result.folder) == contents(wanted.folder)
    assert not list((tmp_path / "three").glob(f"{store.PARTS}*"))


@pytest.mark.parametrize("data", [{}, BLEND], ids=["one", "blend"])
def test_a_run_finds_prepared_data(
    data: Any, spec_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepared(spec_folder, tmp_path / "cache", **data)
    for name in ("write_shards", "open_trained_tokenizer", "open_tokenizer", "train_tokenizer"):
        monkeypatch.delattr(encode, name)
    request, messages = DataRequest(replace(CORPUS, **data), 400, 7), list[str]()
    result = prepare_data(
        request, spec_folder, tmp_path / "run", lambda *_: None, messages.append, cache=tmp_path / "cache"
    )
    assert result.reused and result.meta["sha256"] == before.meta["sha256"]
    assert messages == [f"from {tmp_path / 'cache'}, where another run prepared it"]
    assert (result.folder / "tokenizer.json").exists()


@pytest.mark.parametrize("given", [False, True], ids=["trained", "given"])
def test_encoding_resumes_after_stored_batches(
    given: bool, spec_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure after any number of batches, the next call encodes only the missing ones."""
    if given:
        shutil.copy(prepared(spec_folder, tmp_path / "first").folder / "tokenizer.json", spec_folder / "own.json")
    data = {"tokenizer": "own.json"} if given else {}
    wanted = contents(prepared(spec_folder, tmp_path / "whole", **data).folder)
    add, added, limit = pieces.Journal.add, list[int](), [10**9]

    def failing(self: pieces.Journal, content: bytes) -> None:
        if len(added) >= limit[0]:
            raise OSError(28, "No space left on device")
        added.append(1)
        add(self, content)

    monkeypatch.setattr(pieces.Journal, "add", failing)
    prepared(spec_folder, tmp_path / "count", **data)
    total = len(added)
    assert total > 8
    for after in range(1, total, 4):
        cache = tmp_path / f"after{after}"
        added[:], limit[0] = [], after
        with pytest.raises(OSError, match="No space"):
            prepared(spec_folder, cache, 2, **data)
        assert [path.name[:7] for path in cache.iterdir() if not path.name.startswith(".lock")] == [".parts-"]
        added[:], limit[0] = [], 10**9
        assert contents(prepared(spec_folder, cache, **data).folder) == wanted
        assert len(added) == total - after


def test_a_document_that_cannot_be_encoded_is_named_by_any_number_of_processes(
    spec_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(prepared(spec_folder, tmp_path / "first").folder / "tokenizer.json", spec_folder / "own.json")
    ask = GivenTokenizer._ask

    def refusing(self: GivenTokenizer, texts: Sequence[str]) -> Any:
        if any("text05" in text for text in texts):
            self._process.kill()
            self._process.wait()
        return ask(self, list(texts))

    for name in ("text05", "text17"):
        path = next((spec_folder / "corpus").rglob(f"{name}.txt"))
        path.write_text(path.read_text("utf-8") + "text05", "utf-8")
    monkeypatch.setattr(GivenTokenizer, "_ask", refusing)
    messages = set()
    for jobs in (1, 3):
        with pytest.raises(DataError, match=r"own\.json: cannot encode .*deep/text05\.txt") as raised:
            prepared(spec_folder, tmp_path / f"jobs{jobs}", jobs, tokenizer="own.json")
        messages.add(str(raised.value))
    assert len(messages) == 1


# ---------------------------------------------------------------- the command

SPEC = 'data { source = "text/*.jsonl", tokenizer = train(400), validation = 5% }'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spec with 6 MB of lines, six batches."""
    folder = tmp_path_factory.mktemp("prepare")
    before, _, after = (ROOT / "specs/tiny.dsc").read_text("utf-8").partition("  data {")
    (folder / "run.dsc").write_text(before + f"  {SPEC}" + after.partition("}")[2], "utf-8")
    (folder / "text").mkdir()
    lines = (json.dumps({"text": f"number {i} " + f"is {i * i} and {i % 89} " * 200}) for i in range(1500))
    (folder / "text/lines.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


def _command(folder: Path, cache: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "compiler.cli.main", "data", "prepare", str(folder / "run.dsc")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, "--cache", str(cache), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def parts_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in (cache / "data").glob(f"{store.PARTS}*"))


def test_a_killed_command_goes_on(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", str(folder / "run.dsc"), "--cache", str(tmp_path / "whole"), "--jobs", "1"]) == 0
    output = capsys.readouterr().out
    (entry,) = store.folders(tmp_path / "whole/data")
    assert output.splitlines()[-1].endswith(f"tokens in {entry}")
    cache = tmp_path / "killed"
    sizes = []
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        process = _command(folder, cache, "--jobs", "2")
        before = sizes[-1] if sizes else 0

        def has_more(process: subprocess.Popen[bytes] = process, before: int = before) -> bool:
            assert process.poll() is None
            return parts_bytes(cache) > before

        wait_for(has_more, "more parts")
        process.send_signal(number)
        _, stderr = process.communicate()
        assert b"Traceback" not in stderr and process.returncode in (-number, 128 + number)
        sizes.append(parts_bytes(cache))
    assert sizes == sorted(set(sizes))
    done = _command(folder, cache, "--jobs", "2", "--format", "json")
    answer = parsed(done.communicate()[0].decode(), "data_prepare")
    assert contents(Path(answer["folder"])) == contents(entry)
    assert sum(row["documents"] for row in answer["sources"]) == 1500


def test_options_of_the_other_subcommand_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["prepare", "--row", "1"], "`dsc data prepare` takes no --row"),
        (["show", "--jobs", "1"], "`dsc data show` takes no --jobs"),
    ):
        assert main(["data", words[0], str(folder / "run.dsc"), *words[1:]]) == 2
        assert message in capsys.readouterr().err


def megatron_documents(prefix: Path) -> list[list[int]]:
    """The documents in Megatron's files, read as in its indexed_dataset.py: by pointers and the document index."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0" and struct.unpack_from("<Q", index, 9) == (1,)
    code, sequences, count = struct.unpack_from("<BQQ", index, 17)
    dtype = {4: np.int32, 8: np.uint16}[code]
    sizes = np.frombuffer(index, np.int32, sequences, 34)
    pointers = np.frombuffer(index, np.int64, sequences, 34 + sizes.nbytes)
    documents = np.frombuffer(index, np.int64, count, 34 + sizes.nbytes + pointers.nbytes)
    content = Path(f"{prefix}.bin").read_bytes()
    parts = [
        np.frombuffer(content, dtype, n, pointer).tolist() for n, pointer in zip(sizes.tolist(), pointers, strict=True)
    ]
    return [list(chain.from_iterable(parts[a:b])) for a, b in pairwise(documents.tolist())]


def test_megatron_files_hold_the_tokens_of_the_text(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--cache", str(tmp_path / "cache"), "--format", "json"]
    assert main(["data", "prepare", str(folder / "run.dsc"), "--jobs", "1", *words]) == 0
    answer = parsed(capsys.readouterr().out, "data_prepare")
    bpe = Tokenizer.from_file(answer["folder"] + "/tokenizer.json")
    documents = [
        document for split in ("train", "validation") for document in megatron_documents(Path(answer["folder"]) / split)
    ]
    texts = [json.loads(line)["text"] for line in (folder / "text/lines.jsonl").read_text("utf-8").splitlines()]
    assert {ids[-1] for ids in documents} == {bpe.token_to_id("<|endoftext|>")}
    assert sorted(bpe.decode(ids[:-1]) for ids in documents) == sorted(texts)


PHASES = """\
import "specs/tiny.dsc"
run both extends tiny {
  train { batch = 8 }
  data { sources { web { files = "web.txt", weight = 3 }, code { files = "code.txt", weight = 1 } } }
  phase first { train { steps = 60 } }
  phase last { train { steps = 100 }, data { sources { code { weight = 0 } } } }
}
"""


def test_epochs_count_all_phases_and_many_give_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of 8 sequences of 32 tokens, five before the phases: 3 in 4 are from `web`, and all of the last 100. Only
    whole windows are read; a text shorter than a window is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").symlink_to(ROOT / "specs")
    (tmp_path / "both.dsc").write_text(PHASES, "utf-8")
    (tmp_path / "web.txt").write_text("some words of the web, and some more\n" * 100, "utf-8")
    (tmp_path / "code.txt").write_text("\n".join(map(str, range(3000))), "utf-8")
    words = ["data", "prepare", "both.dsc:both", "-s", "train.sequence=32", "-s", "data.validation=0%", "--jobs", "1"]
    assert main([*words, "--format", "json"]) == 0
    captured = capsys.readouterr()
    rows = {row["source"]: row for row in parsed(captured.out, "data_prepare")["sources"] if row["split"] == "train"}
    assert rows["web"]["epochs"] == pytest.approx((65 * 3 / 4 + 100) * 8 / ((rows["web"]["tokens"] - 2) // 32))
    assert rows["code"]["epochs"] == pytest.approx(65 / 4 * 8 / ((rows["code"]["tokens"] - 2) // 32))
    assert rows["code"]["epochs"] < 4 < rows["web"]["epochs"]
    assert (
        f"warning: web is read {rows['web']['epochs']:,.1f} times" in captured.err
        and "code is read" not in captured.err
    )
    assert main(words) == 0
    assert f"{rows['web']['epochs']:.3g}" in capsys.readouterr().out.splitlines()[1].split()
    (tmp_path / "code.txt").write_text("short", "utf-8")
    assert main([*words, "-s", "data.tokenizer=train(258)", "--format", "json"]) == 0
    rows = {row["source"]: row for row in parsed(capsys.readouterr().out, "data_prepare")["sources"]}
    assert rows["code"]["epochs"] is None and rows["web"]["epochs"] > 4


def test_unread_files_are_reported_at_each_start(spec_folder: Path, tmp_path: Path) -> None:
    """For one source and for a blend, with new and with reused data."""
    (spec_folder / "corpus" / "a.html").write_text("text")
    line = "warning: 1 of 25 files of 'corpus' are not read: 1 other suffix (.html)"
    sources = (BlendSource("one", "corpus", 1), BlendSource("two", "corpus/**/*.txt", 1))
    for data in ({"source": "corpus"}, {"source": None, "sources": sources}):
        request = DataRequest(replace(CORPUS, **data), 400, 7)
        for _ in range(2):
            messages: list[str] = []
            prepare_data(request, spec_folder, tmp_path / "run", lambda *_: None, messages.append)
            assert messages.count(line) == 1
            assert sum("files in several sources of the blend: 24, such as " in message for message in messages) == (
                "sources" in data
            )


def test_the_remaining_time_is_estimated_per_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new source begins where progress falls or the total changes; its rate does not include the first source's."""
    now_s = [100.0]
    monkeypatch.setattr(data_prepare, "monotonic", lambda: now_s[0])
    pace = data_prepare.Pace()
    left_s = []
    for time_s, done, total in (
        (100, 0, 80), (110, 20, 80), (120, 40, 80), (140, 80, 80),  # 2 per second
        (150, 0, 80), (151, 40, 80), (152, 80, 80),  # 40 per second
        (200, 90, 900), (202, 100, 900),
    ):  # fmt: skip
        now_s[0] = time_s
        left_s.append(pace.left_s(done, total))
    assert left_s == [None, 30, 20, None, None, 1, None, 0, 16]
