"""Structured names: of programs, records, bodies, messages, exchanges, segments and data.

They are strings in files, emitted modules and mappings. Only these types parse them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar, Literal, cast, get_args

from runtime.contract.actions import ActionKind

ProgramKind = Literal["train", "evaluate"]
# loss, mtp_loss: of the head and of multi-token prediction · sequence_loss, index_loss: of a layer · load: tokens per
# expert of a layer · logits: the largest logit of each head of a block
RecordKind = Literal["loss", "mtp_loss", "sequence_loss", "index_loss", "load", "logits"]
WEIGHT, AVERAGE, BIAS, TABLE = "weight", "ema", "bias", "table"  # kinds of stored tensors
BodyKind = Literal[ActionKind, "E"]  # E: a forward without a backward


class ProgramName(str):
    """The kind of a program and its number of micro-batches: `train_8`, `evaluate_2`."""

    __slots__ = ()

    @classmethod
    def of(cls, kind: ProgramKind, micro_batches: int) -> ProgramName:
        return cls(f"{kind}_{micro_batches}")

    @classmethod
    def all_of(cls, micro_batches: int) -> tuple[ProgramName, ...]:
        """Return the names of all kinds."""
        return tuple(cls.of(kind, micro_batches) for kind in get_args(ProgramKind))

    @property
    def kind(self) -> ProgramKind:
        return cast(ProgramKind, self.partition("_")[0])

    @property
    def trains(self) -> bool:
        return self.kind == "train"


class RecordName(str):
    """A record of a stage, and its place: `loss`, `load layers.3`, `sequence_loss L3`."""

    __slots__ = ()

    @classmethod
    def of(cls, kind: RecordKind, place: str = "") -> RecordName:
        """`place`: the site of a layer, such as L3, or the prefix of its tensors, such as layers.3."""
        return cls(f"{kind} {place}" if place else kind)

    @property
    def kind(self) -> RecordKind:
        return cast(RecordKind, self.partition(" ")[0])

    @property
    def place(self) -> str:
        return self.partition(" ")[2]

    @property
    def is_largest(self) -> bool:
        """Whether micro-batches are combined by the maximum instead of the sum."""
        return self.kind == "logits"


class KernelExtent(str):
    """An extent of a kernel's tensor: a number, `R` for the received rows, or `R/128` for their tiles, rounded up."""

    __slots__ = ()
    pattern: ClassVar[str] = r"[0-9]{1,18}|[RPX](/[1-9][0-9]{0,17})?"  # P: copies of tokens; X: forwarded rows

    @property
    def has_rows(self) -> bool:
        return not self.isdecimal()

    def at(self, rows: int) -> int:
        """Return the extent for a number of rows."""
        return -(-rows // int(self[2:] or 1)) if self.has_rows else int(self)


class ActionName(str):
    """An action without its micro-batch: `F3` is the forward of stage 3."""

    __slots__ = ()
    pattern: ClassVar[str] = r"[FBIWORE]\d{1,9}"

    @classmethod
    def of(cls, kind: BodyKind, stage: int) -> ActionName:
        return cls(f"{kind}{stage}")

    @property
    def kind(self) -> BodyKind:
        return cast(BodyKind, self[0])

    @property
    def stage(self) -> int:
        return int(self[1:])

    @property
    def adds_gradients(self) -> bool:
        """Whether it accumulates gradients of weights."""
        return self.kind in ("B", "W")


class BodyName(str):
    """The actions of a body: `F3`, or `F3_B4` for an overlapped pair."""

    __slots__ = ()
    pattern: ClassVar[str] = r"[FBIWORE]\d{1,9}(_[FBIWORE]\d{1,9})?"

    @classmethod
    def of(cls, *actions: ActionName) -> BodyName:
        return cls("_".join(actions))

    @property
    def actions(self) -> tuple[ActionName, ...]:
        return tuple(map(ActionName, self.split("_")))


class MessageName(str):
    """A message between pipeline ranks: `F2.5` has the output of stage 2 for micro-batch 5, `B3.1` the gradient of the
    input of stage 3 for micro-batch 1."""

    __slots__ = ()
    pattern: ClassVar[str] = r"[FB]\d{1,9}\.\d{1,9}"

    @classmethod
    def of(cls, producer: str, micro_batch: int) -> MessageName:
        return cls(f"{producer}.{micro_batch}")

    @property
    def micro_batch(self) -> int:
        return int(self.partition(".")[2])


class ExchangeName(str):
    """An exchange of a body, in the notation of schedules: `dispatch F3.0@L17`."""

    __slots__ = ()

    @classmethod
    def of(cls, kind: str, action: str, micro_batch: int, site: str) -> ExchangeName:
        return cls(f"{kind} {action}.{micro_batch}@{site}")

    @property
    def kind(self) -> str:
        return self.partition(" ")[0]

    @property
    def action(self) -> ActionName:
        return ActionName(self._place[0])

    @property
    def micro_batch(self) -> int:
        return int(self._place[2])

    @property
    def _place(self) -> tuple[str, str, str]:
        return self.partition("@")[0].partition(" ")[2].partition(".")

    @property
    def site(self) -> Site:
        return Site(self.rpartition("@")[2])


class Site(str):
    """The place of a segment or an exchange in the model: `L3.attention`, `L17`, `M0.head` in multi-token prediction,
    `embed`."""

    __slots__ = ()
    pattern: ClassVar[str] = r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*"
    _BLOCK: ClassVar[re.Pattern[str]] = re.compile(r"([LM])([0-9]+)")

    @property
    def block(self) -> str:
        """Its block: `L3` for `L3.attention`."""
        return self.partition(".")[0]

    @property
    def part(self) -> str:
        """Its place in its block: `attention` for `L3.attention`; empty for `L3`."""
        return self.partition(".")[2]

    @property
    def layer(self) -> int | None:
        """Index of its layer; None outside of the layers, for example in multi-token prediction."""
        match = self._BLOCK.fullmatch(self.block)
        return int(match[2]) if match and match[1] == "L" else None

    @property
    def predicts_ahead(self) -> bool:
        """Whether it belongs to multi-token prediction."""
        match = self._BLOCK.fullmatch(self.block)
        return match is not None and match[1] == "M"


class ParameterName(str):
    """A logical parameter, or a tensor that stacks several: `layers.3.ffn.experts.17.up`, `mtp.0.norm`, `embedding`."""

    __slots__ = ()
    _BLOCK: ClassVar[re.Pattern[str]] = re.compile(r"(layers|mtp)\.([0-9]+)\.([a-z_]+)")

    @property
    def part(self) -> str:
        """The part of the model: embedding, layers, final_norm, head, mtp."""
        return self.partition(".")[0]

    @property
    def block(self) -> str:
        """The prefix of the parameters of its block: `layers.3`, `mtp.0`; empty outside of blocks."""
        match = self._BLOCK.match(self)
        return f"{match[1]}.{match[2]}" if match else ""

    @property
    def layer(self) -> int | None:
        """Index of its layer; None outside of the layers."""
        match = self._BLOCK.match(self)
        return int(match[2]) if match and match[1] == "layers" else None

    @property
    def is_of_attention(self) -> bool:
        """Whether it belongs to the attention of its block."""
        match = self._BLOCK.match(self)
        return match is not None and match[3] == "attention"

    @property
    def is_of_experts(self) -> bool:
        """Whether it belongs to routed experts."""
        return ".ffn.experts." in self


class StoredName(str):
    """A tensor of a checkpoint: `weight/layers.3.attention.out`, `ema/…` for the moving average of the weights,
    `bias/…` and `table/…` for routers, and the name of each tensor of the optimizer state, such as `m/…`."""

    __slots__ = ()

    @classmethod
    def of(cls, kind: str, name: str) -> StoredName:
        return cls(f"{kind}/{name}")

    @property
    def kind(self) -> str:
        return self.partition("/")[0]

    @property
    def name(self) -> str:
        """The parameter, bias or table."""
        return self.partition("/")[2]

    @property
    def averaged(self) -> StoredName:
        """The moving average of a weight; any other name itself."""
        return StoredName.of(AVERAGE, self.name) if self.kind == WEIGHT else self


def has_average(names: Iterable[str]) -> bool:
    """Whether the tensors of a checkpoint include a moving average of the weights."""
    return any(StoredName(name).kind == AVERAGE for name in names)


class DataName(str):
    """Data of each micro-batch that a stage loads: `tokens`, `targets`, `L3_routes`."""

    __slots__ = ()
    _ROUTES: ClassVar[str] = "_routes"

    @classmethod
    def routes(cls, site: str) -> DataName:
        """Return the name of the replayed experts of a layer's router."""
        return cls(f"{site}{cls._ROUTES}")

    @property
    def router(self) -> Site | None:
        """The layer whose router replays these experts; None for other data."""
        return Site(self.removesuffix(self._ROUTES)) if self.endswith(self._ROUTES) else None
