"""`dsc generate MODEL [PROMPT]`: write text with a trained model.

dsc generate runs/quickstart 'def main('
dsc generate runs/quickstart 'import' --temperature 0.8 --top-p 0.95 --seed 7
echo 'class Tree:' | dsc generate runs/quickstart -
dsc generate runs/assistant --chat 'Who wrote Faust?'

The text goes to stdout, notes about it to stderr. The model runs in this process with a KV cache. A model with
multi-token prediction uses it for speculative decoding: it drafts the token after the next one.

Exit codes: 0 done · 2 the run, the checkpoint or the command line is wrong
"""

# torch is imported only when the model runs.

from __future__ import annotations

import argparse
import json
import sys
from time import perf_counter
from typing import TYPE_CHECKING

from compiler.cli.commands.common import progress, report_error, report_mistakes, say
from compiler.cli.commands.eval import add_model_arguments
from dsl.messages.diagnostics import SpecError

if TYPE_CHECKING:
    from compiler.tools.inference.sources import ModelSource
    from compiler.tools.inference.writing import GeneratedText

JSON_VERSION = 1
STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model_arguments(parser)
    parser.add_argument(
        "prompt", nargs="?", default="", metavar="PROMPT", help="start of the text; - reads it from stdin"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user message, or a conversation in JSON; apply the model's chat template",
    )
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=128, help="maximum number of tokens to write; default: 128"
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.0,
        help="sampling temperature; 0 takes the likeliest token, 1 samples the model's distribution; default: 0",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens with this total probability; default: 1",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="random seed of the sampling; default: 0")
    parser.add_argument("--no-drafts", action="store_true", help="no speculative decoding: one token at a time")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text or json (docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Write text. Returns the exit code."""
    from compiler.tools.inference.sources import InferenceError

    if error_message := _argument_error(args):
        return report_error(error_message, output_format=args.format)
    try:
        return _run(args)
    except SpecError as error:
        return report_mistakes(error.diagnostics, args.format)
    except InferenceError as error:
        return report_error(str(error), error.hint, args.format)


def _argument_error(args: argparse.Namespace) -> str:
    """An error message if a number is out of range, or ""."""
    if args.tokens < 1:
        return "--tokens must be at least 1"
    if not 0 <= args.temperature <= 100:
        return "--temperature must be from 0 to 100"
    if not 0 < args.top_p <= 1:
        return "--top-p must be above 0 and at most 1"
    if not 0 <= args.seed < 2**63:
        return "--seed must be at least 0 and below 2**63"
    return ""


def _run(args: argparse.Namespace) -> int:
    from compiler.cli.commands.model_source import open_model_source

    with open_model_source(args.source, args.spec) as source:
        return _generate(args, source)


def _generate(args: argparse.Namespace, source: ModelSource) -> int:
    from compiler.tools.inference.conversations import conversation_of
    from compiler.tools.inference.generation import Sampler
    from compiler.tools.inference.loaded import limit_threads
    from compiler.tools.inference.sources import InferenceError
    from compiler.tools.inference.writing import open_writer

    if source.spec.model.customs:
        message = (
            "this model cannot generate: its custom modules were traced for whole sequences, and generation computes "
            "one token at a time"
        )
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
    limit_threads(writer.model)
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
    say(summary_text(written, seconds, writer.model.sequence))
    if not written.tokens and conversation is None and writer.conversations.template is not None:
        say("the model has a chat template: `--chat` applies it to the prompt")
    return 0


def _prompt(argument: str) -> str:
    """The prompt: the argument, or stdin for `-`."""
    from compiler.tools.inference.sources import InferenceError

    try:
        text = sys.stdin.read() if argument == STDIN else argument
        text.encode()
    except UnicodeError:
        raise InferenceError("the prompt is not UTF-8") from None
    return text


def document(prompt: str, written: GeneratedText, seconds: float) -> dict[str, object]:
    """Return a generated text as the JSON document of docs/json.md."""
    return {
        "version": JSON_VERSION,
        "prompt": prompt,
        "text": written.text,
        "prompt_tokens": len(written.prompt),
        "tokens": list(written.tokens),
        "ended": bool(written.stop),
        "drafted": written.drafts.drafted,
        "taken": written.drafts.accepted,
        "seconds": seconds,
    }


def summary_text(written: GeneratedText, seconds: float, sequence: int) -> str:
    """Return the speed, the share of accepted drafts, and a warning if the text is longer than a training sequence."""
    count, drafts = len(written.tokens), written.drafts
    lines = [f"{count:,} tokens in {seconds:.2f} s: {count / seconds:.0f} per second"]
    if not count:
        lines[0] = f"no text: the first token is {written.stop}, which ends a text"
    if drafts.drafted:
        lines[0] += (
            f"; {drafts.accepted:,} of {drafts.drafted:,} drafts accepted ({drafts.accepted / drafts.drafted:.0%})"
        )
    if len(written.prompt) + count > sequence:
        lines.append(f"the text is longer than the sequences that the model was trained on ({sequence:,} tokens)")
    return "\n".join(lines)
