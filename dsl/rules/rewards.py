"""Rules on reinforcement learning: prompts, groups, rewards, and features that generation does not support yet."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from math import gcd, lcm
from re import _parser
from typing import Any

from dsl.closed_forms import ramp
from dsl.rules.finding import Finding, nearest_divisor, nearest_multiple
from dsl.rules.precision import ALL_ROLES, ROLES
from dsl.schema import AnyAttention, Custom, Gqa, Mla, Moe, Reward, Spec

# Key of a reward → (checks that read it, example; empty if the key is optional).
KEYS_OF_CHECKS = {
    "pattern": (("regex",), 'pattern = "^<think>"'),
    "file": (("python",), 'file = "reward.py"'),
    "function": (("python",), ""),
    "seconds": (("python", "regex"), ""),
}

NOTE = (("the completions", "train.grpo"),)


def completions_have_prompts(spec: Spec) -> Iterator[Finding]:
    """`train.grpo` needs `data.prompts`, and only `train.grpo` reads them."""
    if spec.train.grpo is not None and spec.data.prompts is None:
        message = "`grpo` needs prompts, but `data` has no `prompts` block"
        yield Finding("E0960", message, "train.grpo", "add `prompts { }` to `data`", (("the data", "data"),))
    if spec.train.grpo is None and spec.data.prompts is not None:
        message = "`prompts` is for `grpo`, but `train` has no `grpo` block"
        hint = (
            "add `grpo { group = 8, prompt = 256, completion = 256, rewards { correct { check = exact } } }` to `train`"
        )
        yield Finding("E0960", message, "data.prompts", hint)


def steps_have_whole_groups(spec: Spec) -> Iterator[Finding]:
    """A step has all completions of each of its prompts, and further steps on the same completions have the same
    size."""
    grpo, batch, micro_batch = spec.train.grpo, spec.train.batch, spec.train.micro_batch
    if grpo is None or batch.end < batch.start:
        return
    if grpo.iterations > 1 and batch.end > batch.start:
        message = (
            f"iterations = {grpo.iterations}: steps on the same completions have the same size, but the batch grows"
        )
        note = (("the iterations", "train.grpo.iterations"),)
        yield Finding("E0962", message, "train.batch", f"write `batch = {batch.end}`", note)
    quantum = ramp.quantum_of(spec.parallel, micro_batch)
    sizes = [*range(batch.start, batch.end, quantum)[: ramp.MAX_SIZES], batch.end]
    size = next((candidate for candidate in sizes if candidate % grpo.group), None)
    if size is None:
        return
    message = f"a step of {size:,} sequences does not have whole groups of {grpo.group} completions"
    group = nearest_divisor(gcd(*sizes), grpo.group)
    multiple = nearest_multiple(size, lcm(grpo.group, spec.parallel.data * micro_batch))
    edits = [f"write `group = {group}`"] if group > 1 else []
    edits += [f"write `batch = {multiple}`"] if batch.start == batch.end else []
    hint = (
        ", or ".join((edits[0], *(edit.removeprefix("write ") for edit in edits[1:]))) if edits else "grow it by more"
    )
    yield Finding("E0962", message, "train.grpo.group", hint, (("the batch", "train.batch"),))


def completions_fit(spec: Spec) -> Iterator[Finding]:
    """The longest prompt and the longest completion fit into a sequence."""
    grpo, sequence = spec.train.grpo, spec.train.sequence
    if grpo is None or grpo.prompt + grpo.completion <= sequence:
        return
    total = grpo.prompt + grpo.completion
    message = (
        f"a prompt of {grpo.prompt:,} and a completion of {grpo.completion:,} tokens have {total:,}, "
        f"but a sequence has {sequence:,}"
    )
    hint = f"write `sequence = {total}`"
    if grpo.prompt < sequence:
        hint = f"write `completion = {sequence - grpo.prompt}`, or `sequence = {total}`"
    yield Finding("E0963", message, "train.grpo.completion", hint, (("the sequence", "train.sequence"),))


def rewards_have_what_they_check(spec: Spec) -> Iterator[Finding]:
    """A reward has the keys that its check reads, and no others; at least one weight is not 0."""
    if spec.train.grpo is None:
        return
    rewards = spec.train.grpo.rewards
    for reward in rewards:
        yield from _key_findings(reward, f"train.grpo.rewards.{reward.name}")
    if not any(reward.weight for reward in rewards):
        message, hint = "all rewards have weight 0, so nothing is learnt", "write `weight = 1` in one of them"
        yield Finding("E0964", message, f"train.grpo.rewards.{rewards[0].name}.weight", hint)


def _key_findings(reward: Reward, path: str) -> Iterator[Finding]:
    for key, (checks, example) in KEYS_OF_CHECKS.items():
        value = getattr(reward, key)
        if example and value is None and reward.check in checks:
            message = f"`check = {reward.check}` needs a {key}, but `{reward.name}` has none"
            yield Finding("E0964", message, f"{path}.check", f"add `{example}`")
        elif value != Reward.model_fields[key].default and reward.check not in checks:
            message = f"`check = {reward.check}` does not use {key}"
            hint = f"remove `{key}`, or write `check = {checks[0]}`"
            yield Finding("E0964", message, f"{path}.{key}", hint, (("the check", f"{path}.check"),))
    if reward.check == "regex" and reward.pattern is not None and (reason := _compile_error(reward.pattern)):
        message = f"`pattern` is not a Python regular expression: {reason}"
        yield Finding(
            "E0964",
            message,
            f"{path}.pattern",
            r"correct it; to match a special character itself, write a backslash before it, as in `\(`",
        )


def _compile_error(pattern: str) -> str:
    """The reason why Python cannot compile a regular expression; "" if it can.

    The expression is only parsed: `(?i)[…]` with many ranges takes minutes to compile, and a run compiles it in a
    process with limits.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about future versions of Python
            tree = _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        return str(error)
    except RecursionError:
        return "it is nested too deep"
    return (
        "look-behind requires fixed-width pattern"
        if any(map(_is_variable_look_behind, _expression_parts(tree)))
        else ""
    )


def _expression_parts(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a parsed expression: (opcode, arguments)."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, _parser.SubPattern):
            yield from node.data
            pending += node.data
        elif isinstance(node, tuple | list):
            pending += node


def _is_variable_look_behind(part: tuple[Any, Any]) -> bool:
    """Whether a part is a look-behind of variable width, which `re.compile` refuses."""
    if part[0] not in (_parser.ASSERT, _parser.ASSERT_NOT):
        return False
    direction, pattern = part[1]
    shortest, longest = pattern.getwidth()
    return bool(direction < 0 and shortest != longest)


# ---------------------------------------------------------------- features that generation does not support yet


def models_generate(spec: Spec) -> Iterator[Finding]:
    """Generation caches the keys and values of all earlier tokens; all other parts of the model see one token."""
    model = spec.model
    if spec.train.grpo is None:
        return
    if model.mtp is not None:
        yield Finding(
            "E1008", "mtp: reinforcement learning trains only the next token", "model.mtp", "write `mtp = none`", NOTE
        )
    if model.hyper_connections is not None:
        message = "hyper_connections: the bits of a row would depend on the other rows"
        yield Finding("E1008", message, "model.hyper_connections", "write `hyper_connections = none`", NOTE)
    for path, attention in model.attentions:
        yield from _attention_findings(path, attention)
    for index, span in enumerate(model.layers):
        if isinstance(span.ffn, Custom):
            message = "ffn custom: custom modules are traced for whole sequences"
            yield Finding(
                "E1008", message, f"model.layers.{index}.ffn", "write `ffn dense { … }` or `ffn moe { … }`", NOTE
            )


def _attention_findings(path: str, attention: AnyAttention) -> Iterator[Finding]:
    if not isinstance(attention, Mla | Gqa):
        message = f"attention {attention.kind}: completions are generated only with mla or gqa"
        yield Finding("E1008", message, path, "write `attention gqa { … }` or `attention mla { … }`", NOTE)
        return
    reason = "completions are generated with attention to all earlier tokens"
    if isinstance(attention, Mla):
        if attention.indexer is not None:
            yield Finding("E1008", f"indexer: {reason}", f"{path}.indexer", "write `indexer = none`", NOTE)
        return
    if attention.window is not None:
        yield Finding(
            "E1008", f"window = {attention.window:,}: {reason}", f"{path}.window", "write `window = none`", NOTE
        )
    if attention.sinks:
        yield Finding("E1008", f"sinks: {reason}, without sinks", f"{path}.sinks", "write `sinks = false`", NOTE)
    if attention.softcap is not None:
        message = f"softcap = {attention.softcap:g}: completions are generated without a cap of the logits"
        yield Finding("E1008", message, f"{path}.softcap", "write `softcap = none`", NOTE)


def ranks_generate(spec: Spec) -> Iterator[Finding]:
    """A rank that generates has whole heads and sequences, and sends each token row directly to its expert."""
    if spec.train.grpo is None:
        return
    for key in ("tensor", "context"):
        degree = getattr(spec.parallel, key)
        if degree > 1:
            message = f"{key} = {degree}: generation needs whole heads and whole sequences on each rank"
            yield Finding("E1008", message, f"parallel.{key}", f"write `{key} = 1`", NOTE)
    if spec.routes_by_nodes and any(isinstance(span.ffn, Moe) for span in spec.model.layers):
        message = "expert groups fill several nodes: generation sends token rows to their experts only directly"
        yield Finding("E1008", message, "parallel.route", "write `route = flat` in `parallel`", NOTE)


def devices_generate(spec: Spec) -> Iterator[Finding]:
    """Generation needs the C++ ops of CPUs, in which the bits of a row do not depend on the other rows."""
    for index, device in enumerate(spec.cluster.devices if spec.train.grpo is not None else ()):
        if device.bf16 is not None:
            message = f"device {device.name}: completions are generated only on CPUs"
            yield Finding(
                "E1008",
                message,
                f"cluster.{'more.' * index}node.device",
                "train on a cluster of `device cpu { … }`",
                NOTE,
            )


def options_generate(spec: Spec) -> Iterator[Finding]:
    """Options of a run that do not work together with `train.grpo` yet."""
    train = spec.train
    if train.grpo is None:
        return
    if train.validate is not None:
        message = "validate: grpo does not support a held-out loss"
        yield Finding("E1008", message, "train.validate", "write `validate = none`", NOTE)
    if train.ema is not None:
        yield Finding("E1008", "ema: grpo does not support a moving average", "train.ema", "write `ema = none`", NOTE)
    if train.optimizer.qk_clip is not None:
        message = f"qk_clip = {train.optimizer.qk_clip:g}: grpo does not support clipping of logits"
        yield Finding("E1008", message, "train.optimizer.qk_clip", "write `qk_clip = none`", NOTE)
    if "logits" in spec.recompute:
        remaining = ", ".join(name for name in spec.recompute if name != "logits")
        message = "recompute names logits, but the loss of completions reads all of them"
        yield Finding("E1008", message, "recompute", f"write `recompute = [{remaining}]`", NOTE)
    roles = [role for role in ALL_ROLES if getattr(spec.precision, role) in (*ROLES, "fp64")]
    if roles:
        dtype = getattr(spec.precision, roles[0])
        message = f"{roles[0]} = {dtype}: completions are generated only in fp32 or bf16"
        hint = f"write `precision = {'fp32' if dtype == 'fp64' else 'bf16'}`"
        yield Finding("E1008", message, "precision", hint, NOTE)
