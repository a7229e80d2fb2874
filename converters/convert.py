"""Conversions: what is chosen of a checkpoint, written in another format; in bounded memory, resumable, by one process or several.

Invariants: nothing can be opened at the destination before all of it is durable. A file is written by one process, and all compute from the
plan which one does (``plan.machines.balanced``). Processes that communicate let the first one finish (``pipeline.divided``); of those that
do not, whoever finds all files there does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt import settings
from ckpt.catalog import Catalog
from ckpt.converters.pipeline.conversion import Conversion
from ckpt.converters.pipeline.divided import Part, WrittenFiles, replacements_noticed, write_divided
from ckpt.converters.pipeline.repair import RepairReport, repaired
from ckpt.converters.pipeline.target import ConvertKeywords, ConvertOptions, Target, target
from ckpt.converters.select.selection import OutputSet
from ckpt.converters.targets.hf import read_configuration
from ckpt.errors import MismatchError, UsageError
from ckpt.formats.registry import open_catalog
from ckpt.telemetry.callbacks import ProgressCallback
from ckpt.text import url_text

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """What a conversion did, or with ``dry_run`` would do. Bytes are those of tensors at the destination, or of whole files."""

    source: str
    target: str
    source_format: str
    to: str
    tensors: int
    tensor_bytes: int
    files: tuple[str, ...]
    """Of tensors, at the destination; all processes' together."""
    file_bytes: int
    """Of these files together."""
    id: str
    """Of the save, for ``native``; for others of the conversion."""
    written_files: int
    """By this process, now: the others were there, or are other processes'."""
    written_bytes: int
    read_bytes: int
    left_out: tuple[str, ...]
    """Stored tensors of which nothing is converted, and paths of values that a translation could not take along."""
    finished: bool
    """Whether the checkpoint exists at the destination; False if other processes are not ready, and with ``dry_run``."""
    seconds: float
    repair: RepairReport | None = None
    """What was repaired of the source on the way; None if that was not asked for."""
    notes: tuple[str, ...] = ()
    """What else the user should know: for ``hf``, what ``config.json`` was made of, or why it was not."""


def convert(
    source: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    to: str,
    part: Part = (0, 1),
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
    **options: Unpack[ConvertKeywords],
) -> ConvertReport:
    """Write the checkpoint at ``source``, of any known format, at ``url`` in the format ``to``: ``native``, ``hf``, ``torch``, ``dcp``,
    ``torch_dist`` or ``megatron``.

    If a conversion was killed, the same call resumes it: whole files stay.

    Args:
        part: number of this process, and how many there are that make the same call, at once or one after another. Or, of processes that
            communicate, the work that they divide: each gives the report of all, and finishes or fails when all do.
        dry_run: only report what would be written.
        progress: called with the bytes that this process has written so far, and all that it has to.
        views: from the shapes of stored tensors to the tensors to make of them (``mapping.convention.translated``); filling becomes zeros.
        only, exclude: globs of new names.
        optimizer: take optimizers too (the default). ``hf`` never does.
        dtype: of floating-point tensors that are no optimizer's: ``"bfloat16"`` and the like. By default as they are.
        root: the key of the state that has the model: for ``hf`` and ``megatron`` by default the only one with tensors, for
            ``torch_dist`` ``model``.
        skip: globs of stored names: these tensors are left out, and ``views`` does not see them.
        shard_size: bytes of a file, about. By default 5 GB for ``hf`` and 4 GiB for others; ``torch`` has one file.
        parallel: the ranks to write for, with ``megatron``; by default one.
        memory: bytes for tensors in memory, 1 GiB by default.
        threads: how many threads read at once (``CKPT_THREADS``).
        overwrite: replace a checkpoint of ours at ``url``; only ``native`` can.
        verify: read every file again, and compare it with what was written. What is read of a source with digests is always compared.
        repair: put right what is known to be written wrong, and report it (``pipeline.repair``). Reads master weights twice more.
        job: for ``repair``, arguments of the Megatron job that the checkpoint does not keep: ``{"data_parallel_size": 12}``.
        config: for ``hf``, the path or URL of a ``config.json``, or of a directory that has it, from where tokenizer files come too.
            Without it, these files are taken from beside the source.
        require_config: for ``hf``, raise UsageError, and write nothing, where there is no ``config.json`` to go with the weights.

    Raises:
        NotFoundError, NotCommittedError, FormatError, CorruptError: there is no whole checkpoint of a known format at ``source``.
        ConflictError: something is at ``url``: a checkpoint, another conversion, or a symbolic link in the place of the directory.
        NamesError: a glob fits nothing, or views do not fit.
        UsageError: the options do not fit each other or the checkpoint, or it cannot be repaired.
        StorageError: the storage failed. What is whole at ``url`` stays there for the next attempt.
    """
    source, url, began = url_text(source), url_text(url), time.monotonic()
    conversion, repair = _conversion(source, url, to, ConvertOptions(**options))
    return run(conversion, source=source, part=part, progress=progress, dry_run=dry_run, repair=repair, began=began)


def _conversion(source: str, url: str, to: str, options: ConvertOptions) -> tuple[Conversion, RepairReport | None]:
    """What is taken of the source, ready to be written; and what was repaired of it."""
    format, catalog = target(to), open_catalog(source)
    beside = files_beside(format, url, options)
    chosen, repair = _chosen(format, catalog, options)
    needed = repair if repair is not None and repair.needed else None
    return Conversion(format, chosen, url, options, repair=needed, beside=beside), repair


def files_beside(format: Target, url: str, options: ConvertOptions) -> Mapping[str, bytes]:
    """What the options ask for beside the tensors, once their memory and configuration are checked."""
    if not isinstance(options.memory, int):
        raise UsageError(f"memory= is a number of bytes, not {options.memory!r}", hint="memory=1 << 30")
    if options.memory < settings.LEAST_MEMORY:
        raise UsageError(f"{options.memory} bytes of memory are too few", hint=f"at least --memory {settings.LEAST_MEMORY >> 20}MiB")
    if options.config is not None and (format.name != "hf" or format.one_file(url)):
        raise UsageError("a configuration lies beside the files of a directory", hint="--config is for --to hf, and a directory")
    return read_configuration(options.config).files


def run(
    conversion: Conversion,
    *,
    source: str,
    part: Part = (0, 1),
    progress: ProgressCallback | None = None,
    dry_run: bool = False,
    repair: RepairReport | None = None,
    began: float,
) -> ConvertReport:
    """This process's part of a conversion, which ``began`` at that time of the monotonic clock."""
    chosen = conversion.chosen
    written = _write(conversion, part, progress, dry_run=dry_run)
    plan = written.plan
    return ConvertReport(
        source=source,
        target=conversion.url,
        source_format=chosen.catalog.format,
        to=conversion.format.name,
        tensors=len(chosen.tensors),
        tensor_bytes=sum(i.length for f in plan.files for i in f.items),
        files=tuple(f.path for f in plan.files),
        file_bytes=sum(f.size for f in plan.files),
        id=conversion.id,
        written_files=written.files,
        written_bytes=written.bytes,
        read_bytes=written.read,
        left_out=tuple(sorted({*chosen.catalog.tensors} - chosen.taken - chosen.united | {*chosen.left_out})),
        finished=written.finished,
        seconds=time.monotonic() - began,
        repair=repair,
        notes=conversion.format.notes(chosen) if conversion.name is None and conversion.options.config is None else (),
    )


def _write(conversion: Conversion, part: Part, progress: ProgressCallback | None, *, dry_run: bool) -> WrittenFiles:
    if not dry_run and not isinstance(part, tuple):
        return write_divided(conversion, part, progress)
    plan = conversion.look() if dry_run or not isinstance(part, tuple) else conversion.begin(part)
    missing, read, finished = conversion.missing(plan), 0, False
    if not dry_run:
        try:
            with replacements_noticed(conversion.chosen):
                read = conversion.write(plan, missing, progress=progress)
        except MismatchError:
            conversion.discard(plan)
            raise
        finished = conversion.finish(plan, again=not missing)
    size = sum(plan.files[i].size for i in missing)
    return WrittenFiles(plan=plan, files=len(missing), bytes=size, read=read, finished=finished)


def _chosen(format: Target, catalog: Catalog, options: ConvertOptions) -> tuple[OutputSet, RepairReport | None]:
    """What is converted, and what was repaired of it if that is asked for."""
    chosen = format.choose(catalog, options.selection)
    if options.repair:
        return repaired(chosen, options.job, threads=options.threads)
    if options.job:
        raise UsageError("arguments of the job are for a repair", hint="--repair")
    return chosen, None
