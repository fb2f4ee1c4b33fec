"""The checks of `dsc check` on the data of a run, such as whether its source matches any file here.

They give warnings, not errors: the text may be on another machine, or in a folder for `dsc train --data`. Training
refuses a source that matches nothing. runtime/data/corpus.py decides which files match.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from compiler.emit import data_recipe
from dsl.messages.diagnostics import Diagnostic, Span
from dsl.schema import Data, Spec
from runtime.contract import EXTRA_TOKENS
from runtime.data import corpus
from runtime.data.files import DataError
from runtime.data.readers import TEXT_SUFFIXES

PLAIN_SUFFIXES = (*TEXT_SUFFIXES, ".jsonl")


def warnings(spec: Spec, origins: Mapping[str, Span], folder: Path) -> tuple[Diagnostic, ...]:
    """Return warnings about the data of a spec in `folder`: sources that match nothing or cannot be filtered, and chat
    templates that cannot render their rows."""
    reasons = {
        path: corpus.reason_for_no_files(pattern, folder, _suffixes(spec.data))
        for path, pattern in spec.data.patterns.items()
    }
    if any(reasons.values()):
        hint = "write a pattern that matches; if the text is elsewhere, `dsc train --data DIR` sets the root of paths"
        return tuple(
            Diagnostic("D0101", reason, origins.get(path), hint, severity="warning")
            for path, reason in reasons.items()
            if reason
        )
    request = data_recipe.data(spec.data)
    filters = [source.filters for source in request.sources] or [request.filters]
    for (path, pattern), source_filters in zip(spec.data.patterns.items(), filters, strict=True):
        if source_filters and corpus.token_files(pattern, folder):
            message = f"{pattern!r} has token ids, which have no text to filter"
            hint = "write `filters { }` in this source" if request.sources else "remove `filters`"
            place = origins.get(path) if request.sources else origins.get("data.filters")
            return (Diagnostic("D0103", message, place, hint, severity="warning"),)
    try:
        diagnostics = tuple(_file_warnings(spec, origins, folder))
    except (DataError, OSError) as error:  # files may change during the check
        place = origins.get(next(iter(spec.data.patterns), ""))
        diagnostics = (Diagnostic("D0104", str(error), place, severity="warning"),)
    message, hint = _template_fault(spec.data, folder)
    if not message:
        return diagnostics
    place = origins.get("data.chat.template") or origins.get("data.chat") or origins.get("data.prompts")
    return (*diagnostics, Diagnostic("D0102", message, place, hint, severity="warning"))


def _file_warnings(spec: Spec, origins: Mapping[str, Span], folder: Path) -> Iterator[Diagnostic]:
    """Yield warnings about files that are not read, are in several sources, or are too short for a sample."""
    matches = {}
    for path, pattern in spec.data.patterns.items():
        if pattern == corpus.STDLIB:
            continue
        if prefixes := corpus.token_files(pattern, folder):
            files = [prefix.with_name(f"{prefix.name}.bin") for prefix in prefixes]
        else:
            matches[path] = corpus.find_by_name(pattern, folder, _suffixes(spec.data))
            files = [file.path for file in matches[path].files]
            if message := corpus.note_on_skipped(pattern, len(files), dict(matches[path].skipped)):
                hint = "if that is intended, write a pattern that matches only files to read, such as `notes/**/*.md`"
                yield Diagnostic("D0104", message, origins.get(path), hint, severity="warning")
        if message := _too_short(files, spec):
            hint = "add more text, or shorten `train.sequence`"
            yield Diagnostic("D0106", f"{pattern!r}: {message}", origins.get(path), hint, severity="warning")
    names = dict(zip(spec.data.patterns, [source.name for source in spec.data.sources] or [""], strict=True))
    if message := corpus.note_on_shared({names[path]: match.files for path, match in matches.items()}):
        hint = "name each file in one source"
        yield Diagnostic("D0105", message, origins.get(next(iter(matches))), hint, severity="warning")


def _too_short(files: Iterable[Path], spec: Spec) -> str:
    """Return a message if files have fewer bytes than a sample has tokens, else "". Every token has at least a byte,
    except for the token that ends a document. Compressed files and tables are not checked."""
    if spec.data.chat is not None or spec.data.prompts is not None:
        return ""
    needed, tokens = spec.train.sequence + EXTRA_TOKENS, 0
    for file in files:
        if not file.name.endswith((*PLAIN_SUFFIXES, ".bin")):
            return ""
        tokens += file.stat().st_size + 1
        if tokens >= needed:
            return ""
    return f"its files have at most {tokens:,} tokens, and a sample takes {needed:,}"


def _suffixes(data: Data) -> Sequence[str]:
    """Return the suffixes of files that are read."""
    if data.chat is None and data.prompts is None:
        return corpus.SUFFIXES
    from runtime.data import chat, prompts  # imports tokenizers, which documents do not need

    return prompts.SUFFIXES if data.prompts is not None else chat.SUFFIXES


def _template_fault(data: Data, folder: Path) -> tuple[str, str]:
    """Return why the first row cannot be read or rendered by the chat template, and a hint. Both are empty if there is
    no fault, or no tokenizer here."""
    request = data_recipe.data(data)
    rows = request.chat or request.prompts
    if rows is None or not isinstance(data.tokenizer, str) or not (folder / data.tokenizer).is_file():
        return "", ""
    assert data.source is not None, "specs allow one source of conversations or prompts"
    from runtime.data import chat
    from runtime.data.prompts import reader_of
    from runtime.data.template_process import marks_assistant

    try:
        settings = chat.read_settings(rows, folder / data.tokenizer, folder)
        read, files = reader_of(settings), corpus.find(data.source, folder, _suffixes(data)).files
        first = next((row for file in files for row in read(file)), "")
        row = json.loads(first) if first else {}
        if not ("messages" in row or isinstance(row.get("prompt"), list)):
            return "", ""
        if settings.template is None:
            return chat.NO_TEMPLATE, chat.NAME_IT if settings.prompts is None else chat.PUT_IT
        if not marks_assistant(settings) and "messages" in row:
            return f"{settings.path}: {chat.UNMARKED}", chat.MARK_IT
    except (DataError, OSError) as error:
        return str(error), ""
    return "", ""
