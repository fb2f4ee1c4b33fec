"""Plan the runs with published peaks of memory and write docs/published-memory.md.

python -m benchmarks.published.memory   # a minute
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.published.memory.page import page, sources
from benchmarks.published.memory.rows import FOLDER, all_peaks, planned, store

PAGE = Path(__file__).parents[3] / "docs" / "published-memory.md"
SOURCES = FOLDER / "sources.md"


def main() -> int:
    """Plan the runs, store their peaks, and write the page."""
    results = {}
    for group, run in all_peaks():
        results[run.name] = planned(group, run)
        print(f"{run.name:24} {results[run.name].off(run):+7.1%}", flush=True)
    store(results)
    PAGE.write_text(page(), "utf-8")
    SOURCES.write_text(sources(), "utf-8")
    print(f"wrote docs/{PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
