"""All checks and measurements that need a GPU, in at most ten minutes: `make gpu`, or without make:

    python3 -m benchmarks.gpu                      # → benchmarks/results/<device>.json, then docs/kernels.md
    python3 -m benchmarks.gpu --out FILE           # the results elsewhere, and no page
    python3 -m benchmarks.gpu --only checks        # a part by name, also several
    python -m benchmarks.gpu --carry               # no GPU: wheels of missing packages into build/gpu, to be copied
    python -m benchmarks.gpu --facts               # no GPU: what kernels compile to → benchmarks/results/kernels.json
    python -m benchmarks.gpu --page                # no GPU: docs/kernels.md from the results that are there
    python -m benchmarks.gpu --code                # no GPU: prints what each launch of kernels.json compiles to
    python -m benchmarks.gpu --rates FILE          # no GPU: prints the rates of libraries in results, for a rate table

It needs torch, triton, numpy and jinja2, and further packages for some parts. A part without its packages is skipped
with a message. Results are written as soon as they are there, and a second run goes on where the first was stopped.
Exit codes: 0 measured, or no GPU · 1 a part failed, or a kernel is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import carried

RESULTS = Path(__file__).parents[1] / "results"
FACTS = RESULTS / "kernels.json"
TOTAL_S = 570.0
MEASURED = ("benchmarks/gpu", "compiler/emit", "runtime")
ASK = """
import json, torch
found = {"torch": torch.__version__}
try:
    import triton
    found["triton"] = triton.__version__
except ImportError:
    pass
if torch.cuda.is_available():
    device = torch.cuda.get_device_properties(0)
    found |= {"device": device.name, "sms": device.multi_processor_count, "memory_bytes": device.total_memory}
    found |= {"l2_bytes": device.L2_cache_size, "cuda": torch.version.cuda}
print(json.dumps(found))
"""


def main() -> int:
    args = _parser().parse_args()
    if args.carry:
        return carried.download(args.python)
    if args.facts:
        from benchmarks.gpu.facts import facts

        document = facts(json.loads(FACTS.read_text("utf-8")) if FACTS.exists() else {})
        FACTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        return write_page()
    if args.page:
        return write_page()
    if args.code:
        from benchmarks.gpu.page import compiled, launches

        print(launches(compiled()), end="")
        return 0
    if args.rates:
        from benchmarks.gpu.rates import rows

        for row in rows(json.loads(args.rates.read_text("utf-8"))):
            print(json.dumps(row.model_dump(by_alias=True, exclude_none=True, mode="json")))
        return 0
    carried.install()
    about = device()
    if "device" not in about:
        print("No CUDA device here: nothing was measured and no result was written.")
        return 0
    return measure(about, args.out, args.only, args.total)


def _parser() -> argparse.ArgumentParser:
    from benchmarks.gpu.parts import PARTS

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS], help="parts to run")
    parser.add_argument("--out", type=Path, help="the file of results; default: benchmarks/results/<device>.json")
    parser.add_argument("--total", type=float, default=TOTAL_S, metavar="S", help="seconds of all parts together")
    parser.add_argument("--carry", action="store_true", help="download wheels for a machine without network, and end")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="the Python of that machine")
    parser.add_argument("--facts", action="store_true", help="compile every kernel for sm_90, and end")
    parser.add_argument("--code", action="store_true", help="print what each launch compiles to, and end")
    parser.add_argument("--page", action="store_true", help="write docs/kernels.md, and end")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="print the rates of libraries in results, and end")
    return parser


def device() -> dict[str, Any]:
    """The device and versions, from a child process, so that this one does not initialize CUDA."""
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        print(done.stderr.strip()[-500:], file=sys.stderr)
        return {}
    about: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return about


def measure(about: dict[str, Any], out: Path | None, only: list[str] | None, total_s: float) -> int:
    from benchmarks.gpu.parts import PARTS, Report, run_parts

    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    header = {**about, "python": platform.python_version(), "date": date, "sources": sources()}
    report = Report(out or RESULTS / f"{short_name(about['device'])}.json", header)
    run_parts(report, only or [part.name for part in PARTS], total_s)
    print(report.path)
    if out is None:
        write_page()
    return int(failed(report.found))


def sources() -> str:
    """A digest of what is measured. Results of other sources are not continued."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in MEASURED:
        for file in sorted([*(root / folder).rglob("*.py"), *(root / folder).rglob("*.j2")]):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def short_name(device: str) -> str:
    """The name of a device in files: h100 for NVIDIA H100 80GB HBM3."""
    model = re.search(r"\b[A-Z]{1,3}\d{2,4}\w*", device)
    return (model[0] if model else re.sub(r"\W+", "-", device)).lower()


def failed(found: dict[str, Any]) -> bool:
    parts = found["parts"].values()
    return any("failed" in part or any("failed" in row for row in part["rows"]) for part in parts)


def write_page() -> int:
    from benchmarks.gpu.page import PAGE, current

    PAGE.write_text(current(), "utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parents[1])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
