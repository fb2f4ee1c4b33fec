"""Devices whose peak rates are known by name, and devices of unknown speed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compiler.machine.rates.table import shipped_table
from compiler.plan.spec_rates import table_for
from dsl.canonical import canonical
from dsl.facts.devices import FIELDS, PEAKS
from dsl.load import load, resolve
from dsl.messages.diagnostics import SpecError
from dsl.schema import Device, Spec
from dsl.schema.precision import BUILT_IN

SPECS = Path(__file__).parents[2] / "specs"
RUN = """
import "single-gpu.dsc"
run mine extends single_gpu {{ cluster = mine }}
cluster mine {{
  nodes = 1
  node {{ devices = 1, device {device} {{ memory = 79.1GiB{more} }}, nvlink = 450GB/s, nic = 50GB/s }}
}}
"""


def written(folder: Path, device: str, more: str = "") -> Path:
    """Write a spec for one device, and the files that it imports, into a folder."""
    for file in SPECS.rglob("*.dsc"):
        copy = folder / file.relative_to(SPECS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    spec = folder / "mine.dsc"
    spec.write_text(RUN.format(device=device, more=f", {more}" if more else ""), "utf-8")
    return spec


def peaks(spec: Spec) -> tuple[Any, ...]:
    return tuple(getattr(spec.cluster.node.device, field) for field in FIELDS)


def dsc(*arguments: str) -> tuple[int, str, str]:
    process = subprocess.run(
        [sys.executable, "-m", "compiler.cli.main", *arguments], capture_output=True, text=True, check=False
    )
    return process.returncode, process.stdout, process.stderr


@pytest.mark.parametrize("name", ["h100", "h800", "a100"])
def test_known_peaks_equal_the_shipped_clusters(name: str) -> None:
    text = "".join(path.read_text("utf-8") for path in sorted((SPECS / "clusters").glob("*.dsc")))
    stated = re.search(rf"device {name} {{(.*)}}", text)
    assert stated is not None
    keys = {key.strip(): value.strip() for key, value in (entry.split("=") for entry in stated[1].split(","))}
    sheet = PEAKS[name]
    assert float(keys["hbm"].replace("TB/s", "e12")) == sheet.hbm and int(keys["sms"]) == sheet.sms
    assert float(keys["bf16"].replace("TFLOPS", "e12")) == sheet.bf16
    assert ("fp8" in keys) == (sheet.fp8 is not None)
    if sheet.fp8 is not None:
        assert float(keys["fp8"].replace("TFLOPS", "e12")) == sheet.fp8


@pytest.mark.parametrize("name", PEAKS)
def test_known_peaks_equal_the_rate_tables(name: str, tmp_path: Path) -> None:
    table = table_for(load(written(tmp_path, name), "mine").cluster.node.device)
    device = shipped_table(table).device
    assert table == name
    assert [getattr(device, field) for field in FIELDS] == [getattr(PEAKS[name], field) for field in FIELDS]


def test_a_known_device_is_planned_at_its_peaks(tmp_path: Path) -> None:
    stated = written(tmp_path / "stated", "h100", "sms = 132, hbm = 3.35TB/s, bf16 = 989TFLOPS, fp8 = 1979TFLOPS")
    for index, name in enumerate(("h100", "H100")):
        bare = written(tmp_path / str(index), name)
        plans = [dsc("plan", f"{spec}:mine", "--format", "json") for spec in (bare, stated)]
        assert [code for code, _, _ in plans] == [0, 0]
        plan, expected = (json.loads(output) for _, output, _ in plans)
        assert plan["step"] == expected["step"] and plan["mfu"] == expected["mfu"] != {"causal": None, "full": None}
        assert plan["assumptions"] == expected["assumptions"]


def test_the_origin_is_the_data_sheet(tmp_path: Path) -> None:
    code, output, _ = dsc("show", f"{written(tmp_path, 'h200')}:mine", "--origin", "cluster.node.device")
    assert code == 0
    for line in ("sms = 132", "hbm = 4.8TB/s", "bf16 = 989TFLOPS", "fp8 = 1979TFLOPS"):
        assert re.search(rf"{line} +# derived: NVIDIA H200 SXM data sheet\n", output)


def test_stated_peaks_override_known_ones(tmp_path: Path) -> None:
    spec = load(written(tmp_path, "h100", "bf16 = 700TFLOPS, sms = 100, fp8 = none"), "mine")
    assert peaks(spec) == (100, 3.35e12, 7e14, 1979e12, None), "none states no peak"
    (tmp_path / "again.dsc").write_text(canonical(spec), "utf-8")
    assert load(tmp_path / "again.dsc") == spec
    assert resolve(tmp_path / "mine.dsc", "mine").origins["cluster.node.device.bf16"].text == "700TFLOPS"


@pytest.mark.parametrize("name", ["b400", "mi355x", "gpu", "h100_pcie"])
@pytest.mark.parametrize("more", ["", "sms = 148", "hbm = 8TB/s, fp8 = 4500TFLOPS"])
def test_a_device_of_unknown_pace_is_refused(name: str, more: str, tmp_path: Path) -> None:
    code, output, error = dsc("plan", f"{written(tmp_path, name, more)}:mine")
    assert (code, output) == (2, "") and f"error[E0917]: device {name} has no peaks" in error
    assert "bf16 = " in error and "cores = 1" in error


@pytest.mark.parametrize(("name", "more"), [("cpu", ""), ("xeon", "cores = 4"), ("b400", "bf16 = 2250TFLOPS")])
def test_a_cpu_and_a_device_with_peaks_are_not(name: str, more: str, tmp_path: Path) -> None:
    assert load(written(tmp_path, name, more), "mine").cluster.node.device.sms is None


def test_every_further_kind_of_nodes_counts(tmp_path: Path) -> None:
    spec = written(tmp_path, "h100")
    text = spec.read_text("utf-8").replace(
        "nodes = 1\n", "nodes = 1\n  more { nodes = 1, node { devices = 1, device A } }\n"
    )
    text = text.replace("cluster = mine", "cluster = mine, parallel { pipeline = 2 }")
    spec.write_text(text.replace("device A", "device a100 { memory = 79.1GiB }"), "utf-8")
    device = load(spec, "mine").cluster.devices[1]
    assert (device.sms, device.hbm, device.bf16, device.fp8) == (108, 2.039e12, 312e12, None)
    assert "derived: NVIDIA A100 80GB SXM data sheet" in dsc("show", f"{spec}:mine", "--origin", "cluster.more")[1]
    spec.write_text(text.replace("device A", "device b100 { memory = 79.1GiB }"), "utf-8")
    with pytest.raises(SpecError) as caught:
        load(spec, "mine")
    assert [item.code for item in caught.value.diagnostics] == ["E0917"]


@pytest.mark.parametrize(
    ("precision", "accelerator", "cpu"), [("bf16", 8, 1), ("fp32", 1, 1), ("fp8_block", 128, 128), ("mxfp8", 32, 32)]
)
def test_only_accelerators_take_rows_of_bf16_in_eights(precision: str, accelerator: int, cpu: int) -> None:
    for name, rows in (("moe-8gpu.dsc", accelerator), ("quickstart.dsc", cpu)):
        spec = resolve(SPECS / name).spec
        chosen = spec.model_copy(update={"precision": BUILT_IN[precision]})
        assert chosen.row_alignment == rows, name


GIB = 2**30


@pytest.mark.parametrize(
    ("overrides", "room"),
    [
        (["memory=100GiB"], 94 * GIB),  # without 4 GiB and 2%
        (["memory=100GiB", "reserve=10GiB"], 90 * GIB),
        (["memory=100GiB", "reserve=0GiB"], 100 * GIB),
        (["memory=100GiB", "reserve=none"], 94 * GIB),
    ],
)
def test_plans_leave_the_reserve_of_an_accelerator_free(overrides: list[str], room: int) -> None:
    """CUDA contexts, NCCL, cuBLAS and fragmentation take memory that no plan counts."""
    words = [f"cluster.node.device.{override}" for override in overrides]
    device = load(SPECS / "llama3-8b.dsc", overrides=words).cluster.node.device
    assert (device.room, device.memory - device.reserved_bytes) == (room, room)
    assert device.model_copy(update={"memory": device.memory_for(room)}).room == room


def test_a_cpu_has_no_reserve() -> None:
    device = load(SPECS / "quickstart.dsc").cluster.node.device
    assert device.room == device.memory == device.memory_for(device.memory)
    assert Device(name="h800", memory=3 * GIB, bf16=1e12).room == 0  # less than its reserve
