"""``ckpt rm``: removes one checkpoint."""

from __future__ import annotations

from .command import command as command
