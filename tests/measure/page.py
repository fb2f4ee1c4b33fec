"""The tables of docs/testing.md: the cost of the tests of each folder, and the share of found mutants per package.

`python -m tests.measure.page [FOLDER]` writes them from benchmarks/results/tests.json; with FOLDER, the results of
`make mutants` there are stored in that file first.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.measure.mutants import COUNT, SEED, measured_in, read_rows, read_verdicts, title_of
from tests.measure.sites import choose

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/tests.json"
PAGE = ROOT / "docs/testing.md"
BEGIN, END = "<!-- tables: make mutants -->\n", "<!-- end of tables -->\n"
TIERS = ("test", "landing")
MOST = 12  # folders that have a row


def results(folder: Path) -> dict[str, Any]:
    """Read what `make mutants` left in a folder: costs by folder of tests, verdicts by package of the product."""
    costs: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for tier in TIERS:
        if measured_in(folder, tier):
            rows = [row for measured in measured_in(folder, tier) for rows in read_rows(measured) for row in rows]
            tests = {row["test"]: row for row in rows if "test" in row}  # one that was measured again counts once
            for row in (*tests.values(), *(row for row in rows if "fixture" in row)):
                place = row.get("test") or row["fixture"]
                cost = Counter(tests="test" in row, ms=max(0, round(1000 * row["seconds"])))
                costs[folder_of(place)][tier] += cost
    notice: dict[str, Counter[str]] = defaultdict(Counter)
    noticed_first: Counter[str] = Counter()
    missed = []
    verdicts = {(verdict.digest, verdict.tier): verdict for verdict in read_verdicts(folder / "verdicts.jsonl")}
    for mutant in choose(ROOT, COUNT, SEED):
        of_mutant = [verdicts[mutant.digest, tier] for tier in TIERS if (mutant.digest, tier) in verdicts]
        notice[mutant.package]["mutants"] += bool(of_mutant)
        first = next((verdict for verdict in of_mutant if verdict.noticed_by), None)
        if first is not None and first.noticed_by:
            notice[mutant.package][first.tier] += 1
            noticed_first[folder_of(first.noticed_by)] += 1
        elif of_mutant:
            missed.append(title_of(mutant))
    return {"costs": costs, "packages": notice, "noticed first by": noticed_first, "not noticed": missed}


def folder_of(test: str) -> str:
    """The folder of a test or a fixture."""
    return test.partition("::")[0].rpartition("/")[0] or "tests"


def tables(found: dict[str, Any]) -> str:
    packages = {name: Counter(row) for name, row in sorted(found["packages"].items())}
    total = sum(packages.values(), Counter())
    share = total["test"] / total["mutants"]
    with_landing = f", and with `make landing` {total['test'] + total['landing']}" if total["landing"] else ""
    found_of = {name: (row["test"] + row["landing"], row["mutants"]) for name, row in packages.items()}
    incomplete = [f"{name} {count}/{mutants}" for name, (count, mutants) in found_of.items() if count < mutants]
    lines = [
        f"`make test` finds {total['test']} of {total['mutants']} mutants ({share:.1%}){with_landing}.",
        f"[{RESULTS.name}](../{RESULTS.relative_to(ROOT)}) lists the others.",
        f"They are in {len(incomplete)} of {len(packages)} packages; mutants found:",
        "",
        ", ".join(incomplete) + ".",
        "",
    ]
    costs, noticed_first = found["costs"], found["noticed first by"]
    measured = [tier for tier in TIERS if any(tier in row for row in costs.values())]
    heads = [head for tier in measured for head in (f"tests in `make {tier}`", "CPU seconds")]
    lines += [f"| {' | '.join(('folder', *heads, 'mutants that it finds first'))} |", "|---" * (len(heads) + 2) + "|"]
    dear = sorted(costs, key=lambda name: -sum(row.get("ms", 0) for row in costs[name].values()))
    for name, folders in [*((folder, [folder]) for folder in dear[:MOST]), ("others", dear[MOST:]), ("all", dear)]:
        cells = []
        for tier in measured:
            rows = [costs[folder].get(tier, {}) for folder in folders]
            tests, ms = (sum(row.get(key, 0) for row in rows) for key in ("tests", "ms"))
            cells += [f"{tests:,}", f"{ms / 1000:,.0f}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {sum(noticed_first.get(folder, 0) for folder in folders)} |")
    return "\n".join(lines) + "\n"


def write() -> None:
    before, _, tail = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = tail.partition(END)
    PAGE.write_text(before + BEGIN + tables(json.loads(RESULTS.read_text("utf-8"))) + END + after, "utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        RESULTS.write_text(json.dumps(results(Path(sys.argv[1])), indent=1, sort_keys=True) + "\n", "utf-8")
    write()
