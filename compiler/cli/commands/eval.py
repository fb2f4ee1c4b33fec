"""`dsc eval MODEL [--tokens FILE | --text GLOB]`: measure the loss of a trained model.

dsc eval runs/quickstart                         on the validation split of the run
dsc eval runs/quickstart --text 'notes/*.md'     on other text, with the tokenizer of the run
dsc eval runs/quickstart@100 --tokens ids.npy    the checkpoint of step 100, on token ids
dsc eval Qwen3-0.6B --text 'notes/*.md'          a published model (see `dsc import hf`)

The loss is the mean cross entropy of the next token, in nats. The model runs in this process, in the dtype of the run's
activations. With --ranks spec, the compiled program computes it on as many ranks as the run was trained on.

Exit codes: 0 done · 1 a rank failed · 2 the run, the checkpoint, the tokens or the command line is wrong · 3 hung
"""

# torch is imported only when the model runs.

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.cli.commands.common import progress, report_error, report_mistakes, say
from dsl.messages.diagnostics import SpecError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from compiler.tools.inference.evaluation import EvaluatedLoss, Ids
    from compiler.tools.inference.sources import ModelSource

JSON_VERSION = 1
DTYPES = ("fp64", "fp32", "bf16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model_arguments(parser)
    inputs = parser.add_mutually_exclusive_group()
    inputs.add_argument("--tokens", metavar="FILE", type=Path, help="token ids: integers in a .npy file")
    inputs.add_argument(
        "--text", metavar="GLOB", help="text files, as in a spec's `data.source`; default: the run's validation split"
    )
    parser.add_argument(
        "--ranks",
        choices=("one", "spec"),
        default="one",
        help="spec: run on as many ranks as the run's spec; default: one",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text or json (docs/json.md)")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that name a trained model. `dsc generate` has them too."""
    parser.add_argument(
        "source",
        metavar="MODEL",
        help="a run, RUN@STEP, a checkpoint folder, a spec whose run starts from weights, or the folder of a "
        "published model (config.json and its weights)",
    )
    parser.add_argument("--spec", metavar="SPEC", help="spec of a checkpoint outside its run folder")
    parser.add_argument("--tokenizer", metavar="FILE", type=Path, help="a tokenizer.json; default: the run's")
    parser.add_argument(
        "--average", action="store_true", help="use the moving average of the weights (`ema` of the spec)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="compute dtype; default: that of the run's activations")


def run(args: argparse.Namespace) -> int:
    """Print the loss. Returns the exit code."""
    from compiler.tools.inference.sources import InferenceError

    try:
        return _run(args)
    except SpecError as error:
        return report_mistakes(error.diagnostics, args.format)
    except InferenceError as error:
        return report_error(str(error), error.hint, args.format)


def _run(args: argparse.Namespace) -> int:
    from compiler.cli.commands.model_source import open_model_source

    with open_model_source(args.source, args.spec) as source:
        return _evaluate(args, source)


def _evaluate(args: argparse.Namespace, source: ModelSource) -> int:
    from compiler.tools.inference import token_streams
    from compiler.tools.inference.evaluation import EvaluatedLoss

    show = progress("eval")
    vocab = source.spec.model.vocab
    if args.text is not None:
        path = token_streams.require_tokenizer(args.tokenizer or source.tokenizer)
        streams = token_streams.tokenize_files(args.text, path, vocab, show)
    else:
        tokenizer = _tokenizer(args.tokenizer, source)
        if args.tokens is not None:
            streams = token_streams.read_token_file(args.tokens, vocab, tokenizer)
        else:
            streams = token_streams.held_out(source.data, tokenizer, source.spec)
    if args.ranks == "spec":
        from compiler.cli.commands.eval_ranks import RanksFailedError, loss_on_ranks

        if args.dtype:
            return report_error(
                "--ranks spec always computes in the precision of the run", "leave --dtype out", args.format
            )
        try:
            loss = loss_on_ranks(source, streams.ids, args.average, show)
        except RanksFailedError as failed:
            return failed.code
    else:
        loss = _loss_on_one_rank(args, source, streams.ids, show)
    loss = EvaluatedLoss(loss.nats, loss.tokens, streams.bytes)
    print(json.dumps(document(args, source, loss), indent=2) if args.format == "json" else text(source, loss))
    return 0


def _tokenizer(named: Path | None, source: ModelSource) -> Tokenizer | None:
    """The tokenizer that gives the byte length of token ids, or None. If the source's own tokenizer cannot be used,
    warn; if the one of --tokenizer cannot, raise InferenceError."""
    from compiler.tools.inference.sources import InferenceError
    from compiler.tools.inference.token_streams import read_tokenizer

    if (path := named or source.tokenizer) is None:
        return None
    try:
        return read_tokenizer(path, source.spec.model.vocab)
    except InferenceError as error:
        if named is not None:
            raise
        say(f"warning: bits per byte are unknown: {error}")
        return None


def _loss_on_one_rank(
    args: argparse.Namespace, source: ModelSource, streams: Sequence[Ids], show: Callable[[str], None]
) -> EvaluatedLoss:
    from compiler.tools.inference.evaluation import loss_of
    from compiler.tools.inference.loaded import limit_threads, load_model

    model = load_model(source, args.dtype or "", average=args.average, progress=show)
    limit_threads(model)
    return loss_of(model, streams, show)


def document(args: argparse.Namespace, source: ModelSource, loss: EvaluatedLoss) -> dict[str, object]:
    """The document that docs/json.md describes."""
    return {
        "version": JSON_VERSION,
        "loss": loss.mean,
        "perplexity": loss.perplexity,
        "bits_per_byte": loss.bits_per_byte,
        "tokens": loss.tokens,
        "bytes": loss.bytes,
        "checkpoint": source.name,
        "step": source.checkpoint.step,
        "average": args.average,
        "dtype": args.dtype or source.spec.precision.compute,
        "sequence": source.spec.train.sequence,
        "ranks": source.spec.parallel.pipeline * source.spec.parallel.columns if args.ranks == "spec" else 1,
    }


def text(source: ModelSource, loss: EvaluatedLoss) -> str:
    """The loss as text."""
    rows = [("loss", f"{loss.mean:.4f} nats per token")]
    if loss.perplexity is not None:
        rows.append(("perplexity", f"{loss.perplexity:.4g}"))
    if loss.bits_per_byte is not None:
        rows.append(("bits per byte", f"{loss.bits_per_byte:.4f} ({loss.bytes:,} bytes)"))
    rows.append(("tokens", f"{loss.tokens:,}, in sequences of {source.spec.train.sequence:,}"))
    rows.append(("checkpoint", source.name))
    return "\n".join(f"{name:<13}  {value}" for name, value in rows)
