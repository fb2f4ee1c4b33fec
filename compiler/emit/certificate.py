"""What the proof of a program found → `certificate/<program>.json`, which `dsc train` re-checks before ranks start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from compiler.ir import Body, Program
from compiler.proof import Certificate
from compiler.proof.channels import producer_of
from compiler.schedules.schedule import Schedule


@dataclass(frozen=True)
class Certificates:
    """The certificates of one build. `digests`: those of its files, by path."""

    digests: Mapping[str, str]
    _bodies: dict[int, str] = field(default_factory=dict, init=False)  # texts by identity: programs share bodies

    def json(self, name: str, program: Program, schedule: Schedule, certificate: Certificate) -> str:
        """Facts of the proof, digests of what it is of, and what each body sends and receives (for the re-check).

        name: of the program's file. The digests are those of the plan, the program and the stage modules.
        """
        wanted = [
            "plan.json",
            f"program/{name}.json",
            *(f"stages/rank_{rank}.py" for rank in range(schedule.num_ranks)),
        ]
        facts = {key: value for key, value in asdict(certificate).items() if key.startswith(("num", "peak"))}
        parts = [
            f' "schedule": {json.dumps(digest(schedule.to_text()))}',
            _object("files", {file: self.digests[file] for file in wanted}),
            _object("facts", facts),
            ' "bodies": [\n' + ",\n".join(self._rank(bodies) for bodies in program.bodies) + "\n ]",
        ]
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def _rank(self, bodies: tuple[Body, ...]) -> str:
        for body in bodies:
            if id(body) not in self._bodies:
                exchanged = [[i.kind, i.peer, producer_of(i), i.slot] for _, i in body.messages]
                self._bodies[id(body)] = f"   {json.dumps(body.name)}: {json.dumps(exchanged)}"
        return "  {\n" + ",\n".join(self._bodies[id(body)] for body in bodies) + "\n  }"


def digest(text: str) -> str:
    """The sha256 of a file's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _object(name: str, values: Mapping[str, object]) -> str:
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    return f" {json.dumps(name)}: {{\n{rows}\n }}"
