"""Compares two versions of dsc by the builds of all shipped specs, file by file.

    python -m tests.measure.builds FOLDER            compile every run of every shipped spec into FOLDER
    python -m tests.measure.builds BEFORE AFTER      print files that differ; exit code 1 if there are any

Names of modules of `runtime` are compared by their last part, and digests of files by the files they are of, so that a
module may move. report.html, which is for people, is left out.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULE = re.compile(r"\bruntime(?:\.\w+)*\.(\w+)")
DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
LEFT_OUT = ("report.html", "cache/")


def names_of_runs(spec: Path) -> list[str]:
    """`quickstart.dsc:tiny` for every run of a spec, or the spec alone."""
    names = re.findall(r"^run +(\w[\w.-]*) *(?:extends +\w[\w.-]* *)?\{", spec.read_text("utf-8"), re.MULTILINE)
    return [f"{spec}:{name}" for name in names] or [str(spec)]


def compile_all(folder: Path) -> int:
    """Compile every run into a folder of its name. Runs that do not compile are listed."""
    failed = 0
    for spec in sorted((ROOT / "specs").glob("*.dsc")):
        for name in names_of_runs(spec):
            build = folder / Path(name).name.replace(":", "-")
            process = subprocess.run(
                [sys.executable, "-m", "compiler.cli.main", "compile", name, "--out", str(build)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            print(
                f"{build.name}: {'compiled' if not process.returncode else process.stderr.strip().splitlines()[-1]}",
                flush=True,
            )
            failed += process.returncode != 0
    return failed


def texts_of(folder: Path) -> dict[str, str]:
    """The files of all builds below a folder, by path."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path.read_text("utf-8")
        for name, path in sorted(files.items())
        if not name.partition("/")[2].startswith(LEFT_OUT)
    }


def different(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names of the files that differ or exist on one side only."""
    digests = {digest(after[name]): digest(before[name]) for name in before.keys() & after.keys()}

    def plain(text: str) -> str:
        text = DIGEST.sub(lambda match: digests.get(match.group(), match.group()), text)
        return MODULE.sub(r"\1", text)

    common = before.keys() & after.keys()
    return sorted(
        (before.keys() ^ after.keys()) | {name for name in common if plain(before[name]) != plain(after[name])}
    )


def digest(text: str) -> str:
    """The sha256 of a file."""
    return hashlib.sha256(text.encode()).hexdigest()


def main(words: list[str]) -> int:
    """Compile, or compare."""
    if len(words) == 1:
        return compile_all(Path(words[0]))
    before, after = (texts_of(Path(word)) for word in words)
    wrong = different(before, after)
    print(f"{len(before)} files before, {len(after)} after, {len(wrong)} differ")
    print("\n".join(wrong[:100]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
