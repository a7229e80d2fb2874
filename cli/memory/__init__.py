"""``ckpt memory``: the daemon that holds checkpoints in this machine's memory."""

from __future__ import annotations

from .command import command

__all__ = ["command"]
