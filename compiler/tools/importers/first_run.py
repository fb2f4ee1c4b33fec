"""Suggests a first run for an imported model: the smallest cluster that fits it, and a recipe to be changed.

The cluster is this machine, a node with one GPU, or nodes of 8 GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from compiler.tools.importers.write import number
from dsl.closed_forms.counts import parameters
from dsl.closed_forms.memory import lower_bound
from dsl.facts.schedules import DEFAULT, FACTS, PLAIN
from dsl.schema import BUILT_IN, AdamW, Batch, Model, Moe, Parallel, ScheduleBlock, Spec, Train

DEVICES = 8  # per node, if one device does not fit the model
NODE = (  # an H100 and its links
    "device h100 { sms = 132, memory = 80GB, hbm = 3.35TB/s, bf16 = 989TFLOPS, fp8 = 1979TFLOPS }",
    "nvlink = 450GB/s",
    "nic = 50GB/s",
)
MEMORY = 80e9  # bytes per device
ROOM = 0.45  # share of the memory for activations and everything else that the lower bound leaves out
INDENTED = "\n    ".join(NODE)
LAPTOP = 50_000_000  # parameters that a laptop can train in FP32, at 16 bytes each
FEWEST_TRAINED = 257  # smallest vocabulary of a trained tokenizer: 256 bytes and the end of a document
PIPELINES = (1, 2, 4, 8, 16)
PLACES = ((1, 1), *((2**power, DEVICES) for power in range(13)))  # (nodes, devices per node)
MAX_EXPERT = 64
SEQUENCES = 512  # per step, at least
STEPS = 20_000


@dataclass(frozen=True)
class ModelSpread:
    """How a model is spread over `nodes` with `devices` each."""

    nodes: int
    devices: int
    schedule: str
    parallel: Parallel

    @property
    def batch(self) -> int:
        """Sequences per step: a multiple of the fewest micro-batches that the default schedule needs."""
        unit = FACTS[DEFAULT].fewest_micro_batches * self.parallel.pipeline * self.parallel.data
        return unit * -(-SEQUENCES // unit)


@dataclass(frozen=True)
class RunBeginning:
    """Paths to the initial weights and to the tokenizer, relative to the spec and escaped for a string of it; "" if
    there is none."""

    weights: str = ""
    tokenizer: str = ""


def run_text(model: Model, context: int, start: RunBeginning = RunBeginning()) -> str:
    """The text of a `run pretrain` and its cluster; "" if no cluster in `PLACES` fits the model."""
    count = parameters(model)
    if count.total + count.mtp <= LAPTOP:
        return _laptop(model, context, start)
    place = _smallest(model, context)
    return _cluster(model, context, place, start) if place else ""


def _initial(start: RunBeginning) -> str:
    """The line `initial = …`; "" without initial weights."""
    return f'    initial = "{start.weights}"\n' if start.weights else ""


def _smallest(model: Model, context: int) -> ModelSpread | None:
    """The smallest cluster that fits the model; None if none does."""
    sparse = [span.ffn for span in model.layers if isinstance(span.ffn, Moe)]
    experts = gcd(*(ffn.experts for ffn in sparse)) or 1
    for nodes, devices in PLACES:
        max_pipeline = max(1, min(nodes * devices, model.num_layers // 2))  # at least two layers per stage
        for pipeline in (degree for degree in PIPELINES if degree <= max_pipeline):
            data = nodes * devices // pipeline
            # the default schedule overlaps the experts' all-to-all; without experts it only costs memory
            schedule = DEFAULT if sparse and pipeline > 1 else PLAIN
            parallel = Parallel(pipeline=pipeline, data=data, expert=_divisor(gcd(experts, data)), zero=1)
            place = ModelSpread(nodes, devices, schedule, parallel)
            if lower_bound(_outline(model, context, place)).total <= (1 - ROOM) * MEMORY:
                return place
    return None


def _outline(model: Model, context: int, place: ModelSpread) -> Spec:
    """A spec with only the keys that determine its memory."""
    batch = Batch(start=place.batch, end=place.batch)
    return Spec.model_construct(
        model=model,
        precision=BUILT_IN["bf16"],
        parallel=place.parallel,
        schedule=ScheduleBlock(name=place.schedule),
        train=Train.model_construct(sequence=context, micro_batch=1, batch=batch, optimizer=AdamW()),
    )


def _divisor(number: int) -> int:
    return next(divisor for divisor in range(min(number, MAX_EXPERT), 0, -1) if number % divisor == 0)


def _cluster(model: Model, context: int, place: ModelSpread, start: RunBeginning) -> str:
    tokens = place.batch * context
    expert = f", expert = {place.parallel.expert}" if place.parallel.expert > 1 else ""
    return f"""\
# A starting point, not a recipe: the smallest cluster of this kind that fits the model, and common learning rates.
run pretrain {{
  model = {model.name}
  cluster = h100 # change it to your nodes, devices and memory
  precision = bf16

  parallel {{ pipeline = {place.parallel.pipeline}{expert}, data = auto, zero = 1 }}
  schedule {{ name = {place.schedule} }}

  train {{
    sequence = {context}
    micro_batch = 1
    batch = {place.batch} # sequences per step: {tokens:,} tokens
    steps = {number(STEPS)} # {tokens * STEPS / 1e9:,.0f}B tokens; change it to what your data has
    optimizer adamw {{ beta1 = 0.9, beta2 = 0.95, weight_decay = 0.1, clip = 1.0 }}
    rate {{
      warmup 2000 steps to 3e-4
      cosine to 3e-5
    }}
    checkpoint {{ every = 1000 steps, keep = 3 }}
{_initial(start)}  }}
  data {{ source = "corpus/*.jsonl", tokenizer = "{start.tokenizer or "tokenizer.json"}", validation = 0.1% }}
}}

cluster h100 {{
  nodes = {place.nodes}
  node {{
    devices = {place.devices}
    {INDENTED}
  }}
}}
"""


def _laptop(model: Model, context: int, start: RunBeginning) -> str:
    path = start.tokenizer or ("tokenizer.json" if model.vocab < FEWEST_TRAINED else "")
    tokenizer = f'"{path}"' if path else f"train({min(model.vocab, 4096)})"
    return f"""\
# A starting point: this model is small enough to train on this machine, on the source files of its Python.
run pretrain {{
  model = {model.name}
  cluster = laptop
  precision = fp32

  train {{
    sequence = {min(context, 128)}
    micro_batch = 2
    batch = 8
    steps = 200
    optimizer adamw {{ beta1 = 0.9, beta2 = 0.95, weight_decay = 0.1, clip = 1.0 }}
    rate {{
      warmup 20 steps to 1e-3
      cosine to 1e-4
    }}
{_initial(start)}  }}
  data {{ source = python_stdlib, tokenizer = {tokenizer}, validation = 5% }}
}}

cluster laptop {{
  nodes = 1
  node {{ devices = 1, device cpu {{ cores = 1, memory = 4GB }} }}
}}
"""
