"""Which frozen tensors a save need not hash again, since their owner vouches for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckpt.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TrustFrozen:
    """Saves refer to frozen tensors without hashing them, as long as torch has not seen them change.

    **You vouch that nothing writes to them past torch**: through ``.data``, numpy, raw pointers or kernels that do not count versions, or
    through another tensor in their memory that is not saved (torch counts the two apart).
    Changes that torch counts, and tensors in other memory, are noticed by every save. Whatever else happens is noticed by every
    ``hash_every``-th save, which hashes all: it fails with :class:`ckpt.errors.ConsistencyError`, and the saves before it may have old
    bytes.

    ``names``: globs of names. Of these, only modules' parameters without gradients are trusted, and of these none that an optimizer of the
    state has state for, or updates with ``fused=True``. All else is hashed by every save: buffers and tensors of state dicts, too, since
    kernels of torch write to such tensors and count nothing.
    """

    names: str | Sequence[str] = "*"
    hash_every: int = 10

    def __post_init__(self) -> None:
        globs = [self.names] if isinstance(self.names, str) else list(self.names) if isinstance(self.names, Iterable) else []
        if not globs or not all(isinstance(glob, str) for glob in globs):
            raise UsageError(f"TrustFrozen(names=) is a glob of names, or several, not {self.names!r}", hint='TrustFrozen(names="model.*")')
        if not isinstance(self.hash_every, int) or isinstance(self.hash_every, bool) or self.hash_every < 1:
            raise UsageError(
                f"TrustFrozen(hash_every=) is a number of saves, at least 1, not {self.hash_every!r}", hint="TrustFrozen(hash_every=10)"
            )

    def covers(self, name: str) -> bool:
        """Whether a tensor may be trusted."""
        return any(fnmatchcase(name, glob) for glob in ((self.names,) if isinstance(self.names, str) else self.names))
