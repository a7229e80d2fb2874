"""What a reshard reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt.tracing.spans import SpanTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes of one rank: ``needed`` by its new state as the old one has them, ``sent`` to others, ``copied`` within its own memory,
    ``received`` from others."""

    needed: int
    sent: int
    copied: int
    received: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardReport:
    """What a reshard did on this rank; on the first rank, ``ranks`` has the bytes of all, elsewhere those of the rank itself.

    ``missing``, ``unexpected``, ``renamed`` and ``cast`` are as in a :class:`ckpt.LoadReport`. ``bytes_needed`` by the tensors of the new
    state, as the old one has them: ``bytes_copied`` of them within this rank, ``bytes_received`` from others. ``bytes_sent`` to others.
    ``seconds`` of wall time. ``spans.sums`` has the seconds and bytes of its phases: ``collect`` (what the old state consists of), ``hash``
    (digests of replicas), ``match``, ``plan``, ``copy`` (within this rank), ``pull`` (one for each connection to a rank), and ``verify``
    within it; none with ``CKPT_SPANS=off``.
    """

    tensors: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    renamed: Mapping[str, str]
    cast: tuple[str, ...]
    bytes_needed: int
    bytes_sent: int
    bytes_copied: int
    bytes_received: int
    seconds: float
    ranks: Mapping[int, Traffic]
    spans: SpanTable
