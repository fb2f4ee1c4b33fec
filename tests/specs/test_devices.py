"""Every shipped run of accelerators is planned in every precision on every kind of device that has a rate table."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest

import compiler.machine.rates
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates
from compiler.predict.predict import memories, time_schedule
from compiler.program.lower import Lowering
from compiler.program.lower.scheduler import Scheduler
from dsl.load import load
from dsl.messages.diagnostics import SpecError
from dsl.schema.precision import BUILT_IN
from tests.specs.shipped import RUNS, SPECS, shipped

TABLES = Path(compiler.machine.rates.__file__).parent / "tables"
DEVICES = ("a100", "b200", "b300", "gb200", "gb300", "h100", "h200", "h800", "mi300x")
PEAKS = ("bf16", "fp8", "fp4")
WRITTEN = re.compile(r"device (?:h100|h800) \{[^}]*\}")
OF_ACCELERATORS = tuple((file, run) for file, run in RUNS if shipped(file, run).has_hosts)


def device_block(name: str) -> str:
    """A device with the peaks of its table, or of the one that this is based on."""
    own = json.loads((TABLES / f"{name}.json").read_text("utf-8"))["device"]
    device = own if "sms" in own else json.loads((TABLES / "h800.json").read_text("utf-8"))["device"] | own
    peaks = [f"{peak} = {device[peak] / 1e12:g}TFLOPS" for peak in PEAKS if peak in device]
    sizes = f"sms = {device['sms']}, memory = 141GB, hbm = {device['hbm'] / 1e12:g}TB/s, price = 2USD/h"
    return f"device {name} {{ {', '.join([sizes, *peaks])} }}"


@pytest.fixture(scope="session")
def specs_of_devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the specs for each device, whose clusters have that device."""
    root = tmp_path_factory.mktemp("devices")
    for name in DEVICES:
        shutil.copytree(SPECS, root / name)
        for path in (root / name / "clusters").glob("*.dsc"):
            text = path.read_text("utf-8")
            path.write_text(WRITTEN.sub(device_block(name), text), "utf-8")
    return root


def test_all_tables_are_planned_with() -> None:
    """But for those of one machine, of a date and of a CPU."""
    assert {path.stem for path in TABLES.glob("*.json")} - {*DEVICES} == {"cpu", "h800-2025-02", "h800-calibrated"}


@pytest.mark.parametrize("precision", BUILT_IN)
@pytest.mark.parametrize(("file", "run"), OF_ACCELERATORS)
def test_is_planned_on_every_device(specs_of_devices: Path, file: str, run: str, precision: str) -> None:
    """Or refused, because the device has no products of the precision."""
    overrides = [f"precision={precision}"]
    if "master" in shipped(file, run).offload and BUILT_IN[precision].master == BUILT_IN[precision].parameter:
        overrides.append("offload=[moments]")  # weights and master weights are the same tensors
    num_planned = 0
    for name in DEVICES:
        try:
            spec = load(specs_of_devices / name / file, run, overrides)
        except SpecError as error:
            assert {item.code for item in error.diagnostics} == {"E0916"}, error.diagnostics
            continue
        lowering = Lowering(make_plan(spec), rank_rates(spec))
        timed = time_schedule(spec, lowering, Scheduler(spec, lowering).largest())
        assert 0 < timed.step.seconds < math.inf
        if not num_planned:
            assert all(0 < rank.peak_bytes < math.inf for rank in memories(timed))
        num_planned += 1
    assert num_planned >= (2 if precision == "nvfp4" else 5)
