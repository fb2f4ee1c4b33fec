"""Manifests of Kubernetes and of SkyPilot, as plain values.

Kubernetes: a JobSet (jobset.x-k8s.io/v1alpha2), with the script of a node in a ConfigMap: a container's `command` and
`env` would have every `$(NAME)` in them replaced. `tests/compiler/tools/launch/schemas` has what the published pages of
these, and of SkyPilot, say of the fields that are used here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from compiler.tools.launch.job import Job, LaunchError, Needs

# --- YAML from plain values, so that every reader of YAML 1.1 or 1.2 finds the same values in it
#
# A word is plain only if no version of YAML could take it for something else than text. All other texts are in double
# quotes: `1e3`, `y` and a digest such as `12e45` are numbers and truths to some readers.

_WORD = re.compile(r"[A-Za-z][A-Za-z_./-]*")
_BREAKS = re.compile("[\r\x85\u2028\u2029]")  # a reader of YAML 1.1 takes these for ends of lines, and makes them \\n
_TRUTHS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})


class _Dumper(yaml.SafeDumper):
    """Strings as above; lists are indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"'
    if "\n" in text and not _BREAKS.search(text):
        style = "|"  # the library falls back to double quotes where a block cannot hold a text
    elif _WORD.fullmatch(text) and text.lower() not in _TRUTHS:
        style = ""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def documents(*values: dict[str, Any]) -> str:
    """The text of one or several documents, keys in their order."""
    return yaml.dump_all(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20, explicit_start=len(values) > 1
    )


# --- manifests

Manifest = dict[str, Any]
SCRIPTS = "/etc/dsc"  # where containers find the script of a node
SCRIPT = "node.sh"
# Fields that --field may set: of a pod, and of the resources of a task of SkyPilot.
POD_FIELDS = (
    *("affinity", "dnsPolicy", "hostNetwork", "imagePullSecrets", "nodeSelector", "priorityClassName"),
    *("runtimeClassName", "schedulerName", "schedulingGates", "securityContext", "serviceAccountName", "tolerations"),
    "topologySpreadConstraints",
)
SKY_FIELDS = ("disk_size", "disk_tier", "instance_type", "labels", "network_tier", "use_spot")
NODE = "node"  # the replicated job and its container


@dataclass(frozen=True)
class Pods:
    """What containers need beside the job.

    `claim`: a PersistentVolumeClaim that all pods can write to, mounted at `mount`. `resources`: further ones of a
    pod, such as rdma/ib. `fields`: further ones of a pod. `grace`: seconds between SIGTERM and SIGKILL.
    """

    image: str
    namespace: str | None
    claim: str
    mount: str
    resources: Mapping[str, int]
    fields: Mapping[str, Any]
    grace: int
    restarts: int

    @property
    def pins_memory(self) -> bool:
        """Whether pods pin memory, as RDMA does: what a pod asks for beside GPUs is taken for adapters."""
        return any(not name.endswith("/gpu") for name in self.resources)


def checked_fields(fields: Mapping[str, Any], settable: Sequence[str], what: str) -> Mapping[str, Any]:
    """The fields. Raises LaunchError where one is not settable."""
    for name in fields:
        if name not in settable:
            raise LaunchError(
                f"--field {name} is not a field of {what} that can be set", f"those are {', '.join(settable)}"
            )
    return fields


def first_host(job: Job) -> str:
    """The name of the first pod of a JobSet, in the headless service that the JobSet makes."""
    return f"{job.name}-{NODE}-0-0.{job.name}"


def jobset(job: Job, pods: Pods, script: str) -> tuple[Manifest, ...]:
    """A ConfigMap and a JobSet: an indexed Job with a pod a node. A pod that ends before the run does restarts all."""
    container = {
        "name": NODE,
        "image": pods.image,
        "command": ["bash", f"{SCRIPTS}/{SCRIPT}"],
        "resources": _resources(job.needs, pods),
        "volumeMounts": _mounts(pods),
    }
    if pods.pins_memory:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.grace,
        "containers": [container],
        "volumes": _volumes(job, pods),
        **pods.fields,
    }
    nodes = job.needs.nodes
    indexed = {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed", "backoffLimit": 0}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": pods.restarts},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": {**indexed, "template": {"spec": pod}}}}],
    }
    head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(job.name, pods)}
    return _config_map(job, pods, script), {**head, "spec": spec}


def _config_map(job: Job, pods: Pods, script: str) -> Manifest:
    metadata = _metadata(f"{job.name}-scripts", pods)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {SCRIPT: script}}


def _metadata(name: str, pods: Pods) -> Manifest:
    return {"name": name} | ({"namespace": pods.namespace} if pods.namespace else {})


def _resources(needs: Needs, pods: Pods) -> Manifest:
    """Requests and limits of a pod. Memory is for the scheduler to find where ranks compute on CPUs."""
    wanted: dict[str, Any] = dict(pods.resources)
    if needs.is_cpu:
        wanted |= {"cpu": needs.cores_per_node, "memory": str(needs.memory_bytes * needs.ranks_per_node)}
    else:
        given = {name: count for name, count in wanted.items() if name.endswith("/gpu")}
        if given and sum(given.values()) != needs.ranks_per_node:
            said = ", ".join(f"{name}={count}" for name, count in given.items())
            raise LaunchError(
                f"--resource {said} is not the {needs.ranks_per_node} devices that the build takes on each node",
                "leave it out, or give as many",
            )
        if not given:
            wanted["amd.com/gpu" if needs.is_amd else "nvidia.com/gpu"] = needs.ranks_per_node
    return {"requests": wanted, "limits": wanted}


def _mounts(pods: Pods) -> list[Manifest]:
    return [
        {"name": "scripts", "mountPath": SCRIPTS},
        {"name": "files", "mountPath": pods.mount},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]


def _volumes(job: Job, pods: Pods) -> list[Manifest]:
    """The script, the claim, and shared memory for NCCL, of which a container has 64 MiB otherwise."""
    return [
        {"name": "scripts", "configMap": {"name": f"{job.name}-scripts"}},
        {"name": "files", "persistentVolumeClaim": {"claimName": pods.claim}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]


# ---------------------------------------------------------------- SkyPilot
@dataclass(frozen=True)
class Sky:
    """What SkyPilot needs beside the job. `volume`: a volume of SkyPilot that all nodes can write to, at `mount`."""

    image: str
    infra: str | None
    accelerator: str
    volume: str
    mount: str
    fields: Mapping[str, Any]  # further ones of its resources
    restarts: int


def sky_task(job: Job, sky: Sky, script: str) -> Manifest:
    """A managed job. SkyPilot starts it again on new nodes after a preemption, and `restarts` times after an error."""
    needs = job.needs
    resources: Manifest = {"infra": sky.infra} if sky.infra else {}
    if needs.is_cpu:
        memory_gb = -(-needs.memory_bytes * needs.ranks_per_node // 10**9)
        resources |= {"cpus": f"{needs.cores_per_node}+", "memory": f"{memory_gb}+"}
    else:
        resources["accelerators"] = {sky.accelerator: needs.ranks_per_node}
    resources["image_id"] = f"docker:{sky.image}"
    recovery: Manifest = {"max_restarts_on_errors": sky.restarts, "recover_on_exit_codes": [143]}
    return {
        "name": job.name,
        "num_nodes": needs.nodes,
        "resources": {**resources, **sky.fields, "job_recovery": recovery},
        "volumes": {sky.mount: sky.volume},
        "run": script,
    }
