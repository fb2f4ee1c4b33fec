"""The text of the module that an export to torchtitan writes; `str.format` fills it with what was rendered."""

from __future__ import annotations

TEMPLATE = """\
# A configuration for torchtitan {version}, written by dsc. In its folder:
#
#   PYTHONPATH=. torchrun ... -m torchtitan.train --module config_registry --config {name}
#
# What torchtitan is not told:
{lost}
from functools import partial
from pathlib import Path

import torch.nn as nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
    register_moe_load_balancing_hook,
)
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.deepseek_v3 import (
    DeepSeekV3Model,
    DeepSeekV3StateDictAdapter,
    MTPLoss,
    _build_mtp_layers,
    build_mla_moe_layers,
    parallelize_deepseekv3,
)
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

NORMAL = partial(nn.init.normal_, std={std})
LINEAR = {{"weight": NORMAL, "bias": nn.init.zeros_}}
NORM = {{"weight": nn.init.ones_}}
EXPERTS = {{"w1_EFD": NORMAL, "w2_EDF": NORMAL, "w3_EFD": NORMAL}}


def model_spec() -> ModelSpec:
    layers = {layers}
    for layer in layers:
        attention = layer.attention
        for norm in (layer.attention_norm, layer.ffn_norm, attention.q_norm, attention.kv_norm):
            norm.eps = {eps}
        if layer.moe is not None:
            layer.moe.load_balance_coeff = {bias}
    return {spec}


def {name}() -> Trainer.Config:
    return {config}
"""
