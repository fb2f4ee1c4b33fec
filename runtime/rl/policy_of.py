"""The policy of a rank: a generator on its executor, prompts, and rewards."""

from __future__ import annotations

from runtime.data.prompt_samples import PromptSamples
from runtime.data.rewards.scoring import Rewards
from runtime.rl.generator import Generator, Limits
from runtime.rl.policy import Policy, Reference
from runtime.rl.sampler import Sampler
from runtime.step.trainer import Trainer


def policy_of(trainer: Trainer, prompts: PromptSamples) -> Policy:
    """The policy of a rank, whose weights are those that the run begins with; processes of rewards have begun.

    Raises RewardError and RolloutError where they cannot.
    """
    plan, grpo, sums = trainer.plan, trainer.plan.train.grpo, trainer.links.sums
    assert grpo is not None, "a run with prompts learns from rewards"
    program = max(
        (each for name, each in trainer.programs.items() if name.startswith("evaluate")),
        key=lambda each: each.micro_batches,
    )
    of_column = program.micro_batches * plan.train.micro_batch
    limits = Limits(grpo.completion, prompts.end, min(of_column, grpo.slots or of_column))
    sampler = Sampler(plan.train.seed)
    generator = Generator(trainer.build, trainer.rank, trainer.executor, program, sums, limits, sampler)
    texts = {each.name: trainer.build.files[each.file].decode() for each in grpo.rewards if each.file}
    scorer = Rewards(grpo.rewards, texts) if trainer.pp_rank == 0 else None
    reference = Reference(trainer.state, sums) if grpo.kl else None
    what = generator, prompts, scorer, sums, trainer.time, reference
    return Policy(plan, trainer.rank, *what, set_action=trainer.board.set_action)
