"""What the proof of a program found → `certificate/<program>.json`, which `dsc train` re-checks before ranks start."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from compiler.ir import Body, Program
from compiler.program.proof import Certificate
from compiler.program.proof.channels import producer_of
from compiler.schedule.schedule import Schedule
from runtime import contract

Exchanges = tuple[contract.Exchanged, ...]


@dataclass(frozen=True)
class Certificates:
    """The certificates of one build. `digests`: those of its files, by path."""

    digests: Mapping[str, str]
    _exchanges: dict[int, Exchanges] = field(default_factory=dict, init=False)  # of bodies by identity: programs share

    def json(self, name: str, program: Program, schedule: Schedule, certificate: Certificate) -> str:
        """Facts of the proof, digests of what it is of, and what each body sends and receives (for the re-check).

        name: of the program's file. The digests are those of the plan, the program and the stage modules.
        """
        wanted = [
            "plan.json",
            f"program/{name}.json",
            *(f"stages/rank_{rank}.py" for rank in range(schedule.num_ranks)),
        ]
        return contract.Certificate(
            schedule=digest(schedule.to_text()),
            files={file: self.digests[file] for file in wanted},
            facts=_facts(certificate),
            bodies=tuple({body.name: self._exchanged(body) for body in bodies} for bodies in program.bodies),
        ).to_json()

    def _exchanged(self, body: Body) -> Exchanges:
        if id(body) not in self._exchanges:
            exchanged = [contract.Exchanged(i.kind, i.peer, producer_of(i), i.slot) for _, i in body.messages]
            self._exchanges[id(body)] = tuple(exchanged)
        return self._exchanges[id(body)]


def _facts(certificate: Certificate) -> contract.Facts:
    return contract.Facts(
        num_ranks=certificate.num_ranks,
        num_micro_batches=certificate.num_micro_batches,
        num_actions=certificate.num_actions,
        num_instructions=certificate.num_instructions,
        num_messages=certificate.num_messages,
        num_exchanges=certificate.num_exchanges,
        num_collectives=certificate.num_collectives,
        peak_activations=certificate.peak_activations,
        peak_fixed_bytes=certificate.peak_fixed_bytes,
        peak_bytes=certificate.peak_bytes,
    )


def digest(text: str) -> str:
    """The sha256 of a file's text."""
    return hashlib.sha256(text.encode()).hexdigest()
