"""Trains this build, constructed by dsc.

torchrun --nproc-per-node 4 train.py --out RUN
"""

from pathlib import Path

from runtime.run.train import main

if __name__ == "__main__":
    raise SystemExit(main(build=Path(__file__).resolve().parent))
