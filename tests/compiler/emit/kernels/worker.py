"""The process in which Triton interprets: it needs TRITON_INTERPRET=1 before Triton is imported, and for good."""

from __future__ import annotations

import importlib
import os
from typing import Any


def start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"  # more threads make the interpreter ten times slower


def call(module: str, name: str, *arguments: Any) -> None:
    """Runs a check of `module`. Its exceptions are raised in the waiting test."""
    getattr(importlib.import_module(module), name)(*arguments)
