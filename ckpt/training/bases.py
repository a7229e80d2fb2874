"""Which earlier save each save of a run refers to, and whether it may store differences from it.

    reuse=True          1 ◄── 2 ◄── 3 ◄── 4         each refers to the one before, for what has not changed
    Anchor(every=3)     1 ◄── 2     4 ◄── 5         2 and 3 are differences from 1, 5 and 6 from 4; what has not changed
                        ▲     3     │     6         since 1 is referred to, by 4 too
                        └───────────┘
    PartialExperts      1 ◄── 2 ◄── 3 ◄── 4         2, 3 and 4 write some experts each; 1 writes all, and so does 5

All ranks count alike: they begin the same saves, and hear of each whether it went well. After one that did not, some may not have heard
yet, so the next one refers to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt.engine.save.base.base_chunks import SaveBase
from ckpt.engine.save.job import SaveOptions
from ckpt.errors import UsageError
from ckpt.formats.native.coding.codecs import WITHOUT_ANCHOR
from ckpt.formats.native.coding.xor_planes import XOR_PLANES
from ckpt.policies.anchor import Anchor
from ckpt.policies.partial_experts import ExpertTurn, PartialExperts
from ckpt.policies.trust_frozen import TrustFrozen


@dataclass(eq=False)
class Bases:
    """The base of the next save. ``anchor``: None if saves store no differences; ``experts``: None if they write all that has changed."""

    anchor: Anchor | None = None
    experts: PartialExperts | None = None
    base: SaveBase | None = None
    """What the next save may refer to: the newest anchor, or else the last save that went well here, or what was restored."""
    since: int = 0
    """How many saves have followed the anchor ``base``, or the last one that wrote all experts."""
    is_anchor: bool = True
    """Whether the save that was begun last is one."""
    whole: bool = True
    """Whether the save that was begun last writes all experts."""

    def of(self, url: str, options: SaveOptions) -> SaveOptions:
        """The options of the save that begins at ``url``."""
        base = self.base if self.base is not None and self.base.url != url else None
        if self.experts is not None:
            return self._of_experts(self.experts, base, options)
        self.is_anchor = self.anchor is None or base is None or self.since >= self.anchor.every - 1
        if self.anchor is None or not self.is_anchor:
            return replace(options, base=base)
        # An anchor refers to the one before for what has not changed. All else is whole, so differences are one read away from it.
        return replace(options, base=base, codec=WITHOUT_ANCHOR.get(options.codec or "", options.codec))

    def _of_experts(self, experts: PartialExperts, base: SaveBase | None, options: SaveOptions) -> SaveOptions:
        # What is whole refers to nothing: else each save would need the one before, and none could ever be removed. A base that cannot be
        # read fails the save, since a rank that writes what others refer to would mix steps within a tensor.
        self.whole = base is None or base.id is None or experts.is_whole(self.since + 1)
        if self.whole or base is None:
            return replace(options, base=None, experts=ExpertTurn(experts))
        return replace(options, base=replace(base, required=True), experts=ExpertTurn(experts, self.since))

    def restored(self, url: str | None) -> None:
        """A run goes on from ``url``; None: from elsewhere, or saves refer to nothing."""
        self.base = None if url is None else SaveBase(url=url, required=False)
        self.since = self.anchor.every if self.anchor is not None else 0  # what was restored may be a difference itself

    def ended(self, saved: SaveBase | None) -> None:
        """A save ended; None: it failed."""
        if saved is None:
            self.base, self.since = None, 0
        elif self.experts is not None:
            self.base, self.since = saved, 0 if self.whole else self.since + 1
        elif self.is_anchor:
            self.base, self.since = saved, 0
        else:
            self.since += 1


def codec_of(codec: str | None, anchor: object) -> str | None:
    """The codec of a run's saves.

    Raises:
        UsageError: ``anchor`` is none, or the codec does not go with it.
    """
    if anchor is None:
        if codec in WITHOUT_ANCHOR:
            raise UsageError(f"codec={codec!r} needs anchors to store differences from", hint="anchor=ckpt.policies.Anchor(every=10)")
        return codec
    if not isinstance(anchor, Anchor):
        raise UsageError(f"anchor= says which saves are anchors, not {anchor!r}", hint="anchor=ckpt.policies.Anchor(every=10)")
    if codec not in (None, XOR_PLANES.name, WITHOUT_ANCHOR[XOR_PLANES.name]):
        raise UsageError(
            f"anchor= has a codec of its own, {XOR_PLANES.name!r}, so codec={codec!r} does not go with it", hint="leave codec= out"
        )
    return XOR_PLANES.name


def check_experts(experts: object, anchor: Anchor | None) -> None:
    """
    Raises:
        UsageError: ``experts`` is no such policy, or does not go with anchors.
    """
    if experts is not None and not isinstance(experts, PartialExperts):
        raise UsageError(f"partial_experts= says which experts a save writes, not {experts!r}", hint=_PARTIAL)
    if experts is not None and anchor is not None:
        raise UsageError("partial_experts= does not go with anchor=: a difference cannot be referred to", hint="leave one of them out")


_PARTIAL = "partial_experts=ckpt.policies.PartialExperts(experts=64, per_save=8)"


def trust_of(reuse: object) -> TrustFrozen | None:
    """
    Raises:
        UsageError: ``reuse`` is neither True nor False nor such a policy.
    """
    if isinstance(reuse, bool):
        return None
    if not isinstance(reuse, TrustFrozen):
        raise UsageError(f"reuse= is True, False or a TrustFrozen, not {reuse!r}", hint="reuse=ckpt.policies.TrustFrozen(hash_every=10)")
    return reuse
