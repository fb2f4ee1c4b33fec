"""The ledger of a plan import: a present key is imported, lost or unknown; null counts as absent."""

from __future__ import annotations

from compiler.tools.importers.json_text import JsonValue
from compiler.tools.importers.key_files import ComputedValue
from compiler.tools.importers.plan_ledger import Keys
from dsl.messages.diagnostics import Source, Span

SPAN = Span(Source("a.yaml", "x: 1"), 0, 1)


def keys_of(**values: object) -> Keys:
    return Keys({name: [JsonValue(value, SPAN, SPAN)] for name, value in values.items()})


def told(keys: Keys) -> dict[str, tuple[str, str]]:
    """Key → kind and value in the ledger."""
    keys.record_unknown()
    return {entry.key: (entry.kind, entry.value) for entry in keys.ledger()}


def test_null_is_the_default() -> None:
    keys = keys_of(a=None, b=None, c=None, d=None)
    assert not keys.has("a") and not keys.has("absent")
    assert keys.take("a", "train.seed", 1234) == 1234
    assert keys.take("b", "model.attention.query_rank", None, int) is None
    keys.lose("c", "there is none")
    assert told(keys) == {
        "a": ("default", "1234"), "b": ("said", "None"), "c": ("no effect", "None"), "d": ("no effect", "None"),
    }  # fmt: skip
    assert not keys.mistakes


def test_computed_values_are_in_the_ledger() -> None:
    keys = keys_of(a=ComputedValue("f(x)"), b=ComputedValue("g()"), c=ComputedValue("h"), d=ComputedValue("$X"))
    assert keys.peek("a", 3) == 3 and keys.take("a", "train.seed", 1234) == 1234 and keys.take("b", "", 1) == 1
    keys.lose("c", "name the text in `data`", kind="assumed")
    assert told(keys) == {
        "a": ("computed", "f(x)"), "b": ("no effect", "g()"), "c": ("assumed", "h"), "d": ("unknown", "$X"),
    }  # fmt: skip


def test_a_size_is_never_assumed() -> None:
    keys = keys_of(null=None, computed=ComputedValue("2 ** 4"), good=7)
    assert [keys.size(name, "model.hidden") for name in ("absent", "null", "computed", "good")] == [1, 1, 1, 7]
    assert [(item.code, item.message) for item in keys.mistakes] == [
        ("I0202", "`absent` is missing"), ("I0202", "`null` is unknown"), ("I0202", "`computed` is unknown"),
    ]  # fmt: skip
    assert told(keys)["good"] == ("said", "7")
