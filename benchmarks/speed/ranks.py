"""Starts the ranks of a contestant of theirs, as torchrun does. Rank 0 is the contestant's own process."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from benchmarks.speed.serve import die_with_parent

NO_TIMEOUT = timedelta(days=1)  # a contestant is stopped between its turns


@contextmanager
def joined(module: str, args: argparse.Namespace, **changed: str) -> Iterator[int]:
    """Join a gloo group of `args.ranks` processes and yield this process's rank. Rank 0 starts the others with its own
    arguments and `changed`.

    If a rank fails, its broken connections make the others fail, too.
    """
    if args.ranks == 1:
        yield 0
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory(prefix="dsc-speed-") as folder:
        store = args.store or str(Path(folder) / "store")
        options = [word for key, value in changed.items() for word in (f"--{key}", value)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *sys.argv[1:], *options, "--rank", str(rank), "--store", store],
                preexec_fn=die_with_parent,
            )
            for rank in range(1, args.ranks)
            if args.rank == 0
        ]
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, args.ranks), rank=args.rank, world_size=args.ranks, timeout=NO_TIMEOUT
        )
        yield args.rank
        dist.barrier()
        dist.destroy_process_group()
        for process in processes:
            process.wait()
