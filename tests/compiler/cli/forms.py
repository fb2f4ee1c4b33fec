"""Checks JSON documents against the forms of docs/json.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "json.md"
TOKEN = re.compile(r"\.\.\.\w+|<\w+>|\w+|[{}\[\]:;,|?]|(\S)")
FORMS: dict[str, Any] = {}
TYPES: dict[str, Any] = {"string": str, "int": int, "number": (int, float), "bool": bool, "null": type(None)}


class _Reader:
    """Reads forms, `name { keys: type; … }` or `name [type]`, as docs/json.md defines them."""

    def __init__(self, text: str) -> None:
        matches = list(TOKEN.finditer(text))
        assert not any(match[1] for match in matches), "a character that no form has"
        self.tokens = [match[0] for match in matches]

    def forms(self) -> Iterator[tuple[str, Any]]:
        while self.tokens:
            yield self._take(), self._type()

    def _take(self, expected: str = "") -> str:
        token = self.tokens.pop(0)
        assert not expected or token == expected, f"{token} where {expected} is expected"
        return token

    def _type(self) -> Any:
        if self.tokens[0] == "[":
            self._take()
            item = self._type()
            self._take("]")
            return [item]
        if self.tokens[0] == "{":
            return self._object()
        kinds = [self._take()]
        while self.tokens and self.tokens[0] in "|?":
            kinds.append(self._take() if self._take() == "|" else "null")
        return " | ".join(kinds)

    def _object(self) -> dict[str, Any]:
        form: dict[str, Any] = {}
        while (behind := self._take()) != "}":
            assert behind in "{;", f"{behind} where a key ends"
            if self.tokens[0].startswith("..."):
                form |= FORMS[self._take()[3:]]
                continue
            names = [self._take()]
            while self._take() == ",":
                names.append(self._take())
            assert not form.keys() & set(names), f"{names} twice"
            form |= dict.fromkeys(names, self._type())
        return form


for _text in re.findall(r"```form\n(.*?)```", PAGE.read_text("utf-8"), re.S):
    for _name, _form in _Reader(_text).forms():
        assert _name not in FORMS, f"two forms of one name: {_name}"
        FORMS[_name] = {"time": "string", "event": "string"} | _form if _name.startswith("event_") else _form


def faults(document: Any, form: Any, at: str = "$") -> list[str]:
    """The paths at which a document violates its form: a wrong type, a missing key, or an undocumented key."""
    if isinstance(form, str):
        kinds = form.split(" | ")
        forms = [FORMS[kind] for kind in kinds if kind in FORMS]
        if forms and isinstance(document, (dict, list)):
            return min((faults(document, alternative, at) for alternative in forms), key=len)
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
    return kind == "bool" or not isinstance(document, bool)


def parsed(text: str, name: str) -> Any:
    """The printed document, after checking its form."""
    document = json.loads(text)
    assert faults(document, FORMS[name]) == []
    return document
