"""Reinforcement learning from rewards that can be checked: group relative policy optimisation.

Shao et al., DeepSeekMath, arXiv 2402.03300; Guo et al., DeepSeek-R1, arXiv 2501.12948.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Choices, FilePath, Node, Quiet, StoredUnit, Syntax

MAX_SEQUENCE = 16_777_216
MAX_GROUP = 1024


class Reward(Node):
    """What a completion is rewarded for: a check that gives a number, mostly 0 or 1, and its weight in the sum."""

    name: Annotated[str, Syntax("label"), Field(description="name of the reward")]
    check: Annotated[
        Literal["exact", "format", "regex", "python"],
        Field(description="what is checked", examples=["check = exact"]),
        Choices(
            {
                "exact": "1 if the answer in the completion equals that of the row, numbers as numbers: the last "
                r"`\boxed{…}`, else what is in `<answer>…</answer>`, else what follows the last `####`, else all of it",
                "format": "1 if the completion is `<think>…</think>` and then `<answer>…</answer>`, as in DeepSeek-R1",
                "regex": "1 if `pattern` matches somewhere in the completion",
                "python": "what a function of `file` returns",
            }
        ),
    ]
    weight: Annotated[
        float,
        Field(
            ge=-1_000_000,
            le=1_000_000,
            description="what its number is multiplied by in the sum of the rewards",
            examples=["weight = 0.5"],
        ),
    ] = 1.0
    pattern: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=4096,
            description="regular expression of Python, of `check = regex`",
            examples=['pattern = "^<think>"'],
        ),
    ] = None
    file: Annotated[
        str | None,
        FilePath(),
        Field(
            min_length=1,
            max_length=4096,
            description="file of Python that needs no file beside it, of `check = python`; relative to the spec",
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
        Quiet(),
    ] = "reward"
    seconds: Annotated[
        float,
        Field(
            gt=0,
            le=86_400,
            description="seconds that a function, or a pattern, may take for all completions of a rank",
            examples=["seconds = 5"],
        ),
        Quiet(),
    ] = 5.0


class Grpo(Node):
    """Training on completions that the model writes itself, by their rewards; prompts are those of `data.prompts`.

    A step draws prompts, writes `group` completions of each, and rewards them. The advantage of a completion is its
    reward less the mean of its group.
    """

    group: Annotated[
        int,
        Field(
            ge=2,
            le=MAX_GROUP,
            description="completions of a prompt; a step has batch / group prompts",
            examples=["group = 8"],
        ),
    ]
    prompt: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_SEQUENCE,
            description="tokens of the longest prompt; a prompt with more is left out",
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
            description="what logits are divided by, where completions are sampled and where they are trained on",
            examples=["temperature = 1.0"],
        ),
    ] = 1.0
    iterations: Annotated[
        int,
        Field(
            ge=1,
            le=1000,
            description="steps of the optimizer on the same completions",
            examples=["iterations = 1"],
        ),
    ] = 1
    slots: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_SEQUENCE,
            description="completions that a data rank writes at the same time, each with its keys and values; by "
            "default all of a step",
            examples=["slots = 64"],
        ),
        Quiet(),
    ] = None
    clip_low: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="the ratio of new to old probability of a token is clipped at 1 less this",
            examples=["clip_low = 0.2"],
        ),
    ] = 0.2
    clip_high: Annotated[
        float,
        Field(
            ge=0,
            le=1000,
            description="the ratio of new to old probability of a token is clipped at 1 and this",
            examples=["clip_high = 0.28"],
        ),
    ] = 0.2
    kl: Annotated[
        float,
        Field(
            ge=0,
            le=1000,
            description="weight of the KL divergence from the weights that the run began with; 0: none is computed",
            examples=["kl = 0.001"],
        ),
    ] = 0.0
    kl_form: Annotated[
        Literal["corrected", "k3"],
        Field(
            description="how the KL divergence of a token is estimated, d = reference − logp", examples=["kl_form = k3"]
        ),
        Choices(
            {
                "corrected": "ratio · (exp(d) − d − 1), whose gradient is that of KL(policy ‖ reference) (arXiv "
                "2512.02556)",
                "k3": "exp(d) − d − 1, as DeepSeekMath writes it (arXiv 2402.03300): where the policy wrote the "
                "completions, its gradient is that of KL(reference ‖ policy)",
            }
        ),
        Quiet(),
    ] = "corrected"
    loss: Annotated[
        Literal["grpo", "dapo", "dr_grpo"],
        Field(description="how the losses of tokens are averaged", examples=["loss = dapo"]),
        Choices(
            {
                "grpo": "over the tokens of each completion, then over completions",
                "dapo": "over all tokens of the completions of a step (arXiv 2503.14476)",
                "dr_grpo": "their sum over completions times `completion`, whatever lengths they have "
                "(arXiv 2503.20783)",
            }
        ),
    ] = "dapo"
    scale: Annotated[
        Literal["group", "batch", "none"],
        Field(description="what advantages are divided by", examples=["scale = group"]),
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
            description="what completions are rewarded for, each with its weight",
            examples=["rewards { correct { check = exact } }"],
        ),
    ]
