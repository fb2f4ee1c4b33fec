"""The contract of build and runtime: parsed strictly, written back byte for byte, and refused by path if damaged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from runtime import contract
from runtime.contract import BuildManifest, Certificate, DataRequest, KernelList, Mesh, RunPlan, RunProgram
from runtime.contract.mesh import Columns, columns_of_channel
from runtime.system.strict_json import FormError, pretty, tree
from tests.runtime.plans import small_plan

GOLDEN = Path(__file__).parents[1] / "golden"
PLANS = sorted(GOLDEN.glob("*/plan.json"))


def test_every_exported_name_is_in_a_module() -> None:
    assert all(hasattr(contract, name) for name in contract.__all__)
    assert not hasattr(contract, "no_such_class")


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.parent.name)
def test_plans_round_trip(path: Path) -> None:
    text = path.read_text("utf-8")
    plan = RunPlan.from_json(text)
    assert pretty(plan) == text
    assert tree(plan) == json.loads(text)
    assert DataRequest.from_json(json.dumps(tree(plan.data_request))) == plan.data_request


@pytest.mark.parametrize(
    ("pattern", "form"),
    [("*/program/*.json", RunProgram), ("*/certificate/*.json", Certificate)],
    ids=["programs", "certificates"],
)
def test_programs_and_certificates_round_trip(pattern: str, form: type[RunProgram] | type[Certificate]) -> None:
    paths = sorted(GOLDEN.glob(pattern))
    assert paths
    for path in paths:
        text = path.read_text("utf-8")
        value = form.from_json(text)
        assert value.to_json() == text and tree(value) == json.loads(text)


@pytest.mark.parametrize(
    ("name", "form"), [("kernels.json", KernelList), ("manifest.json", BuildManifest)], ids=["kernels", "manifests"]
)
def test_lists_of_kernels_and_files_round_trip(name: str, form: type[KernelList] | type[BuildManifest]) -> None:
    paths = sorted(GOLDEN.glob(f"*/{name}"))
    assert paths
    for path in paths:
        text = path.read_text("utf-8")
        assert pretty(form.from_json(text)) == text


def test_a_damaged_program_is_refused_with_the_path() -> None:
    text = (GOLDEN / "tiny" / "program" / "train_4.json").read_text("utf-8")
    for old, new, path in (
        ('["F0", [0], [], []]', '["F0", [0], []]', "ranks"),
        ('["F0", [0], [], []]', '["F0", [-1], [], []]', "ranks.micro_batches"),
        ('["F0", [0], [], []]', '["F0", [0], [[0]], []]', "ranks.posts"),
        ('"micro_batches": 4', '"micro_batches": 0', "micro_batches"),
        ('"placement": "loop(1)"', '"placement": "loop(1)\\n"', "placement"),
    ):
        assert text.count(old) == 1
        with pytest.raises(FormError, match=rf"^{path} is not valid for a program$"):
            RunProgram.from_json(text.replace(old, new))


def test_a_field_that_has_its_default_is_left_out() -> None:
    text = PLANS[0].read_text("utf-8")
    layers = RunPlan.from_json(text).moe_layers
    assert layers and all(layer.slots is None for layer in layers) and '"slots"' not in text
    with pytest.raises(FormError, match=r"^moe_layers\.slots is not valid for a plan$"):
        RunPlan.from_json(text.replace('"sequence_loss": 0.0,', '"sequence_loss": 0.0, "slots": null,', 1))


# ---------------------------------------------------------------- refusals


def put(path: str, value: Any) -> Callable[[Any], None]:
    """An edit of a plan's JSON that sets the value at a path."""

    def edit(whole: Any) -> None:
        *parents, last = path.split(".")
        for key in parents:
            whole = whole[int(key) if isinstance(whole, list) else key]
        whole[int(last) if isinstance(whole, list) else last] = value

    return edit


def without(path: str) -> Callable[[Any], None]:
    """An edit of a plan's JSON that removes a key."""

    def edit(whole: Any) -> None:
        *parents, last = path.split(".")
        for key in parents:
            whole = whole[int(key) if isinstance(whole, list) else key]
        del whole[last]

    return edit


deep: Any = {}
for _ in range(40):
    deep = {"a": deep}
OTHER = "is not valid for a plan"
REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "unknown key": (put("train.colour", 1), "train.colour is not a key of a plan"),
    "missing key": (without("train.optimizer"), f"train.optimizer {OTHER}"),
    "missing key in a row": (without("buckets.0.parameters.0.decay"), f"buckets.parameters.decay {OTHER}"),
    "text for a number": (put("mesh.pp", "1"), f"mesh.pp {OTHER}"),
    "float for an int": (put("mesh.pp", 1.0), f"mesh.pp {OTHER}"),
    "bool for an int": (put("steps", True), f"steps {OTHER}"),
    "int for a bool": (put("buckets.0.parameters.0.decay", 1), f"buckets.parameters.decay {OTHER}"),
    "NaN": (put("train.optimizer.settings.eps", float("nan")), "train.optimizer.settings.eps is not a number"),
    "infinity": (put("mtp_weight.0.value", float("inf")), "mtp_weight.value is not a number"),
    "NaN where nobody reads": (put("model.attention.heads", float("nan")), "model.attention.heads is not a number"),
    "a huge int": (put("train.tokens", 10**40), f"train.tokens {OTHER}"),
    "an int that no float holds": (
        put("train.optimizer.weight_decay", -(10**400)),
        f"train.optimizer.weight_decay {OTHER}",
    ),
    "a huge int where nobody reads": (put("model.attention.heads", 10**40), f"model.attention.heads {OTHER}"),
    "nesting without end": (put("model.mtp", deep), f"model.mtp{'.a' * 33} {OTHER}"),
    "a name that is a path": (put("run", "../x"), f"run {OTHER}"),
    "a name with a line break": (put("run", "x\n"), f"run {OTHER}"),
    "an unknown word": (put("train.rate.0.shape", "wave"), f"train.rate.shape {OTHER}"),
    "a channel of an unknown kind": (put("openings", [["ring", [0], "all"]]), f"openings.kind {OTHER}"),
    "an edge of three": (put("openings", [["edge", [0, 1, 2], "each"]]), "openings: not valid for a plan"),
    "an object for an array": (put("records", {}), f"records {OTHER}"),
    "an array for an object": (put("mesh", []), f"mesh {OTHER}"),
    "a tokenizer of neither form": (put("data.tokenizer", 7), f"data.tokenizer {OTHER}"),
    "a long key": (put("x" * 10_000, 1), f"{'x' * 60}…{'x' * 60} is not a key of a plan"),
    "degrees that do not divide": (put("mesh.ep", 3), "mesh: not valid for a plan"),
    "a weight of eight bits that is none": (
        put("quantised", [{"tensor": "none", "op": "quantise_blocks", "kernel": None, "suffixes": ["_fp8"]}]),
        "quantised: not valid for a plan",
    ),
    "a holder beyond the world": (put("biases.0.holders", [9]), "biases: holders: not valid for a plan"),
    "holders out of order": (put("buckets.0.holders", [0, 0]), "buckets: holders: not valid for a plan"),
    "an owner where elements are shared out": (
        put("buckets.0.owners", [0]),
        "buckets: owners: not valid for a plan",
    ),
    "an optimizer that is a path": (put("train.optimizer.kind", "../x"), f"train.optimizer.kind {OTHER}"),
    "another unit": (put("optimizer.unit", "row"), f"optimizer.unit {OTHER}"),
    "no rate": (put("train.rate", []), "train.rate: not valid for a plan"),
    "a hole between layers": (put("model.layers.1.first", 2), "model.layers: not valid for a plan"),
    "a step of no sequences": (put("batches.0.1", 0), "batches: not valid for a plan"),
    "memory of other ranks": (put("memory", [1, 1]), "memory: not valid for a plan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_plan_is_refused_with_the_path(name: str) -> None:
    edit, message = REFUSED[name]
    document = json.loads((GOLDEN / "tiny" / "plan.json").read_text("utf-8"))
    edit(document)
    with pytest.raises(FormError) as caught:
        RunPlan.from_json(json.dumps(document))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"run": "a", "run": "b"}', "run is there twice"),
        ("[" * 100_000, "it is nested without end"),
        ("{", "it is no JSON: "),
        ("[]", "it is not valid for a plan"),
        ("1" * 5000, "it is no JSON: "),
    ],
    ids=["a key twice", "brackets", "cut off", "no object", "an endless number"],
)
def test_invalid_texts_are_refused(text: str, said: str) -> None:
    with pytest.raises(FormError) as caught:
        RunPlan.from_json(text)
    assert str(caught.value).startswith(said)


def test_a_repeated_key_is_found_anywhere() -> None:
    text = (GOLDEN / "tiny" / "plan.json").read_text("utf-8")
    for old, place in (('"dp": 1', "mesh.dp"), ('"heads": 2', "model.attention.heads"), ('"kind": "dense"', "kind")):
        assert text.count(old) == 1
        with pytest.raises(FormError, match=rf"{place} is there twice$"):
            RunPlan.from_json(text.replace(old, f"{old}, {old}"))


def test_any_edit_is_refused_or_read_back() -> None:
    """With any replaced value, the plan is refused in a printable line, or written as it was read."""
    generator = random.Random(0)
    values = [None, True, 0, 1, -1, 3, 0.5, 1e300, "", "x", "float32", [], [1], [[0, 1]], {}, {"a": 1}, 10**30]
    refused = 0
    for _ in range(400):
        document = tree(small_plan(pp=2))
        node: Any = document
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = generator.choice(keys)
            if not isinstance(node[key], dict | list) or not node[key] or generator.random() < 0.3:
                break
            node = node[key]
        if isinstance(node, dict) and generator.random() < 0.2:
            del node[key]
        else:
            node[key] = generator.choice(values)
        text = json.dumps(document)
        try:
            plan = RunPlan.from_json(text)
        except FormError as error:
            refused += 1
            assert str(error).isprintable() and len(str(error)) < 200
        else:
            assert tree(plan) == document and RunPlan.from_json(pretty(plan)) == plan
    assert refused > 200


@pytest.mark.parametrize(("heads", "first", "is_taken"), [(2, 0, True), (2, 508, True), (2, 509, False), (3, 0, False)])
def test_clipped_rows_are_rows_of_their_parameter(heads: int, first: int, is_taken: bool) -> None:
    """The embedding of 512 rows instead of a query matrix: 2 rows per head, for whole groups of heads."""
    document = json.loads((GOLDEN / "tiny" / "plan.json").read_text("utf-8"))
    document["train"]["optimizer"]["qk_clip"] = 100.0
    rows = {"parameter": "embedding", "first": first, "heads": heads, "parts": [[2, 0.5]]}
    document["clipped"] = [{"name": "layers.0", "heads": 4, "key_heads": 2, "rows": [rows]}]
    if is_taken:
        assert RunPlan.from_json(json.dumps(document)).clipped[0].rows[0].end == first + 4
    else:
        with pytest.raises(FormError, match=r"^clipped: layers\.0: not valid for a plan$"):
            RunPlan.from_json(json.dumps(document))


MESHES = (
    Mesh(pp=1, dp=4, ep=2, tp=1, cp=1),
    Mesh(pp=1, dp=4, ep=8, tp=2, cp=1, node=4),
    Mesh(pp=1, dp=8, ep=4, tp=1, cp=1, node=2),
    Mesh(pp=1, dp=2, ep=2, tp=2, cp=2, etp=2, sq=4),
    Mesh(pp=1, dp=4, ep=2, tp=2, cp=1, etp=2, copies=2),
)


@pytest.mark.parametrize("kind", get_args(Columns))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_channels_of_a_kind_divide_the_columns(mesh: Mesh, kind: Columns) -> None:
    """Each column is in one channel, and all members of a channel have the same one."""
    channels = [tuple(columns_of_channel(column, kind, mesh)) for column in range(mesh.columns)]
    for column, channel in enumerate(channels):
        assert column in channel and {channels[member] for member in channel} == {channel}
    sizes = {
        "block": mesh.expert_group,
        "node": mesh.node or mesh.expert_group,
        "member": mesh.columns // mesh.expert_group,
    }
    sizes |= {"each": 1, "all": mesh.columns, "tensor": mesh.tp, "context": mesh.cp, "slice": mesh.columns // mesh.tp}
    sizes |= {"across": mesh.expert_group // (mesh.node or mesh.expert_group)}
    assert {*map(len, channels)} == {sizes.get(kind, len(channels[0]))}


def test_weights_of_eight_bits_are_not_divided() -> None:
    document = json.loads((GOLDEN / "tiny" / "plan.json").read_text("utf-8"))
    tensor = document["buckets"][0]["parameters"][0]["tensor"]
    document["quantised"] = [{"tensor": tensor, "op": "quantise_blocks", "kernel": None, "suffixes": ["_fp8"]}]
    for zero in range(3):
        assert RunPlan.from_json(json.dumps(document | {"zero": zero})).quantised[0].tensor == tensor
    with pytest.raises(FormError, match=r"^quantised: not valid for a plan$"):
        RunPlan.from_json(json.dumps(document | {"zero": 3}))
