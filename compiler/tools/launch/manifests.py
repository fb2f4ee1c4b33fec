"""Manifests of Kubernetes and SkyPilot, as plain values.

Kubernetes: a JobSet (jobset.x-k8s.io/v1alpha2). The script of a node is in a ConfigMap, because Kubernetes replaces
every `$(NAME)` in a container's `command` and `env`. `tests/compiler/tools/launch/schemas` has the published schemas of
the fields that are used here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from compiler.tools.launch.job import Job, LaunchError, Needs

# --- YAML from plain values, which every parser of YAML 1.1 or 1.2 reads as the same values
#
# A word is unquoted only if it is text in all versions of YAML. All other texts are in double quotes: `1e3`, `y` and a
# digest such as `12e45` are numbers or booleans to some parsers.

_WORD = re.compile(r"[A-Za-z][A-Za-z_./-]*")
_BREAKS = re.compile("[\r\x85\u2028\u2029]")  # line breaks to a parser of YAML 1.1, which makes them \\n
_TRUTHS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})


class _Dumper(yaml.SafeDumper):
    """Quotes strings as above, and indents lists below their key."""

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
    """Return the YAML of one or several documents, with keys in their order."""
    return yaml.dump_all(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20, explicit_start=len(values) > 1
    )


# --- manifests

Manifest = dict[str, Any]
SCRIPTS = "/etc/dsc"  # folder of the node script in containers
SCRIPT = "node.sh"
# Fields that --field may set, of a pod and of the resources of a SkyPilot task.
POD_FIELDS = (
    *("affinity", "dnsPolicy", "hostNetwork", "imagePullSecrets", "nodeSelector", "priorityClassName"),
    *("runtimeClassName", "schedulerName", "schedulingGates", "securityContext", "serviceAccountName", "tolerations"),
    "topologySpreadConstraints",
)
SKY_FIELDS = ("disk_size", "disk_tier", "instance_type", "labels", "network_tier", "use_spot")
NODE = "node"  # name of the replicated job and of its container


@dataclass(frozen=True)
class Pods:
    """Settings of pods that are not part of the job.

    `claim`: a PersistentVolumeClaim that all pods can write to, mounted at `mount`. `resources`: additional resources
    of a pod, such as rdma/ib. `fields`: additional fields of a pod. `grace`: seconds between SIGTERM and SIGKILL.
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
        """Whether pods pin memory, as RDMA does. All resources besides GPUs are assumed to be network adapters."""
        return any(not name.endswith("/gpu") for name in self.resources)


def check_fields(fields: Mapping[str, Any], settable: Sequence[str], owner: str) -> Mapping[str, Any]:
    """Return the fields. Raises LaunchError if one is not settable."""
    for name in fields:
        if name not in settable:
            raise LaunchError(
                f"--field {name} is not a field of {owner} that can be set", f"use one of {', '.join(settable)}"
            )
    return fields


def first_host(job: Job) -> str:
    """Return the name of the first pod of a JobSet, in the headless service of the JobSet."""
    return f"{job.name}-{NODE}-0-0.{job.name}"


def jobset(job: Job, pods: Pods, script: str) -> tuple[Manifest, ...]:
    """Return a ConfigMap and a JobSet: an indexed Job with one pod per node. If a pod fails, all pods restart."""
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
    """Return requests and limits of a pod. Memory is requested only for ranks on CPUs."""
    wanted: dict[str, Any] = dict(pods.resources)
    if needs.is_cpu:
        wanted |= {"cpu": needs.cores_per_node, "memory": str(needs.memory_bytes * needs.ranks_per_node)}
    else:
        gpus = {name: count for name, count in wanted.items() if name.endswith("/gpu")}
        if gpus and sum(gpus.values()) != needs.ranks_per_node:
            listed = ", ".join(f"{name}={count}" for name, count in gpus.items())
            raise LaunchError(
                f"--resource {listed} differs from the {needs.ranks_per_node} devices that the build needs per node",
                "remove the option, or use as many",
            )
        if not gpus:
            wanted["amd.com/gpu" if needs.is_amd else "nvidia.com/gpu"] = needs.ranks_per_node
    return {"requests": wanted, "limits": wanted}


def _mounts(pods: Pods) -> list[Manifest]:
    return [
        {"name": "scripts", "mountPath": SCRIPTS},
        {"name": "files", "mountPath": pods.mount},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]


def _volumes(job: Job, pods: Pods) -> list[Manifest]:
    """Return the script, the claim, and shared memory for NCCL, since a container has only 64 MiB by default."""
    return [
        {"name": "scripts", "configMap": {"name": f"{job.name}-scripts"}},
        {"name": "files", "persistentVolumeClaim": {"claimName": pods.claim}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]


# ---------------------------------------------------------------- SkyPilot
@dataclass(frozen=True)
class Sky:
    """Settings of SkyPilot that are not part of the job. `volume`: a SkyPilot volume that all nodes can write to,
    mounted at `mount`."""

    image: str
    infra: str | None
    accelerator: str
    volume: str
    mount: str
    fields: Mapping[str, Any]  # additional fields of its resources
    restarts: int


def sky_task(job: Job, sky: Sky, script: str) -> Manifest:
    """Return a managed job. SkyPilot restarts it on new nodes after preemptions, and `restarts` times after errors."""
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
