"""Specs of several files and blocks: what may be defined where, what wins, and that nothing written is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsl.canonical import canonical
from dsl.load import load
from dsl.messages.diagnostics import SpecError
from dsl.schema import BUILT_IN
from runtime.data import corpus
from tests.dsl.test_language import BASE, read

BLOCK, LET = "model base { hidden = 64 }", "let count = 1"


def said(tmp_path: Path, text: str, **files: str) -> list[tuple[str, str, str]]:
    """(code, place, message) of each error."""
    with pytest.raises(SpecError) as caught:
        read(tmp_path, text, **files)
    return [(item.code, item.span.text if item.span else "", item.message) for item in caught.value.diagnostics]


@pytest.mark.parametrize(("one", "name"), [(BLOCK, "model `base`"), (LET, "let `count`")])
def test_a_name_defined_by_two_imports_is_ambiguous(one: str, name: str, tmp_path: Path) -> None:
    run = 'import "left.dsc"\nimport "right.dsc"\nrun a extends base { train { seed = 3 } }\n'
    left, right = f'import "base.dsc"\n{one}', f'import "base.dsc"\n{one}\n'
    with pytest.raises(SpecError) as caught:
        read(tmp_path, run, left=left, right=right)
    (mistake,) = caught.value.diagnostics
    assert (mistake.code, mistake.message) == (
        "E0202", f"two imports define {name}, and neither definition is built on the other"
    )  # fmt: skip
    places = [note.span.source.name.rpartition("/")[2] for note in mistake.notes if note.span is not None]
    assert places == ["left.dsc", "right.dsc"]
    built_on = f'import "left.dsc"\n{one}'
    assert read(tmp_path, run, left=left, right=built_on).train.seed == 3
    imports = 'import "left.dsc"\nimport "right.dsc"\n'
    if one == LET:  # the file's own definition wins; a block would still be changed key by key
        assert read(tmp_path, run + "let count = 4\n", left=left, right=right).train.seed == 3
        assert read(tmp_path, 'import "both.dsc"\n' + run, left=left, right=right, both=imports + LET).train.seed == 3
    else:
        assert said(tmp_path, f"{run}{BLOCK}", left=left, right=right)[0][0] == "E0202"


def test_a_name_defined_twice_in_one_file_is_an_error(tmp_path: Path) -> None:
    mistakes = said(
        tmp_path, "run a extends base { train { seed = 2 } }\nmodel b extends base { }\nrun a { }\nmodel b { }"
    )
    assert [(code, place) for code, place, _ in mistakes] == [("E0202", "run a"), ("E0202", "model b")]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("parallel extends foo { }", "extends foo"),
        ("train extends nope { seed = 2 }", "extends nope"),
        ("train { optimizer adamw extends other { } }", "extends other"),
        ("train { rate extends x { constant at 1e-4 } }", "extends x"),
        ("train { rate foo { constant at 1e-4 } }", "foo"),
        ("train { batch foo { from = 16, to = 32, over = 50K tokens } }", "foo"),
        ("train { optimizer adamw foo { } }", "foo"),
    ],
)
def test_words_before_a_brace_are_not_ignored(text: str, place: str, tmp_path: Path) -> None:
    assert [(code, actual_place) for code, actual_place, _ in said(tmp_path, f"run a extends base {{ {text} }}")] == [
        ("E0205", place)
    ]
    with pytest.raises(SpecError) as caught:
        read(tmp_path, "run a extends base { }", text)
    assert [(item.code, item.span and item.span.text) for item in caught.value.diagnostics] == [("E0205", place)]


def test_a_built_in_precision_is_extended_and_not_changed(tmp_path: Path) -> None:
    text = "precision mine extends fp32 { master = fp64 }\nrun a extends base { precision = mine }"
    precision = read(tmp_path, text).precision
    assert precision == BUILT_IN["fp32"].model_copy(update={"name": "mine", "master": "fp64"})
    extended = "precision more extends mine { linear = bf16 }\nrun b extends base { precision = more }"
    assert (read(tmp_path, f"{text}\n{extended}", run="b").precision.master, precision.linear) == ("fp64", "fp32")
    for name in ("fp64", "fp32", "bf16"):
        wrong = said(tmp_path, f"precision {name} {{ linear = bf16 }}\nrun a extends base {{ }}")
        assert [code for code, _, _ in wrong] == ["E0202"]


def test_a_built_in_recipe_may_be_redefined(tmp_path: Path) -> None:
    """A block that extends a built-in FP8 precision has its tiles; a spec may define a precision of the same name."""
    text = "precision mine extends fp8_block { moments = fp32 }\nrun a extends base { precision = mine }"
    precision = read(tmp_path, text).precision
    assert precision == BUILT_IN["fp8_block"].model_copy(update={"name": "mine", "moments": "fp32"})
    text = "precision fp8_block { linear = fp32 }\nrun b extends base { precision = fp8_block }"
    assert read(tmp_path, text, run="b").precision.linear == "fp32"


def test_the_shipped_block_of_fp8_is_the_built_in_one() -> None:
    path = Path(__file__).parents[2] / "specs" / "deepseek-v3.dsc"
    assert load(path, overrides=["precision=fp8_block"]).precision == BUILT_IN["fp8_block"]
    expected = BUILT_IN["fp8_block"].model_copy(update={"name": "published", "attention_output": "e5m6"})
    assert load(path).precision == expected


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("let a = nope", "E0401", "nope"),
        ("let a = 1/0", "E0305", "0"),
        ("let a = 3GX", "E0301", "3GX"),
        ("let a = b\nlet b = a", "E0402", "b"),
        ("let a = 2GB + 3", "E0305", "2GB + 3"),
        ("run a extends base { let z = 1/0 }", "E0305", "0"),
        ("model m extends base { attention mla { let z = nowhere } }\nrun b extends base { model = m }",
         "E0401", "nowhere"),
        ("model m extends base { hidden = 16GX }\nmodel n extends m { hidden = 16 }", "E0301", "16GX"),
        ("model m extends base { layers 0..1x { ffn dense { inner = 8 } } }", "E0301", "1x"),
    ],
)  # fmt: skip
def test_unused_lets_and_blocks_are_checked(text: str, code: str, place: str, tmp_path: Path) -> None:
    run = "" if "run" in text else "run a extends base { }\n"
    assert [(actual_code, actual_place) for actual_code, actual_place, _ in said(tmp_path, run + text)] == [
        (code, place)
    ]


def test_lets_need_not_be_numbers(tmp_path: Path) -> None:
    values = ['"x"', "[rmsnorm, swiglu]", "1x128", "1f1b", "dualpipe", "sigmoid", "true", "none", "469B tokens", "b"]
    lets = "".join(f"let a{index} = {value}\n" for index, value in enumerate(values)) + 'let b = c\nlet c = "x"\n'
    text = lets + "run a extends base { let own = model.hidden * 2, train { sequence = 2 * own } }"
    assert read(tmp_path, text).train.sequence == 4 * read(tmp_path, "run a extends base { }").model.hidden


def test_a_path_starts_at_the_file_it_is_written_in(tmp_path: Path) -> None:
    lib = 'import "../base.dsc"\nlet book = "notes/b.txt"\nrun x extends base { data { source = "notes/*.txt", %s } }'
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "notes").mkdir()
    (tmp_path / "lib" / "notes" / "a.txt").write_text("words", encoding="utf-8")
    (tmp_path / "lib" / "x.dsc").write_text(lib % 'tokenizer = "../tok.json"', encoding="utf-8")
    spec = read(tmp_path, 'import "lib/x.dsc"\nrun y extends x { }')
    assert (spec.data.source, spec.data.tokenizer) == ("lib/notes/*.txt", "tok.json")
    assert [file.path.name for file in corpus.find(spec.data.source, tmp_path).files] == ["a.txt"]
    assert load(tmp_path / "lib" / "x.dsc").data.source == "notes/*.txt"
    overriding = (
        'import "lib/x.dsc"\nrun y extends x { data { source = book } }\nrun z extends x { data { source = "n.txt" } }'
    )
    assert read(tmp_path, overriding, run="y").data.source == "lib/notes/b.txt"
    assert read(tmp_path, overriding, run="z").data.source == "n.txt"
    assert read(tmp_path, overriding, "data.source=notes/c.txt", run="y").data.source == "notes/c.txt"
    text = 'import "../base.dsc"\nrun s extends base { schedule { file = "a/../b.schedule" } }'
    (tmp_path / "lib" / "s.dsc").write_text(text, encoding="utf-8")
    schedule = read(tmp_path, 'import "lib/s.dsc"\nrun t extends s { schedule { name = none } }').schedule
    assert schedule.file == "lib/b.schedule"
    resolved = tmp_path / "resolved.dsc"
    resolved.write_text(canonical(spec), encoding="utf-8")
    assert load(resolved) == spec


def test_numbers_after_a_mistake_are_checked(tmp_path: Path) -> None:
    text = "run c extends base { train { rate { constant at 1, constant until 3GX, constant at 4GY } } }"
    assert [(code, place) for code, place, _ in said(tmp_path, text)] == [
        ("E0704", "constant"), ("E0301", "3GX"), ("E0301", "4GY")
    ]  # fmt: skip


def test_a_path_through_a_link_is_resolved_by_the_system(tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
    (tmp_path / "far" / "x.dsc").write_text('import "base.dsc"\nrun x extends base { data { source = "a.txt" } }')
    (tmp_path / "far" / "base.dsc").write_bytes(BASE.read_bytes())
    (tmp_path / "far" / "a.txt").write_text("words", encoding="utf-8")
    (tmp_path / "spec.dsc").write_text('import "link/../x.dsc"\nrun y extends x { }', encoding="utf-8")
    spec = load(tmp_path / "spec.dsc")
    assert [file.path.name for file in corpus.find(spec.data.source, tmp_path).files] == ["a.txt"]
