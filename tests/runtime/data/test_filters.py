"""Filters of documents: filtered data equals data prepared from only the passing documents, however it is made."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compiler.cli.main import main
from runtime.contract import BlendSource, DataRecipe, DataRequest, FiltersRecipe, TrainedTokenizer
from runtime.data import filters, pieces, readers, store
from runtime.data.blended import prepare_data, prepare_shared
from runtime.data.files import DataError
from runtime.data.filters import KEPT, NAMES
from runtime.data.prepare import PreparedFolder
from runtime.data.shards import ShardReader
from tests.compiler.cli.forms import parsed
from tests.runtime.data import megatron
from tests.runtime.processes import wait_for

ROOT = Path(__file__).parents[3]

ALL = FiltersRecipe(shortest=40, longest=2000, quality="gopher", duplicates="near")
PART = 50  # documents of the first file
SHARDS = ("train.bin", "train.idx", "validation.bin", "validation.idx", "tokenizer.json")


def sentence(draw: random.Random, count: int) -> str:
    return " ".join("".join(draw.choices("abcdefghij", k=draw.randint(3, 8))) for _ in range(count))


def corpus() -> Iterator[tuple[str, str]]:
    """(document, name of the filter of ALL that removes it, or "")."""
    draw = random.Random(4)
    for number in range(30):
        text = sentence(draw, 120)
        yield "", text
        yield "near", f"{text} {sentence(draw, 2)}"
        if number % 3 == 0:
            yield "exact", text.replace(" ", "\n", 5)
        if number % 5 == 0:
            yield "shortest", text[:39]
            yield "longest", sentence(draw, 400)
        if number % 6 == 0:
            yield "words", sentence(draw, 49)
            yield "words", sentence(draw, 49)
        if number % 10 == 0:
            yield "letters", f"{sentence(draw, 75)} {' '.join(map(str, range(10_000, 10_020)))}"
    # A document that an earlier filter removed is not the original of a duplicate.
    yield "words", sentence(random.Random(5), 30)
    yield "words", sentence(random.Random(5), 30)


def write(folder: Path, name: str, texts: Sequence[str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")


@pytest.fixture(scope="module")
def spec_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `all/`, the corpus in two files, and `passed/`, its documents that pass."""
    folder = tmp_path_factory.mktemp("filters")
    documents = [*corpus()]
    for name, part in (("one", documents[:PART]), ("two", documents[PART:])):
        write(folder / "all", name, [text for _, text in part])
        write(folder / "passed", name, [text for fate, text in part if not fate])
    return folder


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BATCH_BYTES", 9000)


def request(source: str = "all/*.jsonl", chosen: FiltersRecipe | None = ALL, **data: Any) -> DataRequest:
    values = DataRecipe(source, TrainedTokenizer(300), 0.2, filters=chosen)
    return DataRequest(replace(values, **data), 400, 7)


def shared(folder: Path, cache: Path, jobs: int = 1, asked: DataRequest | None = None) -> PreparedFolder:
    return prepare_shared(asked or request(), folder, cache, lambda *_: None, lambda _: None, jobs)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tokens(prepared: PreparedFolder) -> dict[str, bytes]:
    """The contents of the shards of a folder, by name."""
    files = contents(prepared.folder).items()
    return {name: content for name, content in files if name.endswith(SHARDS[:4])}


FATES = [fate for fate, _ in corpus()]
FACTS = {
    "documents": len(FATES),
    "kept": FATES.count(""),
    "left_out": {name: FATES.count(name) for name in NAMES if name in FATES},
}


def test_exactly_the_passing_documents_are_prepared(spec_folder: Path, tmp_path: Path) -> None:
    """All documents, the tokenizer, and the split of each document."""
    filtered = shared(spec_folder, tmp_path / "a")
    wanted = shared(spec_folder, tmp_path / "b", asked=request("passed/*.jsonl", None))
    for name in SHARDS:
        assert (filtered.folder / name).read_bytes() == (wanted.folder / name).read_bytes(), name
    assert filtered.meta["splits"] == wanted.meta["splits"] and filtered.meta["held_out"] != []
    assert filtered.meta["filters"] == {"": FACTS}
    head, _, content = (filtered.folder / filters.FILE).read_bytes().partition(b"\n")
    assert json.loads(head)["sizes"] == [PART, len(FATES) - PART]
    assert ["" if fate == KEPT else NAMES[fate - 1] for fate in content] == FATES
    assert "filters" not in wanted.meta and not (wanted.folder / filters.FILE).exists()


def test_no_duplicate_of_a_held_out_document_is_trained_on(spec_folder: Path, tmp_path: Path) -> None:
    words: dict[str, list[set[tuple[int, ...]]]] = {}
    filtered = shared(spec_folder, tmp_path)
    for split in ("train", "validation"):
        reader = ShardReader(filtered.folder / split)
        documents = [reader.document(index).tolist() for index in range(reader.num_documents)]
        words[split] = [
            {tuple(document[first : first + 8]) for first in range(len(document) - 8)} for document in documents
        ]
    shares = [
        len(trained & held_out) / len(trained | held_out)
        for trained in words["train"]
        for held_out in words["validation"]
    ]
    assert words["validation"] and max(shares) < 0.1


@pytest.mark.parametrize(
    "chosen", [ALL, FiltersRecipe(shortest=200, duplicates="exact"), FiltersRecipe(quality="gopher")]
)
def test_any_number_of_processes_gives_the_same_bytes(spec_folder: Path, tmp_path: Path, chosen: FiltersRecipe) -> None:
    data_request = request(chosen=chosen)
    wanted = contents(shared(spec_folder, tmp_path / "1", 1, data_request).folder)
    for jobs in (2, 3) if chosen == ALL else (2,):
        assert contents(shared(spec_folder, tmp_path / f"{jobs}", jobs, data_request).folder) == wanted


def test_filtering_resumes_after_stored_results(
    spec_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure in the filters or after them, the next call computes only the missing results."""
    add, added, limit = pieces.Journal.add, list[int](), [10**9]

    def failing(self: pieces.Journal, content: bytes) -> None:
        if len(added) >= limit[0]:
            raise OSError(28, "No space left on device")
        added.append(1)
        add(self, content)

    monkeypatch.setattr(pieces.Journal, "add", failing)
    wanted = contents(shared(spec_folder, tmp_path / "whole").folder)
    total = len(added)
    assert total > 10
    for after in (2, total - 2):
        cache = tmp_path / f"after{after}"
        added[:], limit[0] = [], after
        with pytest.raises(OSError, match="No space"):
            shared(spec_folder, cache, 2)
        added[:], limit[0] = [], 10**9
        assert contents(shared(spec_folder, cache).folder) == wanted
        assert len(added) == total - after
        assert not [*cache.glob(f"{store.PARTS}*"), *cache.glob(f"{store.BUILDING}*")]


def test_a_run_finds_prepared_data_or_makes_the_same(spec_folder: Path, tmp_path: Path) -> None:
    before, messages = shared(spec_folder, tmp_path / "cache", 2), list[str]()

    def run(name: str, cache: Path | None) -> PreparedFolder:
        target = tmp_path / name
        return prepare_data(request(), spec_folder, target, lambda *_: None, messages.append, cache=cache)

    cached = run("found", tmp_path / "cache")
    assert cached.reused and messages == [f"from {tmp_path / 'cache'}, where another run prepared it"]
    alone, anew = run("alone", None), run("other", tmp_path / "new")
    assert messages[1:] == [filters.summary_line(before.meta["filters"][""])] * 2
    for data in (cached, alone, anew):
        assert data.meta["sha256"] == before.meta["sha256"]
        names = contents(before.folder).keys() - {"meta.json"}
        assert {name: contents(data.folder)[name] for name in names} == {
            name: contents(before.folder)[name] for name in names
        }


def test_a_resume_needs_no_text_for_the_same_filters(spec_folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "all", "one", [text for _, text in corpus()][:40])

    def run(chosen: FiltersRecipe, *resumed: str) -> PreparedFolder:
        data_request = request(chosen=chosen)
        return prepare_data(data_request, tmp_path, tmp_path / "run", lambda *_: None, resumed=resumed)

    first = run(ALL)
    changed = run(replace(ALL, shortest=None), first.meta["sha256"])
    assert not changed.reused and changed.folder != first.folder
    (tmp_path / "all/one.jsonl").unlink()
    assert run(ALL, first.meta["sha256"]).folder == first.folder
    with pytest.raises(DataError, match=r"no .*file found"):
        run(FiltersRecipe(shortest=40), first.meta["sha256"])


def test_filters_are_a_part_of_the_key(spec_folder: Path, tmp_path: Path) -> None:
    recipes = [
        None,
        FiltersRecipe(),
        replace(ALL, shortest=41),
        replace(ALL, longest=1999),
        replace(ALL, quality=None),
        replace(ALL, duplicates="exact"),
        replace(ALL, similarity=0.7),
    ]
    folders = [shared(spec_folder, tmp_path, asked=request(chosen=recipe)).folder for recipe in (ALL, *recipes)]
    assert len({*folders}) == len(folders)
    assert shared(spec_folder, tmp_path).reused


def test_a_text_is_filtered_once(spec_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tokenizer, share or seed uses the stored results. A damaged result is computed again."""
    first = shared(spec_folder, tmp_path)
    wanted = contents(shared(spec_folder, tmp_path / "other", asked=request(tokenizer=TrainedTokenizer(290))).folder)
    judge_batch, calls = filters.judge_batch, list[int]()
    monkeypatch.setattr(filters, "judge_batch", lambda *args: calls.append(1) or judge_batch(*args))
    (spec_folder / "own.json").write_bytes((first.folder / "tokenizer.json").read_bytes())
    for data in ({"tokenizer": "own.json"}, {"validation": 0.3}, {"tokenizer": TrainedTokenizer(290)}):
        result = shared(spec_folder, tmp_path, asked=request(**data))
        assert not result.reused and result.meta["filters"] == first.meta["filters"]
    assert not calls and contents(result.folder) == wanted
    (stored,) = tmp_path.glob(f"{filters.FATES_PREFIX}*")
    content = stored.read_bytes()
    for number, damaged in enumerate((b"{}\n", content[:-1], content[:-1] + b"\1", content.replace(b"50", b"51", 1))):
        stored.write_bytes(damaged)
        stored.with_name(stored.name.replace(filters.FATES_PREFIX, store.BUILDING)).write_bytes(
            content[:9]
        )  # left by a process that died
        calls[:] = []
        again = shared(spec_folder, tmp_path, asked=replace(request(tokenizer=TrainedTokenizer(270 + number))))
        assert calls and again.meta["filters"] == first.meta["filters"] and stored.read_bytes() == content


BLEND: dict[str, Any] = {
    "source": None,
    "filters": None,
    "sources": (
        BlendSource("web", "all/*.jsonl", 2, filters=ALL),
        BlendSource("again", "all/*.jsonl", 1, filters=FiltersRecipe(duplicates="exact")),
        BlendSource("plain", "passed/*.jsonl", 1),
    ),
}


def test_sources_of_a_blend_have_filters_of_their_own(spec_folder: Path, tmp_path: Path) -> None:
    """The tokens are those of sources with only the documents that pass."""
    seen, exact = set[str](), list[str]()
    for _, text in corpus():
        if " ".join(text.split()) not in seen:
            exact.append(text)
        seen.add(" ".join(text.split()))
    write(spec_folder / "exact", "one", exact)
    blended = shared(spec_folder, tmp_path / "a", 1, request(**BLEND))
    facts = {"documents": len(FATES), "kept": len(exact), "left_out": {"exact": len(FATES) - len(exact)}}
    assert blended.meta["filters"] == {"web": FACTS, "again": facts}
    messages = list[str]()
    run = prepare_data(request(**BLEND), spec_folder, tmp_path / "run", lambda *_: None, messages.append)
    assert messages[0].startswith("warning: files in several sources of the blend: 2, such as ")
    assert messages[1:] == [f"web: {filters.summary_line(FACTS)}", f"again: {filters.summary_line(facts)}"]
    assert tokens(run) == tokens(blended)
    sources = (BlendSource("web", "passed/*.jsonl", 1), BlendSource("again", "exact/*.jsonl", 1), BLEND["sources"][2])
    (spec_folder / "own.json").write_bytes((blended.folder / "tokenizer.json").read_bytes())
    named = {"tokenizer": "own.json"}
    wanted = shared(spec_folder, tmp_path / "b", asked=request(**BLEND | {"sources": sources} | named))
    blended = shared(spec_folder, tmp_path / "a", asked=request(**BLEND | named))
    assert tokens(blended) == tokens(wanted) and len(tokens(blended)) == 3 * 4


def test_nothing_passes(spec_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"one\.jsonl: nothing is left to train on: 0 of \d+ documents pass"):
        shared(spec_folder, tmp_path, asked=request(chosen=FiltersRecipe(shortest=10**7)))
    recipe = FiltersRecipe(shortest=2000, longest=2400, duplicates="near", similarity=0.5)
    write(spec_folder / "single", "one", ["a" * 100, "b" * 100, "c" * 2200])
    with pytest.raises(DataError, match="a single document cannot be divided"):
        shared(spec_folder, tmp_path, asked=request("single/*.jsonl", recipe))


def test_token_ids_have_no_text(tmp_path: Path) -> None:
    megatron.write(tmp_path / "ids", [[[1, 2, 3, 0]], [[4, 5, 0]]])
    with pytest.raises(DataError, match="data source 'ids': token ids have no text to filter: remove `filters`"):
        shared(tmp_path, tmp_path / "out", asked=request("ids", ALL, tokenizer=None, end_id=0))


def test_a_process_that_ends_is_named(spec_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send = filters._JudgeProcess._send

    def ended(self: filters._JudgeProcess, value: Any) -> None:
        if isinstance(value, list):
            self._process.kill()
            self._process.wait()
        send(self, value)

    monkeypatch.setattr(filters._JudgeProcess, "_send", ended)
    with pytest.raises(DataError, match=r"one\.jsonl: a process that filters its documents was killed by SIGKILL"):
        shared(spec_folder, tmp_path, 2)


def test_a_process_answers_each_question_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # it would make flushing unnecessary
    file: Any = SimpleNamespace(path=Path("one.jsonl"))
    texts = [text for _, text in corpus()]
    with filters._JudgeProcess(ALL) as judge:
        for batch in (texts[:3], texts[3:9]):
            assert judge.ask([(file, text) for text in batch]) == filters.judge_batch(ALL, batch)


def test_results_are_read_as_they_were_written() -> None:
    texts = [*(text for _, text in corpus()), "", "…"][-20:]
    for chosen in (ALL, replace(ALL, duplicates="exact"), FiltersRecipe(shortest=50), FiltersRecipe(duplicates="near")):
        content = filters.judge_batch(chosen, texts)
        judged = filters.BatchJudgement.from_bytes(content)
        assert judged.to_bytes() == content and len(judged.fates) == len(texts)
        assert len(judged.digests) == (np.count_nonzero(judged.fates == KEPT) if chosen.duplicates else 0)
        assert len(judged.signatures) == (len(judged.digests) if chosen.duplicates == "near" else 0)
    assert filters.BatchJudgement.from_bytes(filters.judge_batch(ALL, [])).fates.size == 0


# ---------------------------------------------------------------- the command

DATA = """
  data {
    source = "text/*.jsonl", tokenizer = train(300), validation = 5%
    filters { shortest = 100, quality = gopher, duplicates = near, similarity = 0.7 }
  }"""


def test_a_killed_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a SIGKILL while documents are filtered, the same command gives the result of an uninterrupted one."""
    monkeypatch.setattr(readers, "BATCH_BYTES", 1 << 20)  # as in the process that is killed
    before, _, after = (ROOT / "specs/tiny.dsc").read_text("utf-8").partition("\n  data {")
    (tmp_path / "run.dsc").write_text(before + DATA + after.partition("}")[2], "utf-8")
    draw = random.Random(8)
    words = sentence(draw, 2000).split()
    texts = [" ".join(draw.choices(words, k=300)) for _ in range(1200)]
    write(tmp_path / "text", "lines", [*texts, *(f"{text} again" for text in texts[:7]), "short"])
    command = ["data", "prepare", str(tmp_path / "run.dsc"), "--cache"]

    def parts() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "killed/data").glob(f"{store.PARTS}*"))

    called = [sys.executable, "-P", "-m", "compiler.cli.main", *command, str(tmp_path / "killed"), "--jobs", "2"]
    process = subprocess.Popen(called, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})

    def has_parts() -> bool:
        assert process.poll() is None
        return parts() >= 10_000

    wait_for(has_parts, "parts")
    process.kill()
    process.communicate()
    assert parts() and not [*(tmp_path / "killed/data").glob(f"{filters.FATES_PREFIX}*")]
    answers, judge_batch, calls = [], filters.judge_batch, list[int]()
    monkeypatch.setattr(filters, "judge_batch", lambda *args: calls.append(len(answers)) or judge_batch(*args))
    for cache in ("killed", "whole"):
        assert main([*command, str(tmp_path / cache), "--jobs", "1", "--format", "json"]) == 0
        answers.append(parsed(capsys.readouterr().out, "data_prepare"))
    assert calls.count(0) < calls.count(1) == 3
    facts = {"documents": 1208, "kept": 1200, "left_out": {"shortest": 1, "exact": 0, "near": 7}}
    assert [answer["filters"] for answer in answers] == [[{"source": "text/*.jsonl", **facts}]] * 2
    resumed, uninterrupted = (contents(Path(answer["folder"])) for answer in answers)
    assert resumed == uninterrupted
    assert main([*command, str(tmp_path / "killed")]) == 0
    assert filters.summary_line(facts) in capsys.readouterr().out.splitlines()
