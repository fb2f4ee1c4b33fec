"""Writes the files beside it: a tokenizer, worked sums to begin with, and prompts. `python specs/r1-tiny/sums.py`

Two numbers of two digits are added digit by digit. Of the worked sums a third slips by one in the digits of ones: who
learns from them alone is wrong as often, and the reward of a right answer is what says so.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

FOLDER = Path(__file__).parent
SPECIAL = ("<end>", "<user>", "<assistant>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}<user>{{ message.content }}{% else %}"
    "<assistant>{% generation %}{{ message.content }}<end>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SLIPS = 1 / 3
WORKED, PROMPTS = 4000, 2000


def tokenizer() -> str:
    """A token for each digit, sign and tag."""
    tokens = (*SPECIAL, *TAGS, *"0123456789+=,")
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([*SPECIAL])
    made.add_tokens([*TAGS])
    return made.to_str(pretty=True)


def worked(a: int, b: int, slip: int) -> str:
    """How a sum is worked out: ones, tens, the answer."""
    ones = a % 10 + b % 10 + slip
    tens = a // 10 + b // 10 + ones // 10
    steps = f"{a % 10}+{b % 10}={ones},{a // 10}+{b // 10}+{ones // 10}={tens}"
    return f"<think>{steps}</think><answer>{10 * tens + ones % 10}</answer>"


def main() -> None:
    chance = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chance.shuffle(pairs)
    rows = []
    for a, b in pairs[:WORKED]:
        slip = chance.choice((1, -1)) if chance.random() < SLIPS and a % 10 + b % 10 > 0 else 0
        said = [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": worked(a, b, slip)}]
        rows.append({"messages": said})
    prompts = [
        {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": str(a + b)}
        for a, b in pairs[WORKED : WORKED + PROMPTS]
    ]
    files = {
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": json.dumps({"eos_token": SPECIAL[0], "chat_template": TEMPLATE}, indent=2) + "\n",
        "worked.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "prompts.jsonl": "".join(json.dumps(row) + "\n" for row in prompts),
    }
    for name, text in files.items():
        (FOLDER / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
