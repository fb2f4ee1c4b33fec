"""A user's `tokenizer.json`, in a process of its own: `python -P -m runtime.data.given CPU_S DATA_BYTES`.

What such a file asks of the tokenizers library is code: a pattern may backtrack without end, a normalizer may make one
letter a million, and the library panics where its limits are passed. So the process has limits on its memory and on the
processor time of each batch, and what ends it becomes a DataError that names the tokenizer and the document.

Its standard input has the length of tokenizer.json in a line, its bytes, then a line for each batch: a JSON list of
texts. Its standard output has a line of JSON for each: first {"json", "sha256", "vocab", "end_of_document"}, then
{"sizes": tokens of each text}, followed by the ids as u32; or {"error": why not}, and its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from runtime.data import tokenizer
from runtime.data.corpus import SourceFile
from runtime.data.errors import DataError
from runtime.data.words import Encoder

Ids = npt.NDArray[np.int64]
CPU_S = 60.0  # for a batch, and again for each MiB of it: a hundred times what published tokenizers take
DATA_BYTES = 4 << 30
DATA_BYTES_PER_BYTE = 128  # of a batch: the library keeps several alignments of each byte
MAX_SHOWN = 200  # characters of what the library says


class _EndedError(Exception):
    """The process has ended, or has said that it cannot go on; the message is the reason."""


class Given:
    """A tokenizer in a process with limits, as a context manager.

    Entering it raises DataError, naming the file, if `content` is no tokenizer.json or no token of it ends a document.
    """

    facts: dict[str, Any]  # what the process says first

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self._content = content

    def __enter__(self) -> Given:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def encode(self, documents: Sequence[tuple[SourceFile, str]]) -> list[Ids]:
        """Token ids of each document. Raises DataError that names the first that cannot be encoded."""
        try:
            return self._ask([text for _, text in documents])
        except _EndedError as ended:
            if len(documents) == 1:
                raise DataError(f"{self.path}: cannot encode {documents[0][0].path}: {ended}") from None
        ids: list[Ids] = []
        for document in documents:  # which of them it is
            self._end()
            self._start()
            ids += self.encode([document])
        return ids

    def _start(self) -> None:
        self._errors = os.fdopen(os.memfd_create("errors"), "r+b")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "runtime.data.given", str(CPU_S), str(DATA_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"RUST_BACKTRACE": "0"},
        )
        try:
            self.facts = self._reply(f"{len(self._content)}\n".encode() + self._content)
        except _EndedError as ended:
            self._end()
            raise DataError(f"{self.path}: {ended}") from None

    def _end(self) -> None:
        """Ends the process, if it has not ended."""
        self._process.kill()
        with self._process:  # closes its pipes
            self._errors.close()

    def _ask(self, texts: list[str]) -> list[Ids]:
        sizes = self._reply(json.dumps(texts, ensure_ascii=False).encode() + b"\n")["sizes"]
        stream = _pipe(self._process.stdout)
        content = stream.read(4 * sum(sizes))
        if len(content) < 4 * sum(sizes):
            raise _EndedError(self._reason())
        ids = np.frombuffer(content, "<u4").astype(np.int64)
        return np.split(ids, np.cumsum(sizes)[:-1])

    def _reply(self, question: bytes) -> dict[str, Any]:
        stdin = _pipe(self._process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it has ended: what it said is read below
            stdin.write(question)
            stdin.flush()
        line = _pipe(self._process.stdout).readline()
        if not line.endswith(b"\n"):
            raise _EndedError(self._reason())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _EndedError(answer["error"])
        return answer

    def _reason(self) -> str:
        """Why the process has ended."""
        code = self._process.wait()
        said = os.pread(self._errors.fileno(), 1 << 16, 0).decode("utf-8", "replace")
        if code == -signal.SIGXCPU:
            return f"it takes more than {CPU_S:g} s of processor time"
        if "memory allocation" in said or code == -signal.SIGKILL:
            return f"it needs more than {DATA_BYTES / 2**30:.3g} GiB of memory"
        last = (said.strip().splitlines() or [""])[-1][:MAX_SHOWN]
        return f"the tokenizers library ended with code {code}{': ' if last else ''}{last}"


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


# ---------------------------------------------------------------- the process


def main(argv: list[str]) -> int:
    cpu_s, data_bytes = float(argv[0]), int(argv[1])
    _end_with_parent()
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    length = int(stdin.readline())
    try:
        _allow(cpu_s, data_bytes, length)
        bpe = tokenizer.parse(stdin.read(length))
        facts = {"json": tokenizer.to_json(bpe), "sha256": tokenizer.digest(bpe), "vocab": tokenizer.size(bpe)}
        _answer(stdout, facts | {"end_of_document": tokenizer.end_id(bpe)})
        encoder = Encoder(bpe)
        for line in stdin:
            _allow(cpu_s, data_bytes, len(line))
            ids = encoder.encode(json.loads(line))
            _answer(
                stdout,
                {"sizes": [len(each) for each in ids]},
                b"".join(np.array(each, "<u4").tobytes() for each in ids),
            )
    except (KeyboardInterrupt, BrokenPipeError):
        return 1
    except MemoryError:
        _answer(stdout, {"error": f"it needs more than {data_bytes / 2**30:.3g} GiB of memory"})
        return 1
    except BaseException as error:  # a panic of the library is no Exception
        name = "" if isinstance(error, DataError) else "the tokenizers library fails: "
        _answer(stdout, {"error": f"{name}{str(error)[:MAX_SHOWN]}"})
        return 1
    return 0


def _allow(cpu_s: float, data_bytes: int, num_bytes: int) -> None:
    """Limits for a batch of so many bytes."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    seconds = int(used + cpu_s * (1 + num_bytes / 2**20)) + 1
    _limit(resource.RLIMIT_CPU, seconds)
    _limit(resource.RLIMIT_DATA, data_bytes + DATA_BYTES_PER_BYTE * num_bytes)


def _limit(which: int, soft: int) -> None:
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _answer(stdout: IO[bytes], answer: dict[str, Any], ids: bytes = b"") -> None:
    stdout.write(json.dumps(answer).encode() + b"\n" + ids)
    stdout.flush()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
