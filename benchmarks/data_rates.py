"""How fast samples are shuffled, read and packed, and whether `dsc data prepare` is linear and goes on after a kill.

    python -m benchmarks.data_rates [--megabytes 20] [--out benchmarks/results/data-rates.txt]

All figures are of one core, by its processor time. The text is the source of Python's standard library, several times,
each time with other names of the files. The exit code is 1 if a continued preparation gives other tokens, or if it
encodes again what the killed one had stored.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # before the libraries read them

import numpy as np

from benchmarks.encoding import sources
from runtime.data import store
from runtime.data.order import Order
from runtime.data.packing import pack_rows
from runtime.data.samples import Samples

ROOT = Path(__file__).parents[1]
SPEC = "specs/tiny.dsc"
TEXT_TOKENS = 10**10  # of an epoch that is shuffled
SEQUENCES = (128, 4096)
NUM_SAMPLES, NUM_ROWS, MEAN_ROW = 20_000, 200_000, 600
MB = 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=20, help="of the smallest text that is prepared")
    parser.add_argument("--out", type=Path, help="also write the table to a file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dsc-data-") as folder:
        prepared = [prepare(Path(folder) / f"{n}", n * args.megabytes) for n in (1, 2, 4)]
        rates = [*shuffled(), *read(prepared[-1].folder), packed()]
        killed = prepare_killed(Path(folder) / "killed", 4 * args.megabytes)
    lines = [f"{'':44}{'M tokens/s':>12}", *(f"{name:44}{rate / 1e6:12.0f}" for name, rate in rates), ""]
    lines.append(f"{'dsc data prepare':20}{'MB':>8}{'core s':>10}{'core s per MB':>16}")
    lines += [f"{'':20}{p.size_mb:8.0f}{p.core_s:10.2f}{p.core_s / p.size_mb:16.3f}" for p in prepared]
    whole, (first_s, rest) = prepared[-1], killed
    is_equal = rest.tokens_of_split() == whole.tokens_of_split()
    lines.append(
        f"killed after {first_s:.2f} core s, gone on in {rest.core_s:.2f}; {'equal' if is_equal else 'other'} tokens"
    )
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text, "utf-8")
    return int(not is_equal or rest.core_s >= whole.core_s)


def rate(num_tokens: int, work: Callable[[], object]) -> float:
    """Tokens per second of processor time."""
    begin = time.process_time()
    work()
    return num_tokens / (time.process_time() - begin)


def shuffled() -> list[tuple[str, float]]:
    """The order of samples: one at a time, and a batch at once."""
    return [figure for sequence in SEQUENCES for figure in _shuffled(sequence)]


def _shuffled(sequence: int) -> list[tuple[str, float]]:
    order, num_tokens = Order(sequence, TEXT_TOKENS // sequence, seed=1), sequence * NUM_SAMPLES
    order.windows_of(np.arange(NUM_SAMPLES, 10 * NUM_SAMPLES))  # most results of rounds are known after some steps
    one_by_one = rate(num_tokens, lambda: [*map(order.window, range(NUM_SAMPLES))])
    at_once = rate(num_tokens, lambda: order.windows_of(np.arange(NUM_SAMPLES)))
    name = f"of {sequence:,} tokens"
    return [(f"shuffled {name}, one by one", one_by_one), (f"shuffled {name}, all at once", at_once)]


def read(folder: Path) -> list[tuple[str, float]]:
    """Samples of a prepared text, shuffled, as a rank reads them."""
    return [_read(Samples(folder, "train", sequence, seed=1)) for sequence in SEQUENCES]


def _read(samples: Samples) -> tuple[str, float]:
    read_all = rate(samples.sequence * NUM_SAMPLES, lambda: [samples.tokens(index) for index in range(NUM_SAMPLES)])
    return f"shuffled and read, of {samples.sequence:,} tokens", read_all


def packed() -> tuple[str, float]:
    """Rows of conversations, packed into sequences."""
    room = SEQUENCES[-1]
    sizes = np.minimum(np.random.default_rng(1).exponential(MEAN_ROW, NUM_ROWS).astype(np.int64) + 1, room)
    return (
        f"packed, rows of {MEAN_ROW} tokens on average",
        rate(int(sizes.sum()), lambda: pack_rows(np.arange(NUM_ROWS), sizes, room)),
    )


# ---------------------------------------------------------------- dsc data prepare


@dataclass(frozen=True)
class Prepared:
    """A prepared text: its size, and the processor time of the command that made it."""

    folder: Path
    size_mb: float
    core_s: float

    def tokens_of_split(self) -> str:
        """The digest of the tokens."""
        return str((store.verified_meta(self.folder) or {}).get("sha256"))


def prepare(folder: Path, megabytes: int) -> Prepared:
    """Prepare a text of some size in an empty cache."""
    size = write_text(folder, megabytes)
    return continued(folder, size)


def prepare_killed(folder: Path, megabytes: int) -> tuple[float, Prepared]:
    """Prepare a text, kill the command when a part of its tokens is stored, and go on.

    Returns the processor seconds of the first command, and what the second made.
    """
    size = write_text(folder, megabytes)
    process = subprocess.Popen(command(folder), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cache = folder / "cache" / "data"
    while not _has_ended(process) and sum(p.stat().st_size for p in cache.glob(f"{store.PARTS}*")) < size / 8:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise SystemExit("the command ended before it was killed: give more --megabytes")
    return usage.ru_utime + usage.ru_stime, continued(folder, size)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended; its processor time can still be read."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def continued(folder: Path, size: int) -> Prepared:
    process = subprocess.Popen(command(folder), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    answer = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("dsc data prepare failed")
    return Prepared(Path(json.loads(answer)["folder"]), size / MB, usage.ru_utime + usage.ru_stime)


def command(folder: Path) -> list[str]:
    source, cache = f'data.source="{folder}/text/*.py"', str(folder / "cache")
    words = ["data", "prepare", SPEC, "-s", source, "--cache", cache, "--jobs", "1", "--format", "json"]
    return [sys.executable, "-m", "compiler.cli.main", *words]


def write_text(folder: Path, megabytes: int) -> int:
    """Write files of the standard library until they have so many megabytes. Returns their size in bytes."""
    texts, _ = sources()
    (folder / "text").mkdir(parents=True)
    size = number = 0
    while size < megabytes * MB:
        content = f"# {number}\n{texts[number % len(texts)]}".encode()
        (folder / "text" / f"{number:06}.py").write_bytes(content)
        size, number = size + len(content), number + 1
    return size


if __name__ == "__main__":
    sys.exit(main())
