"""Which tokens of a conversation have a loss in edge cases, for which the masks of `transformers` and TRL are wrong.

Spans that are empty, or begin or end without a token or within a character; templates that write a marked text
later; templates that render a prompt differently before its completion; the token before texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from runtime.data import tokenizer
from runtime.data.chat import EncodedRow, RowEncoder
from runtime.data.files import DataError
from tests.runtime.data.chats import END, START, said, train_tokenizer

BARE = """\
{%- for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""


def words() -> Tokenizer:
    """A tokenizer of words, without tokens for the spaces between them."""
    bpe = Tokenizer(models.WordLevel({"</s>": 0, "?": 1}, unk_token="?"))
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return bpe


def trimmed() -> Tokenizer:
    """A byte-level tokenizer whose offsets exclude the space before a word, as Llama 3's."""
    bpe = train_tokenizer()
    bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    return bpe


def texts_with_loss(bpe: Tokenizer, template: str | None, row: dict[str, Any]) -> tuple[str, list[str], EncodedRow]:
    """The text of a row's tokens, each run of it that has a loss, and the encoded row."""
    settings = {
        "template": template,
        "path": "x",
        "tokens": {"eos_token": "</s>" if bpe.token_to_id("</s>") == 0 else END},
    }
    (encoded,) = RowEncoder(bpe, settings).encode([json.dumps(row)])
    ids = [i if i >= 0 else ~i for i in encoded.ids]
    runs = [list(run) for loss, run in groupby(range(len(ids)), lambda index: encoded.ids[index] >= 0) if loss]
    return tokenizer.decode(bpe, ids), [tokenizer.decode(bpe, [ids[index] for index in run]) for run in runs], encoded


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [  # user and assistant by turns, the assistant first
        (["A", "\nhello world the user"], 1),
        (["", "hello", "", "\nworld", "\nanswer it"], 2),
        (["", "hello", "yes ", "\nmore from the user\n", "no"], 2),
        (["", "hello", " yes", "\nmore from the user\n", " no"], 2),
        (["", "hello ", "  ", "more ", " "], 0),
    ],
)
def test_spans_may_be_empty_or_begin_and_end_without_a_token(turns: list[str], wanted: int) -> None:
    messages = [said("user" if number % 2 else "assistant", text) for number, text in enumerate(turns)]
    (encoded,) = RowEncoder(words(), {"template": BARE, "path": "x", "tokens": {}}).encode(
        [json.dumps({"messages": messages})]
    )
    assert sum(i >= 0 for i in encoded.ids) == wanted
    assert len(encoded.ids) == len("".join(turns).split())


@pytest.mark.parametrize("make", [train_tokenizer, trimmed])
def test_spaces_and_cut_characters_at_the_ends_of_a_span_have_a_loss(make: Callable[[], Tokenizer]) -> None:
    turns = ["yes", f"{END}x{END}", " ", f"{END}y{END}", " the 🗼", f"{END}z"]
    messages = [said("user" if number % 2 else "assistant", text) for number, text in enumerate(turns)]
    text, trained, _ = texts_with_loss(make(), BARE, {"messages": messages})
    assert text == "".join(turns) and trained == turns[::2]


@pytest.mark.parametrize(
    "template",
    [
        "{% macro say(m) %}A: {% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) if m.role == 'assistant' else 'U: ' ~ m.content }}\n{% endfor %}",
        "{% for m in messages %}{% set text %}U: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endset %}{{ text }}\n{% endfor %}",
        "{% filter trim %}{% for m in messages %}U: {% if m.role == 'assistant' %}{% generation %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endgeneration %}{% else %}x{% endif %}\n{% endfor %}"
        "{% endfilter %}",
    ],
    ids=["macro", "set", "filter"],
)
def test_marks_are_found_where_a_template_writes_them_later(template: str) -> None:
    messages = [said("user", "a"), said("assistant", "the one"), said("user", "b"), said("assistant", "two\ufdd0")]
    assert texts_with_loss(train_tokenizer(), template, {"messages": messages})[1] == ["the one", "two\ufdd0"]


def test_a_template_that_changes_marked_text_is_refused() -> None:
    template = "{% set x %}{% generation %} {{ messages[0].content }} {% endgeneration %}{% endset %}{{ x | trim }}"
    with pytest.raises(DataError, match="changes the text between its `generation` tags"):
        texts_with_loss(train_tokenizer(), template, {"messages": [said("assistant", "x")]})


# As DeepSeek-R1's and Qwen3's: the prompt ends with the beginning of a thought; earlier thoughts are omitted.
THINKS = """\
{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}
{%- if m.role == 'assistant' and loop.index < last.user %}{{ m.content.split('</think>')[-1] }}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
HI = said("user", "hi")


@pytest.mark.parametrize(
    ("prompt", "completion", "wanted", "aligned"),
    [
        ([HI], ["<think>\nwhy</think>the answer"], "why</think>the answer<|im_end|>", True),
        ([HI], ["the answer"], "the answer<|im_end|>", False),
        ([HI], ["<b>the answer"], "<b>the answer<|im_end|>", False),
        ([HI], ["<think>reason</think>the answer"], "<think>reason</think>the answer<|im_end|>", False),
        ([HI, said("assistant", "<think>x</think>yes"), HI], ["the answer"], "the answer<|im_end|>", False),
        ([HI, said("assistant", "<think>x</think>yes")], [[{"type": "text", "text": "z"}]], None, False),
        ([HI, said("assistant", "<think>a long thought</think>yes")], ["the answer"], "the answer<|im_end|>", False),
    ],
)
def test_the_loss_begins_at_the_answer_where_the_template_writes_the_prompt_otherwise_in_front_of_it(
    prompt: list[Any], completion: list[Any], wanted: str | None, aligned: bool
) -> None:
    role = "assistant" if prompt[-1]["role"] == "user" else "user"
    row = {"prompt": prompt, "completion": [said(role, content) for content in completion]}
    text, trained, encoded = texts_with_loss(train_tokenizer(), THINKS, row)
    assert encoded.aligned == aligned and len(trained) == 1 and text.endswith(trained[0])
    assert wanted is None or trained == [wanted]


@pytest.mark.parametrize("prompt", ["hello", f"{START}hello"])
def test_a_text_has_the_start_token_of_the_tokenizer_once(prompt: str) -> None:
    text, trained, encoded = texts_with_loss(train_tokenizer(), None, {"prompt": prompt, "completion": " there"})
    assert (text, trained) == (f"{START}hello there{END}", [f" there{END}"]) and encoded.aligned


def test_rows_without_the_start_token_of_the_tokenizer_are_noticed() -> None:
    row = {"messages": [HI, said("assistant", "x")]}
    assert not texts_with_loss(train_tokenizer(), BARE, row)[2].started
    assert texts_with_loss(
        train_tokenizer(), "{{ bos_token }}" + BARE, row | {"chat_template_kwargs": {"bos_token": START}}
    )[2].started
    assert texts_with_loss(words(), BARE, row)[2].started


def test_a_row_without_a_token_is_a_row_without_loss() -> None:
    empty = {"messages": [said("user", ""), said("assistant", "")]}
    (encoded,) = RowEncoder(words(), {"template": BARE, "path": "x", "tokens": {}}).encode([json.dumps(empty)])
    assert encoded.ids == [~0], "the end token: a document is not empty"
    row = {"prompt": [said("user", " ")], "completion": [said("assistant", "")]}
    assert texts_with_loss(train_tokenizer(), "", row)[1] == []


def test_keyword_arguments_of_a_row_cannot_shadow_parameters() -> None:
    row = {"messages": [HI, said("assistant", "x")], "chat_template_kwargs": {"messages": [], "self": 3, "prompt": 1}}
    assert texts_with_loss(train_tokenizer(), BARE, row)[1] == ["x"]
