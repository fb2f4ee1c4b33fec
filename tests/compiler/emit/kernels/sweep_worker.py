"""A process of `tests.compiler.emit.kernels.sweep`: it reads a launch per line from stdin, and answers with the verdict
on it."""

from __future__ import annotations

import sys
from dataclasses import asdict

from runtime.system.workers import Answer, Task, serve
from tests.compiler.emit.kernels.sweep import JOB, verdict_of


def handle(task: Task) -> Answer:
    return asdict(verdict_of(JOB.validate_python(task)))


if __name__ == "__main__":
    sys.exit(serve(handle))
