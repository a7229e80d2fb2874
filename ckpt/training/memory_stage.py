"""The memory of the machines in front of a local tier: ``Checkpointer(memory=..., local=...)``.

    every step ──► memory ── what ``save`` asks for ──► local tier ──► root
                    keep=2                               local_keep      keep

Each arrow is an :class:`Uploader` of its own, and the second begins a round when the first has ended one. A checkpoint has the same id, and
so the same names of files, in all three. So what a machine has lost from its memory is read from disks, range by range.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from ckpt.coordination.group import Group
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.maintenance.step_listing import Step
from ckpt.policies import All, Latest
from ckpt.spread.nodes import StorageNode
from ckpt.spread.tier import SpreadTier

from .tiers import Tiers
from .uploader import Uploader, UploadRound

log = logging.getLogger("ckpt")

Copies = list[list[Any]]
"""See :meth:`Tiers.copies`."""


class MemoryStage:
    """One rank's end. ``later``: the local tier and the root; it has a local tier."""

    def __init__(self, spread: SpreadTier, keep: int, later: Tiers, group: Group, *, timeout: float, threads: int) -> None:
        assert later.local is not None
        self._later = later
        self._spread = spread
        self.local = spread.url
        self.root = later.root
        self.tiers = Tiers(later.local, All(), spread.url, Latest(keep), spread, newest_only=True)
        self.damaged = self.tiers.damaged
        """Ids of copies that cannot be loaded."""
        self.uploader = Uploader(self.tiers, group, timeout=timeout, threads=threads)
        self.uploader.published = lambda step, url, id: later.retain_in_background()

    def check(self, group: Group, timeout: float) -> None:
        """As :meth:`Tiers.check`, for both. Collective."""
        self._later.check(group, timeout)
        self._spread.connect(self._behind())

    def _behind(self) -> Sequence[StorageNode]:
        """Where the local tier has the same files."""
        if self._later.spread is not None:
            return self._later.spread.nodes.nodes
        assert self._later.local is not None
        return [StorageNode(name=self._later.local, domain="", below=partial(_below, self._later.local), shared=True)]

    def earlier(self, n: int) -> str | None:
        """As :meth:`Tiers.earlier`, of both."""
        return max((id for id in (self._later.earlier(n), self.tiers.earlier(n)) if id is not None), default=None)

    def look(self) -> list[Step]:
        """As :meth:`Tiers.look`, of both."""
        return self._later.look(self.tiers)

    def copies(self, step: int | None, tried: Collection[tuple[str, str]] = ()) -> Copies:
        """As :meth:`Tiers.copies`: those in memory come before others of the same save."""
        return self._later.copies(step, tried, self.tiers)

    def steps(self) -> list[Step]:
        """As :meth:`Tiers.steps`, of both."""
        return self._later.steps(self.tiers)

    def latest(self) -> int | None:
        """As :meth:`Tiers.latest`, of both."""
        return self._later.latest(self.tiers)

    def publish(self, after: Future[Any] | None = None) -> UploadRound:
        """Bring the newest step to the local tier when ``after`` has ended."""
        return self.uploader.add(after)


def _below(root: str, prefix: str) -> Backend:
    return open_backend(join_url(root, prefix.rstrip("/")) if prefix else root)
