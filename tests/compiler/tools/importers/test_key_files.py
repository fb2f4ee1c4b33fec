"""Keys of YAML files, with their values and spans, also with aliases."""

from __future__ import annotations

import pytest

from compiler.tools.importers.json_text import parse
from compiler.tools.importers.key_files import ComputedValue, toml_keys, yaml_keys
from compiler.tools.importers.reader import ConfigReader
from dsl.messages.diagnostics import Source, SpecError


def read(text: str, **variables: str) -> dict[str, list[object]]:
    members, _ = yaml_keys(Source("a.yaml", text), variables)
    return {name: [entry.value for entry in values] for name, values in members.items()}


def test_every_value_has_its_type() -> None:
    text = """\
a: [1, 2.5, x, true, null, "7"]
b:
  - [0, 0]
  - [1]
c: ~
d:
e: null
f: None
g: yes
--h-i: 1e-3
"j": ""
"""
    assert read(text) == {
        "a": [[1, 2.5, "x", True, None, 7]], "b": [[[0, 0], [1]]], "c": [None], "d": [None], "e": [None], "f": [None],
        "g": [True], "h_i": [1e-3], "j": [""],
    }  # fmt: skip


def test_keys_in_lists_are_keys() -> None:
    text = "spec:\n  containers:\n  - name: a\n    env: [{x: 1}, {y: [2]}]\n  - name: b\n"
    assert read(text) == {
        "name": ["a", "b"], "x": [1], "y": [[2]], "env": [["{…}", "{…}"]], "containers": [["{…}", "{…}"]],
    }  # fmt: skip


def test_variables_are_replaced_and_others_are_not_known() -> None:
    text = "a: $N\nb: [1, $M]\nc: ${P:-3}\n"
    assert read(text, N="4", M="5") == {"a": [4], "b": [[1, 5]], "c": [3]}
    members, mistakes = yaml_keys(Source("a.yaml", text), {})
    assert isinstance(members["a"][0].value, ComputedValue) and isinstance(members["b"][0].value, ComputedValue)
    assert [item.hint for item in mistakes] == ["set it: -D N=VALUE", "set it: -D M=VALUE"]


def test_aliased_values_are_read_once() -> None:
    """Aliases that multiply and recursive aliases, which would take forever to follow."""
    doubled = "".join(f"a{n}: &a{n} {{x{n}: 1, l: *a{n - 1}, r: *a{n - 1}}}\n" for n in range(1, 60))
    members = read("a0: &a0 {x0: 1}\n" + doubled)
    assert {name: values for name, values in members.items() if name[0] == "x"} == {f"x{n}": [1] for n in range(60)}
    assert read("a: &a {b: 1, c: *a}\n") == {"b": [1]}
    for text in (
        "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)),
        "a: &a [*a]\n",
        "a: " + "[" * 40 + "]" * 40,
        "a: " + "{b: " * 40 + "1" + "}" * 40,
        "a: " + "[" * 5000 + "]" * 5000,
    ):
        with pytest.raises(SpecError) as caught:
            read(text)
        (item,) = caught.value.diagnostics
        assert item.code == "I0103" and item.span is not None


def test_places_are_from_keys_to_the_ends_of_their_values() -> None:
    text = "a: &one 12\n--b:  'x y'\nc: *one\nd:\ne: {f: [1, 2], g}\n"
    members, _ = yaml_keys(Source("a.yaml", text), {})
    places = {name: values[0].span.text for name, values in members.items()}
    assert places == {"a": "a: &one 12", "b": "--b:  'x y'", "c": "c", "d": "d:", "f": "f: [1, 2]", "g": "g"}


def test_a_number_of_too_many_digits_is_refused() -> None:
    for text in ("steps = " + "9" * 6_000, "x = 0x" + "f" * 100_000):
        with pytest.raises(SpecError, match="too large to be a configuration"):
            toml_keys(Source("a.toml", text))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a = " + "[" * 3_000 + "]" * 3_000, 0),
        ("[" + ".".join("a" * 5_000) + "]\nb = 1\n", 1),
        ("b = 1\n" + "a." * 500_000 + "b = 1\n", 6),
        ("b = 1\na = " + "{a = " * 200 + "1" + "}" * 200, 6),
    ],
    ids=["lists", "table", "key", "tables"],
)
def test_deep_toml_is_refused(text: str, place: int) -> None:
    with pytest.raises(SpecError) as raised:
        toml_keys(Source("a.toml", text))
    (item,) = raised.value.diagnostics
    assert item.message == "this TOML is too deep to be a configuration"
    assert item.span is not None and item.span.start == place


@pytest.mark.parametrize(
    ("text", "value", "mistake"),
    [
        ('{"b": 2, "c": 2}', 2, ""),
        ('{"b": null, "c": 3}', 3, "`c` is 3, `b` is null"),
        ('{"c": 1, "a": 2, "b": 3}', 2, "`b` is 3, `a` is 2: they are two names of one value"),
        ('{"d": 1}', None, ""),
    ],
)
def test_a_key_may_go_by_several_names(text: str, value: object, mistake: str) -> None:
    reader = ConfigReader(parse(Source("config.json", text)), lossy=False)
    entry = reader.get("a", "b", "c")
    assert (entry and entry.value) == value
    assert [item.code for item in reader.mistakes] == ["I0203"] * bool(mistake)
    assert all(mistake in item.message for item in reader.mistakes)
