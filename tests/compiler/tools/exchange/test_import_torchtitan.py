"""`dsc import torchtitan`: round trips of exports, and a ledger entry for every key."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import Phase, example, given, reject, settings
from hypothesis import strategies as st

from compiler.cli.commands.export_plan import _plan_to_export
from compiler.cli.commands.schedule_spec import run_of
from compiler.cli.main import main
from compiler.tools.exporters import torchtitan as exporter
from compiler.tools.importers import python_calls
from compiler.tools.importers.key_files import toml_keys
from compiler.tools.importers.plan_ledger import CHANGES, ImportedPlan, Keys
from compiler.tools.importers.python_calls import read_returned_call
from compiler.tools.importers.torchtitan import CONFIG, RENAMED, SideFiles, import_keys, keys_of_job_file, rate
from dsl.closed_forms.counts import parameters
from dsl.load import load
from dsl.messages.diagnostics import Source, SpecError
from dsl.schema import Mla, Moe, YarnScaling
from dsl.text.formatter import format_source
from runtime.contract.rate import learning_rate
from tests.compiler.cli.forms import parsed
from tests.compiler.tools.exchange.test_export_plans import rate_of_torchtitan
from tests.compiler.tools.exchange.test_import_plans import (
    BENCH,
    ELSEWHERE,
    QUICK,
    ROOT,
    assert_comes_back,
    overrides,
    read_back,
)

Capture = pytest.CaptureFixture[str]
OFF = ("train.validate.*",)  # a lost block; keys that are off are no losses
YARN = "yarn { factor = 40, original = 64, beta_fast = 16, beta_slow = 2, mscale = 0.7, mscale_all_dim = 0.7 }"
JOB = """\
[job]
description = "a run"
[model]
name = "deepseek_v3"
flavor = "671B"  # of torchtitan/models/deepseek_v3
converters = []
[optimizer]
name = "AdamW"
lr = 2.2e-4
[lr_scheduler]
warmup_steps = 2_000
decay_ratio = 0.8
decay_type = "cosine"
lr_min = 0.1
[training]
local_batch_size = 4
seq_len = 4096
max_norm = 1.0
steps = 10_000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "ZBVZeroBubble"
expert_parallel_degree = 8
expert_tensor_parallel_degree = 1
[checkpoint]
enable_checkpoint = true
interval = 500
[activation_checkpoint]
mode = "full"
[float8]
filter_fqns = ["output", "router.gate"]
[new]
option = 3
"""


@st.composite
def exportable(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A spec exportable to torchtitan, and overrides of it."""
    path, changes = draw(overrides())
    if path == QUICK:
        names = ["1f1b", "dualpipev", "zbv", "zb1p", "interleaved", "interleaved_zb", "gpipe", "vhalf"]
        changes.append(f"schedule.name={draw(st.sampled_from(names))}")
        changes.append(f"parallel.expert={draw(st.sampled_from([1, 2]))}")
    given_of = {
        "parallel.zero": st.sampled_from(["= 2", "= 3"]),
        "model.attention.rope.scaling": st.just(YARN),
        "train.checkpoint": st.sampled_from(["{ every = 7 steps, keep = 2 }", "{ every = 100 steps, keep = 5 }"]),
        "recompute": st.just("= [layer]"),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(given_of)), max_size=3))
    return path, [*changes, *(f"{key} {draw(given_of[key])}" for key in sorted(chosen))]


def read(files: dict[str, str], config: str | None = None, devices: int | None = None) -> ImportedPlan:
    """The import of a module whose files are in memory."""
    name, members, computed = read_returned_call(
        Source("config_registry.py", files["config_registry.py"]), CONFIG, config
    )
    assert not computed
    return import_keys(members, name, devices, SideFiles(files.get))


def exported_files(*changes: str) -> dict[str, str]:
    """The exported files of the quickstart, in memory."""
    exported = exporter.export(_plan_to_export(run_of(load(QUICK, overrides=["schedule.name=1f1b", *changes]))))
    return {name: content.decode() for name, content in exported.files.items()}


@settings(max_examples=25, derandomize=True, deadline=None, phases=[Phase.generate])
@given(exportable())
def test_exports_import_as_the_same_spec(case: tuple[str, list[str]]) -> None:
    path, changes = case
    try:
        spec = load(path, overrides=changes)
    except SpecError:  # the values do not fit together
        reject()
    exported = exporter.export(_plan_to_export(run_of(spec)))
    plan = read({name: content.decode() for name, content in exported.files.items()})
    assert assert_comes_back(spec, plan, exported.losses, (*ELSEWHERE, *OFF)).name == spec.name


@pytest.mark.parametrize(
    ("given", "scaling"),
    [
        ("", None),
        (", scaling='yarn'", None),  # by a factor of 1
        (", scaling='yarn', rope_factor=40.0", YarnScaling(factor=40, original=4096, mscale=1, mscale_all_dim=1)),
        (
            ", scaling='yarn', rope_factor=4.0, original_seq_len=64, beta_fast=16.0, beta_slow=2.0, truncate=False",
            YarnScaling(factor=4, original=64, beta_fast=16, beta_slow=2, truncate=False, mscale=1, mscale_all_dim=1),
        ),
    ],
)
def test_a_rotation_has_the_defaults_of_torchtitan(given: str, scaling: YarnScaling | None) -> None:
    files = exported_files()
    text = files["config_registry.py"]
    assert text.count("theta=10000.0") == 1
    plan = read(files | {"config_registry.py": text.replace("theta=10000.0", f"theta=10000.0{given}")})
    attention = read_back(plan.text).model.attention
    assert not plan.mistakes and isinstance(attention, Mla)
    assert attention.rope is not None and attention.rope.scaling == scaling


# ---------------------------------------------------------------- job files


def job(text: str = JOB, devices: int | None = None) -> ImportedPlan:
    return import_keys(keys_of_job_file(toml_keys(Source("job.toml", text))), "mine", devices)


def flat(tables: dict[str, object], path: str = "") -> dict[str, object]:
    """The keys of tables, by their paths."""
    keys: dict[str, object] = {}
    for name, value in tables.items():
        keys |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {path + name: value}
    return keys


def test_every_key_of_a_job_is_in_the_ledger() -> None:
    plan = job(devices=64)
    assert not plan.mistakes
    entries = {entry.key: entry for entry in plan.ledger}
    written = {RENAMED.get(key, key) for key in flat(tomllib.loads(JOB))}
    assert written <= entries.keys()
    assert {key for key in entries if entries[key].kind == "unknown"} == {"new.option"}
    for key in written:
        place = entries[key].place
        assert place is not None and place.text == JOB.splitlines()[place.line - 1].split(" =")[0]
        assert key.endswith(place.text) or key in RENAMED.values()
    assert all(entry.key in plan.text for entry in plan.ledger)
    spec = read_back(plan.text.replace("memory = 80GB", "memory = 1000GB"))
    assert (spec.cluster.world, spec.parallel.pipeline, spec.parallel.data, spec.parallel.expert) == (64, 4, 16, 8)
    assert (spec.train.batch.end, spec.train.micro_batch, spec.schedule.name) == (64, 1, "zbv")
    assert spec.parallel.layout is not None and spec.parallel.layout.count("t") == 61
    assert spec.recompute == ("layer",) and spec.parallel.zero == 2


@pytest.mark.parametrize(("flavour", "billions"), [("16B", 16), ("236B", 236), ("671B", 671)])
def test_flavours_are_the_published_models(flavour: str, billions: int) -> None:
    """By their counts of parameters; 671B is the model of the shipped spec."""
    plan = job(JOB.replace('"671B"', f'"{flavour}"'), 2048)
    by_two = [entry.value for entry in plan.ledger if "the sum of its two best experts" in entry.why]
    assert by_two == (["8"] if flavour == "236B" else []), "the one with groups of softmax scores"
    text = plan.text
    model = read_back(text.replace("memory = 80GB", "memory = 1000GB")).model
    assert round(parameters(model).total / 1e9) == billions
    if flavour == "671B":
        ours = load(ROOT / "specs" / "deepseek-v3.dsc").model
        assert (model.hidden, model.vocab) == (ours.hidden, ours.vocab) and model.layers[0] == ours.layers[0]
        assert isinstance(model.attention, Mla) and isinstance(ours.attention, Mla)
        assert model.attention.model_copy(update={"rope": ours.attention.rope}) == ours.attention
        experts, theirs = model.layers[1].ffn, ours.layers[1].ffn
        assert isinstance(experts, Moe) and isinstance(theirs, Moe)
        assert experts.model_copy(update={"balance": theirs.balance, "max_nodes": theirs.max_nodes}) == theirs


def test_stages_follow_the_job() -> None:
    def with_key(line: str) -> ImportedPlan:
        return job(JOB.replace("pipeline_parallel_degree = 4\n", f"pipeline_parallel_degree = 4\n{line}\n"), devices=64)

    (mistake,) = with_key("pipeline_parallel_layers_per_stage = 9").mistakes
    assert mistake.message == "61 layers cannot be cut into 7 stages on 4 ranks"
    (mistake,) = with_key("pipeline_parallel_first_stage_less_layers = 60").mistakes
    assert mistake.message == "61 layers cannot be cut into 8 stages on 4 ranks"
    right = with_key("pipeline_parallel_first_stage_less_layers = 2")
    assert not right.mistakes and 'layout = "' + "E" + "t" * 6 + "|" in right.text
    parts = [["tok_embeddings", "layers.0"], ["layers.1"], ["layers.2", "new"], ["layers.3", "norm", "output"]]
    named = with_key(f"module_fqns_per_model_part = {parts}")
    assert 'layout = "Et|t|t|tL"' in named.text
    entries = {(entry.kind, entry.value) for entry in named.ledger if entry.key.endswith("module_fqns_per_model_part")}
    assert ("not expressible", "new") in entries


@pytest.mark.parametrize(
    ("copies", "shards", "experts", "written", "told"),
    [
        (1, 4, 4, "", False),
        (4, 1, 4, "", False),
        (2, 2, 4, "", True),
        (2, 2, 2, "zero = 2, shard = 2", False),
    ],
)
def test_groups_that_shard_separately_are_kept(
    copies: int, shards: int, experts: int, written: str, told: bool
) -> None:
    """Groups that hold no whole expert group are no groups here."""
    degrees = f"data_parallel_replicate_degree = {copies}\ndata_parallel_shard_degree = {shards}\n"
    text = JOB.replace("data_parallel_replicate_degree = 1\ndata_parallel_shard_degree = -1\n", degrees)
    plan = job(text.replace("expert_parallel_degree = 8", f"expert_parallel_degree = {experts}"), devices=16)
    notes = [entry for entry in plan.ledger if entry.why.startswith("2 ranks hold no whole expert group of 4")]
    assert not plan.mistakes and [entry.kind for entry in notes] == ["approximated"] * told
    assert written in plan.text and ("shard = " in plan.text) == bool(written)
    (mistake,) = job(text, devices=17).mistakes
    assert mistake.message == "the degrees need 16 devices, but --devices is 17"


@pytest.mark.parametrize(("degree", "written", "lost"), [(1, "false", False), (2, "false", True), (2, "true", False)])
def test_rows_that_tensor_ranks_do_not_split_are_lost(degree: int, written: str, lost: bool) -> None:
    """One rank has nothing to split, whatever the job file says."""
    lines = f"tensor_parallel_degree = {degree}\nenable_sequence_parallel = {written}"
    kinds = {entry.key: entry.kind for entry in job(JOB.replace("tensor_parallel_degree = 1", lines, 1), 64).ledger}
    assert (kinds["parallelism.enable_sequence_parallel"] == "not expressible") == lost


@pytest.mark.parametrize(
    ("implementation", "kind", "moments"), [("fused_opt_states_bf16", "said", "bf16"), ("fused", "no effect", "fp32")]
)
def test_moments_are_as_narrow_as_the_optimizer_of_a_job_keeps_them(
    implementation: str, kind: str, moments: str
) -> None:
    lines = f'lr = 2.2e-4\nimplementation = "{implementation}"\n'
    plan = job(JOB.replace("lr = 2.2e-4\n", lines), 2048)
    assert not plan.mistakes
    assert {entry.key: entry.kind for entry in plan.ledger}["optimizer.implementation"] == kind
    assert read_back(plan.text.replace("memory = 80GB", "memory = 1000GB")).precision.moments == moments


@pytest.mark.parametrize("betas", ["[0.9]", "[0.9, 0.95, 0.99]", '[0.9, "no"]', "[true, 0.95]"])
def test_betas_are_two_numbers(betas: str) -> None:
    (mistake,) = job(JOB.replace("lr = 2.2e-4\n", f"lr = 2.2e-4\nbetas = {betas}\n"), devices=64).mistakes
    assert mistake.code == "I0203" and mistake.message.startswith("`betas` must be two numbers, ")
    right = job(JOB.replace("lr = 2.2e-4\n", "lr = 2.2e-4\nbetas = [0.8, 0.9]\n"), devices=64)
    assert not right.mistakes and "beta1 = 0.8, beta2 = 0.9" in right.text


@pytest.mark.parametrize("written", ["", "beta2 = 0.95\n"])
def test_missing_betas_default_to_those_of_torchtitan(written: str) -> None:
    plan = job(JOB.replace("lr = 2.2e-4\n", f"lr = 2.2e-4\n{written}"), devices=64)
    assert not plan.mistakes and "beta1 = 0.9, beta2 = 0.95" in plan.text
    assert ("default", "optimizer.beta1") in {(entry.kind, entry.key) for entry in plan.ledger}


def test_betas_of_none_default_to_those_of_torchtitan() -> None:
    files = exported_files("train.optimizer.beta1=0.8")
    text = files["config_registry.py"]
    assert text.count("'betas': (0.8, 0.95)") == 2
    plan = read(files | {"config_registry.py": text.replace("(0.8, 0.95)", "None")})
    assert not plan.mistakes and "beta1 = 0.9, beta2 = 0.95" in plan.text


def test_an_unknown_flavour_is_a_missing_model() -> None:
    for text in (JOB.replace('"671B"', '"8B"'), JOB.replace('"deepseek_v3"', '"llama3"')):
        plan = job(text, 64)
        messages = [item for item in plan.mistakes if item.code == "I0202"]
        assert len(messages) == 1 and "dsc import hf" in (messages[0].hint or "") and messages[0].span is not None
        assert messages[0].span.line == 5


def test_a_job_that_names_no_model_is_a_mistake() -> None:
    for text in (JOB.replace('flavor = "671B"  #', "#"), "[training]\nseq_len = 64\n", ""):
        plan = job(text, 64)
        assert [item.message for item in plan.mistakes if item.code == "I0202"] == [
            "no model is named: its sizes are missing"
        ]


def test_stages_that_begin_where_a_job_says_are_approximated() -> None:
    points = 'pipeline_parallel_split_points = ["layers.2"]\npipeline_parallel_schedule ='
    for degree, kind in ((4, "approximated"), (1, "no effect")):
        text = JOB.replace("pipeline_parallel_schedule =", points).replace("degree = 4", f"degree = {degree}")
        kinds = {entry.key: entry.kind for entry in job(text, 64).ledger}
        assert kinds["parallelism.pipeline_parallel_split_points"] == kind


# ---------------------------------------------------------------- rates


@settings(max_examples=60, derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate])
@example(35, 34, 1.0, "cosine", 0.0)  # a decay that begins where the run ends
@given(
    st.integers(1, 60), st.integers(0, 70), st.sampled_from([0.0, 0.1, 0.33, 0.8, 1.0]),
    st.sampled_from(["linear", "cosine"]), st.sampled_from([0.0, 0.1]),
)  # fmt: skip
def test_rates_equal_those_of_torchtitan(steps: int, warmup: int, ratio: float, shape: str, least: float) -> None:
    """At every step, by the formula of the released package."""
    scheduler = f"warmup_steps = {warmup}\ndecay_ratio = {ratio}\ndecay_type = '{shape}'\nmin_lr_factor = {least}"
    keys = keys_of_job_file(
        toml_keys(Source("job.toml", f"[training]\nsteps = {steps}\n[lr_scheduler]\n{scheduler}\n"))
    )
    lines = rate(Keys(keys), 2e-3, steps)
    bench = load(BENCH, overrides=[f"train.steps={steps}", f"train.rate={', '.join(lines[1:-1])}"])
    theirs = {"total_steps": steps, "warmup_steps": min(warmup, steps), "decay_ratio": ratio, "decay_type": shape}
    tokens = bench.train.batch.end * bench.train.sequence
    for step in range(steps):
        expected = 2e-3 * rate_of_torchtitan(theirs | {"min_lr_factor": least}, step)
        our_rate = learning_rate(bench.train.rate, (step + 1) * tokens)  # type: ignore[arg-type]
        assert our_rate == pytest.approx(expected, rel=1e-9, abs=1e-15), step


# ---------------------------------------------------------------- modules


def exported_to(folder: Path, *options: str) -> Path:
    assert main(["export", "torchtitan", QUICK, "-o", str(folder), "--lossy", *options]) == 0
    return folder / "config_registry.py"


def test_a_schedule_without_a_name_is_named_as_a_file(tmp_path: Path, capsys: Capture) -> None:
    module = exported_to(tmp_path / "titan", "-s", "schedule.name=1f1b")
    spec_file, csv = tmp_path / "mine.dsc", tmp_path / "titan" / "schedule.csv"
    command = ["import", "torchtitan", str(module), "-o", str(spec_file), "--force"]
    assert main(command) == 0
    assert load(spec_file).schedule.name == "1f1b"
    rows = csv.read_text().splitlines()
    rows[-1] = rows[-1].replace("1F0,1B0,1F1,1B1", "1F0,1F1,1B0,1B1")
    csv.write_text("\n".join(rows) + "\n")
    assert main(command) == 0
    assert load(spec_file).schedule.file is not None and Path(str(load(spec_file).schedule.file)).name == "schedule.csv"
    assert main(["check", str(spec_file)]) == 0
    for content in ("0F0\n", "not a schedule\n"):
        csv.write_text(content)
        assert main(command) == 2
        assert "I0203" in capsys.readouterr().err
    csv.unlink()
    assert main(command) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_only_an_imported_registry_is_assumed_to_be_that_of_torchtitan() -> None:
    """A module that writes the sizes of its model leaves nothing to assume."""
    written = exported_files()["config_registry.py"]
    head = written.partition("model_spec=")[0]
    for text, assumed in ((written, []), (f"{head}model_spec=model_registry('16B'))\n", ["model_spec"])):
        plan = read({"config_registry.py": text, "schedule.csv": exported_files()["schedule.csv"]})
        assert [entry.key for entry in plan.ledger if entry.why.startswith("the registry is assumed")] == assumed


def test_a_file_elsewhere_is_not_read(tmp_path: Path, capsys: Capture) -> None:
    other_csv = exported_to(tmp_path / "other", "-s", "schedule.name=1f1b").with_name("schedule.csv")
    for name in (str(other_csv), "../other/schedule.csv"):
        file = tmp_path / "job.toml"
        file.write_text(JOB.replace('ZBVZeroBubble"', f'1F1B"\npipeline_parallel_schedule_csv = {name!r}'))
        assert main(["import", "torchtitan", str(file), "--devices", "64", "--lossy"]) == 2
        assert "cannot be read" in capsys.readouterr().err


def test_nothing_is_executed(tmp_path: Path, capsys: Capture) -> None:
    module, mark = exported_to(tmp_path / "titan", "-s", "schedule.name=1f1b"), tmp_path / "mark"
    text, computed = module.read_text(), f"dim=[open({str(mark)!r}, 'w'), 192][1]"
    module.write_text(f"open({str(mark)!r}, 'w')\n" + text.replace("dim=192", computed))
    capsys.readouterr()
    assert main(["import", "torchtitan", str(module)]) == 2
    printed = capsys.readouterr().err
    assert not mark.exists() and "I0104" in printed and "`model_spec.model.layers.dim` is unknown" in printed


def test_a_configuration_that_changes_another(tmp_path: Path, capsys: Capture) -> None:
    """Functions that call each other, as in torchtitan's registry."""
    module = exported_to(tmp_path / "titan", "-s", "schedule.name=1f1b")
    body = "config = quickstart()\n    config.debug.seed = 7\n    return config"
    function_text = f"def longer() -> Trainer.Config:\n    {body}\n"
    module.write_text(f"{module.read_text()}\n\n{function_text}")
    assert main(["import", "torchtitan", str(module)]) == 2
    assert "choose one: --config quickstart" in capsys.readouterr().err
    spec_file = tmp_path / "mine.dsc"
    assert main(["import", "torchtitan", str(module), "--config", "longer", "-o", str(spec_file)]) == 0
    spec = load(spec_file)
    assert (spec.name, spec.train.seed) == ("longer", 7)


def test_names_with_types_are_followed(tmp_path: Path, capsys: Capture) -> None:
    """Annotated names and attributes are followed; a name without a value is skipped."""
    module = exported_to(tmp_path / "titan", "-s", "schedule.name=1f1b")
    body = "config: Trainer.Config = base\n    config.debug.seed: int = 7\n    other: int\n    return config"
    typed = f"base: Trainer.Config = quickstart()\ndef typed() -> Trainer.Config:\n    {body}\n"
    module.write_text(f"{module.read_text()}\n\n{typed}")
    spec_file = tmp_path / "mine.dsc"
    assert main(["import", "torchtitan", str(module), "--config", "typed", "-o", str(spec_file)]) == 0
    assert "I0104" not in capsys.readouterr().err and load(spec_file).train.seed == 7


def test_names_that_lead_to_each_other_end() -> None:
    head = "def run() -> Trainer.Config:\n    return Trainer.Config(training=a)\n"
    for text in ("a = b\nb = a\n", "def f():\n    return f()\na = f()\n", "a = [f(b), f(b)]\nb = [f(a), f(a)]\n"):
        _, _, computed = read_returned_call(Source("c.py", text + head), CONFIG, None)
        assert [item.code for item in computed] == ["I0104"] * len(computed)
    doubled = "".join(f"a{n} = g(x=a{n + 1}, y=a{n + 1})\n" for n in range(30)).replace("a0", "a") + "a30 = 1\n"
    _, _, computed = read_returned_call(Source("c.py", doubled + head), CONFIG, None)
    assert computed and len(computed) < 10


def test_names_that_are_used_many_times_are_followed_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name expands to two of the next one: seven names give a hundred values."""
    lines = [f"a{n} = g(x=a{n + 1}, y=a{n + 1})\n" for n in range(7)]
    text = "".join(lines) + "a7 = 1\ndef run() -> Trainer.Config:\n    return Trainer.Config(training=a0)\n"
    _, values, computed = read_returned_call(Source("c.py", text), CONFIG, None)
    assert not computed and len(values) > 128
    monkeypatch.setattr(python_calls, "MOST_STEPS", 50)
    _, values, computed = read_returned_call(Source("c.py", text), CONFIG, None)
    (item,) = computed
    assert "names that refer to each other" in item.message and len(values) <= 50


@settings(max_examples=100, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.data())
def test_any_value_gives_a_spec_or_a_message(data: st.DataObject) -> None:
    """An import returns a text and a ledger for any values in a job file."""
    odd_values = [
        "0",
        "-1",
        "1e300",
        "nan",
        "9" * 400,
        "true",
        '"none"',
        '"x }"',
        "[0]",
        "[[1]]",
        "0.5",
        '""',
        "2020-01-01",
    ]
    lines = JOB.splitlines()
    chosen = data.draw(
        st.sets(st.sampled_from([n for n, line in enumerate(lines) if "=" in line]), min_size=1, max_size=4)
    )
    for number in chosen:
        lines[number] = f"{lines[number].split(' =')[0]} = {data.draw(st.sampled_from(odd_values))}"
    members = keys_of_job_file(toml_keys(Source("job.toml", "\n".join(lines))))
    plan = import_keys(members, "mine", data.draw(st.sampled_from([None, 64])))
    assert {*members} <= {entry.key for entry in plan.ledger} or plan.mistakes
    format_source(Source("mine.dsc", plan.text))


def test_the_command(tmp_path: Path, capsys: Capture) -> None:
    file, spec_file = tmp_path / "job.toml", tmp_path / "mine.dsc"
    file.write_text(JOB)
    command = ["import", "torchtitan", str(file), "--devices", "1024", "-o", str(spec_file), "--format", "json"]
    assert main(command) == 2
    document = parsed(capsys.readouterr().out, "import")
    assert (document["from"], document["spec"]) == ("torchtitan", None) and not spec_file.exists()
    changed = {entry["key"] for entry in document["keys"] if entry["kind"] in CHANGES}
    assert changed == {"init", "optimizer.weight_decay"}
    assert main([*command, "--lossy"]) == 0
    assert parsed(capsys.readouterr().out, "import")["spec"] == spec_file.read_text()
    assert main(["fmt", "--check", str(spec_file)]) == 0 and main(["check", str(spec_file)]) == 0
    assert main(["import", "torchtitan", str(file), "--vocab", "3"]) == 2
    assert main(["import", "megatron-bridge", str(file), "--config", "a"]) == 2
