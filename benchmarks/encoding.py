"""How fast documents become tokens: `tokenizers` beside the encoder of `dsc data prepare`, on one core, in turn.

    python -m benchmarks.encoding [--rounds 3] [--out benchmarks/results/encoding.txt]

The text is the source of Python's standard library, and the tokenizer a byte-level BPE that is trained on a part of it,
with the pattern of GPT-2. Numbers are medians of MB per second of processor time. The exit code is 1 if their ids
differ, or if gigatoken is not used.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # before the libraries read them

import numpy as np

from runtime.data import tokenizer
from runtime.data.document_encoder import DocumentEncoder

VOCAB, TRAINED_ON, LIMIT_MB = 16_384, 200, 20.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the table to a file")
    args = parser.parse_args()
    texts, size = sources()
    bpe = tokenizer.train(texts[:TRAINED_ON], VOCAB)
    encoder = DocumentEncoder(bpe)
    encoders: dict[str, Callable[[Sequence[str]], Sequence[Sequence[int] | np.ndarray]]] = {
        "tokenizers": lambda given: tokenizer.encode(bpe, given),
        "dsc": encoder.encode,
    }
    rates: dict[str, list[float]] = {name: [] for name in encoders}
    ids: dict[str, np.ndarray] = {}
    for _ in range(args.rounds):
        for name, encode in encoders.items():
            begin = time.process_time()
            found = encode(texts)
            rates[name].append(size / (time.process_time() - begin))
            ids[name] = np.concatenate([np.asarray(row, np.int64) for row in found])
    medians = {name: statistics.median(values) for name, values in rates.items()}
    lines = [f"{'':12}  MB/s of a core  ratio"]
    lines += [f"{name:12}  {rate:14.1f}  {rate / medians['tokenizers']:5.1f}" for name, rate in medians.items()]
    lines.append(f"{len(texts):,} files, {size:.1f} MB, {len(ids['dsc']):,} tokens; medians of {args.rounds} rounds")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text, "utf-8")
    return int(not np.array_equal(ids["tokenizers"], ids["dsc"]) or not encoder.is_fast)


def sources() -> tuple[list[str], float]:
    """The texts, and their size in MB."""
    texts, size = list[str](), 0.0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        content = path.read_bytes()
        try:
            texts.append(content.decode())
        except UnicodeDecodeError:
            continue
        size += len(content) / 1e6
        if size >= LIMIT_MB:
            break
    return texts, size


if __name__ == "__main__":
    sys.exit(main())
