"""For every test: `bless` rewrites goldens (`pytest --bless`), refused where CI is set.

Properties are tested on the same examples each time; `--hypothesis-profile=search` looks for new ones.
`--tier` runs a part of the tests: tests/tiers.py.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.leftovers import guard
from tests.tiers import SLOW_FIRST, TIERS, tiers, tiers_of_file
from tests.watched import watch

if TYPE_CHECKING:
    from compiler.emit.segment_cache import Segments
if find_spec("hypothesis") is not None:  # it may be missing on a GPU machine that only checks kernels
    from hypothesis import settings

    settings.register_profile("search", deadline=None)
    settings.register_profile("fixed", deadline=None, derandomize=True)
    settings.load_profile("fixed")
os.environ.pop("COLUMNS", None)  # set by pytest's workers; output should be as wide as in a pipe


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="rewrite golden files with what the code gives now")
    parser.addoption("--tier", choices=TIERS, default="all", help="run the tests of one tier (tests/tiers.py)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--bless") and os.environ.get("CI"):
        raise pytest.UsageError(
            "--bless is refused where CI is set: goldens are blessed by a person who reads the diff"
        )
    guard(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files without a test of the tier."""
    tier = config.getoption("--tier")
    if tier == "all" or not collection_path.match("test_*.py"):
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    return None if tier in tiers_of_file(file, collection_path.read_text("utf-8")) else True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Deselect the tests of other tiers, and begin with the slowest folders, so that no worker ends late.

    Which cases are a sample depends on the order of their collection. So this wraps the hooks of plugins: one that
    shuffles tests may run before a hook that is merely marked as the first.
    """
    tier = config.getoption("--tier")
    if tier != "all":
        tiers_of_items = tiers(item.nodeid for item in items)
        config.hook.pytest_deselected(
            items=[item for item, item_tiers in zip(items, tiers_of_items, strict=True) if tier not in item_tiers]
        )
        items[:] = [item for item, item_tiers in zip(items, tiers_of_items, strict=True) if tier in item_tiers]
    yield
    items.sort(key=lambda item: not item.nodeid.startswith(SLOW_FIRST))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Spare the collector a million objects of the tests, which stay to the end: each of its runs takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Collect what the tests left while there is time. After its last message, execnet gives a worker of xdist 15
    seconds and then ends it where it is, so that its temporary folder stays. In these seconds pytest runs the collector
    twice.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # so that the interpreter frees them, else nanobind reports leaks


@pytest.fixture(autouse=True)
def interrupts() -> None:
    """SIGINT raises KeyboardInterrupt here and is not ignored by the processes that a test starts.

    A shell that starts pytest in the background makes it ignore SIGINT, and processes inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def segments(tmp_path_factory: pytest.TempPathFactory) -> Segments:
    """Segments traced so far, by any worker of this session: the specs of tests share most of them."""
    from tests.traced import SharedSegments  # imports the compiler

    base = tmp_path_factory.getbasetemp()
    return SharedSegments((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "traced")


@pytest.fixture
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Assert that an attack starts no program, unpickles nothing, reads no secret and changes only the test's files."""
    base = tmp_path_factory.getbasetemp()
    with watch(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) as attacks:
        yield
    assert attacks == []


@pytest.fixture
def bless(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--bless"))
