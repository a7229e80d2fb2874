"""Exports: the model of a running job as files that ``transformers.from_pretrained`` loads, written by all ranks at once."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt import settings
from ckpt.converters.targets.hf import ModelConfig
from ckpt.engine.save.background import wait_for_pending_save
from ckpt.net.group import current_group
from ckpt.plan.layout.layout import Layout
from ckpt.plan.match import several
from ckpt.text import url_text

from .phases import export_state
from .plan import ExportJob, ExportOptions, ExportReport

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.nn import Module

ANCHOR_EVERY = 16
"""A delta is read from the anchor on, and each link of 1 % adds about a third of the time that the anchor alone takes: with so many, a load
takes some seven times as long, and all deltas together are a quarter of the size of the anchor."""


def export(
    url: str | os.PathLike[str],
    state: Module | Mapping[str, Any],
    *,
    names: str | None = None,
    convention: str = "huggingface",
    numbers: Mapping[str, int] | None = None,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    root: str | None = None,
    dtype: str | torch.dtype | None = None,
    shard_size: int | str | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig | None = None,
    layout: Layout | None = None,
    overwrite: bool = False,
    since: str | os.PathLike[str] | None = None,
    anchor_every: int = ANCHOR_EVERY,
    memory: int = settings.EXPORT_MEMORY,
    timeout: float | None = None,
    threads: int | None = None,
    process_group: ProcessGroup | None = None,
) -> ExportReport:
    """Write the model of a running job as safetensors files, as ``ckpt convert --to hf`` would write them of a save of ``state``.

    Collective: every rank of the job calls it; without torch.distributed, one process does. Each rank writes its own blocks at their
    final place, and no rank ever has the whole model. The state must not change before it returns. If it raises, nothing shows at ``url``,
    and what stood there is untouched; but see ``overwrite``.

    Args:
        url: a directory, or one file if it ends in ``.safetensors``. All ranks must see the same storage.
        state: a model, or a state as ``ckpt.save`` takes it.
        names: a translation, such as ``"llama"``, into ``convention``. ``numbers`` of the model that ``config`` lacks: ``{"heads": 32}``.
        only, exclude: globs of new names.
        root: the key of the state that has the model; by default the only one with tensors.
        dtype: of floating-point tensors: ``"bfloat16"`` or ``torch.bfloat16`` and the like. By default as they are.
        shard_size: bytes of a file, about: ``"5GB"``. A single file is never cut.
        config: what becomes ``config.json``: ``model.config`` of transformers, its content, or the path of such a file, or of a directory
            with it, whose tokenizer comes too. Only the leading rank reads it. Beside one file nothing is written.
        layout: places for plain tensors that are parts of larger ones (Megatron-style models).
        overwrite: replace an earlier export. A single file is replaced at once; a directory cannot be opened for a moment, and if the job
            dies in it, not until it is exported again.
        since: an export of the same tensors, full or a delta: only the elements that changed since are written, in a directory that
            ``ckpt.load`` and ``ckpt.convert`` take as the whole model. It refers to ``since``, which must stay where it is. ``config`` is
            written with full exports alone.
        anchor_every: with ``since``, write a full export instead where this would be delta number ``anchor_every`` after a full one.
        memory: bytes of tensors that a rank has in windows at once.
        timeout, threads, process_group: as for ``ckpt.save``.

    Raises:
        ConflictError: something is at ``url``.
        MismatchError: ``since`` has other tensors.
        NotFoundError, FormatError, CorruptError: ``since`` is no export, or damaged.
        NamesError, UsageError: a glob fits nothing, or the options do not fit each other, the state or the translation; or the model has
            adapters of PEFT.
        StateError, LayoutError, ConsistencyError, StorageError, RankFailedError, DeadlineError: as for ``ckpt.save``.
    """
    url = url_text(url)
    options = ExportOptions(
        names=names,
        convention=convention,
        numbers=dict(numbers or {}),
        only=several(only),
        exclude=several(exclude),
        root=root,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        shard_size=shard_size,
        overwrite=overwrite,
        memory=memory,
        since=None if since is None else url_text(since),
        anchor_every=anchor_every,
    )
    group = current_group(process_group)
    wait_for_pending_save(group)
    job = ExportJob(
        call=group.call("export", url, settings.timeout(timeout)),
        options=options,
        config=config,
        threads=settings.threads(threads),
        began=time.perf_counter(),
    )
    return export_state(job, state, layout)
