"""Manifests of `dsc launch` against the published schemas, and the YAML in which they are written."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from compiler.tools.launch.manifests import documents
from tests.compiler.tools.launch.cluster import launch

SCHEMAS = Path(__file__).parent / "schemas"
KINDS = {"kubernetes": ["configmap", "jobset"], "skypilot": ["skypilot"]}


def validator(name: str) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    pod = Resource.from_contents(json.loads((SCHEMAS / "pod.json").read_text("utf-8")))
    return Draft202012Validator(schema, registry=Registry().with_resource("pod", pod))


@pytest.mark.parametrize("launcher", KINDS)
@pytest.mark.parametrize("nodes", ["one_node", "two_nodes", "gpu_nodes"])
def test_manifests_have_the_published_form(
    launcher: str, nodes: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    options = [] if launcher == "skypilot" else ["--namespace", "training", "--resource", "rdma/ib=8"]
    manifests = launch(launcher, request.getfixturevalue(nodes), tmp_path, *options).documents()
    assert len(manifests) == len(KINDS[launcher])
    for document, name in zip(manifests, KINDS[launcher], strict=True):
        assert [error.message for error in validator(name).iter_errors(document)] == []


@pytest.mark.parametrize("launcher", KINDS)
def test_the_schemas_refuse_unknown_keys(launcher: str, two_nodes: Path, tmp_path: Path) -> None:
    """Each object with fixed keys is refused with one additional key, so wrong keys cannot pass."""
    document, name = launch(launcher, two_nodes, tmp_path).documents()[-1], KINDS[launcher][-1]
    free = {"requests", "limits", "volumes"}  # of names that a user gives
    places = [place for place in objects(document) if not place or place[-1] not in free]
    assert len(places) >= (3 if launcher == "skypilot" else 10)
    for place in places:
        changed = copy.deepcopy(document)
        target: Any = changed
        for key in place:
            target = target[key]
        target["nonsense"] = 1
        assert not validator(name).is_valid(changed), place


def objects(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all objects in a document."""
    if isinstance(value, dict):
        return [place, *(inner_place for key, item in value.items() for inner_place in objects(item, (*place, key)))]
    if isinstance(value, list):
        return [inner_place for index, item in enumerate(value) for inner_place in objects(item, (*place, index))]
    return []


def test_a_jobset_has_a_pod_a_node(gpu_nodes: Path, tmp_path: Path) -> None:
    words = ("--restarts", "7", "--grace", "90", "--mount", "/shared", "--resource", "rdma/ib=8")
    scripts, jobset = launch("kubernetes", gpu_nodes, tmp_path, *words).documents()
    (job,) = jobset["spec"]["replicatedJobs"]
    indexed, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    assert (indexed["parallelism"], indexed["completions"], indexed["completionMode"]) == (2, 2, "Indexed")
    assert indexed["backoffLimit"] == 0 and jobset["spec"]["failurePolicy"] == {"maxRestarts": 7}
    assert pod["terminationGracePeriodSeconds"] == 90
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1, "rdma/ib": 8}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert scripts["metadata"]["name"] == pod["volumes"][0]["configMap"]["name"]
    assert "\n    /shared/build/tiny " in scripts["data"]["node.sh"]


FIELDS = {
    "nodeSelector": {"pool": "train"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "imagePullSecrets": [{"name": "registry"}],
}


def test_fields_of_a_pod_have_the_published_form(gpu_nodes: Path, tmp_path: Path) -> None:
    words = [word for name, value in FIELDS.items() for word in ("--field", f"{name}={json.dumps(value)}")]
    document = launch("kubernetes", gpu_nodes, tmp_path, *words, "--field", "serviceAccountName=trainer").documents()[
        -1
    ]
    assert [error.message for error in validator(KINDS["kubernetes"][-1]).iter_errors(document)] == []
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["template"]["spec"].items() >= {**FIELDS, "serviceAccountName": "trainer"}.items()


@pytest.mark.parametrize(
    "words", [("--resource", "amd.com/gpu=1"), ("--resource", "amd.com/gpu=1", "--resource", "rdma/ib=1")]
)
def test_devices_of_another_maker(words: tuple[str, ...], gpu_nodes: Path, tmp_path: Path) -> None:
    """They are requested instead of NVIDIA's. Only RDMA devices need to pin memory."""
    _, jobset = launch("kubernetes", gpu_nodes, tmp_path, *words).documents()
    (container,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    wanted = dict(option.split("=") for option in words[1::2])
    assert container["resources"]["limits"] == {name: int(count) for name, count in wanted.items()}
    assert ("securityContext" in container) == ("rdma/ib" in wanted)


def test_a_task_of_skypilot(gpu_nodes: Path, two_nodes: Path, tmp_path: Path) -> None:
    (task,) = launch("skypilot", gpu_nodes, tmp_path, "--restarts", "3", "--infra", "k8s").documents()
    assert task["num_nodes"] == 2 and task["volumes"] == {"/mnt/dsc": "shared"}
    recovery = {"max_restarts_on_errors": 3, "recover_on_exit_codes": [143]}
    resources = {"infra": "k8s", "accelerators": {"H100": 1}, "image_id": "docker:registry/dsc:1"}
    assert task["resources"] == {**resources, "job_recovery": recovery}
    (task,) = launch(
        "skypilot", gpu_nodes, tmp_path, "--field", "use_spot=true", "--field", "disk_size=500"
    ).documents()
    assert (task["resources"]["use_spot"], task["resources"]["disk_size"]) == (True, 500)
    assert [error.message for error in validator("skypilot").iter_errors(task)] == []
    (task,) = launch("skypilot", two_nodes, tmp_path).documents()
    assert (task["resources"]["cpus"], task["resources"]["memory"]) == ("1+", "4+")


# ---------------------------------------------------------------- YAML

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [
        "y",
        "NO",
        "on",
        "null",
        "~",
        "1e3",
        "0o17",
        "0x1f",
        "1_000",
        "12:30:00",
        "2026-01-01",
        "=",
        "<<",
        ".inf",
        "",
        " ",
        "- a",
        "a: b",
        "#",
        "a #b",
        "|\n",
        "---\n",
        "...\n",
        "&a",
        "*a",
        "!!python/object:os.system",
        "12e45",
        "\t\n a",
        "a\n\x85b",
        "a\n\u2028b\r\n",
    ]
)
VALUES = st.recursive(
    st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(TEXTS, VALUES, max_size=5), min_size=1, max_size=3))
@settings(max_examples=100)
def test_yaml_reads_back(values: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(documents(*values))) == values


@pytest.mark.parametrize(
    "text", ["y", "N", "Yes", "off", "true", "NULL", "1e3", "12e45", "0o17", ".5", "1_0", "+1", "~"]
)
def test_ambiguous_yaml_scalars_are_quoted(text: str) -> None:
    """YAML 1.1, YAML 1.2 and Go's readers disagree on booleans and numbers, but not on quoted strings."""
    assert documents({"value": text}) == f'value: "{text}"\n'


def test_every_text_of_a_manifest_is_a_word_a_block_or_in_quotes(two_nodes: Path, tmp_path: Path) -> None:
    launch("kubernetes", two_nodes, tmp_path)
    for event in yaml.parse((tmp_path / "jobset.yaml").read_text("utf-8")):
        if isinstance(event, yaml.ScalarEvent) and event.style is None:
            plain = event.value
            assert plain.isdecimal() or plain in ("true", "false") or plain.replace("-", "").replace(".", "").isalpha()


def test_repeated_values_are_written_without_anchors() -> None:
    """YAML readers resolve anchors, but a person who edits a manifest does not expect them."""
    shared = {"b": [1, "two"]}
    written = documents({"a": shared, "c": shared})
    assert written == "a:\n  b:\n    - 1\n    - two\nc:\n  b:\n    - 1\n    - two\n"
    assert documents(shared, shared) == 2 * "---\nb:\n  - 1\n  - two\n"
