"""A copy of the project that Python, `dsc` and all processes of tests run from: its modules may be changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent


def make(root: Path, copy: Path) -> Path:
    """Copy the files that git knows or would add, and the compiled C++. Returns the path of the copy's Python.

    Its environment has the packages of the current one, after the copy's own.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    names = [name for name in listed.stdout.decode().split("\0") if name and (root / name).is_file()]
    for name in [*names, *(path.relative_to(root).as_posix() for path in (root / "runtime/ops/native").glob("*.so"))]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, copy / name)
    for words in (["init", "--quiet"], ["add", "--all"]):  # tests that copy the project ask git for its files
        subprocess.run(["git", *words], cwd=copy, check=True)
    scripts, packages = Path(sys.executable).parent, Path(sysconfig.get_path("purelib"))
    site_packages = copy / ".venv" / packages.relative_to(scripts.parent)
    site_packages.mkdir(parents=True)
    (copy / ".venv/bin").mkdir()
    shutil.copy2(scripts.parent / "pyvenv.cfg", copy / ".venv/pyvenv.cfg")
    shutil.copy2(HERE / "mutant_probes.py", site_packages)
    lines = [str(copy), f"import site; site.addsitedir({str(packages)!r})", "import mutant_probes"]
    (site_packages / "copy.pth").write_text("\n".join(lines) + "\n")
    for script in scripts.iterdir():
        target = copy / ".venv/bin" / script.name
        if script.is_symlink():
            target.symlink_to(script.readlink())
        elif script.is_file():
            target.write_bytes(script.read_bytes().replace(str(scripts).encode(), str(target.parent).encode()))
            shutil.copymode(script, target)
    store_bytecode(copy)
    return python_of(copy)


def python_of(copy: Path) -> Path:
    return copy / ".venv/bin/python"


def store_bytecode(copy: Path) -> None:
    """Store the bytecode of all current modules, except in goldens, which must have no other files.

    Without it, each of hundreds of processes compiles them.
    """
    words = [
        str(python_of(copy)),
        "-m",
        "compileall",
        "-q",
        "-x",
        "tests/golden/",
        "dsl",
        "compiler",
        "runtime",
        "tests",
    ]
    subprocess.run(words, cwd=copy, check=False)
