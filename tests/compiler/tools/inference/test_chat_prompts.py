"""Prompts of chat models: their tokens and the probabilities of answers match `transformers`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from compiler.cli.main import main
from compiler.tools.inference.conversations import Conversations, conversation_of
from compiler.tools.inference.harness import DscModel
from compiler.tools.inference.sources import InferenceError
from compiler.tools.inference.writing import TextWriter
from runtime.data import template_process, tokenizer
from tests.compiler.tools.inference.test_harness import Instance
from tests.compiler.tools.weights.published import export, import_, random_model
from tests.runtime.data.chats import END, START, TEMPLATES, TOKENS, TOOL, TURN, said, write_model

# Writes no special token, and a word that ends in a space: nothing is put before its output.
BARE = """\
{%- for m in messages %}{{ m.role }}> {{ m.content | trim }}
{% endfor %}{% if add_generation_prompt %}assistant> {% endif %}"""
ALL = TEMPLATES | {"bare": BARE}
CONVERSATIONS = {
    "one turn": [said("user", "2 + 2?")],
    "several turns": [
        said("system", "Be brief."),
        said("user", "Who?"),
        said("assistant", "Goethe."),
        said("user", "x"),
    ],
    "quoted": [said("user", f"what is {END}?")],
}


@dataclass(frozen=True)
class Both:
    """A chat model of dsc, and its export loaded by `transformers`."""

    spec: Path
    ours: DscModel
    model: PreTrainedModel
    tokens: PreTrainedTokenizerFast

    @property
    def writer(self) -> TextWriter:
        return self.ours._writer

    @torch.no_grad()
    def log_probability(self, prompt: list[int], answer: list[int]) -> float:
        logits_SV = self.model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0].double()
        rows_AV = logits_SV[len(prompt) - 1 : -1].log_softmax(-1)
        return float(rows_AV.gather(1, torch.tensor(answer)[:, None]).sum())


Build = Callable[..., Both]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    def found(template: str | None, has_start: bool = True, **config: Any) -> Both:
        folder = tmp_path_factory.mktemp("chat")
        random_model("llama", torch.float32, vocab_size=330).save_pretrained(folder / "hf")
        path = write_model(folder / "hf", template)
        if not has_start:
            path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
        beside = path.with_name("tokenizer_config.json")
        beside.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS, **config}))
        assert import_(folder / "hf", folder / "m.dsc") == 0
        assert export(folder / "m.weights", folder / "out", "--dtype", "fp32") == 0
        model = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32)
        tokens = PreTrainedTokenizerFast.from_pretrained(folder / "out")
        return Both(folder / "m.dsc", DscModel(str(folder / "m.dsc"), dtype="fp32"), model, tokens)

    return found


@pytest.fixture(scope="module", params=sorted(ALL))
def both(request: pytest.FixtureRequest, build: Build) -> Iterator[Both]:
    yield build(ALL[request.param], has_start=request.param != "chatml")


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_chat_prompts_equal_transformers(both: Both, messages: list[dict[str, Any]]) -> None:
    """Compares tokens, also through the harness class, and the probability of an answer."""
    expected = both.tokens.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert both.writer.reply_prompt({"messages": messages}) == expected
    text = both.ours.apply_chat_template(messages)
    assert text == both.tokens.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answer = both.tokens.encode(f"4{END}", add_special_tokens=False)
    (score,) = both.ours.loglikelihood([Instance((text, f"4{END}"))])
    if not text.endswith(" "):  # such a space belongs to the first word of the answer where a token holds both
        assert math.isclose(score[0], both.log_probability(expected, answer), rel_tol=1e-4)
    written = both.model.generate(
        torch.tensor([expected]), max_new_tokens=6, do_sample=False, eos_token_id=both.writer.end, pad_token_id=0
    )[0, len(expected) :].tolist()
    (ours,) = both.ours.generate_until([Instance((text, {"until": [], "max_gen_toks": 6, "do_sample": False}))])
    expected_text = both.tokens.decode([token for token in written if token != both.writer.end])
    assert ours == expected_text.rstrip("\ufffd"), "without half of a character at the end"


def test_a_final_assistant_message_is_continued(both: Both) -> None:
    messages = [*CONVERSATIONS["one turn"], said("assistant", "The answer  ")]
    expected = both.tokens.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    assert both.writer.reply_prompt({"messages": messages}) == expected
    text = both.ours.apply_chat_template(messages, add_generation_prompt=False)
    assert text == both.tokens.apply_chat_template(messages, continue_final_message=True, tokenize=False)


@pytest.mark.parametrize("has_start", [True, False])
def test_a_text_begins_with_one_start_token(build: Build, has_start: bool) -> None:
    """The start token of `transformers`, but once; without one, a special token of the text, or the separator."""
    pair = build(None, has_start, add_bos_token=not has_start)
    begin, end, turn = (pair.tokens.convert_tokens_to_ids(token) for token in (START, END, TURN))
    assert (pair.tokens("ab")["input_ids"][0] == begin) == has_start
    for text in ("ab", "", f"{TURN}user\nab", f"{START}ab"):
        ids = pair.tokens(text, add_special_tokens=not text.startswith(START))["input_ids"]
        expected = ids if ids and ids[0] in (begin, turn) else [end, *ids]
        assert pair.writer.prompt(text) == expected, text
        (nats,) = pair.ours.loglikelihood_rolling([Instance((text,))])
        assert math.isclose(nats, pair.log_probability(expected[:1], expected[1:]) if expected[1:] else 0, rel_tol=1e-4)


def test_the_prompt_of_the_command_is_a_turn_or_a_conversation(
    build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = build(TEMPLATES["chatml"])
    several = CONVERSATIONS["several turns"]
    row = {"messages": several, "tools": [TOOL]}
    for prompt, messages, tools in (
        ("2 + 2?", CONVERSATIONS["one turn"], None),
        ("[1, 2]", [said("user", "[1, 2]")], None),
        (json.dumps(several), several, None),
        (json.dumps(row), several, [TOOL]),
    ):
        expected = pair.tokens.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        assert pair.writer.reply_prompt(conversation_of(prompt)) == expected
        capsys.readouterr()
        words = ["generate", str(pair.spec), prompt, "--chat", "--tokens", "4"]
        assert main([*words, "--format", "json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["prompt"], document["prompt_tokens"]) == (prompt, len(expected))
        assert main(words) == 0
        assert capsys.readouterr().out == document["text"] + "\n", "the answer alone"


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        ('{"messages": []}', '"messages" is not a list of messages'),
        ('{"messages": "hello"}', '"messages" is not a list of messages'),
        ('[{"role": "user", "content": "a"}, {"content": "b"}]', 'a message of "messages" is no object with a string'),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [1]}', '"tools" is not a list of objects'),
        ('{"messages": [{"role": "user"}], "chat_template_kwargs": 1}', '"chat_template_kwargs" is not an object'),
    ],
)
def test_invalid_messages_are_refused(prompt: str, fault: str) -> None:
    with pytest.raises(InferenceError, match=f"^the prompt: {fault}"):
        conversation_of(prompt)


def test_the_harness_can_read_the_template_and_the_name_of_the_tokenizer(build: Build) -> None:
    with_template, without = build(TEMPLATES["chatml"]), build(None)
    assert with_template.ours.chat_template(True) == TEMPLATES["chatml"]
    assert with_template.ours.chat_template(False) == without.ours.chat_template(False) == ""
    assert with_template.ours.tokenizer_name != without.ours.tokenizer_name
    with pytest.raises(InferenceError, match="there is no chat template") as raised:
        without.ours.chat_template(True)
    assert raised.value.hint == "put chat_template.jinja beside the tokenizer.json"


def test_a_template_without_a_system_message(build: Build) -> None:
    """The harness drops a system message that the template rejects, and continues."""
    refuses = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}{{ m.content }}"
    )
    pair = build(refuses + "{% endfor %}{% if add_generation_prompt %}:{% endif %}")
    with pytest.warns(UserWarning, match="the system message is left out: .*none"):
        assert pair.ours.apply_chat_template([said("system", "a"), said("user", "b")]) == "b:"
    with pytest.raises(InferenceError, match="none"):
        pair.writer.reply_prompt({"messages": [said("system", "a")]})
    assert pair.ours.apply_chat_template([said("user", "c")]) == "c:"


def test_an_empty_text_says_why(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    pair = build(TEMPLATES["chatml"])
    first = pair.writer.tokenizer.id_to_token(json_tokens(capsys, "generate", str(pair.spec), "ab", "--tokens", "1")[0])
    config = next(pair.spec.parent.glob("*.weights/tokenizer_config.json"))
    config.write_text(json.dumps(TOKENS | {"eos_token": first}))
    capsys.readouterr()
    assert main(["generate", str(pair.spec), f"{START}ab"]) == 0
    stderr = capsys.readouterr().err
    assert f"no text: the first token is {first}, which ends a text" in stderr
    assert "the model has a chat template: `--chat` applies it to the prompt" in stderr


def json_tokens(capsys: pytest.CaptureFixture[str], *words: str) -> list[int]:
    capsys.readouterr()
    assert main([*words, "--format", "json"]) == 0
    tokens: list[int] = json.loads(capsys.readouterr().out)["tokens"]
    return tokens


def test_special_tokens_of_a_document_are_text(tmp_path: Path) -> None:
    """Special tokens quoted in a document are encoded as text; in a prompt they are tokens."""
    bpe = tokenizer.parse(tokenizer.read(write_model(tmp_path, None)))
    (quoted,) = tokenizer.encode(bpe, [END])
    tokenizer.parse_special(bpe)
    assert len(quoted) > 1 and tokenizer.encode(bpe, [END]) == [[bpe.token_to_id(END)]]


def test_a_template_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "RENDER_S", 1.0)
    path = write_model(tmp_path, "{{ 9 ** (messages|length * 190000000) }}")
    with pytest.raises(InferenceError, match=r"chat_template\.jinja: .*it takes more than 1 s to be rendered"):
        Conversations(path).text({"messages": [said("user", "a")]})
