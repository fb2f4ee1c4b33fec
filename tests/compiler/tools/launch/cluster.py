"""Shared by the launch tests: extraction of scripts from written files, and stand-ins for programs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from compiler.cli.main import main

# Options that each launcher needs besides a build.
NEEDED = {
    "torchrun": [],
    "slurm": ["--time", "1:00:00"],
    "kubernetes": ["--image", "registry/dsc:1", "--volume", "shared"],
    "skypilot": ["--image", "registry/dsc:1", "--volume", "shared"],
}
# Environment that a scheduler sets on the second of two nodes.
SAID = {
    "torchrun": {},
    "slurm": {"DSC_HOST": "first", "SLURM_NODEID": "1"},
    "kubernetes": {"JOB_COMPLETION_INDEX": "1"},
    "skypilot": {"SKYPILOT_NODE_IPS": "first\nsecond\n", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"},
}
FAKE_PYTHON = f"""#!{sys.executable} -S
import json, os, sys
with open(os.environ["TOLD"], "w") as file:
    json.dump({{"words": sys.argv[1:], "environment": dict(os.environ)}}, file)
"""
FAKE_SRUN = """#!/usr/bin/env bash
cd FOLDER
echo "$*" >> starts
[[ $1 != --nodes=1 ]] || one=yes
while [[ $1 == --* ]]; do shift; done
if [ "${one:-}" ]; then  # a task on one node, of a job that keeps one on each
    echo $$ > "task-$DSC_NODE.new"
    mv "task-$DSC_NODE.new" "task-$DSC_NODE"
    while [ -e "lost-$DSC_NODE" ]; do sleep 0.1; done
    exec "$@"
fi
tasks=()
for node in 0 1; do
    SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
printf '%s\\n' "${tasks[@]}" > tasks.new
mv tasks.new tasks
worst=0
for task in "${tasks[@]}"; do
    code=0
    wait "$task" || code=$?
    ((code <= worst)) || worst=$code
done
exit "$worst"
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
cd FOLDER
case "$*" in
    "show hostnames n[1-2]") hostname; echo second ;;
    "show hostnames n1") hostname ;;
    "requeue "*) echo "$2" >> requeued ;;
    *) exit 1 ;;
esac
"""


@dataclass(frozen=True)
class Written:
    """The files that `dsc launch` wrote for a launcher, one of `NEEDED`."""

    launcher: str
    folder: Path

    def documents(self) -> list[dict[str, Any]]:
        """The documents of the manifest, parsed as YAML."""
        names = {"kubernetes": "jobset.yaml", "skypilot": "task.yaml"}
        return list(yaml.safe_load_all((self.folder / names[self.launcher]).read_bytes()))

    def script(self) -> str:
        """The script of a node."""
        if self.launcher == "kubernetes":
            script: str = self.documents()[0]["data"]["node.sh"]
            return script
        if self.launcher == "skypilot":
            script = self.documents()[0]["run"]
            return script
        return (self.folder / "node.sh").read_bytes().decode()  # with its carriage returns

    def start(self, environment: Mapping[str, str] | None = None, words: Sequence[str] = ("first", "1")) -> Any:
        """Run the script of a node, as its launcher does. Returns its output and exit code."""
        variables = SAID[self.launcher] if environment is None else environment
        command = ["bash", "-c", self.script(), "node.sh", *(words if self.launcher == "torchrun" else ())]
        return subprocess.run(
            command, env={**os.environ, **variables}, cwd=self.folder, capture_output=True, text=True, check=False
        )


def launch(launcher: str, build: Path, folder: Path, *words: str) -> Written:
    """Write the files of a launcher; it must succeed."""
    assert main(["launch", launcher, str(build), "--out", str(folder), *NEEDED[launcher], *words]) == 0
    return Written(launcher, folder)


def fake_python(path: Path) -> Path:
    """A program that writes its arguments and its environment to the file $TOLD."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE_PYTHON, "utf-8")
    path.chmod(0o755)
    return path


def fake_slurm(folder: Path) -> Path:
    """A folder for PATH with an srun that starts two tasks here, and an scontrol.

    Files beside it: `tasks` has the process ids of the tasks, one per line, `task-NODE` that of a task in a step of one
    node, which does not begin while `lost-NODE` exists; `starts` has a line per srun; `requeued` the jobs that
    were requeued.
    """
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        path = programs / name
        path.write_text(text.replace("FOLDER", shlex.quote(str(folder))), "utf-8")
        path.chmod(0o755)
    return programs


def in_job(programs: Path) -> dict[str, str]:
    """The environment of a batch script, in a job of two nodes."""
    path = f"{programs}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}


def told(path: Path) -> Any:
    """The arguments and environment that the program wrote."""
    return json.loads(path.read_text("utf-8"))
