"""`dsc generate MODEL [PROMPT]`: text that a trained model writes.

dsc generate runs/quickstart 'def main('
dsc generate runs/quickstart 'import' --temperature 0.8 --top-p 0.95 --seed 7
echo 'class Tree:' | dsc generate runs/quickstart -
dsc generate runs/assistant --chat 'Who wrote Faust?'

The text goes to standard output, what is said about it to standard error. The model is computed in this process, with
a cache of what attention has seen; where it has multi-token prediction, that drafts the token after the next one.

Exit codes: 0 done · 2 the run, the checkpoint or the command line is wrong
"""

# torch is imported when a model is to be computed, and not before.

from __future__ import annotations

import argparse
import json
import sys
from time import perf_counter
from typing import TYPE_CHECKING

from compiler.cli.commands.common import progress, refused, say, wrong
from compiler.cli.commands.eval import add_model_arguments
from dsl.messages.diagnostics import SpecError

if TYPE_CHECKING:
    from compiler.tools.inference.sources import ModelSource
    from compiler.tools.inference.writing import Written

JSON_VERSION = 1
STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model_arguments(parser)
    parser.add_argument(
        "prompt", nargs="?", default="", metavar="PROMPT", help="how the text begins; - reads it from standard input"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is what a user says, or a conversation in JSON; it goes through the model's chat template",
    )
    parser.add_argument("--tokens", metavar="N", type=int, default=128, help="most tokens to write; default: 128")
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.0,
        help="0, the default, takes the likeliest token; 1 draws as the model says",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="draw from the likeliest tokens that have this probability together",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of what is drawn; default: 0")
    parser.add_argument("--no-drafts", action="store_true", help="one token at a time, without multi-token prediction")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text or json (docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Write text; 0, or 2 where something that was given cannot be used."""
    from compiler.tools.inference.sources import InferenceError

    if fault := _fault(args):
        return wrong(fault, how=args.format)
    try:
        return _run(args)
    except SpecError as error:
        return refused(error.diagnostics, args.format)
    except InferenceError as error:
        return wrong(str(error), error.hint, args.format)


def _fault(args: argparse.Namespace) -> str:
    """What is wrong with numbers of the command line, or ""."""
    if args.tokens < 1:
        return "--tokens is at least 1"
    if not 0 <= args.temperature <= 100:
        return "--temperature is from 0 to 100"
    if not 0 < args.top_p <= 1:
        return "--top-p is above 0, and at most 1"
    if not 0 <= args.seed < 2**63:
        return "--seed is a whole number from 0 on"
    return ""


def _run(args: argparse.Namespace) -> int:
    from compiler.cli.commands.model_source import opened

    with opened(args.source, args.spec) as source:
        return _written(args, source)


def _written(args: argparse.Namespace, source: ModelSource) -> int:
    from compiler.tools.inference.conversations import conversation_of
    from compiler.tools.inference.generation import Sampler
    from compiler.tools.inference.loaded import divide_work
    from compiler.tools.inference.sources import InferenceError
    from compiler.tools.inference.writing import open_writer

    if source.spec.model.customs:
        message = "text is written token by token, and modules of this model were traced for whole sequences"
        raise InferenceError(message, "`dsc eval` computes its loss")
    prompt = _prompt(args.prompt)
    conversation = conversation_of(prompt) if args.chat else None
    writer = open_writer(
        source,
        args.dtype or "",
        average=args.average,
        tokenizer=args.tokenizer,
        drafts=not args.no_drafts,
        progress=progress("generate"),
    )
    divide_work(writer.model)
    ids = writer.prompt(prompt) if conversation is None else writer.reply_prompt(conversation)
    sampler = Sampler(args.temperature, args.top_p, args.seed)
    begin = perf_counter()
    if args.format == "json":
        written = writer.write(ids, args.tokens, sampler)
        print(json.dumps(document(prompt, written, perf_counter() - begin), indent=2, ensure_ascii=False))
        return 0
    print(prompt if conversation is None else "", end="", flush=True)
    written = writer.write(ids, args.tokens, sampler, lambda text: print(text, end="", flush=True))
    print(flush=True)
    seconds = perf_counter() - begin
    say(said(written, seconds, writer.model.sequence))
    if not written.tokens and conversation is None and writer.conversations.template is not None:
        say("the model has a chat template: `--chat` puts the prompt into it")
    return 0


def _prompt(argument: str) -> str:
    """The prompt that an argument is, or says where to read."""
    from compiler.tools.inference.sources import InferenceError

    try:
        text = sys.stdin.read() if argument == STDIN else argument
        text.encode()
    except UnicodeError:
        raise InferenceError("the prompt is not UTF-8") from None
    return text


def document(prompt: str, written: Written, seconds: float) -> dict[str, object]:
    """The document that docs/json.md describes."""
    return {
        "version": JSON_VERSION,
        "prompt": prompt,
        "text": written.text,
        "prompt_tokens": len(written.prompt),
        "tokens": list(written.tokens),
        "ended": bool(written.stop),
        "drafted": written.drafts.drafted,
        "taken": written.drafts.taken,
        "seconds": seconds,
    }


def said(written: Written, seconds: float, sequence: int) -> str:
    """What is said about a text."""
    count, drafts = len(written.tokens), written.drafts
    lines = [f"{count:,} tokens in {seconds:.2f} s: {count / seconds:.0f} a second"]
    if not count:
        lines[0] = f"no text: the first token that the model wrote is {written.stop}, which ends a text"
    if drafts.drafted:
        lines[0] += f"; {drafts.taken:,} of {drafts.drafted:,} drafts taken ({drafts.taken / drafts.drafted:.0%})"
    if len(written.prompt) + count > sequence:
        lines.append(f"longer than the {sequence:,} tokens of the sequences that the model was trained on")
    return "\n".join(lines)
