"""How much longer a step takes because many devices wait for the slowest of them."""

from __future__ import annotations

from math import expm1, log1p
from statistics import NormalDist

from dsl.schema.cluster import Cluster, Scale

NODE = 8  # devices at whose speed rates are measured


def slowest_factor(cluster: Cluster) -> float:
    """The time of a step on all devices of a cluster, over that on a node; 1 for CPUs without the block `scale`.

    The time of equal devices is normal around its mean, and a device keeps its speed, so a step takes the time of the
    slowest one. Where a share of devices is slow, a step is slow if the cluster has any of them.
    """
    scale = scale_of(cluster)
    if scale is None:
        return 1.0
    world = max(NODE, cluster.world)
    spread = (1 + scale.spread * expected_maximum(world)) / (1 + scale.spread * expected_maximum(NODE))
    chance = -expm1(cluster.world * log1p(-scale.slow))
    return spread * (1 + scale.slowdown * chance)


def scale_of(cluster: Cluster) -> Scale | None:
    """The block `scale` of a cluster, or its defaults for accelerators."""
    return cluster.scale or (Scale() if any(device.bf16 is not None for device in cluster.devices) else None)


def expected_maximum(count: int) -> float:
    """The mean of the largest of `count` standard normal numbers, within 0.015 from 8 numbers on (G. Blom, Statistical
    Estimates and Transformed Beta-Variables, 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
