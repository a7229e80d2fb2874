"""What the ranks of ``test_checkpoints.py`` do."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt import ExportReport, export
from ckpt.io_backends.s3_backend import S3Backend
from tests.s3.rank_work import COLUMNS, on_request, whole

PART = 5 << 20
"""The smallest that stores take."""


def model(seed: int) -> tuple[dict[str, Any], ckpt.Layout]:
    """24 MB: a tensor cut by rows, one cut by columns, and a small one that all ranks have."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, columns = whole(seed).chunk(size)[rank].clone(), whole(seed + 1).chunk(size, 1)[rank].clone()
    state = {"rows": rows, "columns": columns, "small": whole(seed + 2)[0].clone()}
    rules = [("rows", ckpt.Shard(0, "tp")), ("columns", ckpt.Shard(1, "tp"), ckpt.Uneven(1, COLUMNS)), ("*", ckpt.Replicate())]
    return state, ckpt.Layout({"tp": size}, rules)


def wanted(seed: int) -> dict[str, torch.Tensor]:
    return {"rows": whole(seed), "columns": whole(seed + 1), "small": whole(seed + 2)[0]}


def export_model(environment: dict[str, str], url: str, seed: int, options: dict[str, Any]) -> ExportReport:
    os.environ.update(environment)
    S3Backend.__init__.__kwdefaults__["part"] = PART
    state, layout = model(seed)
    return export(url, state, layout=layout, job=ckpt.Job(timeout=60), **options)


def die_at_request(environment: dict[str, str], url: str, seed: int, rank: int, operation: str) -> None:
    """A rank is killed when it is about to send its second request of a kind; its first one of ``CompleteMultipartUpload``."""
    os.environ.update(environment)
    S3Backend.__init__.__kwdefaults__["part"] = PART
    seen: list[str] = []

    def note(found: str, request: Any) -> None:
        if "/.prepare-" not in request.url:  # the trial of what the store can do
            seen.append(found)
        if dist.get_rank() == rank and seen.count(operation) > (operation == "UploadPart"):
            os.kill(os.getpid(), signal.SIGKILL)

    on_request(note)
    state, layout = model(seed)
    export(url, state, layout=layout, job=ckpt.Job(timeout=8))
