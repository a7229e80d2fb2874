"""Conversions: what is chosen of a checkpoint, written in another format; in bounded memory, resumable, by one process or several.

Invariants: nothing can be opened at the destination before all of it is durable. A file is written by one process, and all compute from the
plan which one does (``plan.machines.balanced``). Processes that communicate let the first one finish (``write_divided``); of those that
do not, whoever finds all files there does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt import settings, units
from ckpt.converters.targets.hf import read_configuration
from ckpt.errors import CkptError, ConsistencyError, FormatError, MismatchError, RankFailedError, UsageError
from ckpt.formats.megatron.names import EMBEDDING
from ckpt.formats.megatron.repair import RepairedTensor, repaired_catalog, repaired_states
from ckpt.formats.megatron.stored_buffers import NAMES, Buckets, likely_buckets
from ckpt.formats.megatron.training import CONTENT, MARK, STATE, MegatronCatalog
from ckpt.formats.native.catalog import replacement_noticed
from ckpt.formats.registry import open_catalog
from ckpt.net.channel import Row
from ckpt.net.divided_work import DividedWork
from ckpt.plan.machines import balanced, bytes_of
from ckpt.settings import __version__, check_flags
from ckpt.telemetry.progress import ProgressCallback, check_progress
from ckpt.text import url_text

from .conversion import Conversion
from .selection import OutputSet
from .semantic import misfit_masters
from .target import ConvertKeywords, ConvertOptions, OutputPlan, Target, check_sizes, target

if TYPE_CHECKING:
    from typing_extensions import Unpack


# A conversion that several processes divide among them, and that communicate: the first one begins and finishes it, each writes its files.
#
# Invariants: nobody writes before the first process has begun, and that one finishes only when every process has said that its files are
# durable. The files that are left at the begin are divided, not all: after a kill, any number of processes resumes.

log = logging.getLogger("ckpt")

Part = tuple[int, int] | DividedWork
"""Number of this process and how many there are, which do not communicate; or the work of processes that do."""


Counts = dict[str, int]
"""Files that were written, their bytes, bytes read of the sources, and whether the checkpoint exists (``finished``)."""


def write_divided(conversion: Conversion, work: DividedWork, progress: ProgressCallback | None) -> tuple[OutputPlan, Counts]:
    """Write the conversion, together with the other processes of ``work``. Every process gives the counts of all."""
    if conversion.name is not None:
        text = f"{conversion.format.name} writes one file, and a file is written by one process"
        raise UsageError(text, where=conversion.url, hint="run the command in one process; --threads sets its number of threads")
    plans: list[OutputPlan] = []

    def begin(rows: dict[int, Row]) -> Row:
        (first, expected), *others = rows.items()
        for rank, row in others:
            if row != expected:
                raise ConsistencyError(
                    f"processes {first} and {rank} do not see the same source, or have other versions of ckpt",
                    hint="give all of them a source on storage that they share; do not write to it meanwhile",
                )
        plans.append(conversion.begin(None))
        left = conversion.missing(plans[0])
        if left and len(left) < work.count:
            text = "%d of %d processes have nothing to write: %d files are left. Smaller ones (--shard-size) divide better"
            log.warning(text, work.count - len(left), work.count, len(left))
        return {"id": conversion.id, "ended": conversion.has_ended, "left": left}

    begun = work.agree("begin", lambda: {"digest": conversion.digest}, begin)
    plan = plans[0] if plans else conversion.join(begun["id"], ended=begun["ended"])
    sizes = [plan.files[number].size for number in begun["left"]]
    shares = balanced(sizes, work.count)
    mine = [begun["left"][n] for n in shares[work.number]]

    def write() -> Row:
        with replacements_noticed(conversion.chosen):
            # What a lost process has made durable counts as written, and is not written again.
            again = set(conversion.missing(plan)) if work.repeats else mine
            read = conversion.write(plan, [n for n in mine if n in again], progress=report)
        return {"files": len(mine), "bytes": sum(plan.files[i].size for i in mine), "read": read}

    def finish(rows: dict[int, Row]) -> Row:
        return {
            **{name: sum(row[name] for row in rows.values()) for name in ("files", "bytes", "read")},
            "finished": conversion.finish(plan, again=True),
        }

    try:
        with work.shown(bytes_of(sizes, shares), progress) as report:
            return plan, work.agree("write", write, finish)
    except CkptError as err:
        kind = err.cause_class() if isinstance(err, RankFailedError) else type(err)
        if issubclass(kind, MismatchError):
            work.agree("discard", dict, lambda rows: conversion.discard(plan))
        raise


@contextmanager
def replacements_noticed(chosen: OutputSet) -> Iterator[None]:
    """Around reads of what was chosen: a checkpoint that was replaced meanwhile is an error that says so."""
    with ExitStack() as watched:
        for catalog in chosen.catalogs:
            watched.enter_context(replacement_noticed(catalog))
        yield


# Conversions that repair what is known to be written wrong: states of optimizers that Megatron-Core 0.15 to 0.19 displaced. No torch.
#
# Invariant: a repaired checkpoint is one whose every master, cast, is its weight; what is not wrong is not touched.

HINT = "say how the job put parameters into buckets: --job ddp_bucket_size=N, --job data_parallel_size=N, or another of its arguments"


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairReport:
    """What a repair did. Without need nothing is changed, and ``reason`` says why not.

    ``bucket_size`` (None: one bucket), ``data_parallel`` and ``divisor`` are the buckets that it found the elements with; ``masters`` were
    compared with their weights.
    """

    needed: bool
    reason: str
    masters: int = 0
    bucket_size: int | None = None
    data_parallel: int | None = None
    divisor: int | None = None
    tensors: tuple[RepairedTensor, ...] = ()
    """Those of the conversion that were mended or filled."""

    @property
    def mended(self) -> int:
        return sum(t.mended for t in self.tensors)

    @property
    def filled(self) -> int:
        return sum(t.filled for t in self.tensors)


def repaired(chosen: OutputSet, job: Mapping[str, int], *, threads: int | None = None) -> tuple[OutputSet, RepairReport]:
    """The same choice of a repaired checkpoint. All masters are read and compared with the weights, before and after.

    Args:
        job: arguments of Megatron that the checkpoint does not have, or has wrong: ``formats.megatron.job.NAMES``.
    """
    unknown = sorted(set(job) - set(NAMES))
    if unknown:
        raise UsageError(f"--job {unknown[0]}: no argument that a repair needs", hint=f"one of {', '.join(NAMES)}")
    catalog = chosen.catalog
    if not isinstance(catalog, MegatronCatalog) or catalog.suspect is None:
        return chosen, RepairReport(needed=False, reason=f"no defect is known in such a checkpoint ({catalog.format})")
    taken = chosen.taken()
    if not any(name.startswith(STATE) for name in taken):
        raise UsageError(
            "--repair is for states of optimizers, and none is converted", hint="leave out --repair, or take the optimizer too"
        )
    masters, problem = misfit_masters(catalog, threads=threads)
    if not masters:
        raise FormatError("no master can be compared with its weight, so whether states are displaced is unknown", where=catalog.url)
    if problem is None:
        return chosen, RepairReport(needed=False, reason="every master is its weight", masters=masters)
    arguments = {**catalog.arguments, **job}
    tried = likely_buckets(arguments)
    for buckets in tried:
        result = _mended(catalog, buckets, arguments, threads)
        if result is not None:
            mended, tensors = result
            mending = RepairReport(
                needed=True,
                reason="states were displaced by the padding of buckets (Megatron-LM pull request 5077)",
                masters=masters,
                bucket_size=buckets.size,
                data_parallel=buckets.ranks,
                divisor=buckets.divisor,
                tensors=tuple(t for t in tensors if t.tensor in taken),
            )
            state = chosen.state
            if isinstance(state, dict) and CONTENT in state:  # in which form Megatron-Core wrote it; it is ours now, so nobody suspects it
                state = {**state, MARK: __version__}
            return replace(chosen, catalog=mended, state=state), mending
    attempts = " or ".join(
        f"{'one bucket' if b.size is None else f'buckets of {b.size:,}'} and data-parallel size {b.ranks}" for b in tried
    )
    what = f"{problem.tensor} is not its weight, and would not be with {attempts} either"
    raise UsageError(f"the optimizer's state cannot be repaired: {what}", where=catalog.url, hint=_hint(catalog, arguments))


def _hint(catalog: MegatronCatalog, arguments: Mapping[str, object]) -> str:
    """What to say of the job: the arguments that nobody said, and what the files let one think of its pipeline."""
    unknown = [name for name in NAMES if arguments.get(name) is None]
    advice = f"; nothing says {', '.join(unknown)}" if unknown else ""
    states = [entry for name, entry in catalog.tensors.items() if name.startswith(STATE)]
    writers = {catalog.files[row].rank for entry in states for row in entry.grid.files}
    embedding = catalog.tensors.get(f"{STATE}{EMBEDDING}.master")
    tensor = 1 if embedding is None else len({int(o) for o in embedding.grid.all_boxes()[0][:, 0]})
    stages, rest = divmod(len(writers), tensor)
    if stages > 1 and not rest and arguments.get("pipeline_model_parallel_size") in (None, 1):
        advice += f". {len(writers)} ranks wrote the state, so it may be that --job pipeline_model_parallel_size={stages} is missing"
    return HINT + advice


def _mended(
    catalog: MegatronCatalog, buckets: Buckets, arguments: Mapping[str, object], threads: int | None
) -> tuple[MegatronCatalog, tuple[RepairedTensor, ...]] | None:
    """The catalog repaired for such buckets; None if masters would not be weights."""
    try:
        states = repaired_states(catalog, buckets, arguments)
    except UsageError:
        return None
    mended, tensors = repaired_catalog(catalog, states)
    _, problem = misfit_masters(mended, threads=threads)
    return (mended, tensors) if problem is None else None


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

    def __str__(self) -> str:
        contents = f"{units.plural(self.tensors, 'tensor')}, {units.size(self.tensor_bytes)}"
        return f"wrote {contents}, to {self.target} in {units.duration(self.seconds)}{'' if self.finished else ', not finished'}"


def convert(
    source: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    to: str,
    part: Part | None = None,
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
        dtype: of floating-point tensors that do not belong to an optimizer: ``"bfloat16"`` and the like. By default as they are.
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
    asked = ConvertOptions(**options)
    format, catalog = target(to), open_catalog(source)
    beside = files_beside(format, url, asked)
    chosen, repair = format.choose(catalog, asked), None
    if asked.repair:
        chosen, repair = repaired(chosen, asked.job, threads=asked.threads)
    elif asked.job:
        raise UsageError("arguments of the job are for a repair", hint="--repair")
    needed = repair if repair is not None and repair.needed else None
    conversion = Conversion(format, chosen, url, asked, repair=needed, beside=beside)
    return run(conversion, source=source, part=part, progress=progress, dry_run=dry_run, repair=repair, began=began)


def files_beside(format: Target, url: str, options: ConvertOptions) -> Mapping[str, bytes]:
    """What the options ask for beside the tensors, once their memory and configuration are checked."""
    check_flags(**{name: getattr(options, name) for name in ("optimizer", "overwrite", "verify", "repair", "require_config")})
    check_sizes(memory=options.memory, shard_size=options.shard_size)
    if options.memory < settings.LEAST_MEMORY:
        raise UsageError(f"{options.memory} bytes of memory are too few", hint=f"at least --memory {settings.LEAST_MEMORY >> 20}MiB")
    if options.config is not None and (format.name != "hf" or format.one_file(url)):
        raise UsageError("a configuration lies beside the files of a directory", hint="--config is for --to hf, and a directory")
    return {} if options.config is None else read_configuration(options.config).files


def run(
    conversion: Conversion,
    *,
    source: str,
    part: Part | None = None,
    progress: ProgressCallback | None = None,
    dry_run: bool = False,
    repair: RepairReport | None = None,
    began: float,
) -> ConvertReport:
    """This process's part of a conversion, which ``began`` at that time of the monotonic clock."""
    chosen = conversion.chosen
    check_flags(dry_run=dry_run)
    check_progress(progress)
    if part is not None and not isinstance(part, DividedWork):
        pair = isinstance(part, tuple) and len(part) == 2 and all(isinstance(n, int) for n in part)
        if not (pair and 0 <= part[0] < part[1]):
            raise UsageError(f"part= is the number of this process, from 0, and how many there are, not {part!r}", hint="part=(0, 4)")
    if not dry_run and isinstance(part, DividedWork):
        plan, counts = write_divided(conversion, part, progress)
    else:
        plan = conversion.look() if dry_run or isinstance(part, DividedWork) else conversion.begin(part)
        missing, read, finished = conversion.missing(plan), 0, False
        if not dry_run:
            try:
                with replacements_noticed(chosen):
                    read = conversion.write(plan, missing, progress=progress)
            except MismatchError:
                conversion.discard(plan)
                raise
            finished = conversion.finish(plan, again=not missing)
        size = sum(plan.files[i].size for i in missing)
        counts = {"files": len(missing), "bytes": size, "read": read, "finished": finished}
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
        written_files=counts["files"],
        written_bytes=counts["bytes"],
        read_bytes=counts["read"],
        left_out=tuple(sorted({*chosen.catalog.tensors} - chosen.taken() - chosen.united | {*chosen.left_out})),
        finished=bool(counts["finished"]),
        seconds=time.monotonic() - began,
        repair=repair,
        notes=conversion.format.notes(chosen) if conversion.name is None and conversion.options.config is None else (),
    )
