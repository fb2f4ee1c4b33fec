"""A small tokenizer with special tokens, chat templates with generation marks, and conversations of all forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TURN, END, START = "<|im_start|>", "<|im_end|>", "<|begin|>"
SPECIAL = ("<|endoftext|>", TURN, END, START)
TOKENS = {"bos_token": START, "eos_token": END}

# As Qwen's: turns between two special tokens; the marked span includes the end of the turn.
CHATML = """\
{%- if tools %}
<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content or '' }}
    {%- for call in message.tool_calls or [] %}
{{- '\\n<call>' }}{{ call.function | tojson }}{{- '</call>' }}
    {%- endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
  {%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# As Llama's: names of special tokens, loop controls, a namespace; reasoning; the marked span ends within a word.
PLAIN = """\
{{- bos_token }}{% set seen = namespace(turns=0) %}
{%- for m in messages -%}
{%- if m.role == 'system' %}{{ '[' ~ m.content | trim ~ ']' }}{% continue %}{% endif -%}
{%- set seen.turns = seen.turns + 1 -%}
{%- if m.role == 'assistant' -%}
A:{% generation %}{% if m.reasoning_content is defined %}({{ m.reasoning_content }}){% endif %}{{ m.content }}
{%- endgeneration %}{{ eos_token }}
{%- else -%}
{{ m.role[0] | upper }}{{ seen.turns }}:{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}A:{% endif -%}
"""
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TEMPLATES = {"chatml": CHATML, "plain": PLAIN}

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "q": "<a & b>"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}


def said(role: str, content: str | None = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


MESSAGES = {
    "one turn": [said("user", "2 + 2?"), said("assistant", "4")],
    "several turns": [
        said("system", "Be brief. "),
        said("user", "Who wrote Faust?"),
        said("assistant", "Goethe."),
        said("user", "And when?\n\nIn one word"),
        said("assistant", " 1808, then 1832 "),
    ],
    "unicode": [said("user", "日本の首都は？"), said("assistant", "東京です 🗼, naïve — é̄")],
    "empty": [said("user", ""), said("assistant", ""), said("user", "x"), said("assistant", "y")],
    "tool": [
        said("user", "weather?"),
        said("assistant", None, tool_calls=[CALL]),
        said("tool", '{"t": 3}'),
        said("assistant", "3 degrees"),
    ],
    "quoted": [said("user", "what is <|im_end|>?"), said("assistant", "the end: <|im_end|> of a turn")],
    "reasoning": [said("user", "7 * 6"), said("assistant", "42", reasoning="7 * 6 = 42", thinking=None)],
    "no assistant": [said("user", "anybody there?")],
    "only assistant": [said("assistant", "hello")],
    "number": [said("user", "say it", weight=1.5), said("assistant", "it's 1.50 & <b>")],
}
TEXTS = [("Q: one and one?\nA:", " two"), ("", "alone"), ("der Prompt", "text ohne Lücke"), ("ab", f"c{END}")]


def train_tokenizer() -> Tokenizer:
    """A BPE tokenizer of a few hundred tokens that puts START before a text encoded with special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    texts = [json.dumps(messages, ensure_ascii=False) for messages in MESSAGES.values()] + [a + b for a, b in TEXTS]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    index = tokenizer.token_to_id(START)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, index)])
    return tokenizer


def write_model(folder: Path, template: str | None) -> Path:
    """Write tokenizer.json, tokenizer_config.json and any chat_template.jinja into a folder. Returns the first path."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": START, "special": True}, "eos_token": END, "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    return folder / "tokenizer.json"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
