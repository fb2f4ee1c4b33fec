"""What the proof of a program found → `certificate/<program>.json`, which `dsc train` re-checks before ranks start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from compiler.ir import Body, Program
from compiler.proof import Certificate
from compiler.proof.channels import message_of
from compiler.schedules.schedule import Schedule


def certificate_json(
    name: str, program: Program, schedule: Schedule, certificate: Certificate, files: Mapping[str, str]
) -> str:
    """Facts of the proof, digests of what it is of, and what each body sends and receives (for the re-check).

    name: of the program's file. files: the build's, by path; the plan, the program and the stage modules are digested.
    """
    wanted = ["plan.json", f"program/{name}.json", *(f"stages/rank_{rank}.py" for rank in range(schedule.num_ranks))]
    facts = {key: value for key, value in asdict(certificate).items() if key.startswith(("num", "peak"))}
    parts = [
        f' "schedule": {json.dumps(_digest(schedule.to_text()))}',
        _object("files", {file: _digest(files[file]) for file in wanted}),
        _object("facts", facts),
        ' "bodies": [\n' + ",\n".join(_rank(bodies) for bodies in program.bodies) + "\n ]",
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _object(name: str, values: Mapping[str, object]) -> str:
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    return f" {json.dumps(name)}: {{\n{rows}\n }}"


def _rank(bodies: tuple[Body, ...]) -> str:
    rows = [
        f"   {json.dumps(body.name)}: "
        + json.dumps([[i.kind, i.peer, message_of(i, 0).action, i.slot] for i in body.instructions if i.peer >= 0])
        for body in bodies
    ]
    return "  {\n" + ",\n".join(rows) + "\n  }"
