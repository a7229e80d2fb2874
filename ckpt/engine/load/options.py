"""What a caller may ask of a load, and what a load reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ckpt.byte_source.digest_reader import Verify
from ckpt.layout.layout import Layout
from ckpt.plan.match import Selection
from ckpt.tracing.progress_callback import ProgressCallback
from ckpt.tracing.spans import Spans


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a load did, or with ``dry_run`` would do.

    ``missing``: names of the state, on any rank, that the checkpoint lacks. ``unexpected``: names of the checkpoint that no rank's
    state has. ``renamed``: a tensor's stored name → its name in the state. ``cast``: tensors of this rank whose dtype was converted.
    Bytes are this rank's: ``bytes_needed`` by its tensors as they are stored, ``bytes_read`` from storage, for others too,
    ``bytes_unverified`` read without a check of their digest, ``bytes_received`` of those needed that other ranks had read. They came
    in ``requests`` reads, which storage may split, from ``files`` files. ``memory`` is what reading took beside the state, in bytes. Of
    a dry run it is the most that reading can take, and ``seconds`` is an estimate for the slowest rank, from what ``estimated_from``
    says.
    """

    url: str
    tensors: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    renamed: Mapping[str, str]
    cast: tuple[str, ...]
    bytes_needed: int
    bytes_read: int
    bytes_unverified: int
    bytes_received: int
    seconds: float
    requests: int = 0
    files: int = 0
    memory: int = 0
    dry_run: bool = False
    estimated_from: str | None = None


Shares = Literal["all", "parts", "none"]
"""What ranks read for each other: all that several want, on one machine only what several want different parts of, or nothing."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    layout: Layout | None
    selection: Selection
    strict: bool
    cast: bool
    verify: Verify
    timeout: float
    threads: int
    exchange: Shares = "none"
    spans: Spans | None = None
    progress: ProgressCallback | None = None
    dry_run: bool = False
    """Plan it, and read nothing but the index and headers."""
    sources: tuple[str, ...] | None = None
    """Where the files may lie that a virtual checkpoint points into; None: as CKPT_SOURCES says."""
