"""Compiling the C++: the libraries, their sources, and the message if compiling fails."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.ops.native import compile_cpp, library
from tests.runtime.processes import wait_for

LIBRARIES = [compile_cpp.path(instructions).name for instructions in compile_cpp.VARIANTS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A separate package with the sources, in which a source that compiles quickly replaces ours."""
    (tmp_path / "compile_cpp.py").write_bytes(Path(compile_cpp.__file__).read_bytes())
    (tmp_path / "one.cpp").write_text('extern "C" const char *digest() { return DIGEST; }\n', "utf-8")
    return tmp_path


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != compile_cpp.ELSEWHERE}
    return subprocess.run(
        [sys.executable, str(folder / "compile_cpp.py")],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_compiles_every_library_once(folder: Path) -> None:
    done = run(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(folder / name) for name in LIBRARIES]
    assert sorted(path.name for path in folder.iterdir()) == sorted(["compile_cpp.py", "one.cpp", *LIBRARIES])
    again = run(folder, CXX="/bin/false")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    (folder / "one.cpp").write_text('extern "C" const char *digest() { return "" DIGEST; }\n', "utf-8")
    assert run(folder, CXX="/bin/false").returncode == 1
    assert run(folder).returncode == 0


def test_an_installation_compiles_the_library_that_is_loaded(folder: Path) -> None:
    process = [sys.executable, str(folder / "compile_cpp.py"), "own"]
    inherited = {name: value for name, value in os.environ.items() if name != compile_cpp.ELSEWHERE}
    done = subprocess.run(process, env=inherited, capture_output=True, text=True, check=True)
    loaded = compile_cpp.path(library.instructions()).name
    assert done.stdout.split() == [str(folder / loaded)] and [path.name for path in folder.glob("lib*")] == [loaded]


@pytest.mark.parametrize(
    ("flags", "own"),
    [
        ("avx2 fma bmi2", ("AVX2",)),
        ("avx2 fma bmi2 avx512f avx512bw avx512cd avx512dq avx512vl", ("AVX512",)),
        ("avx2 fma bmi2 avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16", ("AVX512_BF16",)),
        ("avx2 fma bmi2 avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16 amx_bf16", ("AVX512",)),
        ("avx2 fma bmi2 avx512f", ("AVX512_BF16", "AVX512", "AVX2")),
        ("sse2", ("AVX512_BF16", "AVX512", "AVX2")),
    ],
)
def test_all_libraries_are_compiled_for_a_processor_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, flags: str, own: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_: f"flags : {flags}\n")
    assert compile_cpp.own() == own


def test_libraries_may_be_in_another_folder(folder: Path) -> None:
    """For a read-only checkout."""
    elsewhere = folder / "build" / "native"
    done = run(folder, DSC_NATIVE=str(elsewhere))
    assert (done.returncode, done.stdout.split()) == (0, [str(elsewhere / name) for name in LIBRARIES])
    assert not [*folder.glob("lib*")]
    (folder / "file").touch()
    done = run(folder, DSC_NATIVE=str(folder / "file" / "native"))
    assert done.returncode == 1 and "libraries cannot be kept in" in done.stderr


def test_of_several_processes_one_compiles(folder: Path) -> None:
    (folder / "cxx").write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo >> {folder}/compiled; esac\nexec c++ "$@"')
    (folder / "cxx").chmod(0o755)
    with ThreadPoolExecutor(3) as pool:
        done = [*pool.map(lambda _: run(folder, CXX=str(folder / "cxx")), range(3))]
    assert [process.returncode for process in done] == [0, 0, 0]
    assert len((folder / "compiled").read_text()) == len(LIBRARIES)


def test_others_see_that_libraries_are_being_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable installation does not wait for them."""
    monkeypatch.setattr(compile_cpp, "HERE", folder)
    monkeypatch.delenv(compile_cpp.ELSEWHERE, raising=False)
    compiler, begun, end = folder / "cxx", folder / "begun", folder / "end"
    compiler.write_text(f"#!/bin/sh\ntouch {begun}\nwhile [ ! -e {end} ]; do sleep 0.01; done\nexit 1")
    compiler.chmod(0o755)
    assert not compile_cpp.is_being_built()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run, folder, CXX=str(compiler))
        wait_for(begun.exists, "the compiler")
        assert compile_cpp.is_being_built()
        end.touch()
        assert done.result().returncode == 1
    assert not compile_cpp.is_being_built()


def test_a_compiler_that_does_not_know_new_instructions_makes_the_others(folder: Path) -> None:
    (folder / "old").write_text(
        '#!/bin/sh\ncase "$*" in *avx512bf16*) echo error: too new >&2; exit 1; esac\nexec c++ "$@"'
    )
    (folder / "old").chmod(0o755)
    done = run(folder, CXX=str(folder / "old"))
    assert done.returncode == 1 and "error: too new" in done.stderr
    assert sorted(path.name for path in folder.glob("lib*")) == ["libavx2.so", "libavx512.so"]


@pytest.mark.parametrize(
    ("cxx", "path", "said"),
    [
        ("/bin/false", None, "/bin/false failed: with exit code 1"),
        ("/nowhere/c++ -O1", None, "/nowhere/c++ failed: [Errno 2] No such file or directory: '/nowhere/c++'"),
        ("c++ 'unclosed", None, "CXX cannot be read: No closing quotation"),
        ("c++ -include nowhere.h", None, "fatal error: nowhere.h"),
        ("", "/nowhere", "no C++ compiler was found (c++, g++, clang++, or what CXX names)"),
    ],
)
def test_a_failed_compilation_is_explained_in_one_line(folder: Path, cxx: str, path: str | None, said: str) -> None:
    done = run(folder, CXX=cxx, PATH=path or os.environ["PATH"])
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert done.stderr.startswith("ops will run on torch, ")
    assert not [*folder.glob("lib*")]


def test_libraries_do_not_contain_machine_paths(folder: Path, instructions: str) -> None:
    """Equal sources in another folder give equal bytes, which do not contain the folder's path."""
    assert run(folder).returncode == 0
    elsewhere = folder / "other"
    elsewhere.mkdir()
    for name in ("compile_cpp.py", "one.cpp"):
        (elsewhere / name).write_bytes((folder / name).read_bytes())
    assert run(elsewhere).returncode == 0
    for name in LIBRARIES:
        assert (folder / name).read_bytes() == (elsewhere / name).read_bytes()
    ours = compile_cpp.path(instructions).read_bytes()
    for path in (compile_cpp.HERE, Path.home(), Path(sys.prefix)):
        assert str(path).encode() not in ours
