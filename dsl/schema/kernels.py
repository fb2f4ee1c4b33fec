"""How kernels run on GPUs: which implementation computes an op, where there is more than one, and how they are
launched."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Choices, Node, QuietField

TRITON = "a kernel of the build, written in Triton"
TORCH = (
    "torch, in FP32 and in blocks: slower; where nothing is named, `dsc compile` refuses more than 20% of the compute"
)
FLASH = "the package FlashAttention-3, for Hopper GPUs; RoPE is a pass of torch before it"
DEFAULT = "default: a kernel of the build if there is one, else torch"


class Kernels(Node):
    """The implementations of ops on GPUs, and their launches. CPUs run the same ops, whichever is chosen.

    Naming one accepts the time of torch for ops that it lacks.
    """

    attention: Annotated[
        Literal["triton", "cudnn", "flash_attn"] | None,
        Field(description=f"grouped-query attention; {DEFAULT}", examples=["attention = cudnn"]),
        Choices(
            {
                "triton": TRITON,
                "cudnn": "cuDNN, through torch; gradients may differ in their last bits",
                "flash_attn": FLASH,
            }
        ),
        QuietField(),
    ] = None
    latent_attention: Annotated[
        Literal["triton", "flash_attn"] | None,
        Field(description=f"multi-head latent attention; {DEFAULT}", examples=["latent_attention = flash_attn"]),
        Choices({"triton": TRITON, "flash_attn": FLASH}),
        QuietField(),
    ] = None
    fp8_products: Annotated[
        Literal["triton", "deep_gemm"] | None,
        Field(description=f"products of rows by weights in FP8; {DEFAULT}", examples=["fp8_products = deep_gemm"]),
        Choices({"triton": TRITON, "deep_gemm": "the package DeepGEMM; weight gradients stay with the build"}),
        QuietField(),
    ] = None
    grouped_products: Annotated[
        Literal["triton", "grouped_mm"] | None,
        Field(
            description=f"the products of routed experts in BF16; {DEFAULT}", examples=["grouped_products = grouped_mm"]
        ),
        Choices({"triton": TRITON, "grouped_mm": "torch's grouped product, `torch.nn.functional.grouped_mm`"}),
        QuietField(),
    ] = None
    sparse_attention: Annotated[
        Literal["triton", "torch"] | None,
        Field(
            description=f"attention to chosen keys, their choice and the loss; {DEFAULT}",
            examples=["sparse_attention = torch"],
        ),
        Choices({"triton": TRITON, "torch": TORCH}),
        QuietField(),
    ] = None
    compressed_attention: Annotated[
        Literal["triton", "torch"] | None,
        Field(
            description=f"attention to a window and to entries; {DEFAULT}", examples=["compressed_attention = torch"]
        ),
        Choices({"triton": TRITON, "torch": TORCH}),
        QuietField(),
    ] = None
    delta_rule: Annotated[
        Literal["triton", "torch", "fla"] | None,
        Field(description=f"the recurrence of linear attention; {DEFAULT}", examples=["delta_rule = fla"]),
        Choices(
            {
                "triton": TRITON,
                "torch": TORCH,
                "fla": "the package flash-linear-attention, whose kernels are written in Triton",
            }
        ),
        QuietField(),
    ] = None
    graphs: Annotated[
        bool,
        Field(
            description="capture the launches of each segment in a CUDA graph in the second step and replay it in "
            "later steps; not where rows of experts move between ranks or weights are gathered",
            examples=["graphs = true"],
        ),
        QuietField(),
    ] = False


_WORDS = {
    word
    for field in Kernels.model_fields.values()
    for mark in field.metadata
    if isinstance(mark, Choices)
    for word in mark.meanings
}
LIBRARY_NAMES = tuple(sorted(_WORDS - {"triton", "torch"}))  # the words of `kernels` that name libraries
