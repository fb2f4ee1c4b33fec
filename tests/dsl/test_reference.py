"""docs/reference matches the schema, the codes and the commands. `make docs` rewrites it."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from compiler.cli.main import COMMANDS, main
from compiler.cli.reference import commands_page
from dsl import schema
from dsl.facts.devices import FIELDS as PEAK_FIELDS
from dsl.load import check
from dsl.reference import BlockKeys, blocks, find, keys, suggestions, text_of, without_kinds
from dsl.reference.keys import codes_of
from dsl.reference.lessons import FILE, lesson
from dsl.reference.pages import errors_page, keys_page, units_page
from dsl.reference.topics import BATCH, FAMILIES, GROUPS, WORDS, LanguageWord, family, names_of_topics, sample
from dsl.resolve.derive import DEFAULTS
from dsl.rules import REFUSALS, RULES
from dsl.rules.codes import CODES, RETIRED
from dsl.schema import OPTIMIZERS, Choices, DerivedDefault, Node, Spec
from dsl.schema.base import fields_of, keys_of
from tests import copies
from tests.dsl.test_lessons import said

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CLASSES = [cls for cls in vars(schema).values() if isinstance(cls, type) and issubclass(cls, Node) and cls is not Node]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the shipped specs, which is the current folder."""
    folder = tmp_path_factory.mktemp("reference")
    copies.copytree(ROOT / "specs", folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def messages() -> dict[str, str]:
    """The messages about the wrong example of each lesson, by code."""
    return {code: "\n\n".join(map(str, said(lesson(code).wrong, with_refusals=True))) for code in CODES}


KINDS = ("mla", "gqa", "compressed", "deltanet")  # of attention with heads


# ---------------------------------------------------------------- the pages


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ["keys", "units", "errors", "commands"])
def test_page_is_current(name: str, bless: bool) -> None:
    pages = {"keys": keys_page, "units": units_page, "commands": commands_page}
    text = (pages[name]() if name in pages else errors_page(messages())).rstrip("\n") + "\n"
    page = DOCS / "reference" / f"{name}.md"
    if bless:
        page.write_text(text, encoding="utf-8")
    assert text == page.read_text("utf-8"), f"{name}.md is not current: `make docs`"


def test_picture_of_the_first_page_is_current(bless: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The README says which command draws docs/pictures/dualpipe.svg."""
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    command = re.search(r"the output of `dsc (schedule [^`]*--format svg)`", readme)
    assert command and "](docs/pictures/dualpipe.svg)" in readme
    assert main(shlex.split(command[1])) == 0
    drawn, picture = capsys.readouterr().out, DOCS / "pictures" / "dualpipe.svg"
    if bless:
        picture.write_text(drawn, encoding="utf-8")
    assert drawn == picture.read_text("utf-8"), "dualpipe.svg is not current: `make docs`"


def test_every_command_is_in_the_table() -> None:
    """Each with its usage, with which the docstring of a command begins."""
    page = commands_page()
    rows = re.findall(r"^\| \[(\w+)\]\(#\1\) \| `dsc (\w+)", page, re.MULTILINE)
    assert rows == [(name, name) for name in COMMANDS]
    assert argparse.SUPPRESS not in page, "what commands tell each other is no option of a user"
    assert "\n\n```sh\ndsc calibrate -o rates.json  " in page, "lines of a terminal are as they are"
    assert "\n\nExit codes: 0 done · 2 the spec, the trace or the command line is wrong · others: " in page


# ---------------------------------------------------------------- the schema


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_and_field_is_described(cls: type[Node]) -> None:
    assert cls.__doc__ and cls.__doc__ != BaseModel.__doc__
    for name, info in cls.model_fields.items():
        assert info.description, f"{cls.__name__}.{name}"
        assert not info.description.endswith(".")


def test_every_choice_is_explained() -> None:
    for cls in CLASSES:
        for name, kind in fields_of(cls).items():
            literals = [
                part for type_ in kind.types for part in (type_, *get_args(type_)) if get_origin(part) is Literal
            ]
            if not literals or kind.form or cls is schema.RatePhase:
                continue
            (marks,) = [mark for mark in cls.model_fields[name].metadata if isinstance(mark, Choices)]
            assert tuple(marks.meanings) == get_args(literals[0]), f"{cls.__name__}.{name}"


def test_derived_defaults_are_documented() -> None:
    marked = {
        (cls, name)
        for cls in CLASSES
        for name, info in cls.model_fields.items()
        if any(isinstance(mark, DerivedDefault) for mark in info.metadata)
    }
    derived = {(cls, name) for cls, fields in DEFAULTS.items() for name in fields}
    of_sources = {(schema.Data, name) for name in ("source", "tokenizer", "end_id")}
    of_sources |= {*((schema.DataSource, name) for name in ("fim", "filters")), (schema.Prompts, "answer")}
    assert marked == derived | {(schema.Device, name) for name in PEAK_FIELDS} | of_sources


def test_every_key_of_every_block_is_documented() -> None:
    """The blocks of the reference against those that the resolver accepts."""
    keys_by_class: dict[type[Node], set[str]] = {}

    def visit(cls: type[Node]) -> None:
        keys_by_class[cls] = set(keys_of(cls)) - ({"first", "last"} if cls is schema.LayerRange else set())
        for kind in fields_of(cls).values():
            for inner in (part for type_ in kind.types for part in (type_, *get_args(type_))):
                if isinstance(inner, type) and issubclass(inner, Node) and inner not in keys_by_class:
                    visit(inner)

    visit(Spec)
    written_otherwise = {schema.Batch, schema.RatePhase, schema.Phase, schema.Tile, schema.TrainTokenizer}
    # the keys of the other attention, of other nodes, of the other feed-forward part, and of sources
    repeated = ("cluster.more.node", "model.layers.ffn.moe.clamp", "data.sources.filters")
    repeated += tuple(
        f"model.attention.{path}" for path in ("gqa.rope", "compressed.rope", "compressed.compress.csa.indexer")
    )
    documented = sorted(
        sorted(key.name for key in block.keys) for block in blocks() if not block.path.startswith(repeated)
    )
    assert documented == sorted(sorted(names) for cls, names in keys_by_class.items() if cls not in written_otherwise)


# ---------------------------------------------------------------- examples


def spec_with(path: str, given: dict[str, str]) -> str:
    """A spec with these statements, by key, in the block at `path`; other required keys are as in their examples."""
    blocks_by_path = {block.path: block for block in blocks()}
    while True:
        block = blocks_by_path[path or "run"]
        run = "\n".join(given.values())
        if block.path == "run":
            return f'import "tiny.dsc"\nrun mine extends tiny {{\n{run}\n}}\n'
        without = {*given, "tokens" if "steps" in given else "steps"}
        beside = [key.examples[0] for key in block.keys if not key.default and key.name not in without]
        head = block.head.replace("NAME", "mine").replace("FIRST..LAST", "0..2")
        text = "\n".join([f"{head} {{", *given.values(), *beside, block.closing])
        if path in ("model", "cluster", "precision"):
            return f'import "tiny.dsc"\n{text}\nrun mine extends tiny {{ {path} = mine }}\n'
        outer = path.rpartition(".")[0]
        while outer and outer not in blocks_by_path:
            outer = outer.rpartition(".")[0]
        given, path = {path.removeprefix(outer).lstrip(".").split(".")[0]: text}, outer


def mistakes(spec: str) -> list[str]:
    """The messages about a spec, except on rules across keys and on names that tiny.dsc does not define."""
    Path(FILE).write_text(spec, encoding="utf-8")
    return [str(item) for item in check(FILE) if item.code < "E07" and item.code != "E0401"]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.path)
def test_examples_of_keys_are_right(block: BlockKeys) -> None:
    """The first examples of all keys together; each further example in place of the first one."""
    for key in block.keys:
        assert key.examples and all(text.split()[0] == key.name for text in key.examples), key.path
    first = {key.name: key.examples[0] for key in block.keys}
    instead = {"steps": "tokens", "sources": "source"}  # keys with the same meaning
    variants = [{name: text for name, text in first.items() if name not in instead}]
    for key in block.keys:
        compatible = {name: text for name, text in first.items() if name not in (*instead, instead.get(key.name))}
        start = 0 if key.name in instead else 1
        variants += [compatible | {key.name: text} for text in key.examples[start:]]
    for statements in variants:
        spec = spec_with(block.path, statements)
        assert not mistakes(spec), spec


@pytest.mark.usefixtures("place")
def test_an_example_that_is_wrong_is_found() -> None:
    assert mistakes(spec_with("model.attention.mla", {"heads": "heads = 128GB"}))
    assert not mistakes(spec_with("model.attention.mla", {"heads": "heads = 128"}))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.path)
def test_samples_of_blocks_are_read(block: BlockKeys) -> None:
    """The sample of a block is valid and has every key of the block, except keys that exclude another."""
    text = sample(block)
    spec = text if block.path in ("run", "model", "cluster", "precision") else f"run mine {{\n{text}\n}}"
    Path(FILE).write_text(spec, encoding="utf-8")
    assert not [item for item in check(FILE) if item.code in ("E0105", "E0107", "E0108")]
    assert all(f"\n  {key.name} " in text for key in block.keys if key.name != "steps")


AROUND = {  # the first word of an example → the text around it
    "import": "{}\nrun mine extends tiny {{ }}",
    "let": "{}\nrun mine extends tiny {{ }}",
    "run": "{}",
    "weight": "model mine extends tiny {{ mtp {{ {} }} }}",
    "tokenizer": "run mine extends tiny {{ data {{ {} }} }}",
    "source": "run mine extends tiny {{ data {{ {} }} }}",
    "optimizer": "run mine extends tiny {{ train {{ {} }} }}",
    "parallel": "run mine extends tiny {{ {} }}",
    "phase": "run mine extends tiny {{ train {{ steps = 4 }}, {} }}",
}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.text)
def test_examples_of_words_are_right(word: LanguageWord) -> None:
    assert word.text.partition("(")[0] in word.example
    around = AROUND.get(word.example.split()[0])
    if around is None:  # a phase of the learning rate; one without an end is the last
        last = "constant" if re.search("until|over|steps", word.example) else ""
        phases = f"constant at 1e-3 over 1T tokens\n{{}}\n{last}"
        around = f"run mine extends tiny {{{{ train {{{{ tokens = 100T, rate {{{{\n{phases}\n}}}} }}}} }}}}"
    spec = 'import "tiny.dsc"\n' + around.format(word.example) + "\n"
    Path(FILE).write_text(spec, encoding="utf-8")
    errors = [item for item in check(FILE) if item.code < "E08"]
    assert not errors, spec + "\n".join(map(str, errors))


@pytest.mark.usefixtures("place")
def test_keys_of_a_growing_batch() -> None:
    """`batch { … }` takes these three and no others."""
    for without in (*BATCH, None):
        statements = ", ".join(word.example for word in BATCH if word is not without)
        spec = f'import "tiny.dsc"\nrun mine extends tiny {{ train {{ batch {{ {statements} }} }} }}\n'
        Path(FILE).write_text(spec, "utf-8")
        errors = [item.message for item in check(FILE) if item.code < "E08"]
        assert errors == ([f"`batch` has no `{without.text}`"] if without else [])


# ---------------------------------------------------------------- rules and keys


def test_every_code_of_a_rule_is_documented_at_some_key() -> None:
    documented = {code for key in keys().values() for code in key.codes}
    rule_codes = {code for rule in (*(rule for _, rule in RULES), *REFUSALS) for code in codes_of(rule)}
    assert documented == rule_codes | {"E0703", "E0704", "E0708", "E1005"}
    assert {code for code in CODES if code >= "E07"} == documented


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("code", [code for code in CODES if code >= "E07"])
def test_the_underlined_key_lists_the_code(code: str) -> None:
    (mistake,) = said(lesson(code).wrong, with_refusals=True)
    assert mistake.span
    before = mistake.span.source.line(mistake.span.line)[: mistake.span.column - 1]
    words = {*re.findall(r"(\w+)\s*(?:=\s*(?:\[[^]]*)?|\s)$", before), mistake.span.text.split()[0]}
    words |= {"rate"} if words & {"warmup", "constant", "cosine", "linear"} else set()
    assert words & {key.name for key in keys().values() if code in key.codes}, (words, str(mistake))


def test_a_rule_for_one_kind_is_not_listed_at_another() -> None:
    listed = {key.name for key in keys().values() if "E0802" in key.codes}
    assert listed == {"expert", "expert_tensor", "data", "tensor", "context"}
    assert "E0908" not in keys()["model.attention.mla.heads"].codes
    assert "E0908" in keys()["model.attention.gqa.heads"].codes


def test_every_code_has_a_group() -> None:
    assert not set(CODES) & set(RETIRED)
    assert all(sum(code.startswith(group) for group in GROUPS) == 1 for code in CODES)


# ---------------------------------------------------------------- search


def test_every_topic_is_explained() -> None:
    for name in sorted(names_of_topics()):
        topics = find(name)
        assert topics, name
        for topic in topics:
            text = text_of(topic)
            assert text.startswith(f"{topic.name}: ") and "None" not in text
            assert all(find(related) for related in topic.see), topic.see


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("e0802", ["E0802"]),
        ("E1002", ["E1002"]),
        ("cluster.more.more", ["cluster.more"]),
        ("cluster.more.more.node.devices", ["cluster.more.node.devices"]),
        ("parallel.expert", ["parallel.expert"]),
        ("run.parallel.expert", ["parallel.expert"]),
        ("expert", ["parallel.expert"]),
        ("model.attention.heads", [f"model.attention.{kind}.heads" for kind in KINDS]),
        ("attention.mla.kv_rank", ["model.attention.mla.kv_rank"]),
        ("model.layers.1.ffn.experts", ["model.layers.ffn.moe.experts"]),
        ("bias_rate", ["model.layers.ffn.moe.balance.bias_rate"]),
        ("train", ["train", "train(entries)"]),
        ("every", ["train.checkpoint.every", "train.validate.every"]),
        ("GiB", ["GiB"]),
        ("GB/min", ["GB/min"]),
        ("until", ["until"]),
        ("dualpipe", ["dualpipe"]),
        ("from", ["from", "train.batch.from"]),
        ("`zero`", ["parallel.zero"]),
    ],
)
def test_finds(asked: str, names: list[str]) -> None:
    assert [topic.name for topic in find(asked)] == names


@pytest.mark.parametrize(
    "asked", ["", " ", ".", "E9999", "80GB", "..", "train.train", "parallel.", "model.zero", "\x1b[31m"]
)
def test_finds_nothing(asked: str) -> None:
    assert find(asked) == ()


@given(st.text(max_size=40) | st.lists(st.sampled_from(sorted(names_of_topics())), max_size=3).map(".".join))
def test_any_word_is_found_or_not(asked: str) -> None:
    topics = find(asked)
    assert all(text_of(topic) for topic in topics)
    assert topics or isinstance(suggestions(asked), tuple)


def test_suggests() -> None:
    assert suggestions("pipelin")[0] == "pipeline"
    assert suggestions("parallel.exprt")[0] == "parallel.expert"
    assert suggestions("gib")[0] == "GiB"
    assert suggestions("E0899") and not suggestions("qqqqqq")


def test_a_key_tells_type_bounds_default_and_rules() -> None:
    text = text_of(find("parallel.data")[0])
    for part in (
        "1 to 1,048,576",
        "auto: devices of the cluster",
        "E0802  expert divides data·tensor·context",
        "-s parallel.data=auto",
    ):
        assert part in text
    assert "or none" in text_of(find("query_rank")[0])
    assert "80GB" in text_of(find("memory")[0])


@pytest.mark.usefixtures("place")
def test_overrides_that_are_shown_are_taken() -> None:
    within = "within { number = 1, phases = 1, first_step = 0, first_token = 0, longest = 4096 }"
    blocks = f'train {{ validate {{ every = 9 }}, initial = "v3", {within} }}, adapter lora {{ rank = 1, on = [out] }}'
    Path(FILE).write_text(f'import "deepseek-v3.dsc"\nrun mine extends pretrain {{ {blocks} }}\n', "utf-8")
    overrides = {
        key: dict(topic.facts).get("override", ("",))[0] for key in keys() for topic in find(key) if topic.name == key
    }
    assert len([override for override in overrides.values() if override]) > 40
    mixed = 'import "deepseek-v3.dsc"\nimport "clusters/mixed.dsc"\nrun m extends pretrain { cluster = h100_a100 }\n'
    Path("mixed.dsc").write_text(mixed, "utf-8")
    web = 'model = s, data { sources { web { files = "web/*.txt", weight = 1 } }, tokenizer = train(4096) }'
    blend = f"run mine extends tiny {{ {web} }}\nmodel s extends tiny {{ hyper_connections {{ streams = 2 }} }}\n"
    Path("blend.dsc").write_text(f'import "tiny.dsc"\n{blend}', "utf-8")
    copies.copytree(ROOT / "tests/ui/lib", ".", dirs_exist_ok=True)
    spec_names = {".more": "mixed", ".sources": "blend", ".hyper_": "blend", ".muon": "kimi-k2", ".grpo": "rewards"}
    spec_names |= {".compressed.": "laptop-v4", ".deltanet.": "laptop-hybrid", ".mla.index": "deepseek-v3.2"}
    for key, override in overrides.items():
        without_spec = {"gqa", "custom", *OPTIMIZERS.keys() - {"adamw", "muon"}}  # no shipped spec has these
        if override and not without_spec & {*key.split(".")} and "scaling." not in key:
            option, value = shlex.split(override)
            file = next((f"{name}.dsc" for mark, name in spec_names.items() if mark in key), FILE)
            errors = [
                str(item) for item in check(file, overrides=[value]) if item.code < "E07" and item.code != "E0401"
            ]
            assert option == "-s" and not errors, override


def test_units_are_exact() -> None:
    units: dict[str, Any] = {unit.text: unit for name in FAMILIES for unit in family(name)}
    assert units["GiB"].exact_value == "2^30 = 1,073,741,824 bytes"
    assert units["Gb/s"].exact_value == "125,000,000 bytes/s"
    assert units["ms"].exact_value == "1/1,000 seconds"
    assert units["s"].exact_value.split()[0] == "1", "no fraction"
    assert units["B"].exact_value == "1,000,000,000"


def test_plain_paths_equal_those_of_the_command_line() -> None:
    assert without_kinds("model.attention.mla.head_dim.rope") == "model.attention.head_dim.rope"
    assert without_kinds("model.layers.ffn.moe.experts") == "model.layers.ffn.experts"


@pytest.mark.parametrize("word", ["e4m3", "e2m1", "e5m6"])
def test_a_dtype_of_few_bits_is_shown_in_a_role_that_may_have_it(word: str) -> None:
    topics = [topic for topic in find(word) if topic.kind == "choice" and "precision.scale" not in text_of(topic)]
    assert topics
    for topic in topics:
        assert "parameter" not in text_of(topic) and "moments" not in text_of(topic)
