"""For every test: `bless` rewrites goldens (`pytest --bless`), refused where CI is set.

Properties are held against the same examples each time; `--hypothesis-profile=search` looks for new ones.
"""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec

import pytest

if find_spec("hypothesis") is not None:  # on a machine with a GPU, where kernels alone are checked, it may be missing
    from hypothesis import settings

    settings.register_profile("search", deadline=None)
    settings.register_profile("fixed", deadline=None, derandomize=True)
    settings.load_profile("fixed")
os.environ.pop("COLUMNS", None)  # of pytest's workers: what is printed is as wide as in a pipe


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="rewrite golden files with what the code gives now")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--bless") and os.environ.get("CI"):
        raise pytest.UsageError(
            "--bless is refused where CI is set: goldens are blessed by a person who reads the diff"
        )


@pytest.fixture(autouse=True)
def interrupts() -> None:
    """SIGINT raises KeyboardInterrupt here and is not ignored by the processes that a test starts.

    A shell that starts pytest in the background makes it ignore SIGINT, and processes inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def bless(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--bless"))
