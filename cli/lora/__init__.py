"""``ckpt lora``: adapters of PEFT."""

from __future__ import annotations

from .command import command as command
