"""Rules only read the values that their rows list, so that no rule is given a missing value."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from compiler.plan.plan import make_plan
from dsl import schema
from dsl.load import check, load
from dsl.rules import JOINT, JOINT_CODES, RULES
from dsl.rules.finding import Rule, nearest_divisor
from dsl.rules.parallel import stages_have_layers, world_is_used
from dsl.rules.rewards import _compile_error
from dsl.schema import Node, ScheduleBlock, Spec
from dsl.schema.base import fields_of

SPECS = Path(__file__).parents[2] / "specs"


@pytest.mark.parametrize(
    ("degrees", "hint"),
    [
        ({"pipeline": 4, "data": 3}, "write `data = auto`"),
        ({"pipeline": 3, "data": 2}, "write `pipeline = 2` and `data = auto`"),
        ({"pipeline": 4, "tensor": 2}, "write `pipeline = 2` and `data = auto`"),
        ({"pipeline": 1, "tensor": 4, "data": 2}, "write `data = auto`"),
        ({"tensor": 3}, "write `tensor = 1` and `data = auto`"),
        ({"context": 3}, "write `tensor = 1`, `context = 1` and `data = auto`"),
    ],
)
def test_wrong_degrees_get_a_hint_to_the_nearest_right_ones(degrees: dict[str, int], hint: str) -> None:
    """On four devices."""
    spec = load(SPECS / "quickstart.dsc")
    single = dict.fromkeys(("pipeline", "data", "tensor", "context"), 1)
    parallel = spec.parallel.model_copy(update=single | degrees)
    (finding,) = world_is_used(spec.model_copy(update={"parallel": parallel}))
    assert (finding.path, finding.hint) == ("parallel.data", hint)


class Recorder:
    """A stand-in for a node that records which values are read."""

    def __init__(self, node: Any, path: str, seen: set[str]) -> None:
        self.__dict__.update(_node=node, _path=path, _seen=seen)

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self._node)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(type(self._node), name, None)
        if isinstance(attribute, property):
            assert attribute.fget is not None
            return attribute.fget(self)
        path = f"{self._path}.{name}".lstrip(".")
        return self._wrapped(getattr(self._node, name), path)

    def _wrapped(self, value: Any, path: str) -> Any:
        if isinstance(value, tuple) and value and isinstance(value[0], Node):
            return tuple(self._wrapped(element, f"{path}.{index}") for index, element in enumerate(value))
        if isinstance(value, Node):
            return Recorder(value, path, self._seen)
        if value is None and self._is_block(path.rpartition(".")[2]):
            return None  # an omitted block; if a block failed, everything in it failed
        self._seen.add(path)
        return value

    def _is_block(self, name: str) -> bool:
        kind = fields_of(type(self._node)).get(name)
        inner = [part for type_ in (kind.types if kind else ()) for part in getattr(type_, "__args__", (type_,))]
        return any(isinstance(part, type) and issubclass(part, Node) for part in inner)


def covers(read: str, path: str) -> bool:
    read_parts, path_parts = read.split("."), path.split(".")
    return len(read_parts) <= len(path_parts) and all(
        part in ("*", name) for part, name in zip(read_parts, path_parts, strict=False)
    )


def variants() -> list[Spec]:
    """Specs that reach the branches of rules; some break rules."""
    v3, quick = load(SPECS / "deepseek-v3.dsc"), load(SPECS / "quickstart.dsc")
    odd = quick.parallel.model_copy(update={"pipeline": 3, "tensor": 2, "zero": 2, "expert": 5})
    few = quick.train.batch.model_copy(update={"start": 3, "end": 7})
    moe = quick.model.layers[1].ffn.model_copy(update={"groups": 3, "top_groups": 5})
    layers = (quick.model.layers[0], quick.model.layers[1].model_copy(update={"ffn": moe, "first": 2}))
    reward = schema.Reward(name="own", check="regex", pattern="(a")
    grpo = schema.Grpo(group=3, prompt=100, completion=100, iterations=2, rewards=(reward,))
    prompts = schema.Prompts()
    return [
        v3,
        quick,
        quick.model_copy(update={"parallel": odd}),
        quick.model_copy(update={"train": quick.train.model_copy(update={"batch": few})}),
        quick.model_copy(update={"model": quick.model.model_copy(update={"layers": layers})}),
        quick.model_copy(update={"train": quick.train.model_copy(update={"grpo": grpo, "batch": few})}),
        quick.model_copy(update={"data": quick.data.model_copy(update={"prompts": prompts})}),
        v3.model_copy(update={"train": v3.train.model_copy(update={"grpo": grpo})}),
    ]


@pytest.mark.parametrize(("reads", "rule"), RULES, ids=lambda value: getattr(value, "__name__", None))
def test_a_rule_reads_only_what_its_row_names(reads: tuple[str, ...], rule: Rule) -> None:
    for spec in variants():
        read_paths: set[str] = set()
        list(rule(Recorder(spec, "", read_paths)))  # type: ignore[arg-type]
        assert not {path for path in read_paths if not any(covers(read, path) for read in reads)}


@pytest.mark.parametrize(("reads", "rule"), RULES, ids=lambda value: getattr(value, "__name__", None))
def test_the_paths_of_a_row_exist(reads: tuple[str, ...], rule: Rule) -> None:
    for read in reads:
        classes: tuple[Any, ...] = (Spec,)
        for part in read.split("."):
            if part != "*":
                kinds = [fields_of(cls)[part] for cls in classes if part in fields_of(cls)]
                assert kinds, f"{rule.__name__} reads {read}"
                types = [type_ for kind in kinds for type_ in kind.types]
                inner = [part for type_ in types for part in getattr(type_, "__args__", (type_,))]
                classes = tuple(part for part in inner if isinstance(part, type) and issubclass(part, Node))


def test_nearest_divisor() -> None:
    assert [nearest_divisor(12, wanted) for wanted in (1, 5, 7, 8, 9, 100)] == [1, 4, 6, 6, 6, 12]
    for number in range(1, 60):
        for wanted in range(1, 70):
            divisor = nearest_divisor(number, wanted)
            divisors = [candidate for candidate in range(1, number + 1) if number % candidate == 0]
            assert divisor in divisors and all(
                abs(divisor - wanted) <= abs(candidate - wanted) for candidate in divisors
            )


def test_the_codes_of_joint_rules_match_their_source() -> None:
    """These codes are checked before the search for conflicts."""
    codes = {code for _, rule in JOINT for code in re.findall(r'"(E\d{4})"', inspect.getsource(rule))}
    assert codes == JOINT_CODES


def test_a_joint_rule_is_a_rule() -> None:
    assert {rule for _, rule in JOINT} <= {rule for _, rule in RULES}


@pytest.mark.parametrize(
    ("overrides", "sms"),
    [
        ((), 0),
        (("parallel.zero=2",), 20),  # shards of state
        (("parallel.tensor=2",), 0),  # its schedule overlaps no rows
        (("parallel.tensor=2", "schedule.name=dualpipe"), 20),
    ],
)
def test_sms_are_reserved_if_something_is_sent_during_compute(overrides: tuple[str, ...], sms: int) -> None:
    assert load(SPECS / "llama3-8b.dsc", overrides=overrides).sm.communication == sms


def test_a_pipeline_may_be_as_long_as_the_planner_can_fill() -> None:
    """The first and last stage need no layer: 4 layers fill at most 6 stages."""
    sizes = ["parallel.expert=1", "train.batch=32"]
    six = load(SPECS / "quickstart.dsc", overrides=["parallel.pipeline=6", "cluster.node.devices=6", *sizes])
    assert len(make_plan(six).stages) == 6
    eight = check(SPECS / "quickstart.dsc", overrides=["parallel.pipeline=8", "cluster.node.devices=8", *sizes])
    assert [item.code for item in eight] == ["E0808"]


@pytest.mark.parametrize(
    ("schedule", "hint"),
    [
        (ScheduleBlock(name="1f1b"), "write `pipeline = 63`"),
        (ScheduleBlock(name="zbv"), "write `pipeline = 31`"),
        (ScheduleBlock(name="dualpipe"), "write `pipeline = 62`"),  # both have an even number of ranks
        (ScheduleBlock(name="auto", placement="bidirectional"), "write `pipeline = 62`"),
        (ScheduleBlock(name="interleaved", chunks=64), "write `schedule { name = 1f1b }`"),
    ],
)
def test_the_longest_pipeline_that_is_offered_suits_the_schedule(schedule: ScheduleBlock, hint: str) -> None:
    """61 layers, with too many pipeline ranks."""
    spec = load(SPECS / "deepseek-v3.dsc")
    parallel = spec.parallel.model_copy(update={"pipeline": 64})
    (finding,) = stages_have_layers(spec.model_copy(update={"schedule": schedule, "parallel": parallel}))
    assert finding.hint == hint


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?<=a+)b", "(?<!a|bc)b", "(a)(?(1)(?<=a*)|b)", "(?:x(?<=ab|cd))", "(?<=ab)(?=a+)", "(?>a)", "(?(1)a|b)"),
        *("(a", "\\", "a**", "a{99999999999999}", "(" * 5_000 + ")" * 5_000, "(?:" * 600 + "a" + ")*" * 600),
    ],
    ids=lambda pattern: pattern[:20],
)
def test_a_pattern_is_refused_where_python_refuses_it(pattern: str) -> None:
    try:
        re.compile(pattern)
        expected = ""
    except (re.error, OverflowError) as error:
        expected = str(error)
    except RecursionError:
        expected = "it is nested too deep"
    assert _compile_error(pattern) == expected


def test_a_pattern_is_not_compiled_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling a case-insensitive set of ranges takes time proportional to the span of the ranges, not to the text."""
    monkeypatch.setattr(re, "compile", lambda *_: pytest.fail("compiled"))
    assert _compile_error("(?i)[" + "".join(f"{chr(0x100 + index)}-\uffff" for index in range(2_000)) + "]") == ""
