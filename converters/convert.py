"""Conversions: what is chosen of a checkpoint, written in another format; in bounded memory, resumable, by one process or several.

Invariants: nothing can be opened at the destination before all of it is durable. A file is written by one process, number ``i`` by process
``i mod`` the number of processes, so nobody has to divide the work; whoever finds all files there finishes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.catalog import Catalog
from ckpt.converters.pipeline.conversion import Conversion, Progress
from ckpt.converters.pipeline.parallel import MegatronParallel
from ckpt.converters.pipeline.repair import RepairReport, repaired
from ckpt.converters.pipeline.target import Target, target
from ckpt.converters.select.selection import OutputSet, SelectOptions, Views
from ckpt.converters.targets.hf_config import read_configuration
from ckpt.errors import UsageError
from ckpt.formats.native.replaced import replacement_noticed
from ckpt.formats.registry import open_catalog
from ckpt.plan.match import several

MEMORY = 1 << 30
"""Bytes for tensors in memory, unless the caller says."""
SMALLEST = 32 << 20


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


def convert(
    source: str,
    url: str,
    *,
    to: str,
    views: Views | None = None,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    optimizer: bool = True,
    dtype: str | None = None,
    root: str | None = None,
    skip: Sequence[str] = (),
    shard_size: int | None = None,
    parallel: MegatronParallel | None = None,
    memory: int = MEMORY,
    threads: int | None = None,
    overwrite: bool = False,
    verify: bool = False,
    part: tuple[int, int] = (0, 1),
    dry_run: bool = False,
    repair: bool = False,
    job: Mapping[str, int] | None = None,
    config: str | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write the checkpoint at ``source``, of any known format, at ``url`` in the format ``to``: ``native``, ``hf``, ``torch``, ``dcp``,
    ``torch_dist`` or ``megatron``.

    A conversion that was killed goes on when the same call is made again; files that are whole stay.

    Args:
        views: from the shapes of stored tensors to what shall be made of them (``mapping.convention.translated``); filling becomes
            zeros.
        only, exclude: globs of new names.
        optimizer: take optimizers too. ``hf`` never does.
        dtype: of floating-point tensors that are no optimizer's: ``"bfloat16"`` and the like. By default as they are.
        root: the key of the state that has the model: for ``hf`` and ``megatron`` by default the only one with tensors, for
            ``torch_dist`` ``model``.
        skip: globs of stored names: these tensors are left out, and ``views`` does not see them.
        shard_size: bytes of a file, about. By default 5 GB for ``hf`` and 4 GiB for others; ``torch`` has one file.
        parallel: the ranks to write for, with ``megatron``; by default one.
        memory: bytes for tensors in memory.
        overwrite: replace a checkpoint of ours at ``url``; only ``native`` can.
        verify: read every file again, and compare it with what was written. What is read of a source with digests is always compared.
        part: number of this process, and how many there are that make the same call, at once or one after another.
        repair: put right what is known to be written wrong, and say what (``pipeline.repair``). Masters are read twice more for it.
        job: for ``repair``, arguments of the Megatron job that the checkpoint does not keep: ``{"data_parallel_size": 12}``.
        config: for ``hf``, the path or URL of a ``config.json``, or of a directory that has it, from where tokenizer files come too: what
            lies beside the source is not asked then.

    Raises:
        NotFoundError, NotCommittedError, FormatError, CorruptError: there is no whole checkpoint of a known format at ``source``.
        ConflictError: something is at ``url``: a checkpoint, another conversion, or a symbolic link in the place of the directory.
        NamesError: a glob fits nothing, or views do not fit.
        UsageError: the options do not fit each other or the checkpoint, or it cannot be repaired.
        StorageError: the storage failed. What is whole at ``url`` stays there for the next attempt.
    """
    began = time.monotonic()
    if memory < SMALLEST:
        raise UsageError(f"{memory} bytes of memory are too few", hint=f"at least --memory {SMALLEST >> 20}MiB")
    format, catalog = target(to), open_catalog(source)
    if config is not None and (to != "hf" or format.one_file(url)):
        raise UsageError("a configuration lies beside the files of a directory", hint="--config is for --to hf, and a directory")
    beside = read_configuration(config).files
    choice = SelectOptions(
        views=views, only=several(only), exclude=several(exclude), optimizer=optimizer, dtype=dtype, root=root, skip=several(skip)
    )
    chosen, mending = _chosen(format, catalog, choice, repair=repair, job=job or {}, threads=threads)
    conversion = Conversion(
        format, chosen, url, shard_size=shard_size, parallel=parallel, overwrite=overwrite, mending=mending, beside=beside
    )
    planned = conversion.look() if dry_run else conversion.begin(part)
    missing, read = conversion.missing(planned), 0
    if not dry_run:
        with replacement_noticed(catalog):
            read = conversion.write(planned, missing, memory=memory, threads=threads, verify=verify, progress=progress)
    written = [planned.files[i] for i in missing]
    return ConvertReport(
        source=source,
        target=url,
        source_format=catalog.format,
        to=to,
        tensors=len(chosen.tensors),
        tensor_bytes=sum(i.length for f in planned.files for i in f.items),
        files=tuple(f.path for f in planned.files),
        file_bytes=sum(f.size for f in planned.files),
        id=conversion.id,
        written_files=len(written),
        written_bytes=sum(f.size for f in written),
        read_bytes=read,
        left_out=tuple(sorted({*catalog.tensors} - chosen.taken - chosen.united | {*chosen.left_out})),
        finished=not dry_run and conversion.finish(planned, again=not missing),
        seconds=time.monotonic() - began,
        repair=mending,
    )


def _chosen(
    format: Target, catalog: Catalog, choice: SelectOptions, *, repair: bool, job: Mapping[str, int], threads: int | None
) -> tuple[OutputSet, RepairReport | None]:
    """What is converted, and what was repaired of it if that is asked for."""
    chosen = format.choose(catalog, choice)
    if repair:
        return repaired(chosen, job, threads=threads)
    if job:
        raise UsageError("arguments of the job are for a repair", hint="--repair")
    return chosen, None
