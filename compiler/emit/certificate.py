"""What the proof of a program found → `certificate/<program>.json`, which `dsc train` re-checks before ranks start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from compiler.ir import Body, Program
from compiler.proof import Certificate
from compiler.proof.channels import producer_of
from compiler.schedules.schedule import Schedule


def certificate_json(
    name: str,
    program: Program,
    schedule: Schedule,
    certificate: Certificate,
    digests: Mapping[str, str],
    told: dict[int, str] | None = None,
) -> str:
    """Facts of the proof, digests of what it is of, and what each body sends and receives (for the re-check).

    name: of the program's file. digests: of the build's files, by path; those of the plan, the program and the stage
    modules are told. told: what is said of bodies, by identity; programs that share bodies share it.
    """
    known = {} if told is None else told
    wanted = ["plan.json", f"program/{name}.json", *(f"stages/rank_{rank}.py" for rank in range(schedule.num_ranks))]
    facts = {key: value for key, value in asdict(certificate).items() if key.startswith(("num", "peak"))}
    parts = [
        f' "schedule": {json.dumps(digest(schedule.to_text()))}',
        _object("files", {file: digests[file] for file in wanted}),
        _object("facts", facts),
        ' "bodies": [\n' + ",\n".join(_rank(bodies, known) for bodies in program.bodies) + "\n ]",
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def digest(text: str) -> str:
    """Of a file."""
    return hashlib.sha256(text.encode()).hexdigest()


def _object(name: str, values: Mapping[str, object]) -> str:
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    return f" {json.dumps(name)}: {{\n{rows}\n }}"


def _rank(bodies: tuple[Body, ...], told: dict[int, str]) -> str:
    for body in bodies:
        if id(body) not in told:
            exchanged = [[i.kind, i.peer, producer_of(i), i.slot] for _, i in body.messages]
            told[id(body)] = f"   {json.dumps(body.name)}: {json.dumps(exchanged)}"
    return "  {\n" + ",\n".join(told[id(body)] for body in bodies) + "\n  }"
