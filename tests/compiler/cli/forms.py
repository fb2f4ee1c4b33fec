"""The forms of docs/json.md, and whether a document has the form it should have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "json.md"
WRITTEN = re.findall(r"```form (\w+)\n(.*?)```", PAGE.read_text("utf-8"), re.S)
FORMS = {name: json.loads(text) for name, text in WRITTEN}
assert len(FORMS) == len(WRITTEN), "two forms of one name"
TYPES: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}


def faults(document: Any, form: Any, at: str = "$") -> list[str]:
    """Places where a document does not have its form: a wrong type, a missing key, a key that is not described."""
    if isinstance(form, str):
        kinds = form.split(" | ")
        forms = [FORMS[kind] for kind in kinds if kind in FORMS]
        if forms and isinstance(document, (dict, list)):
            return min((faults(document, each, at) for each in forms), key=len)
        fits = any(
            kind == "any" or (kind in TYPES and isinstance(document, TYPES[kind]) and _is_no_bool(document, kind))
            for kind in kinds
        )
        return [] if fits else [f"{at}: {document!r} is no {form}"]
    if isinstance(form, list):
        if not isinstance(document, list):
            return [f"{at}: no list"]
        return [fault for index, item in enumerate(document) for fault in faults(item, form[0], f"{at}[{index}]")]
    if not isinstance(document, dict):
        return [f"{at}: no object"]
    if list(form) == ["<path>"]:
        return [fault for key, item in document.items() for fault in faults(item, form["<path>"], f"{at}.{key}")]
    wrong = [f"{at}: {key} is missing" for key in form if key not in document]
    wrong += [f"{at}: {key} is not described" for key in document if key not in form]
    return wrong + [
        fault for key in form if key in document for fault in faults(document[key], form[key], f"{at}.{key}")
    ]


def _is_no_bool(document: Any, kind: str) -> bool:
    return kind == "boolean" or not isinstance(document, bool)


def parsed(text: str, name: str) -> Any:
    """The document that was printed; asserts its form."""
    document = json.loads(text)
    assert faults(document, FORMS[name]) == []
    return document
