"""Ranges of files that share their extents with another file (reflinks of XFS, Btrfs, bcachefs, NFS 4.2): a copy that writes nothing."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from ckpt.errors import CkptError
from ckpt.io_backends.protocol import CopySource

from .files import open_regular

try:
    import fcntl
except ImportError:  # pragma: no cover  not on this system
    fcntl = None  # type: ignore[assignment]

_CLONE_RANGE = 0x4020940D
"""FICLONERANGE of linux/fs.h."""


@dataclass(frozen=True, slots=True)
class ClonedFile(CopySource):
    """A file that others may share extents with."""

    path: str

    def clone(self, at: int, length: int, target: int, offset: int) -> bool:
        """Let the file of the descriptor ``target`` have, from ``offset`` on, ``length`` bytes of this one from ``at``. False, and nothing
        happened, if the file system does not share extents, the files lie on two of them, or the range does not begin at a block."""
        if fcntl is None or not length:
            return False
        try:
            source = open_regular(self.path)
        except (OSError, CkptError):  # whoever reads it then finds out why
            return False
        try:
            fcntl.ioctl(target, _CLONE_RANGE, struct.pack("qQQQ", source, at, length, offset))
        except OSError:  # EOPNOTSUPP, EXDEV, EINVAL and others: each means that the bytes have to be written
            return False
        finally:
            os.close(source)
        return True
