"""Memory for windows and operands, in whole pages."""

from __future__ import annotations

import mmap

import torch


def page_memory(size: int) -> torch.Tensor:
    """Memory that begins at a page, which the system gets back as soon as nobody has it."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # touching it for the first time then costs little
    return torch.frombuffer(memory, dtype=torch.uint8)
