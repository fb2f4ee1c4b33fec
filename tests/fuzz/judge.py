"""What every input must end in: located messages, or a spec that reads back; after little work, and in little memory.

Work is counted in calls of functions, so that the same input is right or wrong on every machine, however busy.
"""

from __future__ import annotations

import os
import resource
import signal
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from cProfile import Profile
from pathlib import Path
from typing import Any
from zlib import crc32

from dsl.canonical import canonical
from dsl.load import analyse
from dsl.messages.diagnostics import Diagnostic, Source, SpecError, render_all
from dsl.rules.codes import CODES
from dsl.schema import Node, Spec
from dsl.text.formatter import format_source
from dsl.text.parser import decode, parse
from dsl.text.table import tokens
from tests.fuzz.generate import Input

CALLS = 10_000_000  # of functions in Python, for one input; the largest seen takes 3.4 million (seed 6546)
COUNTED_S = 0.05  # of the processor, from which on calls are counted
HANG_S = 60.0  # of the processor: only against an input that never ends
BYTES = 256 << 20  # above the initial memory of the process
FORMATTED = 6  # one text of so many is formatted, twice
PLACELESS = {"E0101", "E0404", "E0102"}  # about a file as a whole
Read = tuple[Source, tuple[Diagnostic, ...]]


class TooSlowError(Exception):
    """An input takes more than its work, or never ends."""


def judged(given: Input) -> tuple[str, ...]:
    """The codes of an input's mistakes; none for a valid spec. Raises for crashes, slowness and excessive memory."""
    with _limited():

        def reader(path: str) -> Read:
            name = os.path.normpath(path)
            if name not in given.files:
                return Source(path, ""), (Diagnostic("E0101", f"there is no file {path}"),)
            return decode(name, given.content(name))

        first = next(iter(given.files))
        analysis = analyse(first, None, given.overrides, reader)
        _look_at(analysis.diagnostics)
        source, mistakes = reader(first)
        if not mistakes and crc32(source.text.encode("utf-8", "replace")) % FORMATTED == 0:
            _lay_out(source)
        if not analysis.diagnostics:
            for view in analysis.views:
                assert not view.context.failed or not hasattr(view.spec, "train"), "a silent failure"
                _look_at_spec(view.spec)
    return tuple(item.code for item in analysis.diagnostics)


def limit_memory() -> None:
    """Hold this process to the memory it has and BYTES more."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    limit = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextmanager
def _limited() -> Iterator[None]:
    """Raise TooSlowError if the block does not end, or after it if it took more than CALLS.

    Counting makes everything twice as slow, so it begins after COUNTED_S: an input within its calls on one machine is
    so on each, and on a fast one slightly more may pass.
    """
    profile, counting = Profile(subcalls=False, builtins=False), False

    def late(*_: object) -> None:
        nonlocal counting
        if counting:
            raise TooSlowError(f"more than {HANG_S:g} s of the processor")
        counting = True
        profile.enable()

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, COUNTED_S, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        profile.disable()
    calls = sum(entry.callcount for entry in profile.getstats())
    if calls > CALLS:
        raise TooSlowError(f"{calls:,} calls of functions, more than {CALLS:,}")


def _look_at(diagnostics: tuple[Diagnostic, ...]) -> None:
    """Every message is known, located, and can be shown."""
    assert len(set(diagnostics)) == len(diagnostics)
    for item in diagnostics:
        assert item.code in CODES and item.message and item.severity == "error"
        assert item.span is not None or item.code in PLACELESS, item.code
        for span in (item.span, *(note.span for note in item.notes)):
            assert span is None or 0 <= span.start <= span.end <= max(1, len(span.source.text)), span
    text = render_all(diagnostics)
    assert bool(text) == bool(diagnostics)
    if not text.isascii():
        wrong = [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
        assert not wrong, wrong
    assert len(text) < 400_000


def _lay_out(source: Source) -> None:
    """A text that can be read can be formatted, and has the same words then."""
    if parse(source).diagnostics:
        return
    laid = format_source(source)
    assert format_source(Source("laid", laid)) == laid
    assert [word.text for word in tokens(laid) if word.type != "NEWLINE"] == [
        word.text for word in tokens(source.text) if word.type != "NEWLINE"
    ]


def _look_at_spec(spec: Spec) -> None:
    """A spec is one that pydantic, too, finds right, and reads back."""
    _revalidate(spec)
    if not hasattr(spec, "train"):
        return  # the blocks of a library
    text = canonical(spec)
    analysis = analyse("again", None, (), lambda _: (Source("again", text), ()))
    if analysis.diagnostics:
        raise SpecError(analysis.diagnostics)
    assert analysis.views[0].spec == spec


def _revalidate(value: Any) -> None:
    if isinstance(value, Node):
        fields = dict(value)
        if set(fields) == set(type(value).model_fields):
            assert type(value).model_validate(fields) == value
        for item in fields.values():
            _revalidate(item)
    elif isinstance(value, tuple):
        for item in value:
            _revalidate(item)
