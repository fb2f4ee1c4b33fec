"""A TextMate grammar, read as editors read it: rules in order, the leftmost match wins, regions nest over lines.

As much of the format as the grammar of the extension uses; an unknown key is an error. `make extension` runs the same
expectations in the engine of VS Code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

KNOWN = {"match", "name", "captures", "begin", "end", "beginCaptures", "endCaptures", "patterns", "include", "comment"}
Scopes = tuple[str, ...]


@dataclass(frozen=True)
class Region:
    """An open begin/end rule."""

    rule: int  # index in Grammar.rules
    scopes: Scopes


class Grammar:
    def __init__(self, source: dict[str, Any]) -> None:
        self.source = source
        self.rules: list[dict[str, Any]] = []

    def tokenize(self, text: str) -> list[list[tuple[str, Scopes]]]:
        """Pieces of each line with their scopes, innermost last."""
        stack: list[Region] = []
        return [self._line(line, stack) for line in text.split("\n")]

    def _line(self, line: str, stack: list[Region]) -> list[tuple[str, Scopes]]:
        scopes: list[Scopes] = [self._base(stack)] * len(line)
        offset, seen = 0, set[tuple[int, int]]()
        while True:
            hit = self._next(line, offset, stack)
            if hit is None:
                self._fill(scopes, offset, len(line), self._base(stack))
                return [(line[i : i + 1], char_scopes) for i, char_scopes in enumerate(scopes)]
            match, rule, ends = hit
            self._fill(scopes, offset, match.start(), self._base(stack))
            name = (rule["name"],) if "name" in rule else ()
            if ends:
                self._paint(scopes, match, self._base(stack), rule.get("endCaptures", {}))
                stack.pop()
            elif "begin" in rule:
                self.rules.append(rule)
                stack.append(Region(len(self.rules) - 1, self._base(stack) + name))
                self._paint(scopes, match, self._base(stack), rule.get("beginCaptures", {}))
            else:
                self._paint(scopes, match, self._base(stack) + name, rule.get("captures", {}))
            state = (match.end(), len(stack))
            assert match.end() > offset or state not in seen, f"stuck in {line!r} at {offset}"
            seen.add(state)
            offset = match.end()

    def _next(self, line: str, at: int, stack: list[Region]) -> tuple[re.Match[str], dict[str, Any], bool] | None:
        """The leftmost match; of several at one place the end of the region, then the first rule."""
        best: tuple[re.Match[str], dict[str, Any], bool] | None = None
        patterns = self.source["patterns"]
        if stack:
            rule = self.rules[stack[-1].rule]
            patterns = rule.get("patterns", [])
            match = compiled(rule["end"]).search(line, at)
            best = (match, rule, True) if match else None
        for rule in self._flat(patterns):
            match = compiled(rule.get("match") or rule["begin"]).search(line, at)
            if match and (match.end() > match.start()) and (best is None or match.start() < best[0].start()):
                best = (match, rule, False)
        return best

    def _flat(self, patterns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rules: list[dict[str, Any]] = []
        for rule in patterns:
            assert set(rule) <= KNOWN, set(rule) - KNOWN
            if "include" in rule:
                rules += self._flat([self.source["repository"][rule["include"].removeprefix("#")]])
            elif "match" in rule or "begin" in rule:
                rules.append(rule)
            else:
                rules += self._flat(rule["patterns"])
        return rules

    def _base(self, stack: list[Region]) -> Scopes:
        return stack[-1].scopes if stack else (self.source["scopeName"],)

    def _paint(self, scopes: list[Scopes], match: re.Match[str], base: Scopes, captures: dict[str, Any]) -> None:
        self._fill(scopes, match.start(), match.end(), base)
        for number, capture in sorted(captures.items()):
            start, end = match.span(int(number))
            self._fill(scopes, start, end, (*base, capture["name"]))

    @staticmethod
    def _fill(scopes: list[Scopes], start: int, end: int, value: Scopes) -> None:
        scopes[start:end] = [value] * (end - start)


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
