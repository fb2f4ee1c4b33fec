"""Conversations as tokens: the tokens of `transformers`, and a loss on each token that holds a marked character.

Ids equal those of `transformers`. `expected` computes the mask from the text that `transformers` renders and the spans
that its template marks. The mask of `transformers` itself, which TRL uses, is also compared, except where a span ends
with a character outside ASCII: of the tokens that encode such a character, the mask of `transformers` lacks the last.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from runtime.contract import ChatRecipe
from runtime.data import chat, tokenizer
from runtime.data.chat import EncodedRow, RowEncoder, read_settings
from runtime.data.chat_template import Template
from runtime.data.files import DataError
from runtime.data.given import GivenTokenizer
from runtime.data.readers import SourceFile
from tests.runtime.data.chats import (
    END,
    MESSAGES,
    TEMPLATES,
    TEXTS,
    TOKENS,
    TOOL,
    UNMARKED,
    said,
    write_model,
    write_rows,
)

SETTINGS = ChatRecipe(None, "cut")


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def encoders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Our encoder and the tokenizer of `transformers` for one template."""
    path = write_model(tmp_path_factory.mktemp(request.param), TEMPLATES[request.param])
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=TEMPLATES[request.param], **TOKENS)
    return encoder_of(path), theirs


def encoder_of(path: Path, settings: ChatRecipe = SETTINGS) -> RowEncoder:
    bpe = tokenizer.parse(tokenizer.read(path))
    return RowEncoder(bpe, read_settings(settings, path, path.parent).to_json())


def encode(encoder: RowEncoder, row: dict[str, Any]) -> tuple[list[int], list[int], bool]:
    """Ids, mask, and whether the prompt is aligned."""
    (encoded,) = encoder.encode([json.dumps(row)])
    return [i if i >= 0 else ~i for i in encoded.ids], [int(i >= 0) for i in encoded.ids], encoded.aligned


def expected(
    theirs: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: Any = None
) -> tuple[list[int], list[int]]:
    """Ids and mask from the marked spans and the offsets of tokens that `transformers` returns."""
    without_none = [{name: value for name, value in message.items() if value is not None} for message in messages]
    (text,), (spans,) = render_jinja_template(
        [without_none], chat_template=theirs.chat_template, return_assistant_tokens_mask=True, tools=tools, **TOKENS
    )
    encoding = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = overlaps(encoding["offset_mapping"], spans)
    by_transformers = theirs.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    assert by_transformers["input_ids"] == encoding["input_ids"]
    if all(text[end - 1].isascii() for _, end in spans):
        assert by_transformers["assistant_masks"] == mask
    return encoding["input_ids"], mask


def overlaps(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[int]:
    return [int(any(set(range(*token)) & set(range(*span)) for span in spans)) for token in offsets]


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_masks_of_messages_equal_transformers(encoders: Any, name: str, tools: Any) -> None:
    encoder, theirs = encoders
    ids, mask, _ = encode(encoder, {"messages": MESSAGES[name], "tools": tools})
    assert (ids, mask) == expected(theirs, MESSAGES[name], tools=tools)
    assert any(mask) == any(message["role"] == "assistant" for message in MESSAGES[name])
    assert not all(mask)


def conversations() -> Iterator[list[dict[str, Any]]]:
    source = random.Random(5)
    parts = ("a", "<|im_end|>", " ", "\n", "é", "東", "🗼", "x1", "'s", "<", "  ", "\t", "{{ x }}")
    for _ in range(200):
        roles = [source.choice(("system", "user", "assistant", "assistant")) for _ in range(source.randrange(1, 7))]
        yield [said(role, "".join(source.choices(parts, k=source.randrange(0, 6)))) for role in roles]


def test_masks_of_random_messages_equal_transformers(encoders: Any) -> None:
    encoder, theirs = encoders
    num_marked = 0
    for messages in conversations():
        ids, mask, _ = encode(encoder, {"messages": messages})
        assert (ids, mask) == expected(theirs, messages)
        num_marked += any(mask)
    assert num_marked > 100


@pytest.mark.parametrize("name", sorted(MESSAGES.keys() - {"no assistant"}))
@pytest.mark.parametrize("kwargs", [{}, {"bos_token": "[b]"}], ids=["no kwargs", "kwargs"])
def test_completions_of_messages_follow_trl(encoders: Any, name: str, kwargs: dict[str, Any]) -> None:
    """TRL encodes prompt and completion together; the mask begins after the tokens of the prompt alone or, where
    these differ, at the token with the first character of the completion."""
    encoder, theirs = encoders
    prompt, completion = MESSAGES[name][:-1] or [said("user", "hi")], MESSAGES[name][-1:]
    row = {"prompt": prompt, "completion": completion, "tools": [TOOL], "chat_template_kwargs": kwargs}
    ids, mask, aligned = encode(encoder, row)
    before = theirs.apply_chat_template(prompt, add_generation_prompt=True, tools=[TOOL], return_dict=False, **kwargs)
    full_ids = theirs.apply_chat_template(prompt + completion, tools=[TOOL], return_dict=False, **kwargs)
    assert ids == full_ids and mask == [0] * len(before) + [1] * (len(full_ids) - len(before))
    assert aligned == (full_ids[: len(before)] == before)


@pytest.mark.parametrize(("prompt", "completion"), TEXTS)
def test_completions_of_texts_follow_trl(encoders: Any, prompt: str, completion: str) -> None:
    """TRL appends the end token to a completion that lacks it, and encodes texts with their special tokens."""
    encoder, theirs = encoders
    ids, mask, aligned = encode(encoder, {"prompt": prompt, "completion": completion})
    before = theirs(text=prompt)["input_ids"]
    full_ids = theirs(text=prompt + completion.removesuffix(END) + END)["input_ids"]
    assert ids == full_ids and mask == [0] * len(before) + [1] * (len(full_ids) - len(before))
    assert aligned == (full_ids[: len(before)] == before) and ids[-1] == theirs.eos_token_id


def test_prompts_that_tokenize_differently_alone_are_noticed(encoders: Any) -> None:
    encoder, _ = encoders
    assert not encode(encoder, {"prompt": "an assist", "completion": "ant"})[2]
    assert encode(encoder, {"prompt": "der Prompt ", "completion": "\nx"})[2]


def test_tools_may_be_json_in_a_text(encoders: Any) -> None:
    encoder, _ = encoders
    row = {"messages": MESSAGES["tool"]}
    assert encode(encoder, row | {"tools": json.dumps([TOOL])}) == encode(encoder, row | {"tools": [TOOL]})


# ---------------------------------------------------------------- where the template comes from


def test_the_template_is_the_named_one_or_that_beside_the_tokenizer(tmp_path: Path) -> None:
    path = write_model(tmp_path, None)
    assert read_settings(SETTINGS, path, tmp_path).template is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "of the config", "eos_token": None}), "utf-8")
    settings = read_settings(SETTINGS, path, tmp_path)
    assert (settings.template, settings.path, settings.tokens) == ("of the config", str(config), {})
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "of several"}]
    config.write_text(json.dumps({"chat_template": several}), "utf-8")
    assert read_settings(SETTINGS, path, tmp_path).template == "of several"
    (tmp_path / "chat_template.jinja").write_text("beside", "utf-8")
    assert read_settings(SETTINGS, path, tmp_path).template == "beside"
    (tmp_path / "mine.jinja").write_text("named", "utf-8")
    digests = {read_settings(ChatRecipe(name, "cut"), path, tmp_path).digest for name in (None, "mine.jinja")}
    assert len(digests) == 2
    with pytest.raises(DataError, match=r"none\.jinja: cannot be read: No such file"):
        read_settings(ChatRecipe("none.jinja", "cut"), path, tmp_path)
    config.write_text("[1]", "utf-8")
    with pytest.raises(DataError, match="expected an object"):
        read_settings(SETTINGS, path, tmp_path)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], 'expected an object with "messages"'),
        ({"conversations": []}, 'expected "messages", or "prompt"'),
        ({"text": "x"}, "is a document"),
        ({"messages": []}, '"messages" is not a list of messages'),
        ({"messages": [{"content": "x"}]}, 'a message of "messages" is no object with a string under "role"'),
        ({"prompt": "x", "completion": [said("assistant")]}, "both texts, or both lists"),
        ({"prompt": [], "completion": []}, '"prompt" is not a list of messages'),
        ({"prompt": [said("user")], "completion": 3}, '"completion" is not a list'),
        ({"prompt": "x", "completion": 3}, "both texts, or both lists"),
        ({"messages": [said("user")], "tools": "{"}, '"tools" is a text that is not JSON'),
        ({"messages": [said("user")], "tools": [3]}, '"tools" is not a list of objects'),
        ({"messages": [said("user")], "chat_template_kwargs": 3}, '"chat_template_kwargs" is not an object'),
    ],
)
def test_an_invalid_row_is_refused_with_its_place(tmp_path: Path, row: Any, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES["unicode"]}) + "\n\n" + json.dumps(row) + "\n", "utf-8")
    with pytest.raises(DataError) as caught:
        list(chat.rows(SourceFile("rows.jsonl", path)))
    assert str(caught.value).startswith(f"{path}:3: ") and message in str(caught.value)


def refusal_by_process(folder: Path, template: str | None, row: dict[str, Any]) -> str:
    """The encoding process's error about a row, which is the second of a file."""
    path = write_model(folder / "model", template)
    file = SourceFile("rows.jsonl", folder / "rows.jsonl")
    first = {"prompt": "a", "completion": "b"}
    write_rows(file.path, [first, row])
    settings = read_settings(SETTINGS, path, folder)
    with (
        pytest.raises(DataError) as caught,
        GivenTokenizer(path, tokenizer.read(path), settings) as process,
    ):
        process.encode([(file, text) for text in chat.rows(file)])
    return str(caught.value)


MESSAGES_ROW = {"messages": MESSAGES["one turn"]}


def test_a_template_without_marks_is_refused_only_for_messages(tmp_path: Path) -> None:
    refusal = refusal_by_process(tmp_path, UNMARKED, MESSAGES_ROW)
    assert refusal.startswith(f"{tmp_path / 'rows.jsonl'}:2: {tmp_path / 'model' / 'chat_template.jinja'}: ")
    assert "does not mark what the assistant says" in refusal and "{% generation %}" in refusal
    prompt = {"prompt": MESSAGES["one turn"][:1], "completion": MESSAGES["one turn"][1:]}
    assert sum(encode(encoder_of(tmp_path / "model" / "tokenizer.json"), prompt)[1]) > 0


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "there is no chat template: write `template`"),
        ("{{ raise_exception('roles must alternate') }}", "the chat template fails: roles must alternate"),
        ("{{ messages[3].role }}", "the chat template fails:"),
        ("{{ messages.append(1) }}", "the chat template fails:"),  # arguments are not modified
        ("{{ ''.__class__.__mro__ }}", "the chat template fails:"),
        ("{% set x = namespace(_a=1) %}", "no name that begins with _"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "writes more than"),
        ("{% for i in range(100001) %}{% endfor %}", "the chat template fails: Range too big"),
        ("{{ '\\ud800' }}", "half of a surrogate pair"),
    ],
)
def test_faulty_templates_are_refused_with_the_row(tmp_path: Path, template: str | None, message: str) -> None:
    text = template if template is None else template + "{% generation %}{% endgeneration %}"
    refusal = refusal_by_process(tmp_path, text, MESSAGES_ROW)
    assert refusal.startswith(f"{tmp_path / 'rows.jsonl'}:2: ") and message in refusal


def test_an_invalid_template_is_refused_with_its_line(tmp_path: Path) -> None:
    refusal = refusal_by_process(tmp_path, "{{ messages }}\n{% for %}", MESSAGES_ROW)
    assert refusal.startswith(f"{tmp_path / 'model' / 'chat_template.jinja'}: not a chat template, line 2: ")


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("{%- generation -%}x{%+ endgeneration %}", True),
        ("{# generation #}{{ '{% generation %}' }}", False),
        ("{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}x{% endcall %}", False),
    ],
)
def test_only_generation_tags_are_marks_in_any_spelling(text: str, marks: bool) -> None:
    assert Template(text, {}, None).marks_assistant == marks


def test_the_process_gives_the_results_of_the_encoder(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", TEMPLATES["chatml"])
    file = SourceFile("rows.jsonl", tmp_path / "rows.jsonl")
    rows = [{"messages": messages} for messages in MESSAGES.values()]
    rows += [{"prompt": "an assist", "completion": "ant"}, {"prompt": "ab", "completion": "c"}]
    write_rows(file.path, rows)
    encoder = encoder_of(path)
    wanted: list[EncodedRow] = [encoder.encode([json.dumps(row)])[0] for row in rows]
    with GivenTokenizer(path, tokenizer.read(path), read_settings(SETTINGS, path, tmp_path)) as process:
        by_process = process.encode([(file, text) for text in chat.rows(file)])
        assert process.notices.unaligned == sum(not encoded.aligned for encoded in wanted) == 1
    assert all(np.array_equal(a, b.ids) for a, b in zip(by_process, wanted, strict=True))
