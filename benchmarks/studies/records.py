"""The stored results of a study's runs: curves as means over windows of steps, in one JSON file per study."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from benchmarks.studies.study import ROOT, Run, Study, Variant, tenth, window_of

Curve = list[float]


@dataclass(frozen=True)
class Record:
    """The result of a complete run.

    `digest`: of the spec. `loss` (nats per token) and `imbalance` (by layer, the load of the busiest expert over the
    mean) are means over windows of steps. `loads`: by layer, the tokens of each expert in the last tenth of the steps.
    `validation_loss`: at the end, nats per token.
    """

    variant: str
    seed: int
    digest: str
    loss: Curve
    validation_loss: float | None
    imbalance: Mapping[str, Curve]
    loads: Mapping[str, list[int]]

    @property
    def last_loss(self) -> float:
        """Mean loss of the last tenth of the steps, nats per token."""
        return last(self.loss)


@dataclass
class Results:
    """The results of all runs of a study by name, and the reasons for variants without runs."""

    study: str
    steps: int
    about: dict[str, str]
    runs: dict[str, Record] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def of(self, variant: Variant) -> list[Record]:
        """The records of a variant, ordered by seed."""
        records = [record for record in self.runs.values() if record.variant == variant.name]
        return sorted(records, key=lambda record: record.seed)

    def layers(self) -> list[str]:
        """The names of the layers with experts."""
        return list(next(iter(self.runs.values())).imbalance)


def last(curve: Sequence[float]) -> float:
    """Mean of the last tenth of a curve."""
    return statistics.fmean(curve[-tenth(len(curve)) :])


def results_path(study: Study) -> Path:
    """The file with the results of a study."""
    return ROOT / "benchmarks" / "results" / f"{study.name}.json"


def read_results(path: Path, study: Study) -> Results:
    """The stored results for a study's variants and seeds; empty if there is no file."""
    results = Results(study.name, study.steps, about())
    if path.exists():
        document = json.loads(path.read_text("utf-8"))
        results.about = document["about"]
        names = {run.name for run in study.runs()}
        results.runs = {name: Record(**record) for name, record in document["runs"].items() if name in names}
        variants = {variant.name for variant in study.variants}
        results.refused = {name: why for name, why in document["refused"].items() if name in variants}
    return results


def write_results(path: Path, results: Results) -> None:
    """Replace the file atomically: a study that is killed leaves the previous one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results.runs = dict(sorted(results.runs.items()))
    temporary = path.with_suffix(".tmp")
    temporary.write_text(_json(results), "utf-8")
    temporary.replace(path)


def _json(results: Results) -> str:
    """One line per run, so that a diff shows which runs are new."""
    head = json.dumps({key: value for key, value in asdict(results).items() if key != "runs"})
    runs = ",\n".join(f" {json.dumps(name)}: {json.dumps(asdict(run))}" for name, run in results.runs.items())
    return f'{head[:-1]},\n"runs": {{\n{runs}\n}}}}\n'


def about() -> dict[str, str]:
    """The date, the processor, and the versions of Python and torch."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    processors = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processors[0] if processors else platform.machine(),
        "python": platform.python_version(),
        "torch": metadata.version("torch").partition("+")[0],
    }


def record_of(run: Run, digest: str, folder: Path) -> Record:
    """Read the result of a complete run from its folder."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    window = window_of(len(rows))
    validations = [row["validation_loss"] for row in rows if "validation_loss" in row]
    layers = list(rows[0].get("layer_imbalance", {}))
    return Record(
        variant=run.variant.name,
        seed=run.seed,
        digest=digest,
        loss=_means([row["loss"] for row in rows], window),
        validation_loss=validations[-1] if validations else None,
        imbalance={name: _means([row["layer_imbalance"][name] for row in rows], window) for name in layers},
        loads=_last_loads(folder, len(rows)),
    )


def _means(values: Sequence[float], window: int) -> Curve:
    return [round(statistics.fmean(values[start : start + window]), 6) for start in range(0, len(values), window)]


def _last_loads(folder: Path, steps: int) -> dict[str, list[int]]:
    """By layer, the tokens of each expert in the last tenth of the steps, as checkpoints have cumulative counts."""
    before, after = (_checkpoint_loads(folder, step) for step in (steps - tenth(steps), steps))
    return {name: [b - a for a, b in zip(before[name], load, strict=True)] for name, load in after.items()}


def _checkpoint_loads(folder: Path, step: int) -> dict[str, list[int]]:
    manifest = folder / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    loads: dict[str, list[int]] = json.loads(manifest.read_text("utf-8"))["meta"]["loads"]
    return loads
