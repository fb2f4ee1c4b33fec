"""Reinforcement learning from verifiable rewards: group relative policy optimisation (GRPO).

Shao et al., DeepSeekMath, arXiv 2402.03300; Guo et al., DeepSeek-R1, arXiv 2501.12948.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Choices, FilePath, Node, QuietField, StoredUnit, Syntax

MAX_SEQUENCE = 16_777_216
MAX_GROUP = 1024


class Reward(Node):
    """A reward of a completion: a check that returns a number, mostly 0 or 1, and its weight in the sum."""

    name: Annotated[str, Syntax("label"), Field(description="name of the reward")]
    check: Annotated[
        Literal["exact", "format", "regex", "python"],
        Field(description="what is checked", examples=["check = exact"]),
        Choices(
            {
                "exact": "1 if the answer in the completion equals that of the row, numbers by value; the answer is "
                r"the last `\boxed{…}`, else the text in `<answer>…</answer>`, else the text after the last `####`, "
                "else all of it",
                "format": "1 if the completion is `<think>…</think>` and then `<answer>…</answer>`, as in DeepSeek-R1",
                "regex": "1 if `pattern` matches somewhere in the completion",
                "python": "the return value of a function in `file`",
            }
        ),
    ]
    weight: Annotated[
        float,
        Field(
            ge=-1_000_000,
            le=1_000_000,
            description="factor of this reward in the sum of the rewards",
            examples=["weight = 0.5"],
        ),
    ] = 1.0
    pattern: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=4096,
            description="for `check = regex`: a Python regular expression",
            examples=['pattern = "^<think>"'],
        ),
    ] = None
    file: Annotated[
        str | None,
        FilePath(),
        Field(
            min_length=1,
            max_length=4096,
            description="for `check = python`: a self-contained Python file, relative to the spec",
            examples=['file = "reward.py"'],
        ),
    ] = None
    function: Annotated[
        str,
        Field(
            min_length=1,
            max_length=255,
            description="name of the function in `file`",
            examples=['function = "reward"'],
        ),
        QuietField(),
    ] = "reward"
    seconds: Annotated[
        float,
        Field(
            gt=0,
            le=86_400,
            description="time limit of a function or pattern for all completions of a rank, in seconds",
            examples=["seconds = 5"],
        ),
        QuietField(),
    ] = 5.0


class Grpo(Node):
    """GRPO: the model generates completions of the prompts in `data.prompts` and is trained on them by their rewards.

    A step draws prompts, generates `group` completions of each and computes their rewards. The advantage of a
    completion is its reward minus the mean of its group.
    """

    group: Annotated[
        int,
        Field(
            ge=2,
            le=MAX_GROUP,
            description="completions per prompt; a step has batch / group prompts",
            examples=["group = 8"],
        ),
    ]
    prompt: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_SEQUENCE,
            description="tokens of the longest prompt; longer prompts are left out",
            examples=["prompt = 256"],
        ),
        StoredUnit("token", bare=True),
    ]
    completion: Annotated[
        int,
        Field(ge=1, le=MAX_SEQUENCE, description="tokens of the longest completion", examples=["completion = 256"]),
        StoredUnit("token", bare=True),
    ]
    temperature: Annotated[
        float,
        Field(
            gt=0,
            le=100,
            description="divisor of the logits, in sampling and in training",
            examples=["temperature = 1.0"],
        ),
    ] = 1.0
    iterations: Annotated[
        int,
        Field(
            ge=1,
            le=1000,
            description="optimizer steps on the same completions",
            examples=["iterations = 1"],
        ),
    ] = 1
    slots: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_SEQUENCE,
            description="completions that a data rank generates at a time, each with its KV cache; default: all of a "
            "step",
            examples=["slots = 64"],
        ),
        QuietField(),
    ] = None
    clip_low: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="the ratio of new to old token probability is clipped at 1 − clip_low",
            examples=["clip_low = 0.2"],
        ),
    ] = 0.2
    clip_high: Annotated[
        float,
        Field(
            ge=0,
            le=1000,
            description="the ratio of new to old token probability is clipped at 1 + clip_high",
            examples=["clip_high = 0.28"],
        ),
    ] = 0.2
    kl: Annotated[
        float,
        Field(
            ge=0,
            le=1000,
            description="weight of the KL divergence from the initial model of the run; 0: it is not computed",
            examples=["kl = 0.001"],
        ),
    ] = 0.0
    kl_form: Annotated[
        Literal["corrected", "k3"],
        Field(
            description="estimator of the KL divergence of a token, with d = log p_reference − log p_policy",
            examples=["kl_form = k3"],
        ),
        Choices(
            {
                "corrected": "ratio · (exp(d) − d − 1), whose gradient is that of KL(policy ‖ reference) (arXiv "
                "2512.02556)",
                "k3": "exp(d) − d − 1, as in DeepSeekMath (arXiv 2402.03300): on completions of the policy itself, its "
                "gradient is that of KL(reference ‖ policy)",
            }
        ),
        QuietField(),
    ] = "corrected"
    loss: Annotated[
        Literal["grpo", "dapo", "dr_grpo"],
        Field(description="how token losses are averaged", examples=["loss = dapo"]),
        Choices(
            {
                "grpo": "over the tokens of each completion, then over completions",
                "dapo": "over all tokens of the completions of a step (arXiv 2503.14476)",
                "dr_grpo": "their sum, divided by the number of completions times `completion`, whatever their "
                "lengths (arXiv 2503.20783)",
            }
        ),
    ] = "dapo"
    scale: Annotated[
        Literal["group", "batch", "none"],
        Field(description="divisor of the advantages", examples=["scale = group"]),
        Choices(
            {
                "group": "the standard deviation of the rewards of the group",
                "batch": "the standard deviation of all rewards of the step",
                "none": "nothing",
            }
        ),
    ] = "group"
    rewards: Annotated[
        tuple[Reward, ...],
        Syntax("entries"),
        Field(
            description="the rewards of a completion, each with its weight",
            examples=["rewards { correct { check = exact } }"],
        ),
    ]
