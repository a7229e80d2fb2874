"""Checkpoints some of whose tensors are of an earlier step than the others: experts that a save did not write (docs/format.md §16).

They are not what a job had at any moment. So whoever reads values from one has to say that this is meant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from ckpt.catalog import Catalog, job_tensors
from ckpt.errors import ConsistencyError

from .native.commit import MIXED

C = TypeVar("C", bound=Catalog)
_SHOWN = 3


def earlier_steps(catalog: Catalog) -> dict[str, int]:
    """Tensors with bytes of an earlier step than their checkpoint's, by name, aliases too, and the earliest such step."""
    record = catalog.record
    if record is None or MIXED not in record.features:
        return {}
    return {name: entry.step for name, entry in job_tensors(catalog).items() if entry.step is not None}


def steps_text(steps: Mapping[str, int]) -> str:
    """How many tensors are of which earliest step; the latest first."""
    counts = sorted(Counter(steps.values()).items(), reverse=True)
    more = f" and {len(counts) - _SHOWN} more steps" if len(counts) > _SHOWN else ""
    return ", ".join(f"{count:,} of step {step}" for step, count in counts[:_SHOWN]) + more


def allowed(catalog: C, *, mixed_steps: bool) -> C:
    """The catalog, if its tensors are of one step or ``mixed_steps`` are asked for.

    Raises:
        ConsistencyError: they are not.
    """
    if not mixed_steps and (steps := earlier_steps(catalog)):
        raise ConsistencyError(
            f"{len(steps):,} of its {len(job_tensors(catalog)):,} tensors are of earlier steps than the others: {steps_text(steps)}, "
            f"such as {min(steps)}",
            where=catalog.url,
            hint="mixed_steps=True (`--mixed-steps`) takes them as they are; `ckpt inspect` lists them",
        )
    return catalog
