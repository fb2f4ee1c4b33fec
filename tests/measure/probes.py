"""Which tests execute which mutants: with tests.measure.costs, in a copy of the project that has probes.

`pytest -p tests.measure.probes --costs FOLDER` adds the numbers of the mutants that each test, and each fixture,
executed to the lines of tests.measure.costs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutant_probes
import pytest

from tests.measure import costs
from tests.traced import SharedSegments


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--probes", type=int, help="how many mutants have a probe")
    costs.pytest_addoption(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    folder: Path = config.getoption("--costs")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.probes"
    file.write_bytes(bytes(config.getoption("--probes")))
    os.environ[mutant_probes.NAME] = str(file)
    mutant_probes.share(str(file))
    nameless = Path(mutant_probes.NAMELESS)
    if not nameless.exists():
        nameless.write_bytes(file.read_bytes())
    config.pluginmanager.register(Probes(file.with_suffix(".jsonl").open("w")))
    remember_traces()


class Probes(costs.Costs):
    """Writes the lines of Costs, with the executed places."""

    def write(self, **row: Any) -> None:
        super().write(**row, executed=mutant_probes.take())


def remember_traces() -> None:
    """Count the places executed by a trace also for tests that reuse the segment."""
    code: Callable[..., Any] = SharedSegments.code

    def traced(self: SharedSegments, segment: Any, target: Any, progress: Any) -> Any:
        digest = hashlib.sha256(f"{segment.emitted_key} {target}".encode()).hexdigest()
        file = self.shared_folder.parent / "executed" / digest
        if file.exists():
            segment_code = code(self, segment, target, progress)
            executed = json.loads(file.read_text())
        else:
            before = mutant_probes.take()
            segment_code = code(self, segment, target, progress)
            executed = mutant_probes.take()
            file.parent.mkdir(exist_ok=True)
            (partial := file.with_suffix(f".{os.getpid()}")).write_text(json.dumps(executed))
            partial.rename(file)
            executed += before
        for number in executed:
            mutant_probes.hit(number)
        return segment_code

    SharedSegments.code = traced  # type: ignore[method-assign]
