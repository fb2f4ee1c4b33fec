"""What each pipeline rank of a plan holds at once: its weights, gradients and optimizer state, and the proven peak."""

from __future__ import annotations

from collections.abc import Iterable

from compiler.ir import Plan
from compiler.proof import Certificate
from dsl.memory import Memory, bytes_per_element
from dsl.schema import Spec


def rank_memory(spec: Spec, plan: Plan, certificates: Iterable[Certificate], rank: int) -> Memory:
    """Bytes of a device of pipeline rank `rank`: data rank 0 of it, as all of them, and the fullest of its programs."""
    device = plan.mesh.rank(rank, 0)
    held = [replica for replica in plan.replicas if replica.role == "parameter" and device in replica.holders]
    elements = sum(replica.num_elements for replica in held)
    zero, size = spec.parallel.zero, bytes_per_element(spec.precision)
    owned = sum(r.num_elements // len(r.holders) if zero else r.num_elements for r in held)
    return Memory(
        weights=elements * size.weights,
        gradients=elements * size.gradients,
        optimizer=owned * size.optimizer,
        activations=max(certificate.peak_bytes[rank] for certificate in certificates),
    )
