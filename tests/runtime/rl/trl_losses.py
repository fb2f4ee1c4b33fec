"""TRL's advantages, losses and gradients for completions. Writes trl_losses.json beside this file, or FILE:

    make .trl/.installed && PYTHONPATH=.trl .venv/bin/python -m tests.runtime.rl.trl_losses [FILE]

TRL's trainer rolls out, rewards and computes its loss, on a small Llama in float64. It is given the completions, their
rewards, and the log-probabilities of the old and the reference policy, which are near the model's: if they were equal,
every ratio would be 1. `corrected`: TRL's option `use_bias_correction_kl`, which is on by default and multiplies the
divergence from the reference by the ratio.

N completions, G for each prompt · T their tokens · D hidden · V vocabulary.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).with_suffix(".json")
VOCAB, HIDDEN, NUM, GROUP, LONGEST = 13, 8, 8, 4, 7
REWARD_WEIGHTS = [1.0, -0.7]
SHARED = {"low": 0.2, "high": 0.28}
RUNS = [
    {"loss": loss, "scale": scale, "kl": kl, "temperature": temperature, "corrected": corrected}
    for loss, scale, kl, temperature, corrected in [
        *(
            (*settings, 1.0, False)
            for settings in product(("grpo", "dapo", "dr_grpo"), ("group", "batch", "none"), (0.0, 0.3))
        ),
        ("dapo", "group", 0.3, 0.7, False),
        *((loss, "group", 0.3, 1.0, True) for loss in ("grpo", "dapo", "dr_grpo")),
        ("dapo", "group", 0.3, 0.7, True),
    ]
]
Rows = list[list[float]]


def completions() -> tuple[list[list[int]], list[list[int]], Rows]:
    """Prompts, completions and rewards. All rewards of the last group are equal."""
    random = np.random.default_rng(0)
    prompts = [random.integers(2, VOCAB, 1 + 2 * (i // GROUP)).tolist() for i in range(NUM) if i % GROUP == 0]
    lengths = [1 + (3 * i) % LONGEST for i in range(NUM)]
    rewards = [[float(i % 3 == 0), i / 4] for i in range(NUM - GROUP)] + [[1.0, 0.5]] * GROUP
    return (
        [prompts[i // GROUP] for i in range(NUM)],
        [random.integers(2, VOCAB, length).tolist() for length in lengths],
        rewards,
    )


def save_model(folder: Path) -> None:
    """Save a small Llama, and a tokenizer of numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<end>": 1} | {str(i): i for i in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        initializer_range=0.6,
        pad_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).double().save_pretrained(folder)


def trainer_of(model: Path, folder: Path, run: dict[str, Any], rewards_NR: Rows) -> Any:
    """A TRL trainer that uses the fixed completions and rewards."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompts, tokens, _ = completions()

    def reward(index: int) -> Any:
        def of(completions: list[str], **_: Any) -> list[float]:
            return [row[index] for row in rewards_NR]

        of.__name__ = f"reward_{index}"
        return of

    def rollout(given: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": prompts,
            "completion_ids": tokens,
            "logprobs": [[0.0] * len(completion) for completion in tokens],
        }

    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=NUM,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        loss_type=run["loss"],
        scale_rewards=run["scale"],
        beta=run["kl"],
        use_bias_correction_kl=run["corrected"],
        temperature=run["temperature"],
        epsilon=SHARED["low"],
        epsilon_high=SHARED["high"],
        reward_weights=REWARD_WEIGHTS,
        model_init_kwargs={"dtype": torch.float64},
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
    )
    rows = Dataset.from_dict({"prompt": [" ".join(map(str, prompt)) for prompt in prompts]})
    functions = [reward(index) for index in range(len(REWARD_WEIGHTS))]
    return GRPOTrainer(str(model), functions, config, train_dataset=rows, rollout_func=rollout)


def near(logps: list[Tensor], seed: int) -> list[Tensor]:
    """Log-probabilities near others, some so far away that ratios are clipped."""
    random = np.random.default_rng(seed)
    return [
        (logp_C + torch.from_numpy(random.normal(scale=0.5, size=len(logp_C)))).clamp(max=-1e-3) for logp_C in logps
    ]


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def measured(trainer: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(inputs of the loss that all runs share, those shared by runs of one temperature, TRL's results)."""
    prompts, tokens, rewards_NR = completions()
    rows = [{"prompt": " ".join(map(str, prompt))} for prompt in prompts]
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # one batch per step
    hidden = list[Tensor]()
    hook = trainer.model.model.register_forward_hook(lambda module, args, output: hidden.append(output[0]))
    inputs = trainer._generate_and_score_completions(rows)
    longest = inputs["completion_ids"].shape[1]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad():
        logps_NC = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest)[0]
    logps = [row_C[: len(completion)] for row_C, completion in zip(logps_NC, tokens, strict=True)]
    old, reference = near(logps, 3), near(logps, 4)
    inputs["old_per_token_logps"], inputs["ref_per_token_logps"] = padded(old), padded(reference)
    hidden.clear()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    hook.remove()
    first = inputs["prompt_ids"].shape[1] - 1
    h_TD = torch.cat(
        [h_LD[first : first + len(completion)] for h_LD, completion in zip(hidden[0], tokens, strict=True)]
    )
    loss_inputs = {
        "hidden_TD": h_TD.tolist(),
        "head_VD": trainer.model.lm_head.weight.tolist(),
        "targets_T": [token for completion in tokens for token in completion],
        "lengths_N": [len(completion) for completion in tokens],
        "rewards_NR": rewards_NR,
    }
    named = {"logp_T": logps, "old_T": old, "reference_T": reference}
    return (
        loss_inputs,
        {name: torch.cat(parts).tolist() for name, parts in named.items()},
        {
            "advantages_N": inputs["advantages"].tolist(),
            "value": loss.item(),
            "d_head_VD": trainer.model.lm_head.weight.grad.tolist(),
        },
    )


def main(file: Path = FILE) -> int:
    import transformers
    import trl

    rewards_NR, runs, shared, by_temperature = completions()[2], [], None, dict[str, Any]()
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        for run in RUNS:
            loss_inputs, policies, results = measured(trainer_of(folder / "model", folder / "out", run, rewards_NR))
            assert shared in (None, loss_inputs), "the model is the same"
            shared = loss_inputs
            assert by_temperature.setdefault(str(run["temperature"]), policies) == policies, "so are the policies"
            runs.append(run | results)
    content = {
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__},
        "group": GROUP,
        "longest": LONGEST,
        "reward_weights": REWARD_WEIGHTS,
        **SHARED,
        "given": shared,
        "by_temperature": by_temperature,
    }
    head, lines = json.dumps(content, indent=1)[:-2], ",\n".join(f"  {json.dumps(run)}" for run in runs)
    file.write_text(f'{head},\n "runs": [\n{lines}\n ]\n}}\n', "utf-8")
    return 0


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main(*map(Path, sys.argv[1:])))
