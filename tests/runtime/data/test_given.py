"""A user's tokenizer.json is used as it is, and cannot crash this process or exhaust the machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from runtime.data import given, template_process, tokenizer
from runtime.data.chat import Settings
from runtime.data.files import DataError
from runtime.data.given import GivenTokenizer
from runtime.data.prepare import PreparedFolder
from runtime.data.readers import SourceFile
from tests.progress import children

TEXTS = [f"def f{i}(x):\n    return x * {i}  # größer als {i}\n" for i in range(200)]
JSON = tokenizer.to_json(tokenizer.train(TEXTS, 300))
BACKTRACKS = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)


def _documents(*texts: str) -> list[tuple[SourceFile, str]]:
    return [(SourceFile(f"{i}.txt", Path(f"corpus/{i}.txt")), text) for i, text in enumerate(texts)]


def _changed(change: Callable[[Tokenizer], None]) -> bytes:
    bpe = Tokenizer.from_str(JSON)
    change(bpe)
    return bpe.to_str().encode()


def _expanding(factor: int, times: int) -> bytes:
    """A tokenizer whose normalizer turns each `a` into factor^times of them."""
    replace = [normalizers.Replace("a", "a" * factor)] * times
    return _changed(lambda bpe: setattr(bpe, "normalizer", normalizers.Sequence(replace)))


def _refused(content: bytes, *texts: str) -> str:
    before = children(os.getpid())  # children of other tests: workers that stay, and multiprocessing's own
    with pytest.raises(DataError) as error, GivenTokenizer(Path("own.json"), content) as process:
        process.encode(_documents(*texts))
    assert set(children(os.getpid())) <= set(before), "its process has ended"
    return str(error.value)


def test_ids_equal_those_of_the_library_in_any_batches() -> None:
    with GivenTokenizer(Path("own.json"), JSON.encode()) as process:
        assert process.facts["sha256"] == tokenizer.digest(Tokenizer.from_str(JSON)) and process.facts["vocab"] == 300
        for texts in (TEXTS, TEXTS[:1], ["a\u2028b\nc", "", "\x00😀"]):
            encoded = [ids.tolist() for ids in process.encode(_documents(*texts))]
            assert encoded == tokenizer.encode(Tokenizer.from_str(JSON), texts)


def test_a_pattern_that_backtracks_names_tokenizer_and_document(capfd: pytest.CaptureFixture[str]) -> None:
    message = _refused(_changed(lambda bpe: setattr(bpe, "pre_tokenizer", BACKTRACKS)), "good", "x" * 60, "good too")
    assert message.startswith("own.json: cannot encode corpus/1.txt: the tokenizers library fails: ")
    assert capfd.readouterr() == ("", ""), "nothing of the panic of the library"


@pytest.mark.parametrize(("factor", "times"), [(1000, 5), (1 << 20, 1)], ids=["one allocation", "a step at a time"])
def test_a_normalizer_that_expands_is_bounded(monkeypatch: pytest.MonkeyPatch, factor: int, times: int) -> None:
    monkeypatch.setattr(given, "DATA_BYTES", 1 << 28)
    message = _refused(_expanding(factor, times), "good", "a" * 500)
    assert message == "own.json: cannot encode corpus/1.txt: it needs more than 0.25 GiB of memory"


def test_limits_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts the CPU seconds of the process from then on, rounded up."""
    limits: dict[int, int] = {}
    monkeypatch.setattr(given, "limit", limits.__setitem__)
    usage = SimpleNamespace(getrusage=lambda _: (2.5, 0.5, 7), RUSAGE_SELF=0, RLIMIT_CPU=1, RLIMIT_DATA=2)
    monkeypatch.setattr(given, "resource", usage)
    for num_bytes, seconds in ((0, 8), (2**20, 12), (2**19, 10)):
        given._allow(4.0, 1000, num_bytes)
        assert limits == {1: seconds, 2: 1000 + given.DATA_BYTES_PER_BYTE * num_bytes}


def test_processor_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each match scans the rest of the text; none is too slow for the library, but together they take minutes."""
    monkeypatch.setattr(given, "CPU_S", 1.0)
    monkeypatch.setattr(given, "DATA_BYTES", 1 << 40)
    slow = [normalizers.Replace(Regex("b(?=b*d)"), "b")] * 40
    content = _changed(lambda bpe: setattr(bpe, "normalizer", normalizers.Sequence(slow)))
    assert _refused(content, "b" * 60_000 + "d") == (
        "own.json: cannot encode corpus/0.txt: it takes more than 1 s of processor time"
    )


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 9 ** (9 ** 9) }}", "a.jinja: not a chat template: it takes more than 2 s to be compiled"),
        ("{{ 9 ** (messages|length * 190000000) }}", ":1: it takes more than 1 s of processor time"),
        ("{{ ('x' * (messages|length * 9000000000))|length }}", ":1: the chat template fails: MemoryError"),
    ],
    ids=["compiled", "rendered", "large"],
)
def test_a_chat_template_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, said: str) -> None:
    monkeypatch.setattr(given, "CPU_S", 1.0)
    monkeypatch.setattr(template_process, "COMPILE_S", 2.0)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    settings = Settings(template, "a.jinja", {"eos_token": tokenizer.END})
    with pytest.raises(DataError) as raised, GivenTokenizer(Path("own.json"), JSON.encode(), settings) as process:
        process.encode([(SourceFile("rows.jsonl", rows), rows.read_text().strip())])
    assert str(raised.value).endswith(said)


def test_a_row_that_is_refused_is_named_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process reports the row: earlier rows are not encoded again in separate processes."""
    conversation = {"messages": [{"role": "assistant", "content": "a"}]}
    rows = [json.dumps(row) for row in (*[conversation] * 9, {"messages": [{"role": "assistant"}]}, conversation)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows), "utf-8")
    template = "{% for m in messages %}{% generation %}{{ m.content + '!' }}{% endgeneration %}{% endfor %}"
    settings = Settings(template, "a.jinja", {"eos_token": tokenizer.END})
    file = SourceFile("rows.jsonl", path)
    starts: list[int] = []
    start = GivenTokenizer._start
    monkeypatch.setattr(GivenTokenizer, "_start", lambda self: (starts.append(1), start(self)))
    with pytest.raises(DataError) as raised, GivenTokenizer(Path("own.json"), JSON.encode(), settings) as process:
        process.encode([(file, row) for row in rows])
    assert str(raised.value) == f"{path}:10: the chat template fails: 'dict object' has no attribute 'content'"
    assert len(starts) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "not a tokenizer.json: .*utf-8"),
        (b"", "not a tokenizer.json"),
        (b"{}", "not a tokenizer.json"),
        (b"[" * 100_000, "not a tokenizer.json"),
        (JSON.replace(tokenizer.END, "<end>").encode(), "none of <.endoftext.>"),
        (json.dumps(json.loads(JSON) | {"model": "\x1b[2J"}).encode(), "not a tokenizer.json"),
    ],
)
def test_an_invalid_tokenizer_is_refused_by_name(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"own\.json: {message}") as error, GivenTokenizer(Path("own.json"), content):
        pass
    assert str(error.value).isprintable()


def test_unreadable_tokenizers_are_refused_by_name(
    prepared: Callable[..., PreparedFolder], spec_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(spec_folder / "pipe.json")
    (spec_folder / "folder.json").mkdir()
    (spec_folder / "large.json").write_bytes(b"x" * 1001)
    monkeypatch.setattr(tokenizer, "MAX_FILE_BYTES", 1000)
    for name, message in (
        ("pipe", "not a regular file"),
        ("folder", "not a regular file"),
        ("none", "no tokenizer can be read: No such file"),
        ("large", "larger than"),
    ):
        with pytest.raises(DataError, match=rf"{name}\.json: {message}"):
            prepared(tokenizer=f"{name}.json")


def test_a_failure_leaves_nothing_behind(
    prepared: Callable[..., PreparedFolder], spec_folder: Path, tmp_path: Path
) -> None:
    (spec_folder / "own.json").write_bytes(_changed(lambda bpe: setattr(bpe, "pre_tokenizer", BACKTRACKS)))
    (spec_folder / "corpus" / "bad.txt").write_text("x" * 60)
    with pytest.raises(DataError, match=r"own\.json: cannot encode .*corpus/bad\.txt: the tokenizers library fails"):
        prepared(tokenizer="own.json")
    assert [path.name for path in (tmp_path / "data").iterdir()] == [".lock"]
