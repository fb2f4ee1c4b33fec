"""`make kernels`: what is compiled or reused from the last run, the output, and the exit code."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import tests.compiler.emit.kernels.sweep as sweep
from runtime.build.launches import Launch
from tests.compiler.emit.kernels.gate import GFX942, SM_90, TARGETS, Verdict, key_of
from tests.compiler.emit.kernels.gate_launch import streams_rows
from tests.compiler.emit.kernels.shapes import VARIANTS
from tests.compiler.emit.kernels.sweep import Row, Sweep, launches, main, plan, recall, table, written

TINY = ["--spec", "tiny", "--op", "^rmsnorm_wgrad_$", "--target", "sm_90"]


def test_a_sweep_prints_its_verdicts_and_reuses_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept_option = ["--kept", str(tmp_path)]
    assert main([*TINY, *kept_option, "--format", "json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert all(row["verdict"]["registers"] and not row["verdict"]["failures"] for row in report["rows"])
    calls = [row["call"] for row in report["rows"]]
    assert any("bfloat16[16, 16]" in call for call in calls) and any("float32[16, 8]" in call for call in calls)
    num = len({row["key"] for row in report["rows"]})
    assert num > 2 and f"{num} of {num} launches" in err

    assert main([*TINY, *kept_option]) == 0
    assert f"{num} distinct launches, 0 of them compiled" in capsys.readouterr().out

    (path,) = tmp_path.glob("*.jsonl")
    lines = [line for line in path.read_text().splitlines() if line]
    path.write_text("\n".join([*lines[:-2], lines[-1][:50]]))  # stopped as it wrote the last but one
    assert main([*TINY, *kept_option]) == 0
    assert f"{num} distinct launches, 2 of them compiled" in capsys.readouterr().out
    assert len(recall(path)) == num


def test_a_failure_is_reported_and_retried(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "WORKER", ("sh", "-c", "echo of what it died >&2; exit 11"))
    for _ in range(2):
        assert main([*TINY, "--kept", str(tmp_path)]) == 1
        out, err = capsys.readouterr()
        failure = "does not compile: its process ended with code 11: of what it died"
        assert f" on sm_90 {failure}: rmsnorm_wgrad_(" in out and failure in err
        assert "distinct launches, 0 of them" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--op", "no such op"), "no launch is of --spec 'tiny', --op 'no such op' and --target ''"),
        (("--op", "("), "--op '(' is no regular expression"),
        (("--jobs", "0"), "--jobs 0: at least one process is needed"),
    ],
)
def test_nothing_to_do_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--spec", "tiny", *words, "--kept", str(tmp_path)])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_invalid_lines_of_stored_verdicts_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b'5\n["k", {"x": 1}]\n[1, 2]\n\xff\n{"torn')
    assert recall(tmp_path / "kept") == {}


def test_a_spec_that_cannot_be_planned_fails() -> None:
    planned = plan([("no such.dsc", "pretrain", ())], TARGETS)
    assert not planned.jobs and [
        "is not planned" in text for v in planned.verdicts.values() for text in v.failures
    ] == [True]
    assert " on any is not planned" in table(planned, colour=False)


def test_a_launch_is_compiled_once_for_all_specs_and_ops() -> None:
    tiny = [variant for variant in VARIANTS if variant[0] == "tiny.dsc"]
    planned = plan(tiny, TARGETS, "^(rmsnorm|add_rmsnorm|rmsnorm_wgrad_)$")
    assert {row.key for row in planned.rows} == set(planned.jobs) and len(planned.jobs) < len(planned.rows)
    assert set(plan(tiny * 2, TARGETS, "^(rmsnorm|add_rmsnorm|rmsnorm_wgrad_)$").jobs) == set(planned.jobs)
    per_target = Counter(job.target for job in planned.jobs.values())
    assert len(set(per_target.values())) == 1 and len(per_target) == len(TARGETS)


def test_a_verdict_is_reused_only_for_equal_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input is changed separately: kernel text, launch, streams of its family, the gate, and Triton."""
    tiny = [variant for variant in VARIANTS if variant[0] == "tiny.dsc"][:1]

    def keys() -> set[str]:
        sweep._of_the_gate.cache_clear()
        job_keys = set(plan(tiny, [SM_90], "^rmsnorm$").jobs)
        assert job_keys
        return job_keys

    def other(old: str, new: str) -> None:
        def emit(*arguments: object) -> sweep.KernelFile | None:
            file = emitted(*arguments)  # type: ignore[arg-type]
            assert file and old in file.source
            return sweep.KernelFile(file.name, file.source.replace(old, new))

        monkeypatch.setattr(sweep, "emit_kernel", emit)

    emitted, first = sweep.emit_kernel, keys()
    assert keys() == first
    with monkeypatch.context() as patch:
        patch.setattr(sweep.triton, "__version__", "0")
        assert not keys() & first
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "streams_of", lambda op: {"_forward": ("ld.global.nc",)})
        assert not keys() & first
    other("'num_warps': 4", "'num_warps': 8")
    assert not keys() & first
    other("tl.rsqrt(tl.sum(values * values, 1) / D + eps)", "tl.rsqrt(tl.sum(values * values, 1) / D)")
    assert not keys() & first
    monkeypatch.setattr(sweep, "emit_kernel", emitted)
    assert keys() == first


def test_wide_loads_are_required_of_views_with_known_strides() -> None:
    def wanted(stride: int, width: int = 128) -> bool:
        rows = torch.empty(64, stride, device="meta")[:, :width]
        return streams_rows(Launch(None, (rows, torch.empty(64, width, device="meta")), ()))

    assert wanted(128) and wanted(576)
    assert not wanted(136), "16 bytes divide 136 · 4, but 16 does not divide 136"
    assert wanted(136, width=136), "what is no view has its width in the kernel's text"
    assert not wanted(130, width=130) and not wanted(64, width=64)


def test_few_stages_for_few_bytes() -> None:
    tiny = [variant for variant in VARIANTS if variant[0] == "tiny.dsc"]
    jobs = list(plan(tiny, TARGETS, "^grouped_linear_wgrad_$").jobs.values())
    for target, max_stages in ((SM_90, 4), (GFX942, 2)):
        keys = [key_of(launch, target) for job in jobs for launch in launches(job.file, job.call, job.rows)]
        assert max(int(stages) for key in keys for stages in re.findall(r"'num_stages', (\d+)", key)) == max_stages


def test_verdicts_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    verdict = Verdict("_forward", "sm_90", (), 40, 1024, 0, 128, 12, ("HGMMA",), 16)
    path.write_text(written("a", verdict) + written("b", Verdict("_sum", "sm_80"))[:40])
    assert recall(path) == {"a": verdict} and recall(tmp_path / "none") == {}


def test_the_table() -> None:
    verdicts = {
        "a": Verdict("_forward", "sm_90", (), 40, 1024, 0, 128, 12, ("HGMMA",), 16),
        "b": Verdict("_forward", "sm_90", (), 48, 512, 0, 128, 10, (), 4),
        "c": Verdict("_forward", "sm_100", ("spills 8 bytes",), 255, 0, 8, 128, 4),
    }
    rows = [Row(spec, "f", "f(x)", "f_d8", key) for key in verdicts for spec in ("a.dsc", "b.dsc")]
    small_sweep = Sweep([*rows, Row("a.dsc", "g", "g(x)", "f_d8", "b")], {}, verdicts)
    assert table(small_sweep, colour=False).splitlines() == [
        "       sm_90                               sm_100",
        "op  launches  failed  registers  shared  launches  failed  registers  shared",
        "f          2       -         48    1024         1       1        255       -",
        "g          1       -         48     512         -       -          -       -",
        "f_d8._forward on sm_100 spills 8 bytes: f(x) of a.dsc, and 1 more",
    ]
    assert "\033[31mf_d8._forward on sm_100 spills 8 bytes\033[0m" in table(small_sweep, colour=True)
