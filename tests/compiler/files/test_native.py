"""Libraries in C are compiled when they are missing or outdated, and their random numbers are those of Python."""

from __future__ import annotations

from ctypes import CDLL, byref, c_double, c_uint32
from pathlib import Path
from random import Random

import pytest

from compiler.files import native

SOURCE = '#include "{header}"\ndouble draw(Draw *draw) {{ return share(draw); }}\n'
HEADER = Path(native.__file__).with_name("random.h")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source whose library is in the folder `libraries` next to it. Skips the test without a C compiler."""
    monkeypatch.setenv(native.ELSEWHERE, str(tmp_path / "libraries"))
    path = tmp_path / "draws.c"
    path.write_text(SOURCE.format(header=HEADER))
    if (problem := native.build(path)) is not None:
        pytest.skip(problem)
    return path


@pytest.mark.parametrize("seed", range(3))
def test_c_draws_the_numbers_of_python(seed: int, source: Path) -> None:
    library, draw = CDLL(str(native.library_of(source))), Random(seed)
    library.draw.restype = c_double
    state = (c_uint32 * native.WORDS)(*draw.getstate()[1])
    assert [library.draw(byref(state)) for _ in range(2000)] == [draw.random() for _ in range(2000)]


@pytest.mark.parametrize("damage", [None, "double draw(void) { return 1; }"], ids=["no library", "outdated"])
def test_a_missing_or_outdated_library_is_compiled(damage: str | None, source: Path) -> None:
    library = native.library_of(source)
    library.unlink()
    if damage:
        library.write_text(damage)
    assert native.build(source) is None
    assert [path.name for path in library.parent.iterdir()] == [library.name]
    before = library.stat()
    assert native.build(source) is None and library.stat() == before


def test_a_changed_source_is_compiled_again(source: Path) -> None:
    before = native.library_of(source).read_bytes()
    source.write_text(source.read_text() + "int more(void) { return 1; }\n")
    assert native.build(source) is None and native.library_of(source).read_bytes() != before


def test_without_a_compiler_there_is_a_reason_and_no_file(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.library_of(source).unlink()
    monkeypatch.setenv("CC", str(source.parent / "none"))
    assert "No such file" in (native.build(source) or "")
    assert not [*native.library_of(source).parent.iterdir()]
    native.loaded.cache_clear()
    assert native.loaded(source) is None
