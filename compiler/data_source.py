"""The text that a run trains on, as far as `dsc check` looks: whether its source matches any file here.

A warning, not an error: the text may be on another machine, or in a folder that `dsc train --data` names. Training
refuses a source that matches nothing. What matches is decided in one place, runtime/data/corpus.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dsl.diagnostics import Diagnostic
from dsl.schema import Spec
from dsl.source import Span
from runtime.data import chat, corpus

CODES = {"D0101": "the source of the data matches files that hold text"}
MORE = {
    "D0101": "A warning of `dsc check`, as the text may be elsewhere: `dsc train --data DIR` says where the paths of "
    "the data start. `dsc train` refuses a source that matches nothing. A pattern ends in files, as in `corpus/*.txt`; "
    "read are .txt, .md and .py files whole, and .jsonl files with a document a line.",
}


def warnings(spec: Spec, origins: Mapping[str, Span], folder: Path) -> tuple[Diagnostic, ...]:
    """The warning that the source of a spec in `folder` matches nothing; empty where it matches something."""
    reason = corpus.why_nothing(spec.data.source, folder, chat.SUFFIXES if spec.data.chat else corpus.SUFFIXES)
    if not reason:
        return ()
    hint = "write a pattern that matches; if the text is elsewhere, `dsc train --data DIR` says where paths start"
    return (Diagnostic("D0101", reason, origins.get("data.source"), hint, severity="warning"),)
