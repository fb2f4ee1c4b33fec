"""Plan the published runs and write docs/published-runs.md.

python -m benchmarks.published          # all runs: a few minutes, mostly the search for ZB-2p schedules at the end
python -m benchmarks.published mpt zb   # only runs whose names begin with these words; others keep their results
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.published.page import page
from benchmarks.published.rows import RESULTS, all_runs, predicted, store, stored

PAGE = Path(__file__).parents[2] / "docs" / "published-runs.md"


def main(starts: tuple[str, ...]) -> int:
    """Predict the runs, store the predictions, and write the page."""
    results = stored() if RESULTS.exists() else {}
    for run in sorted(all_runs(), key=lambda run: run.is_searched):
        if not starts or run.name.startswith(starts):
            results[run.name] = predicted(run)
            print(f"{run.name:24} {results[run.name].off(run):+7.1%}", flush=True)
            store(results)
    PAGE.write_text(page(), "utf-8")
    print(f"wrote docs/{PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
