"""A build folder matches its manifest exactly, and a run trains the build compiled for it, whatever others do."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.load import load
from runtime.build import run_copy
from runtime.build.build import Build, BuildError, OtherBuildError
from runtime.build.files import read
from runtime.launch.room import memory_shortage
from runtime.run.resume import _flatten_plan
from runtime.system.strict_json import tree
from tests import copies
from tests.runtime.run.place import ONE_RANK, Place, rows, spec_text

RATES = ("1e-3", "4e-3")
ROUNDS = 3
TINY_BUILD = Path(__file__).parents[2] / "golden" / "tiny"


# ---------------------------------------------------------------- two runs of one name


@pytest.mark.parametrize("number", range(ROUNDS))
def test_two_runs_of_one_name_train_their_own_settings(place: Place, number: int) -> None:
    """Started at once in one folder, both compile different specs into build/tiny."""
    place.write(ONE_RANK)  # and the text
    specs = [place.folder / f"{index}.dsc" for index in range(2)]
    for path, rate in zip(specs, RATES, strict=True):
        path.write_text(spec_text(dict(ONE_RANK, rate=rate, decay=0.01 * (number + 1))), "utf-8")
    runs = [place.folder / f"run-{index}" for index in range(2)]
    words = [("train", spec.name, "--out", run.name, "--steps", "1") for spec, run in zip(specs, runs, strict=True)]
    results = place.at_once(*words)
    assert [done.returncode for done in results] == [0, 0], results
    for run, rate in zip(runs, RATES, strict=True):
        assert [row["rate"] for row in rows(run)] == [float(rate) / 2], results
        assert f"to {float(rate)}" in (run / "spec.resolved").read_text("utf-8").replace("1e-03", "0.001")


def test_a_build_that_is_replaced_before_the_start_is_compiled_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another spec's build replaces the fresh one and the next two that are compiled."""
    from compiler.cli.main import main
    from compiler.tools import training

    place.compile(ONE_RANK)
    files = compile_spec(load(place.write(dict(ONE_RANK, rate="9e-3"), "other.dsc")), segments=place.segments).files
    monkeypatch.chdir(place.folder)
    calls = []

    def replaced(command: list[str], **streams: Any) -> int:
        calls.append(command)
        if len(calls) <= 3:
            write_build(Path("build/tiny"), files)
        return before(command, **streams)

    before = training.call
    monkeypatch.setattr(training, "call", replaced)
    assert main(["train", "tiny.dsc", "--steps", "1"]) == 0
    assert len(calls) == 4
    assert [row["rate"] for row in rows(place.folder / "runs" / "tiny")] == [1e-3]
    stdout, stderr = capfd.readouterr()
    assert "error" not in stderr and "proven" not in stdout, "what is compiled again is not told"


# ---------------------------------------------------------------- a run uses the build that it opened


def test_only_verified_modules_are_run(place: Place) -> None:
    """The folder is replaced, then removed, after the build was opened."""
    # Modules are cached by the digest of their build: another test's equal build would be found here, with its paths.
    folder = place.compile(ONE_RANK | {"name": "verified"}, "verified.dsc")
    build = Build.open(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "stages").mkdir()
    (folder / "stages" / "rank_0.py").write_text("raise SystemExit('not this one')\n")
    (folder / "spec.resolved").write_text("not this one")
    bodies = build.bodies(0)
    assert set(bodies) == {"F0", "B0", "E0"}
    try:
        bodies["F0"](None, None, None, 0)
    except AttributeError as error:
        trace = "".join(traceback.format_exception(error))
    assert f'File "{folder}/stages/rank_0.py", line' in trace and "v = c.values(0, a)" in trace
    run = place.folder / "run"
    run.mkdir()
    (run / "placement.json").write_text("of an earlier build")
    run_copy.copy(build.files, run)
    assert (run / "spec.resolved").read_bytes() == build.files["spec.resolved"]
    names = ["program.sha256", "schedule.txt", "spec.resolved", "watch.json"]
    assert sorted(path.name for path in run.iterdir()) == names
    assert run_copy.digest(run_copy.files_of_run(run)) == run_copy.digest(build.files)


def test_the_expected_digest_is_checked(place: Place) -> None:
    """compile prints the digest; train refuses other builds."""
    place.write(ONE_RANK)
    lines = place.dsc("compile").stdout.splitlines()
    digest = lines[-2].removeprefix("digest: ")
    manifest = (place.folder / "build" / "tiny" / "manifest.json").read_bytes()
    assert digest == hashlib.sha256(manifest).hexdigest()
    for argument in ("build/tiny", "tiny.dsc"):
        done = place.dsc("train", argument, "--expect", "0" * 64, code=2)
        assert done.stderr == (
            f"error: build/tiny is not the build that was asked for: its digest is {digest}, not {'0' * 64}\n"
        )
        assert not (place.folder / "runs").exists()
    assert "is not the digest of a build" in place.dsc("train", "build/tiny", "--expect", "123", code=2).stderr
    place.dsc("train", "build/tiny", "--expect", digest, "--steps", 1)


# ---------------------------------------------------------------- exactly the manifest


def fitted(build: Path, **other: Any) -> None:
    """Rewrite the certificates and manifest of a build to match its files."""
    for path in build.glob("certificate/*.json"):
        certificate = json.loads(path.read_text("utf-8"))
        certificate["files"] = {name: sha256(build / name) for name in certificate["files"] if (build / name).is_file()}
        path.write_text(json.dumps(certificate), "utf-8")
    manifest = json.loads((build / "manifest.json").read_text("utf-8"))
    names = [path.relative_to(build).as_posix() for path in sorted(build.rglob("*")) if path.is_file()]
    manifest["files"] = {name: sha256(build / name) for name in names if name != "manifest.json"}
    (build / "manifest.json").write_text(json.dumps(manifest | other), "utf-8")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shadow(build: Path) -> None:
    (build / "stages" / "rank_0").mkdir()
    (build / "stages" / "rank_0" / "__init__.py").write_text("raise SystemExit('shadowed')\n")


def empty(build: Path) -> None:
    (build / "manifest.json").write_text('{"versions": {}, "files": {}}')
    with (build / "stages" / "rank_0.py").open("a") as file:
        file.write("raise SystemExit('edited')\n")


def other_torch(build: Path) -> None:
    manifest = json.loads((build / "manifest.json").read_text("utf-8"))
    fitted(build, versions=manifest["versions"] | {"torch": "2.0.1"})


def extra_program(build: Path) -> None:
    (build / "program" / "zz.json").write_text("{}")
    fitted(build)


def many_layers(build: Path) -> None:
    edit_plan(build, lambda tree: tree["model"]["layers"][-1].update(last=10**9))


def forged_layers(build: Path) -> None:
    edit_plan(build, lambda tree: tree["model"].update(layers=[{"first": "0"}]))


def forged_run(build: Path) -> None:
    edit_plan(build, lambda tree: tree.update(run="../../elsewhere"))


def edit_plan(build: Path, edit: Callable[[Any], object]) -> None:
    written = json.loads((build / "plan.json").read_text("utf-8"))
    edit(written)
    (build / "plan.json").write_text(json.dumps(written), "utf-8")
    fitted(build)


def pipe(name: str) -> Callable[[Path], None]:
    def edit(build: Path) -> None:
        (build / name).unlink()
        os.mkfifo(build / name)

    return edit


def link(build: Path) -> None:
    (build / "plan.json").rename(build.parent / "plan.json")
    (build / "plan.json").symlink_to("../plan.json")


def no_file(build: Path) -> None:
    (build / "stages" / "rank_0.py").unlink()
    (build / "stages" / "rank_0.py").mkdir()


def escapes(build: Path) -> None:
    manifest = json.loads((build / "manifest.json").read_text("utf-8"))
    manifest["files"]["\x1b]0;title\x07.py"] = ""
    (build / "manifest.json").write_text(json.dumps(manifest), "utf-8")


def listed(build: Path) -> None:
    (build / "manifest.json").write_text("[]")


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (shadow, "b/stages/rank_0/__init__.py is not in its manifest: remove it, or run dsc compile again"),
    (empty, "b is not what dsc compile wrote: manifest.json lists no spec.resolved; compile it again"),
    (other_torch, "b was compiled with torch 2.0.1, and torch "),
    (
        extra_program,
        "b is not what dsc compile wrote: manifest.json lists program/zz.json, which is no file of a build",
    ),
    (many_layers, "b is not what dsc compile wrote: plan.json: model.layers.last is not valid for a plan"),
    (forged_layers, "b is not what dsc compile wrote: plan.json: model.layers.first is not valid for a plan"),
    (forged_run, "b is not what dsc compile wrote: plan.json: run is not valid for a plan"),
    (pipe("manifest.json"), "b holds no build (manifest.json: no regular file); run dsc compile"),
    (pipe("stages/rank_0.py"), "b/stages/rank_0.py is not the file that was compiled (no regular file); run"),
    (link, "b/plan.json is not the file that was compiled (a link); run dsc compile again"),
    (no_file, "b/stages/rank_0.py is not the file that was compiled (no regular file); run"),
    (escapes, r"b is not what dsc compile wrote: manifest.json lists \x1b]0;title\x07.py, which is no file"),
    (listed, "b is not what dsc compile wrote: manifest.json must have versions and files; compile it again"),
]


@pytest.fixture(scope="module")
def whole(new_place: Callable[[], Place]) -> Place:
    """A folder with a build."""
    place = new_place()
    place.compile(ONE_RANK)
    return place


@pytest.mark.parametrize(("edit", "said"), REFUSED, ids=[message.split()[-1] for _, message in REFUSED])
def test_changed_builds_are_refused(whole: Place, tmp_path: Path, edit: Callable[[Path], None], said: str) -> None:
    """`dsc train BUILD` refuses such a build with one line and exit code 2, before it runs any of it."""
    shutil.copytree(whole.folder / "build" / "tiny", tmp_path / "b")
    edit(tmp_path / "b")
    done = Place(tmp_path, {}).dsc("train", "b", "--data", whole.folder, "--steps", 1, code=2)
    assert done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == "" and not (tmp_path / "runs").exists()


def test_caches_of_python_and_compile_are_not_part_of_a_build(whole: Place, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    shutil.copytree(whole.folder / "build" / "tiny", folder)
    (folder / "stages" / "__pycache__").mkdir()
    (folder / "stages" / "__pycache__" / "rank_0.cpython-311.pyc").write_bytes(b"never read")
    (folder / "cache" / "orders").mkdir(parents=True)
    (folder / "cache" / "orders" / f"{'0' * 64}.json").write_text("{}")
    digest = Build.open(folder).digest
    with pytest.raises(OtherBuildError):
        Build.open(folder, "0" * 64)
    (folder / "cache" / "notes").touch()
    with pytest.raises(BuildError, match="cache/notes is not in its manifest"):
        Build.open(folder, digest)


def test_differences_are_reported_in_the_order_of_names(tmp_path: Path) -> None:
    """All of them if requested, and the first one if a build is refused."""
    folder = tmp_path / "b"
    copies.copytree(TINY_BUILD, folder)
    (folder / "plan.txt").unlink()
    (folder / "notes.txt").write_text("mine", "utf-8")
    for path in (folder / "segments").iterdir():
        path.write_text("# edited\n", "utf-8")
    names = ["notes.txt", "plan.txt", *sorted(f"segments/{path.name}" for path in (folder / "segments").iterdir())]
    edits = read(folder, edited=True).edits
    assert [text.partition(" is not ")[0] for text in edits] == [str(folder / name) for name in names]
    assert "in its manifest: remove it" in edits[0] and "the file that was compiled (No such file" in edits[1]
    with pytest.raises(BuildError) as refused:
        read(folder)
    assert str(refused.value) == edits[0]


@pytest.mark.parametrize("fits", [False, True])
def test_random_edits_of_any_file(whole: Place, tmp_path: Path, fits: bool) -> None:
    """300 edits of bytes, numbers and lines of every file: refused in one line or, if manifest and certificates are
    rewritten to match, handled by the launcher without an exception."""
    source = whole.folder / "build" / "tiny"
    names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
    picked = [name for name in names if name.endswith((".json", ".txt", ".resolved"))] if fits else names
    generator = random.Random(7)
    refused = 0
    folder = tmp_path / "b"
    for number in range(300):
        shutil.copytree(source, folder)
        name = generator.choice(picked)
        before = (folder / name).read_bytes()
        after = mutated(before, generator)
        (folder / name).write_bytes(after)
        if fits and name != "manifest.json":
            try:
                fitted(folder)
            except (ValueError, AttributeError, KeyError, TypeError, RecursionError):  # no valid certificate to rewrite
                shutil.rmtree(folder)
                continue
        try:
            build = Build.open(folder)
        except BuildError as error:
            refused += 1
            assert str(error).isprintable() and len(str(error)) < 500, (number, name, error)
        else:
            assert fits or after == before or name == "manifest.json", (number, name)
            memory_shortage(build.plan)
            dict(_flatten_plan(tree(build.plan)))
            assert all(len(program.ranks) == build.plan.mesh.pp for program in build.programs.values())
        shutil.rmtree(folder)
    assert refused > (100 if fits else 250)


def mutated(data: bytes, generator: random.Random) -> bytes:
    text = data.decode("utf-8")
    kind = generator.randrange(6)
    offset = generator.randrange(len(data) + 1)
    if kind == 0:
        return data[:offset] + bytes([generator.randrange(256)]) + data[offset + 1 :]
    if kind == 1:
        return data[:offset]
    if kind == 2:
        return generator.choice([b"", b"[]", b"{}", b"null", b"[" * 100_000, b"9" * 5000, b'"\\u001b[2J"', b"\xff\xfe"])
    if kind == 3:  # a number becomes another
        words = [i for i, c in enumerate(text) if c.isdigit()]
        offset = generator.choice(words or [0])
        number = generator.choice(["-1", "1000000000", "1e999", "0.5", "null", '"x"', "[]", "{}", "9" * 400])
        return (text[:offset] + number + text[offset + 1 :]).encode()
    lines = text.splitlines(keepends=True)
    index = generator.randrange(max(1, len(lines)))
    if kind == 4:
        return "".join(lines[:index] + lines[index + 1 :]).encode()
    return "".join(lines[:index] + lines[index : index + 1] * 2 + lines[index + 1 :]).encode()
