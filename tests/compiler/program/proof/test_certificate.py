"""The certificate of a build: the checks before ranks start, and the messages that refuse an edited build."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compiler.emit.build_files import manifest, program_json
from compiler.emit.emission import Certificates, digest
from compiler.ir import Plan, Program
from compiler.ir.stage_placement import ONE_STAGE
from compiler.program.lower.opening_order import opening_order
from compiler.program.proof import ProofError, prove
from compiler.program.proof.channels import check_channels
from compiler.program.proof.structure import Structure
from compiler.schedule.schedule import Schedule
from runtime import contract
from runtime.build.build import Build, BuildError
from runtime.build.certificate import Event, events, replay
from runtime.system.strict_json import pretty
from tests.compiler.program.proof.mutants import MUTATIONS, NothingToEditError
from tests.compiler.program.proof.programs import FAMILY, family_program
from tests.runtime.plans import small_plan

Files = dict[str, str]


def emitted(program: Program, plan: Plan, schedule: Schedule) -> Files:
    """The files of a build that a certificate is of, in small; what no test looks at is empty."""
    name = name_of(program)
    files = {"plan.json": small_plan_json(program, plan), f"program/{name}.json": program_json(program)}
    files |= {f"stages/rank_{rank}.py": f"# rank {rank}\n" for rank in range(schedule.num_ranks)}
    digests = {name: digest(text) for name, text in files.items()}
    text = Certificates(digests).json(name, program, schedule, prove(program, plan))
    other_files = ("spec.resolved", "plan.txt", "schedule.txt", "train.py", "kernels.json", "launches.json")
    return dict.fromkeys((*other_files, "watch.json", "report.html"), "") | files | {f"certificate/{name}.json": text}


def name_of(program: Program) -> str:
    return f"train_{program.num_micro_batches}"


def small_plan_json(program: Program, plan: Plan) -> str:
    """The part of a plan that the runtime reads, with one layer, and one parameter per bucket."""
    mesh = contract.Mesh(plan.mesh.pp, plan.mesh.dp, plan.mesh.ep, 1, 1)
    buckets = tuple(
        contract.PlannedBucket(bucket.name, tuple(bucket.holders), bucket.stages, (parameter,))
        for bucket in plan.buckets
        for parameter in [contract.HeldParameter(bucket.name, bucket.name, (2,), None, False)]
    )
    parts = {"mesh": mesh, "placement": str(program.stage_placement), "buckets": buckets, "zero": plan.zero}
    cluster = contract.NodeKind(1, mesh.world, "cpu", None, 1 << 30)
    parts |= {"openings": opening_order(plan, [program]), "cluster": (cluster,)}
    batches = ((0, program.num_micro_batches * mesh.dp),)
    return pretty(small_plan(pp=len(program.bodies), batches=batches, **parts))


def written(folder: Path, files: Files) -> Path:
    """Write a build folder with a manifest of these files, edited or not."""
    for name, text in (files | {"manifest.json": manifest(files)}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def refused(folder: Path, files: Files) -> str:
    with pytest.raises(BuildError) as caught:
        Build.open(written(folder, files))
    return str(caught.value).removeprefix(f"{folder} does not match its proof: ")


@pytest.fixture
def files() -> Files:
    program, plan = family_program("dualpipe", 2, 4)
    return emitted(program, plan, Structure(plan).schedule_of(program))


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), FAMILY)
def test_proven_builds_open(tmp_path: Path, name: str, ranks: int, micro_batches: int) -> None:
    program, plan = family_program(name, ranks, micro_batches)
    schedule = Structure(plan).schedule_of(program)
    build = Build.open(written(tmp_path, emitted(program, plan, schedule)))
    labels = [" ".join(call.label for call in build.programs[name_of(program)].ranks[rank]) for rank in range(ranks)]
    assert "\n".join(labels) + "\n" == schedule.to_text().partition("\n")[2]


def test_state_with_one_holder_is_not_gathered(tmp_path: Path) -> None:
    """Data ranks divide the optimizer's state, and of some experts there is one holder."""
    program, plan = family_program("zbv", 2, 5, 1)
    alone = {bucket.name for bucket in plan.buckets if len(bucket.holders) == 1}
    assert alone and program.update and alone.isdisjoint(collective.name for collective in program.update)
    Build.open(written(tmp_path, emitted(program, plan, Structure(plan).schedule_of(program))))


EDITED = "was changed after program train_4 was proven: certificate/train_4.json is of another"
EDITS: list[tuple[str, Callable[[str], str], str]] = [
    ("program/train_4.json", lambda text: text.replace("[0, ", "[1, ", 1), f"program/train_4.json {EDITED} program"),
    ("plan.json", lambda text: '{"edges": []}\n', f"plan.json {EDITED} plan.json"),
    ("stages/rank_1.py", lambda text: text + "\n", f"stages/rank_1.py {EDITED} stages/rank_1.py"),
    ("certificate/train_4.json", lambda text: "", "program/train_4.json does not fit its certificate (it is no JSON: "),
    (
        "certificate/train_4.json",
        lambda text: "[]",
        "program/train_4.json does not fit its certificate (it is not valid for a certificate)",
    ),
    (
        "certificate/train_4.json",
        lambda text: text.replace('"schedule": "', '"schedule": "0'),
        "program/train_4.json carries out another schedule than certificate/train_4.json proves",
    ),
    (
        "certificate/train_4.json",
        lambda text: text.replace('["send", 1, "F0", 0]', '["send", 1, "F1", 0]', 1),
        "program/train_4.json: rank ",
    ),
]


@pytest.mark.parametrize(("name", "edit", "message"), EDITS)
def test_an_edited_build_is_refused(
    tmp_path: Path, files: Files, name: str, edit: Callable[[str], str], message: str
) -> None:
    """An edited build is refused even if its manifest was changed to fit."""
    edited = edit(files[name])
    assert edited != files[name]
    refusal = refused(tmp_path, files | {name: edited})
    assert refusal.startswith(message) and refusal.endswith("; run dsc compile again"), refusal


def openings_of(files: Files) -> list[contract.Opening]:
    return list(contract.RunPlan.from_json(files["plan.json"]).openings)


def with_plan(files: Files, **parts: object) -> Files:
    """The files with another plan and matching certificates."""
    plan = replace(contract.RunPlan.from_json(files["plan.json"]), **parts)  # type: ignore[arg-type]
    text, name = pretty(plan), "certificate/train_4.json"
    return files | {"plan.json": text, name: files[name].replace(digest(files["plan.json"]), digest(text))}


def test_start_up_that_does_not_match_the_programs(tmp_path: Path, files: Files) -> None:
    """A channel that is not opened, opened twice, or that nothing uses."""
    first, *rest = openings_of(files)
    assert first == ("edge", (0, 1), "each")
    for openings, message in (
        (rest, "the channels `edge` of pipeline ranks 0, 1 are opened 0 times instead of 1"),
        ([first, *rest, first], "the channels `edge` of pipeline ranks 0, 1 are opened 2 times instead of 1"),
        (
            [first, *rest, first._replace(kind="reduce", columns="member")],
            "the channels `reduce` of pipeline ranks 0, 1 are opened 1",
        ),
    ):
        refusal = refused(tmp_path, with_plan(files, openings=tuple(openings)))
        assert refusal.startswith(f"plan.json: {message}"), refusal
    Build.open(written(tmp_path, with_plan(files, openings=(*rest[::-1], first))))  # any one order will do


@pytest.mark.parametrize("kind", ["prologue", "epilogue", "update"])
def test_collectives_that_differ_from_the_plan(tmp_path: Path, files: Files, kind: str) -> None:
    name = "program/train_4.json"
    program = contract.RunProgram.from_json(files[name])
    listed = getattr(program, kind)
    for changed in (listed[1:] if listed else (contract.Collective("gather", "head"),), (*listed, *program.prologue)):
        text = replace(program, **{kind: changed}).to_json()
        proven = files["certificate/train_4.json"].replace(digest(files[name]), digest(text))
        refusal = refused(tmp_path, files | {name: text, "certificate/train_4.json": proven})
        assert refusal.startswith(f"{name}: its {kind} differs from the plan's buckets"), refusal


def test_reductions_that_differ_from_the_plan(tmp_path: Path, files: Files) -> None:
    """Reductions that come too early, twice, for other stages, after no call, or in two orders."""
    name = "program/train_4.json"
    program = contract.RunProgram.from_json(files[name])
    (first, *rest), of_other = program.reductions
    last = len(program.ranks[0]) - 1
    changes = {
        "rank 0 starts a reduction before ": (first._replace(after=0), *rest),
        "the reductions that rank 0 starts are not": (first, first, *rest),
        "the reductions that rank 0 starts are": (first._replace(stages=(9,)), *rest),
        "the reductions of rank 0 do not follow its calls": (*rest, first._replace(after=last + 1)),
        "ranks 0, 1 start reductions in several orders": [r._replace(after=last) for r in (*rest[::-1], first)],
    }
    for message, row in changes.items():
        text = replace(program, reductions=(tuple(row), of_other)).to_json()
        proven = files["certificate/train_4.json"].replace(digest(files[name]), digest(text))
        refusal = refused(tmp_path, files | {name: text, "certificate/train_4.json": proven})
        assert refusal.startswith(f"{name}: {message}"), refusal


def test_programs_without_certificates(tmp_path: Path, files: Files) -> None:
    without = {name: text for name, text in files.items() if not name.startswith("certificate")}
    assert refused(tmp_path, without).startswith("program/train_4.json has no certificate: it was never proven")
    without = {name: text for name, text in files.items() if not name.startswith("program")}
    (tmp_path / "program" / "train_4.json").unlink()
    assert refused(tmp_path, without).startswith("certificate/train_4.json is of a program that is not there")


def test_an_edited_file_under_the_old_manifest(tmp_path: Path, files: Files) -> None:
    path = written(tmp_path, files) / "program" / "train_4.json"
    path.write_text(path.read_text().replace("[0, ", "[1, ", 1))
    with pytest.raises(BuildError, match="is not the file that was compiled"):
        Build.open(tmp_path)


# ---------------------------------------------------------------- the run, against the proof's


@pytest.mark.parametrize("row", [("dualpipe", 4, 8), ("interleaved", 3, 6), ("zbv", 1, 3), ("zbv", 4, 6)])
def test_the_run_agrees_with_the_proof(row: tuple[str, int, int]) -> None:
    """The second, independent run refuses what the proof refuses: mutants of posts, releases, sends and receives."""
    program, plan = family_program(*row)
    schedule, generator = Structure(plan).schedule_of(program), random.Random(0)
    assert replay(events_of(program)) == ""
    names = [name for name in sorted(MUTATIONS) if name.endswith((" post", " release", " send or receive", "'s peer"))]
    refusals = 0
    for number in range(160):
        try:
            changed = MUTATIONS[names[number % len(names)]](program, generator)
        except NothingToEditError:
            continue
        fault, refused_too = replay(events_of(changed)), is_refused(changed, schedule)
        refusals += refused_too
        if refused_too:
            assert fault, names[number % len(names)]
        else:  # round a loop, the proof knows of arrivals by way of a third rank
            assert not fault or (row[0] == "interleaved" and "is not known by then" in fault), fault
    assert refusals >= 20


def events_of(program: Program) -> list[list[Event]]:
    """Events of each rank, read from the files as the runtime reads them."""
    ranks = len(program.bodies)
    names = ["plan.json", "program/x.json", *(f"stages/rank_{rank}.py" for rank in range(ranks))]
    proven = prove(*family_program("1f1b", 2, 5))  # its facts are not looked at
    schedule = Schedule("any", ranks, 1, ONE_STAGE, ((),) * ranks)  # nor is this
    text = Certificates(dict.fromkeys(names, "")).json("x", program, schedule, proven)
    bodies = contract.Certificate.from_json(text).bodies
    return [
        events(row, bodies[rank]) for rank, row in enumerate(contract.RunProgram.from_json(program_json(program)).ranks)
    ]


def is_refused(program: Program, schedule: Schedule) -> bool:
    try:
        check_channels(program, schedule)
    except ProofError:
        return True
    return False
