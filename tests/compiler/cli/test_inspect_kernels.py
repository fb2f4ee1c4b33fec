"""`dsc inspect BUILD --kernels` lists the emitted kernels and reports errors."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from compiler.cli.commands.inspect_kernels import ON_CPUS, read, rows_of, runs_on_cpus, text
from compiler.cli.main import main
from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from compiler.tools.picture.drawing import Screen
from compiler.tools.picture.labels import num_bytes
from dsl.canonical import canonical
from dsl.load import load
from runtime.contract import RunPlan
from runtime.system.strict_json import FormError
from tests.compiler.cli.forms import parsed

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Builds of tiny: unchanged, and without fusion."""
    spec, folder = load(ROOT / "specs" / "tiny.dsc"), tmp_path_factory.mktemp("builds")
    unfused = spec.model_copy(update={"unfused": ("residual_norm", "route", "join")})
    for name, variant in (("tiny", spec), ("apart", unfused)):
        write_build(folder / name, compile_spec(variant).files)
    return folder / "tiny", folder / "apart"


def test_every_file_and_every_fused_op_is_listed(builds: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    build, _ = builds
    assert main(["inspect", str(build), "--kernels", "--format", "json"]) == 0
    listing = parsed(capsys.readouterr().out, "kernels")
    files = {path.stem for path in (build / "kernels").glob("*.py")}
    assert [*sorted(row["kernel"] for row in listing["kernels"]), listing["optimizer"]["kernel"]] == [
        *sorted(files - {"adamw"}),
        "adamw",
    ]
    built = parsed((build / "kernels.json").read_text(), "built_kernels")
    texts = {path.stem: path.read_text() for path in (build / "segments").glob("*.py")}
    for segment in built["segments"]:
        text = texts[segment["segment"]]
        for op in {call["op"] for call in segment["ops"]} - {"add", "cat2"}:
            called = sum(call["op"] == op for call in segment["ops"])
            names = re.findall(rf"^(\w+) = on_cuda\(__file__, '\w+', {op}\)$", text, re.M) or [op]
            assert sum(len(re.findall(rf"(?<![\w.]){name}\(", text)) for name in {*names}) >= called, op
    assert {row["op"] for row in listing["fused"]} == {
        "add_rmsnorm",
        "rmsnorm_dgrad_add",
        "sum_rmsnorm_dgrad_add",
        "route_permute",
        "permuted_rmsnorm_dgrad_add",
        "unpermute_add",
    }
    assert all(row["bytes_saved"] > 0 and row["calls"] > 0 for row in listing["fused"])


def test_calls_in_graphs_are_counted_and_the_others_have_reasons(builds: tuple[Path, Path]) -> None:
    build, _ = builds
    document = json.loads((build / "kernels.json").read_bytes())
    assert rows_of(json.dumps(document).encode())["graphs"] is None
    counted = {"replayed": 1200, "others": [{"reason": "they move", "calls": 34}]}
    report = rows_of(json.dumps({**document, "graphs": counted}).encode())
    assert report["graphs"] == counted
    line = "graphs: 1,200 of 1,234 calls of segments in a step are replayed from the third step on; 34 launch kernel by"
    assert f"{line} kernel: they move\n" in text("build", report)


def test_ops_that_the_spec_leaves_unfused_are_reported(
    builds: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, unfused = builds
    assert main(["inspect", str(unfused), "--kernels"]) == 0
    stdout = capsys.readouterr().out
    assert "the spec turns these fusions off: residual_norm, route, join" in stdout and "stands for" not in stdout
    assert "by torch: add," in stdout


@pytest.mark.parametrize("name", ["tiny", "moe-8gpu"])
def test_the_optimizer_is_listed(
    builds: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """Elements match the runtime's buckets of a rank, bytes match the optimizer's tensors."""
    spec = load(ROOT / "specs" / f"{name}.dsc")
    build = builds[0] if name == "tiny" else tmp_path
    if name != "tiny":
        write_build(build, compile_spec(spec).files)
    assert main(["inspect", str(build), "--kernels", "--format", "json"]) == 0
    optimizer = parsed(capsys.readouterr().out, "kernels")["optimizer"]
    plan = RunPlan.from_json((build / "plan.json").read_bytes())
    owned: Counter[int] = Counter()
    for bucket in plan.buckets:
        elements = sum(math.prod(parameter.shape) for parameter in bucket.parameters)
        for rank in bucket.holders:
            owned[rank] += -(-elements // len(bucket.holders)) if spec.parallel.zero else elements
    assert optimizer["elements"] == max(owned.values())
    sizes = {"fp32": 4, "bf16": 2}
    precision = spec.precision
    master, gradient, moment = (sizes[dtype] for dtype in (precision.master, precision.gradients, precision.moments))
    parameter_copy = sizes[precision.parameter] if precision.parameter != precision.master else 0
    assert optimizer["bytes"] == optimizer["elements"] * (2 * master + gradient + 4 * moment + parameter_copy)
    assert main(["inspect", str(build), "--kernels"]) == 0
    assert f"optimizer: adamw by adamw, {optimizer['elements']:,} elements and" in capsys.readouterr().out


def test_kernels_that_quantise_weights_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every quantised weight of plan.json, with the kernel that it names; other recipes have none."""
    widths = ["model.attention.query_rank=16", "model.attention.kv_rank=16"]
    spec = load(ROOT / "specs" / "tiny.dsc", overrides=["precision=fp8_block", *widths])
    files = dict(compile_spec(spec).files)
    write_build(tmp_path, tuple(files.items()))
    assert main(["inspect", str(tmp_path), "--kernels", "--format", "json"]) == 0
    listing = parsed(capsys.readouterr().out, "kernels")
    counts = Counter((weight.op, weight.kernel) for weight in RunPlan.from_json(files["plan.json"]).quantised)
    assert {(row["op"], row["kernel"]): row["calls"] for row in listing["quantised"]} == counts and counts
    assert all(op == "quantise_blocks" and f"kernels/{kernel}.py" in files for op, kernel in counts)
    assert main(["inspect", str(tmp_path), "--kernels"]) == 0
    stdout = capsys.readouterr().out
    assert f"{sum(name.startswith('kernels/') for name in files)} kernel files" in stdout
    assert all(
        f"quantise_blocks by {kernel}, {calls} calls per step" in stdout for (_, kernel), calls in counts.items()
    )


def test_names_are_not_broken_across_lines(builds: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A row is one line in a pipe, however long; on a narrow terminal, lists continue on the next line after a name."""
    listing = read(builds[0])
    names = {row["kernel"] for row in listing["kernels"]} | {op for row in listing["kernels"] for op in row["ops"]}
    names |= {row["op"] for row in listing["without"]} | {part for row in listing["fused"] for part in row["of"]}
    assert main(["inspect", str(builds[0]), "--kernels"]) == 0
    piped = capsys.readouterr().out
    assert all(f"  {', '.join(row['ops'])}  " in piped for row in listing["kernels"])
    assert all(f"  {' + '.join(row['of'])}  " in piped for row in listing["fused"])
    for width in (10, 72, 100, 250):
        wrapped = text("tiny", listing, Screen(width), on_cpus=True)
        assert names <= {*re.findall(r"\w+", wrapped)}, width
        assert ON_CPUS in " ".join(wrapped.split()) and "…" not in wrapped
        assert all(len(line) <= max(width, 72) for line in wrapped.splitlines()[:4]), width


def test_prints_saved_bytes_and_the_target_machine(
    builds: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(builds[0]), "--kernels"]) == 0
    stdout = capsys.readouterr().out
    listing = read(builds[0])
    saved = [int(row["bytes_saved"]) for row in listing["fused"]]
    lines = stdout.splitlines()
    printed = [re.split(r"  +", line)[-1] for line in lines[lines.index("") + 2 :][: len(saved) + 1]]
    assert printed == [num_bytes(size) for size in (*saved, sum(saved))] and all(
        not cell.startswith("0") for cell in printed
    )
    assert f"{num_bytes(listing['optimizer']['bytes'])} per step on the pipeline rank that updates most" in stdout
    assert ON_CPUS in stdout  # tiny is for CPUs
    assert ON_CPUS not in text("tiny", listing)
    (builds[0] / "spec.resolved").rename(builds[0] / "spec.other")
    try:
        assert not runs_on_cpus(builds[0])  # not known
    finally:
        (builds[0] / "spec.other").rename(builds[0] / "spec.resolved")
    gpus = builds[0].parent / "gpus"
    gpus.mkdir()
    (gpus / "spec.resolved").write_text(canonical(load(ROOT / "specs" / "moe-8gpu.dsc")), encoding="utf-8")
    assert not runs_on_cpus(gpus) and runs_on_cpus(builds[0])


def test_commands_for_runs_and_specs_refuse_a_build(
    builds: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    build, unfused = builds
    assert main(["inspect", str(build)]) == 2
    err = capsys.readouterr().err
    assert f"{build} is a build" in err and f"dsc inspect {build} --kernels" in err and "Errno" not in err
    assert main(["diff", str(build), str(unfused)]) == 2
    err = capsys.readouterr().err
    assert f"{build} is a folder, not a spec" in err and f"the one of this folder is {unfused}/spec.resolved" in err
    assert main(["diff", f"{build}/spec.resolved", f"{unfused}/spec.resolved"]) == 1
    assert "unfused  [] → [residual_norm, route, join]" in capsys.readouterr().out


def test_the_page_shows_printed_lines(builds: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of docs/kernels.md are printed lines, in this order; … stands for others."""
    page = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    excerpt = re.search(r"\$ dsc inspect build/tiny --kernels\n(.*?)```", page, re.DOTALL)
    assert excerpt and main(["inspect", str(builds[0]), "--kernels"]) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    for line in excerpt[1].splitlines():
        assert line == "…" or any(line == printed_line.rstrip() for printed_line in printed), line


def test_output_to_a_file(builds: tuple[Path, Path], tmp_path: Path) -> None:
    assert main(["inspect", str(builds[0]), "--kernels", "-o", str(tmp_path / "kernels.txt")]) == 0
    text = (tmp_path / "kernels.txt").read_text()
    assert text.startswith("tiny: ") and "\x1b" not in text and "rmsnorm + " not in text.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernels"], "holds no build (manifest.json: No such file or directory); run dsc compile"),
        (["--kernels", "--format", "svg"], "--kernels has no --format svg: use terminal or json"),
        (["--kernels", "--costs", "plan"], "--program, --costs and --write-costs are for runs"),
        (["--format", "json"], "--format json needs --kernels"),
    ],
)
def test_invalid_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["inspect", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


RIGHT = (
    '{"rows": 1, "unfused": [], "segments": [{"segment": "x_1", "kind": "x", "site": "L0", "uses": 1,'
    ' "ops": [{"function": "F", "op": "y[/z]", "kernel": null, "reason": "a view"}]}],'
    ' "quantised": [], "optimizer": {"op": "adamw", "kernel": null, "reason": "-", "elements": 1, "bytes": 30}}'
)


def test_names_are_not_parsed_as_markup() -> None:
    assert "by torch: y[/z]" in text("x", rows_of(RIGHT.encode()))


@pytest.mark.parametrize("streams", [">&-", "| true"])
def test_closed_or_unread_output_exits_with_141(builds: tuple[Path, Path], streams: str) -> None:
    command = f"{sys.executable} -m compiler.cli.main inspect {builds[0]} --kernels {streams}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[1]", '{"rows": 1, "unfused": [], "segments": [{}]}', "\udcff", "[" * 200_000),
        *(
            RIGHT.replace(*words)
            for words in (("30", "Infinity"), ("30", '"x"'), ("[]", "[5]"), ('"optimizer"', '"o"'))
        ),
    ],
)
def test_a_list_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(FormError):
        rows_of(text.encode("utf-8", "surrogateescape"))


def test_a_damaged_build_is_refused(
    builds: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = shutil.copytree(builds[0], tmp_path / "build")
    assert main(["inspect", str(build), "--kernels"]) == 0
    listed = (build / "kernels.json").read_bytes()
    (build / "kernels.json").write_bytes(listed.replace(b'"uses": 1', b'"uses": 2'))
    assert main(["inspect", str(build), "--kernels"]) == 2
    assert f"{build}/kernels.json is not the file that was compiled; run dsc compile again" in capsys.readouterr().err
    manifest = json.loads((build / "manifest.json").read_text())
    for data in (b"{}", b""):  # as a dsc with another form of the list would have compiled it
        manifest["files"]["kernels.json"] = hashlib.sha256(data).hexdigest()
        (build / "kernels.json").write_bytes(data)
        (build / "manifest.json").write_text(json.dumps(manifest))
        assert main(["inspect", str(build), "--kernels"]) == 2
        assert "has no readable kernels.json" in capsys.readouterr().err
