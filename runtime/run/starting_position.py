"""Where a run starts or resumes in the data: the order of its samples, and its position in them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from runtime.build.build import Build
from runtime.checkpoint.publish import LoadedCheckpoint
from runtime.contract import EXTRA_TOKENS, RunPlan
from runtime.contract.rate import batch_at, last_step, tokens_after, tokens_to_train
from runtime.data.blend import Blend, SourceShare, seed_of
from runtime.data.files import DataError
from runtime.data.order import Order, windows_in
from runtime.data.position import Position
from runtime.data.samples import RowSamples, short_split_error


def order_of(build: Build, corpus: Path) -> Order | Blend:
    """Return the order in which this build draws the training samples of a prepared corpus. For conversations, a window
    is a row that counts as one token, so that the order does not depend on the sequence, or a sequence of packed rows.
    For prompts, a window is a completion.

    Raises DataError if no row is left to train on, or a split of a source is shorter than one sample.
    """
    if build.plan.data.prompts is not None:
        from runtime.data.prompts import open_prompts  # with tokenizers

        return open_prompts(build.plan, corpus).order
    meta, train = json.loads((corpus / "meta.json").read_text("utf-8")), build.plan.train
    if (chat := build.plan.data.chat) is not None:
        rows = RowSamples(
            corpus, "train", train.sequence, EXTRA_TOKENS, seed=train.seed, long=chat.long, pack=chat.pack
        )
        return Order(train.sequence if chat.pack else 1, rows.num_windows, train.seed)
    longest = train.within.longest if train.within else train.sequence
    needed = {"train": longest + EXTRA_TOKENS}
    needed |= {"validation": train.sequence + EXTRA_TOKENS} if train.validate else {}
    if reason := short_split_error(meta, needed):
        raise DataError(reason)
    if sources := build.plan.data.sources:
        orders = {
            source.name: _order_of_text(
                build, meta["sources"][source.name]["train"]["tokens"], seed_of(train.seed, source.name)
            )
            for source in sources
        }
        shares = (SourceShare(source.name, source.weight, orders[source.name].whole_run) for source in sources)
        within = train.within
        samples = None if within is None or within.is_last else tokens_to_train(build.plan) // train.sequence
        return Blend(tuple(shares), samples=samples, phase=within.number if within else 0)
    return _order_of_text(build, meta["splits"]["train"]["tokens"], train.seed)


def _order_of_text(build: Build, tokens: int, seed: int) -> Order:
    """Return the order of samples of one text with this number of tokens."""
    train, within = build.plan.train, build.plan.train.within
    longest = None if within is None else within.longest
    plain = Order(train.sequence, windows_in(tokens, train.sequence, longest), seed)
    if within is None:
        return plain
    end = None if within.is_last else within.first_token + tokens_to_train(build.plan)
    return replace(plain, piece=within.longest, first=within.first_token, end=end)


def start_position(order: Order | Blend) -> Position:
    """Return the position at which a new run starts."""
    if isinstance(order, Blend):
        return Position().continue_in_blend(order, partial(Position.convert_to, same_text=True))
    return Position(order=order)


# ---------------------------------------------------------------- resuming from a checkpoint


def resume_position(
    checkpoint: LoadedCheckpoint, build: Build, order: Order | Blend, *, same_text: bool
) -> tuple[Position, list[str]]:
    """Return the position at which this build resumes, and notes about changes of windows and order."""
    if isinstance(order, Blend):
        return _position_in_blend(Position.from_json(checkpoint.meta.get("position")), order, same_text=same_text)
    if (value := checkpoint.meta.get("position")) is None:  # an older version did not record it
        train = build.plan.train
        trained = tokens_after(build.plan.batches, order.sequence, checkpoint.step - train.first_step)
        tokens = train.first_token + trained
        samples = tokens // order.sequence
        note = f"this checkpoint does not say which samples it has seen: taken as {samples:,}, as if by this build"
        return Position(samples, tokens, samples, (), order), [note]
    old = Position.from_json(value)
    if not isinstance(old.order, Order):
        if isinstance(old.order, Blend):
            return old.convert_to(order, same_text=same_text), ["the samples are of one source, which begins"]
        raise ValueError("does not say in which order samples were drawn")
    if build.plan.data.prompts is not None:
        return (
            (old.convert_to(order, same_text=same_text), []) if old.order == order else _position_of_prompts(old, order)
        )
    is_chat = build.plan.data.chat is not None
    if is_chat and old.order.sequence != order.sequence:
        note = "rows are packed otherwise: the run goes on at the same share of the epoch"
        return old.convert_at_same_share(order), [note]
    same_rows = same_text and not (is_chat and old.order.windows != order.windows)  # else other rows are cut or dropped
    position = old.convert_to(order, same_text=same_rows)
    if old.order == order or not position.cuts:
        return position, []
    if is_chat:
        return position, [f"rows of epoch {position.cuts[0].epoch + 1:,} that are still ahead have another order"]
    lost = position.unavoidable_tokens()
    effect = "as few as windows of whole sequences can"
    if lost is not None:
        effect = f"{lost[0]:,} tokens are skipped and {lost[1]:,} repeated"
        effect += ", the fewest that whole windows can" if any(lost) else ""
    text = f"windows of {old.order.sequence:,} tokens are cut again into {order.sequence:,}: of the rest of epoch"
    return position, [f"{text} {position.cuts[0].epoch + 1:,} {effect}; its order changes"]


def _position_of_prompts(was: Position, order: Order) -> tuple[Position, list[str]]:
    """Return the position if prompts or their order have changed: the first completion of a prompt."""
    position = was.convert_at_same_share(order)
    note = "the prompts are others, or their order is: the run goes on at the same share of the epoch"
    return replace(position, next=position.next // order.sequence * order.sequence), [note]


def _position_in_blend(was: Position, order: Blend, *, same_text: bool) -> tuple[Position, list[str]]:
    """Return the position of a build with several sources, and notes about their weights."""
    position = was.continue_in_blend(order, partial(Position.convert_to, same_text=same_text))
    shares = was.order.shares if isinstance(was.order, Blend) else ()
    seeds = {share.name: share.order.seed for share in shares}
    notes = []
    if same_text and any(seeds.get(share.name, share.order.seed) != share.order.seed for share in order.shares):
        notes.append("sources have other orders: samples not yet used in this epoch come first")
    old_weights = {share.name: share.weight for share in shares}
    weights = {share.name: share.weight for share in order.shares}
    if old_weights == weights:
        return position, notes
    changes = ", ".join(
        f"{name} {old_weights.get(name, 0)} → {weights.get(name, 0)}" for name in {**old_weights, **weights}
    )
    return position, [*notes, f"weights of sources: {changes}; each source goes on with its next sample"]


def course_notes(step: int, position: Position, plan: RunPlan) -> list[str]:
    """Return notes on the next samples and the end of the run."""
    batches, train = plan.batches, plan.train
    trained = position.tokens - train.first_token
    size = batch_at(batches, train.sequence, trained)
    drawn = position.draw(size)
    total = tokens_to_train(plan)
    end = last_step(batches, train.sequence, step, trained, total)
    ends = "phase" if train.within and not train.within.is_last else "run"
    exact = not position.cuts and not position.skip
    progress = f"{position.samples:,} samples ({position.tokens:,} tokens) were trained on"
    following = f"{size:,} of samples {int(drawn[0]):,} to {int(drawn[-1]):,}" + ", which follow" * exact
    return [
        f"{progress}; step {step + 1:,} takes {following}",
        "rate, phases and the growth of the batch go by tokens; "
        f"the {ends} ends at {train.first_token + total:,} tokens, after step {end:,}",
    ]
