"""A user's `tokenizer.json` in a separate process: `python -P -m runtime.data.given CPU_S DATA_BYTES`.

Such a file can make the tokenizers library misbehave: a pattern may backtrack without end, a normalizer may turn one
letter into a million, and the library panics beyond its limits. So the process has limits on its memory and on the
processor time of each batch, and if it ends, a DataError names the tokenizer and the document.

A chat template is code, too, and is rendered in this process.

Its standard input has a line of JSON: the length of tokenizer.json, the token that ends a document or null, and the
chat settings or null if texts are documents. Then come the bytes of tokenizer.json, and a line for each batch: a JSON
list of texts. Its standard output has a line of JSON for each: first {"json", "sha256", "vocab",
"end_of_document"}, then {"sizes": tokens of each text}, followed by the ids as i32; or {"error": why not}, and its end.
For rows there is {"notices": the fields of Notices} beside the sizes, {"at": its place in the batch} beside the error
of a row that is refused, and a token without loss is ~id (runtime/data/chat.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from runtime.data import tokenizer, tokenizer_files
from runtime.data.chat import EncodedRow, RowEncoder, Settings
from runtime.data.document_encoder import DocumentEncoder
from runtime.data.files import DataError
from runtime.data.prompts import PromptEncoder, place_of
from runtime.data.readers import SourceFile
from runtime.data.shards import Notices
from runtime.data.template_process import marks_assistant
from runtime.system.limits import end_with_parent, limit, memory_limit_message

Ids = npt.NDArray[np.int64]
# Texts → ids of each, and further entries of the answer.
Encode = Callable[[list[str]], tuple[Sequence[Sequence[int] | Ids], dict[str, Any]]]
CPU_S = 60.0  # for a batch, and again for each MiB of it: a hundred times the need of published tokenizers
DATA_BYTES = 4 << 30
DATA_BYTES_PER_BYTE = 128  # of a batch: the library keeps several alignments of each byte
MAX_SHOWN, MAX_REASON = 200, 2000  # characters of a message of the library, and of a reason


class _EndedError(Exception):
    """The process has ended, or has reported an error and will end; the message is the reason. `index`: that of the
    text that caused it, if known."""

    def __init__(self, reason: str, index: int | None = None) -> None:
        super().__init__(reason)
        self.index = index


class _RowError(DataError):
    """A row of a batch is refused."""

    def __init__(self, reason: str, index: int) -> None:
        super().__init__(reason)
        self.index = index


class GivenTokenizer:
    """A tokenizer in a process with limits, as a context manager.

    Entering it raises DataError that names the file if `content` is no tokenizer.json or has no end token.
    """

    facts: dict[str, Any]  # the first answer of the process

    def __init__(self, path: Path, content: bytes, chat: Settings | None = None, threads: int | None = None) -> None:
        """threads: threads of the library in the process; None for one per core."""
        self.path = path
        self._threads = {} if threads is None else {"RAYON_NUM_THREADS": f"{threads}"}
        self._stopped = False
        self.notices = Notices()
        self._content = content
        self._chat = chat
        self._named = (
            tokenizer_files.special_tokens(path).get("eos_token") if chat is None else chat.tokens.get("eos_token")
        )

    def __enter__(self) -> GivenTokenizer:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def encode(self, documents: Sequence[tuple[SourceFile, str]]) -> list[Ids]:
        """Return the token ids of each document. Raises DataError that names the first that cannot be encoded."""
        if self._stopped:
            raise DataError(f"{self.path}: stopped")
        try:
            return self._ask([text for _, text in documents])
        except _EndedError as ended:
            if self._stopped:
                raise DataError(f"{self.path}: stopped") from None
            if len(documents) == 1 or ended.index is not None:
                file, text = documents[ended.index or 0]
                if self._chat is not None:
                    raise DataError(f"{place_of(self._chat, file, text)}: {ended}") from None
                raise DataError(f"{self.path}: cannot encode {file.path}: {ended}") from None
        ids: list[Ids] = []
        for document in documents:  # find the document that fails
            self._end()
            self._start()
            ids += self.encode([document])
        return ids

    def stop(self) -> None:
        """Kill the process. A call in another thread raises DataError."""
        self._stopped = True
        self._process.kill()

    def _start(self) -> None:
        self._errors = os.fdopen(os.memfd_create("errors"), "r+b")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "runtime.data.given", str(CPU_S), str(DATA_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"RUST_BACKTRACE": "0"} | self._threads,
        )
        try:
            head = [len(self._content), self._named, None if self._chat is None else self._chat.to_json()]
            self.facts = self._reply(json.dumps(head).encode() + b"\n" + self._content)
        except _EndedError as ended:
            self._end()
            names_file = self._chat is not None and str(ended).startswith(f"{self._chat.path}:")
            if not names_file and self._chat is not None and self._chat.template is not None:
                marks_assistant(self._chat)  # raises if the template is the cause
            template = self._chat.path if self._chat is not None and self._chat.template is not None else None
            named = f"{self.path}, or its chat template {template}" if template else f"{self.path}"
            raise DataError(f"{ended}" if names_file else f"{named}: {ended}") from None

    def _end(self) -> None:
        """Kill the process, if it has not ended."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # a question was not read
            _pipe(self._process.stdin).close()
        with self._process:  # closes its pipes
            self._errors.close()

    def _ask(self, texts: list[str]) -> list[Ids]:
        answer = self._reply(json.dumps(texts, ensure_ascii=False).encode() + b"\n")
        sizes = answer["sizes"]
        self.notices += Notices(**answer.get("notices", {}))
        stream = _pipe(self._process.stdout)
        content = stream.read(4 * sum(sizes))
        if len(content) < 4 * sum(sizes):
            raise _EndedError(self._reason())
        ids = np.frombuffer(content, "<i4").astype(np.int64)
        return np.split(ids, np.cumsum(sizes)[:-1])

    def _reply(self, question: bytes) -> dict[str, Any]:
        stdin = _pipe(self._process.stdin)
        with contextlib.suppress(BrokenPipeError):  # the process has ended: its last answer is read below
            stdin.write(question)
            stdin.flush()
        line = _pipe(self._process.stdout).readline()
        if not line.endswith(b"\n"):
            raise _EndedError(self._reason())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _EndedError(answer["error"], answer.get("at"))
        return answer

    def _reason(self) -> str:
        """Return why the process has ended."""
        code = self._process.wait()
        errors = os.pread(self._errors.fileno(), 1 << 16, 0).decode("utf-8", "replace")
        if code == -signal.SIGXCPU:
            return f"it takes more than {CPU_S:g} s of processor time"
        if "memory allocation" in errors or code == -signal.SIGKILL:
            return memory_limit_message(DATA_BYTES)
        last = (errors.strip().splitlines() or [""])[-1][:MAX_SHOWN]
        return f"the tokenizers library ended with code {code}{': ' if last else ''}{last}"


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


# ---------------------------------------------------------------- the process


def main(argv: list[str]) -> int:
    cpu_s, data_bytes = float(argv[0]), int(argv[1])
    end_with_parent()
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    length, end, settings = json.loads(stdin.readline())
    try:
        _allow(cpu_s, data_bytes, length)
        bpe = tokenizer.parse(stdin.read(length), end)
        facts = {"json": tokenizer.to_json(bpe), "sha256": tokenizer.digest(bpe), "vocab": tokenizer.size(bpe)}
        facts["end_of_document"] = tokenizer.end_id(bpe, end)
        encode = _documents(bpe) if settings is None else _conversations(bpe, settings)
        _answer(stdout, facts)
        for line in stdin:
            _allow(cpu_s, data_bytes, len(line))
            ids, extra_fields = encode(json.loads(line))
            answer = {"sizes": [len(tokens) for tokens in ids]} | extra_fields
            _answer(stdout, answer, b"".join(np.array(tokens, "<i4").tobytes() for tokens in ids))
    except (KeyboardInterrupt, BrokenPipeError):
        return 1
    except MemoryError:
        _answer(stdout, {"error": memory_limit_message(data_bytes)})
        return 1
    except BaseException as error:  # a Rust panic is no Exception
        text = str(error) if isinstance(error, DataError) else f"the tokenizers library fails: {str(error)[:MAX_SHOWN]}"
        _answer(stdout, {"error": text[:MAX_REASON]} | ({"at": error.index} if isinstance(error, _RowError) else {}))
        return 1
    return 0


def _documents(bpe: Tokenizer) -> Encode:
    encoder = DocumentEncoder(bpe)
    return lambda texts: (encoder.encode(texts), {})


def _conversations(bpe: Tokenizer, settings: dict[str, Any]) -> Encode:
    encoder = (PromptEncoder if settings["prompts"] else RowEncoder)(bpe, settings)

    def encode(texts: list[str]) -> tuple[list[list[int]], dict[str, Any]]:
        rows: list[EncodedRow] = []
        for text in texts:
            try:
                rows += encoder.encode([text])
            except DataError as error:
                raise _RowError(str(error), len(rows)) from None
        notices = Notices(sum(not row.aligned for row in rows), sum(not row.started for row in rows))
        return [row.ids for row in rows], {"notices": asdict(notices)}

    return encode


def _allow(cpu_s: float, data_bytes: int, num_bytes: int) -> None:
    """Set the limits for a batch of `num_bytes`."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    seconds = int(used + cpu_s * (1 + num_bytes / 2**20)) + 1
    limit(resource.RLIMIT_CPU, seconds)
    limit(resource.RLIMIT_DATA, data_bytes + DATA_BYTES_PER_BYTE * num_bytes)


def _answer(stdout: IO[bytes], answer: dict[str, Any], ids: bytes = b"") -> None:
    stdout.write(json.dumps(answer).encode() + b"\n" + ids)
    stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
