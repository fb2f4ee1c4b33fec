"""Names of the parameters of an adapter of low rank: those of its weight, and an end. PEFT's lora_A and lora_B.

A module of its own without imports, for emitted segments depend on it (compiler/emit/segment_cache.py).
"""

A, B = "_lora_a", "_lora_b"


def is_adapter(name: str) -> bool:
    """Whether a parameter, by its local or its logical name, is one of an adapter."""
    return name.endswith((A, B))


def weight_of(name: str) -> str:
    """The name of the weight of an adapter's parameter; any other name as it is."""
    return name.removesuffix(A).removesuffix(B)
