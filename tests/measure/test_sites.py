"""Mutants make the stated change, affect execution, and are found by their probes."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.measure.choose import choose as choose_shares
from tests.measure.choose import staying
from tests.measure.mutants import BATCHES_S, OF_A_FUNCTION, Measured, batches
from tests.measure.sites import PRODUCT, choose, mutants_of, with_probes

ROOT = Path(__file__).parents[2]
SOURCE = b"""
LIMIT = 1 + 1

def f(x, flag=True):
    "A text stays: 1 < 2."
    if x < 2 and flag:
        raise ValueError(f"{x + 1} is small")
    total = 0
    for each in range(x):
        if each % 2 == 0: continue
        total += each
    return [min(total, y) for y in (1, 5) if y > 3]
"""


def changes(source: bytes) -> set[tuple[str, str]]:
    return {(source[mutant.begin : mutant.end].decode(), mutant.text) for mutant in mutants_of(source, "m.py")}


def test_places_that_mutants_change() -> None:
    assert changes(SOURCE) == {
        ("x < 2 and flag", "(x < 2 or flag)"),
        ("x < 2", "(x <= 2)"),
        ("2", "3"),
        ("0", "1"),
        ("each % 2", "(each // 2)"),
        ("each % 2 == 0", "(each % 2 != 0)"),
        ("continue", "break"),
        ("total += each", "total -= each"),
        ("min(total, y)", "(max(total, y))"),
        ("[min(total, y) for y in (1, 5) if y > 3]", "[min(total, y) for y in (1, 5)]"),
        ("y > 3", "(y >= 3)"),
        ("1", "2"),
        ("5", "6"),
        ("3", "4"),
    }


def outcome(source: bytes, x: int) -> object:
    """The result of the function of a source, or its error."""
    names: dict[str, Any] = {}
    exec(compile(source, "m.py", "exec"), names)
    try:
        return names["f"](x)
    except ValueError as error:
        return str(error)


def test_a_probe_is_hit_where_its_mutant_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    hit = set[int]()
    monkeypatch.setitem(sys.modules, "mutant_probes", SimpleNamespace(hit=hit.add))
    mutants = [*mutants_of(SOURCE, "m.py")]
    for x in (2, 9):
        hit.clear()
        expected = outcome(SOURCE, x)
        assert outcome(with_probes(SOURCE, [*enumerate(mutants)]), x) == expected
        differing = {number for number, mutant in enumerate(mutants) if outcome(mutant.apply(SOURCE), x) != expected}
        assert differing and differing <= hit


def test_a_module_that_moves_keeps_its_mutants(tmp_path: Path) -> None:
    for file in ("old/dsl/a/m.py", "new/dsl/b.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_bytes(SOURCE)
    old, new = ([(mutant.line, mutant.text) for mutant in choose(tmp_path / place, 2)] for place in ("old", "new"))
    assert len(old) > 1 and old == new


def test_mutants_of_the_product_are_python_and_of_all_packages() -> None:
    chosen = choose(ROOT, 300)
    assert {mutant.package.partition("/")[0] for mutant in chosen} == {*PRODUCT}
    assert len({(mutant.file, mutant.line) for mutant in chosen}) == len(chosen)
    assert {*chosen} <= {*choose(ROOT, 1000)}
    files = defaultdict(list)
    for number, mutant in enumerate(chosen):
        files[mutant.file].append((number, mutant))
    for file, numbered_mutants in files.items():
        source = (ROOT / file).read_bytes()
        compile(with_probes(source, numbered_mutants), file, "exec")
        for _, mutant in numbered_mutants:
            compile(mutant.apply(source), file, "exec")


def test_each_test_is_run_once_and_those_with_few_cases_first() -> None:
    tests = [Measured(f"tests/a/test_{n % 7}.py::test[{n}]", n % 5 / 10) for n in range(100)]
    planned = [*batches(tests)]
    assert len(planned) <= len(BATCHES_S) and sorted(chain.from_iterable(planned)) == sorted(test.id for test in tests)
    assert [len(batch) <= limit * 7 for batch, limit in zip(planned, OF_A_FUNCTION, strict=False)] == [True, True]


PLACES = [f"place {number}" for number in range(40)]


def test_kept_tests_cover_mutants_worth_their_time() -> None:
    chance = random.Random(0)
    functions = {
        f"f{number}": [
            Measured("", chance.random() * 9, executed={*chance.sample(PLACES, 3)}) for _ in range(number % 4 + 1)
        ]
        for number in range(30)
    }
    shares = choose_shares(functions)
    stays = [case for name, cases in functions.items() for case in staying(cases, shares[name])]
    places = set[str]().union(*(case.executed for case in stays))
    for name, cases in functions.items():
        for case in cases:
            assert (case.executed <= places) or case.seconds > 5 * len(case.executed - places) - 0.1, name
    cheap = {"f": [Measured("", 0.1, executed=set())], "g": [Measured("", 3.0, executed=set())]}
    assert choose_shares(cheap) == {"f": 1, "g": 0}
