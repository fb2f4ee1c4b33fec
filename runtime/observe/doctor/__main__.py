"""Checks this node before a run: `python -P -m runtime.observe.doctor [BUILD] [--format json]`.

Exit codes: 0 no errors, perhaps warnings · 1 errors · 2 the build cannot be read · 141 the output pipe was closed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from runtime.build.files import BuildError, read
from runtime.contract import RunPlan
from runtime.observe.doctor.checks import CheckFinding, NodeFacts, check
from runtime.system.outcome import printable
from runtime.system.strict_json import FormError

VERSION = 1  # of the JSON
EXIT_FOUND, EXIT_USAGE, EXIT_BROKEN_PIPE = 1, 2, 141


def main(argv: Sequence[str] | None = None, look: Callable[[Path, int], NodeFacts] | None = None) -> int:
    """Check the node and print the findings. `look`: returns the facts of a node; tests pass a fake."""
    parser = argparse.ArgumentParser(prog="python -m runtime.observe.doctor", allow_abbrev=False)
    parser.add_argument("build", nargs="?", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--port", type=int, default=29400)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args(argv)
    plan = None
    if args.build is not None:
        try:
            plan = RunPlan.from_json(read(args.build).files["plan.json"])
        except (BuildError, FormError, KeyError) as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            return EXIT_USAGE
    if look is None:
        from runtime.observe.doctor import probe  # imports torch, which is not needed to reject a build

        look = probe.look
    run = args.out or Path("runs") / (plan.run if plan else "")
    findings = check(look(run, args.port), plan)
    try:
        print(_as_json(findings, args.build) if args.format == "json" else _as_text(findings), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return EXIT_FOUND if any(finding.status == "error" for finding in findings) else 0


def _as_text(findings: Sequence[CheckFinding]) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<7}  {finding.name:<{width}}  {finding.found}".rstrip())
        if finding.mend:
            lines.append(f"{'':<7}  {'':<{width}}  → {finding.mend}")
    return "\n".join(lines)


def _as_json(findings: Sequence[CheckFinding], build: Path | None) -> str:
    counts = {f"{status}s": sum(finding.status == status for finding in findings) for status in ("error", "warning")}
    checks = [asdict(finding) for finding in findings]
    value = {"version": VERSION, "build": None if build is None else str(build), "checks": checks, **counts}
    return json.dumps(value, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main())
