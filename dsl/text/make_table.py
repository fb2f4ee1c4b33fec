"""Generate the parser's table from grammar.lark: `python -m dsl.text.make_table` writes grammar.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lark import Lark
from lark.lexer import BasicLexer
from lark.parsers.lalr_analysis import Reduce

GRAMMAR, TABLE = (Path(__file__).with_name(f"grammar.{kind}") for kind in ("lark", "json"))


def table_text() -> str:
    """Return the text of grammar.json. It is deterministic: states are numbered in the order in which they are
    reached."""
    lark = Lark(GRAMMAR.read_text("utf-8"), parser="lalr", lexer="basic", maybe_placeholders=False)
    frontend: Any = lark.parser
    lexer, table = frontend.lexer, frontend.parser._parse_table
    assert isinstance(lexer, BasicLexer)
    order = _reachable_states(table)
    number = {state: index for index, state in enumerate(order)}
    rules = {rule: index for index, rule in enumerate(sorted(lark.rules, key=str))}
    data: dict[str, Any] = {
        "pattern": "|".join(f"(?P<{terminal.name}>{terminal.pattern.to_regexp()})" for terminal in lexer.terminals),
        "ignored": sorted(lexer.ignore_types),
        "start": number[table.start_states["start"]],
        "end": number[table.end_states["start"]],
        "rules": [_rule(rule) for rule in rules],
        "states": [
            {
                name: ~rules[target] if action is Reduce else number[target]
                for name, (action, target) in sorted(table.states[state].items())
            }
            for state in order
        ],
    }
    rows = {key: [json.dumps(row) for row in value] for key, value in data.items() if key in ("rules", "states")}
    lines = [f'"{key}": {json.dumps(value)}' for key, value in data.items() if key not in rows]
    lines += [f'"{key}": [\n  {joined}\n ]' for key, value in rows.items() if (joined := ",\n  ".join(value))]
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _reachable_states(table: Any) -> list[Any]:
    """The states, in the order in which they are reached from the first."""
    order = [table.start_states["start"]]
    for state in order:
        for _, (action, target) in sorted(table.states[state].items()):
            if action is not Reduce and target not in order:
                order.append(target)
    return order


def _rule(rule: Any) -> list[Any]:
    """A rule as the fields of `dsl.text.table.GrammarRule`. As in lark, the values of a rule whose name begins with `_`
    are inlined."""
    spread = [index for index, symbol in enumerate(rule.expansion) if symbol.name.startswith("_")]
    if rule.origin.name.startswith("_"):
        method = "*"
    elif rule.options.expand1 and not rule.alias:
        assert len(rule.expansion) == 1, rule
        method = ""
    else:
        method = rule.alias or rule.origin.name
    return [rule.origin.name, len(rule.expansion), spread, method]


if __name__ == "__main__":
    TABLE.write_text(table_text(), encoding="utf-8")
