"""Libraries that only some data needs: the extra `data` of the package."""

from __future__ import annotations

import importlib
from typing import Any

from runtime.data.errors import DataError

INSTALL = 'pip install "dsc-trainer[data]"'


def extra(name: str, purpose: str) -> Any:
    """A module of the extra. Raises DataError that says what it is for and how to install it, where it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise DataError(f"{purpose}, {error.name} has to be installed: {INSTALL}") from None
