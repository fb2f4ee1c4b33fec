"""The processes that commands start, with small modules instead of the compiler and the ranks: arguments, output and
exit codes."""

from __future__ import annotations

import signal
from pathlib import Path
from threading import Thread

import pytest

from compiler.tools import processes
from compiler.tools.processes import ask, call, call_both, run_compiler

Captured = pytest.CaptureFixture[str]

MODULES = {
    "ends": "import sys\nprint('said')\nsys.exit(int(sys.argv[1]))",
    "killed": "import os, sys\nos.kill(os.getpid(), int(sys.argv[1]))",
    "reads": "import sys\nopen(sys.argv[1], 'w').write(sys.stdin.readline() + sys.stdin.readline())",
    # Prints the digest of a build, and then ends with a code.
    "compiles": "import os, sys\nos.write(int(sys.argv[-1]), b'abc\\n')\nsys.exit(int(sys.argv[1]))",
    "waits": "import signal\nsignal.pause()",
    "answers": """import json, sys
asked = json.loads(sys.stdin.read())
for row in asked["rows"]:
    print(json.dumps(row))
sys.exit(asked["code"])""",
    # Asks this process's parent to end, and ends when that passes it on.
    "forwarded": """import os, signal, sys
number = int(sys.argv[1])
signal.signal(number, signal.SIG_DFL)
os.kill(os.getppid(), number)
signal.pause()""",
    # The same signal comes too late to end it.
    "finishes": """import os, signal, sys
number = int(sys.argv[1])
signal.signal(number, lambda *_: sys.exit())
os.kill(os.getppid(), number)
signal.pause()""",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text + "\n", "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def open_files() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("code", [0, 1, 75])
def test_the_exit_code_equals_that_of_the_process(capfd: Captured, code: int) -> None:
    assert call(["ends", str(code)]) == code and capfd.readouterr().out == "said\n"
    assert call(["ends", str(code)], quiet=True) == code and capfd.readouterr().out == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_unexpected_kill_is_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: Captured, number: signal.Signals
) -> None:
    assert call(["killed", str(int(number))]) == 128 + number
    assert capfd.readouterr().err.startswith(f"error: killed was killed by {number.name}")
    monkeypatch.setitem(processes.NAMES, "killed", "the compiler")
    assert call(["killed", str(int(number))]) == 128 + number
    assert capfd.readouterr().err.startswith("error: the compiler was ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_forwarded_silently(capfd: Captured, number: int) -> None:
    before = signal.getsignal(number)
    assert call(["forwarded", str(int(number))]) == 128 + number
    assert capfd.readouterr().err == "" and signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_counts_although_the_process_finishes(capfd: Captured, number: int) -> None:
    """A command of several processes must not start the next one."""
    assert call(["finishes", str(int(number))]) == 128 + number
    assert capfd.readouterr().err == ""


def test_answers_and_their_progress_are_received() -> None:
    rows = '{"done": 1, "total": 3}, {"done": 0, "total": 0}, {"result": [7]}, {"done": 3, "total": 3}'
    updates: list[str] = []
    assert ask(["answers"], f'{{"code": 0, "rows": [{rows}]}}', updates.append) == (0, [7])
    assert updates == ["33%", "0%", "100%", ""]
    assert ask(["answers"], '{"code": 4, "rows": []}', updates.append) == (4, None)
    assert updates[4:] == [""]


def test_a_compilation_gives_its_digest(capfd: Captured) -> None:
    files = open_files()
    assert run_compiler(["compiles", "0"], quiet=True) == (0, "abc")
    assert run_compiler(["compiles", "2"], quiet=False) == (2, "abc")
    assert run_compiler(["ends", "2"], quiet=False) == (2, "") and capfd.readouterr().out == "said\n"
    assert open_files() == files


def test_the_launcher_receives_the_parts_and_then_the_build(tmp_path: Path) -> None:
    """One line each; a launcher that ends before reading is no error of this process."""
    files = open_files()
    assert call_both(["compiles", "0"], ["reads", str(tmp_path / "told")], '{"a": 1}') == (0, True)
    assert (tmp_path / "told").read_text("utf-8") == '{"a": 1}\nabc\n'
    assert open_files() == files


@pytest.mark.parametrize(
    ("compiler", "launcher", "code", "built"),
    [
        (["compiles", "2"], ["waits"], 2, False),
        (["waits"], ["ends", "75"], 75, False),
        (["killed", "9"], ["waits"], 128 + 9, False),
        (["waits"], ["killed", "9"], 128 + 9, False),
    ],
)
def test_if_one_process_fails_the_other_is_ended(
    capfd: Captured, compiler: list[str], launcher: list[str], code: int, built: bool
) -> None:
    files = open_files()
    assert call_both(compiler, launcher, "parts") == (code, built)
    assert open_files() == files
    stderr = capfd.readouterr().err
    assert stderr.startswith("error: killed was killed") if code > 128 else stderr == ""


def test_lines_are_shown_as_they_come_and_kept(capfd: Captured) -> None:
    """Lines of the process on both streams and of this process keep their order, in any thread."""
    lines, files = list[str](), open_files()

    def run() -> None:
        with processes.CapturedOutput(lines.append) as output:
            output.tell("before")
            assert call(["ends", "3"], output=output) == 3
            assert call(["killed", "9"], output=output) == 128 + 9
            output.warn("after")
        assert output.lines == lines

    thread = Thread(target=run)
    thread.start()
    thread.join()
    killed = "error: killed was killed by SIGKILL, from outside or by the kernel for want of memory"
    assert lines == ["before", "said", killed, "after"]
    assert capfd.readouterr() == ("", "") and open_files() == files
