"""Costs: their text, their tables, and the time of a step by them."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from compiler.schedule.costs import (
    PAIR_KINDS,
    Costs,
    costs_of_json,
    parse_costs,
    shipped_cost_names,
    shipped_costs,
    with_every_pair_gaining,
)
from runtime.contract.actions import Action, Pair

F, B, I, W = (Action(kind, stage, 0) for stage, kind in enumerate("FBIW"))
HALF = Fraction(1, 2)


def test_flags_give_only_costs_that_are_not_1() -> None:
    costs = parse_costs("F=2, W=1.5,FB=9/5")
    assert costs == Costs(Fraction(2), Fraction(1), Fraction(3, 2), None, (("BF", Fraction(9, 5)),))
    assert costs.lone_time("B") == Fraction(5, 2)
    assert parse_costs("B=3").lone_time("B") == 3
    assert parse_costs("FB=2") == parse_costs("BF=2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not a cost: write it as F=1"),
        ("F", "'F' is not a cost"),
        ("F=1,F=2", "F is given twice"),
        ("FB=1,BF=2", "BF is given twice"),
        ("Q=1", "unknown cost 'Q'"),
        ("FBI=1", "unknown cost 'FBI'"),
        ("F=", "F: '' is not a number of 0 or more"),
        ("F=-1", "F: '-1' is not a number of 0 or more"),
        ("F=nan", "is not a number of 0 or more"),
        ("F=1e999999999", "F: '1e999999999' is too large: at most 1e15"),  # a number of a gigabyte
        ("F=" + "9" * 5000, "is too large: at most 1e15"),
        ("F=1000000000000001", "is too large: at most 1e15"),
        ("F=1e-999999999", "is too small: at least 1e-20, or 0"),
        ("F=1e-21", "is too small: at least 1e-20, or 0"),
        ("F=1." + "1" * 21, "has too many decimals: at most 20"),
        ("F=1/" + "3" * 21, "has too many digits: at most 20 on each side"),
        ("FB=30.1", "the pair BF takes 30.1, but its two actions one after the other 3: give it at most 10 times"),
        ("W=0,WW=1", "the pair WW takes 1, but its two actions one after the other 0"),
        ("F=1/0", "is not a number of 0 or more"),
        ("F=0", "F costs nothing"),
        ("I=0,W=0", "B costs nothing"),
        ("FB=0", "the pair BF costs nothing"),
    ],
)
def test_invalid_flags_suggest_a_correction(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]{1,200}$") as caught:
        parse_costs(text)
    assert said in str(caught.value)


def test_zero_is_a_time_where_something_is_left() -> None:
    assert parse_costs("W=0").step_time(W, 0) == 0
    assert parse_costs("W=0").lone_time("B") == 1


def test_the_bounds_of_times_are_times() -> None:
    assert parse_costs("F=1e15,I=1e-20,FB=2").lone_time("F") == 10**15
    assert parse_costs("FB=30").pair_time("FB") == 30 and parse_costs("F=1e-9,I=1e-9,W=1e-9").lone_time(
        "B"
    ) == Fraction(2, 10**9)
    assert parse_costs("F=" + "0" * 19 + "1").lone_time("F") == 1 and parse_costs("F=1." + "5" * 20).lone_time("F") > 1


# ---------------------------------------------------------------- tables


def test_the_shipped_tables_are_the_published_numbers() -> None:
    """ms of four layers of V3; the pairs not measured by the lane rule, worked out by hand."""
    assert shipped_cost_names() == ("deepseek-v3-high", "deepseek-v3-low")
    low, high = shipped_costs("deepseek-v3-low"), shipped_costs("deepseek-v3-high")
    assert [float(low.lone_time(kind)) for kind in "FBIW"] == [77.7, 133.9, 98.8, 35.1]
    assert [float(high.lone_time(kind)) for kind in "FBIW"] == [97.5, 146.8, 111.7, 35.1]
    assert low.pair_time("FB") == high.pair_time("BF") == 129  # measured, not the rule's 129.0024
    assert float(low.pair_time("FF")) == 82.8  # communication
    assert float(low.pair_time("IW")) == 98.8  # the chain of I
    assert float(low.pair_time("BB")) == pytest.approx(0.984 * 2 * 94.8)  # compute
    assert low.pair_time("WW") == 2 * low.lone_time("W")


def test_a_table_accepts_the_flags_and_more() -> None:
    text = (
        '{"F": 1, "I": 2, "W": 1.5, "B": 3, "pairs": {"FB": 3.25}, "latency": 1e-1, "stages": [1, 2], "ranks": [0.5]}'
    )
    assert costs_of_json(text) == Costs(
        Fraction(1),
        Fraction(2),
        Fraction(3, 2),
        Fraction(3),
        (("BF", Fraction(13, 4)),),
        Fraction(1, 10),
        (Fraction(1), Fraction(2)),
        (HALF,),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[1]", "the table must be an object of F, I, W, B"),
        ('{"F": 1, "I": 1}', "the table has no W"),
        ('{"F": 1, "I": 1, "W": "1"}', '"W" must be a number'),
        ('{"F": 1, "I": 1, "W": true}', '"W" must be a number'),
        ('{"F": 1, "I": 1, "W": -1}', "'-1' is not a number of 0 or more"),
        ('{"F": NaN, "I": 1, "W": 1}', "'NaN' is not a number of 0 or more"),
        ('{"F": 1e999999999, "I": 1, "W": 1}', "'1e999999999' is too large: at most 1e15"),
        ('{"F": 1, "I": 1, "W": 1, "pairs": {"FB": 31}}', "the pair BF takes 31"),
        ('{"F": 1, "I": 1, "W": 1, "pairs": {"FF": 0}}', "the pair FF costs nothing"),
        (
            '{"lanes": {"compute": {"F": 1, "I": 1, "W": 1}, "communication": {"F": 1, "B": 1}, "overlap": 1e3}}',
            '"overlap" is 1000: at most 10',
        ),
        ('{"F": 1, "I": 1, "W": 1, "X": 1}', "unknown key 'X'"),
        ('{"F": 1, "I": 1,\n "W": 1, "F": 2}', "table:2:10: `F` is given twice"),
        ('{"F": 1, "I": 1, "W": 1,\n"pairs": {"FB": 2, "FF": 1,\n "\\u0046B": 3}}', "table:3:2: `FB` is given twice"),
        ('{"F": 1, "I": 1, "W": 1, "pairs": {"FB": 2, "BF": 1}}', '"pairs" has BF and FB, which are one pair'),
        ('{"F": 1, "I": 1,\n "W": -1x}', "table:2:7: '-1' is not a number of 0 or more"),
        ('{"F": 1, "bytes": {"activation": "2GB"}, "I": 1, "W": 1}', '"bytes" has no "beside", what a rank holds'),
        ('{"F": 1, "bytes": {"beside": "2GB"}, "I": 1, "W": 1}', '"bytes" has no "activation"'),
        ('{"F": 1, "bytes": {"activation": 0, "beside": 1}, "I": 1, "W": 1}', '"activation" is 0: write the size of'),
        ('{"F": 1, "bytes": {"activation": 2, "beside": []}, "I": 1, "W": 1}', '"bytes" has no "beside"'),
        ('{"F": 1, "I": 1, "W": 1, "pairs": {"F": 1}}', "which is not a pair"),
        ('{"F": 1, "I": 1, "W": 1, "pairs": {"FB": "1"}}', "must be a number"),
        ('{"F": 1, "I": 1, "W": 1, "stages": [1, 0]}', "numbers above 0"),
        ('{"F": 1, "I": 1, "W": 1, "ranks": [[]]}', "numbers above 0"),
        ('{"lanes": {}}', '"compute" must be an object'),
        ('{"lanes": 1}', '"lanes" must be an object'),
        ('{"lanes": {"compute": {"F": 1, "I": 1, "W": 1}, "communication": {"F": 1}}}', '"lanes" has no B'),
        ('{"lanes": {}, "F": 1}', "unknown key 'F'"),
        (json.dumps({"F": 1, "I": 1, "W": 1, "stages": [1] * 5000}), "at most 4096"),
        (" " * (1 << 21), "characters"),
    ],
)
def test_invalid_tables_are_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]{1,200}$") as caught:
        costs_of_json(text)
    assert said in str(caught.value)


# ---------------------------------------------------------------- steps


def test_pairs_gain_equally_except_with_w() -> None:
    costs = with_every_pair_gaining(parse_costs("F=1,I=2,W=3,FB=4.5"))  # 0.75 of 6
    assert costs.pair_time("FF") == Fraction(3, 2)
    assert costs.pair_time("BI") == Fraction(21, 4)
    assert costs.pair_time("FB") == Fraction(9, 2)
    assert {kinds for kinds in PAIR_KINDS if kinds not in costs.gains()} == {"BW", "FW", "IW", "WW"}
    assert with_every_pair_gaining(Costs()).gains() == frozenset()


def test_weights_multiply() -> None:
    costs = Costs(stages=(Fraction(1), Fraction(2), Fraction(1), Fraction(1)), ranks=(Fraction(1), Fraction(3)))
    assert [costs.step_time(B, rank) for rank in (0, 1)] == [4, 12]  # I + W = 2, on a stage of weight 2
    assert costs.step_time(Pair(F, B), 1) == 3 * (1 + 4)
    costs.check(2, 4)
    with pytest.raises(ValueError, match="weights of 4 stages, but the schedule has 8"):
        costs.check(2, 8)


def test_a_pair_of_unequal_weights_keeps_its_share_and_takes_as_long_as_the_longer() -> None:
    table = (("BF", Fraction(9, 5)),)
    weighted = [Costs(pairs=table, stages=(Fraction(w), Fraction(1), Fraction(1), Fraction(1))) for w in (1, 2, 9)]
    assert [costs.step_time(Pair(F, B), 0) for costs in weighted] == [Fraction(9, 5), Fraction(12, 5), 9]
    # the share is continuous: nearly equal weights take nearly the time of equal ones
    near = Costs(pairs=table, stages=(Fraction(1001, 1000), Fraction(1), Fraction(1), Fraction(1)))
    assert 0 < near.step_time(Pair(F, B), 0) - Fraction(9, 5) < Fraction(1, 100)


def test_every_step_has_a_time_in_any_order() -> None:
    costs = shipped_costs("deepseek-v3-low")
    for a, b in product("FBIW", repeat=2):
        time = costs.step_time(Pair(Action(a, 0, 0), Action(b, 0, 1)), 0)
        assert time == costs.step_time(Pair(Action(b, 0, 1), Action(a, 0, 0)), 0) == costs.pair_time(a + b)
        chains = [costs.lone_time("I" if kind == "B" else kind) for kind in (a, b)]
        assert max(chains) <= time <= costs.lone_time(a) + costs.lone_time(b)


@pytest.mark.parametrize(("had", "wanted"), [(4, 8), (8, 4), (4, 6), (6, 4)])
def test_recutting_the_model_keeps_its_total_time(had: int, wanted: int) -> None:
    weights = tuple(Fraction(k + 1, had) for k in range(had))
    costs = Costs(Fraction(2), Fraction(3), Fraction(1), Fraction(5), (("BF", Fraction(6)),), HALF, weights)
    anew = costs.recut(had, wanted)
    assert len(anew.stages) == wanted and anew.latency == HALF
    for old_time, new_time in (
        (costs.lone_time("F"), anew.lone_time("F")),
        (costs.pair_time("FB"), anew.pair_time("FB")),
    ):
        assert old_time * sum(costs.stages) == new_time * sum(anew.stages)
    assert costs.recut(had, had) is costs
    if wanted % had == 0:
        assert anew.recut(wanted, had) == costs


def test_weights_may_be_those_of_smaller_stages() -> None:
    """`F` is the time of 1/2 of the model, and the weights are those of its quarters."""
    quarters = tuple(map(Fraction, (1, 3, 5, 9)))
    costs = Costs(F=Fraction(2), stages=quarters)
    assert costs.recut(2, 4).stages == quarters and costs.recut(2, 4).F == 1
    assert costs.recut(2, 2) == replace(costs, stages=(Fraction(2), Fraction(7)))
    costs.check_cut(2, 2)
    costs.check_cut(2, 4)
    with pytest.raises(ValueError, match="weights of 4 stages, but the schedule has 3"):
        costs.check_cut(3, 3)
