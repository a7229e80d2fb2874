"""save, save_async, load and open: wiring only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ckpt.io_backends.registry import scheme_of
from ckpt.net.group import Group, Job, group_of, warn_if_others_are_missing
from ckpt.plan.layout.layout import Layout, check_layout
from ckpt.telemetry.progress import ProgressCallback, callback_of

from . import settings
from .concurrency import gc_paused
from .errors import UsageError
from .settings import check_flags
from .text import url_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpt.engine.load.fill import LoadReport, ReadOptions
    from ckpt.engine.save.background import SaveHandle
    from ckpt.engine.save.options import SaveArguments, SaveOptions, SaveReport
    from ckpt.engine.view import View


@gc_paused()
def save(
    url: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    only: str | Sequence[str] | None = None,
    trainable: bool = False,
    layout: Layout | None = None,
    check_replicas: bool = True,
    merge_flat_shards: bool = True,
    codec: str | None = None,
    reuse: bool | str | os.PathLike[str] = False,
    job: Job | None = None,
    progress: bool | ProgressCallback | None = None,
    dry_run: bool = False,
) -> SaveReport:
    """Save a state as one checkpoint. Collective: every rank of the job calls it; without torch.distributed, one process does.

    When it returns, the checkpoint is committed and durable. Whatever stood at ``url`` stays readable until then and is then
    replaced. If it raises, what stood there is untouched.

    Args:
        url: where: a path, or a URL of a known backend. All ranks must see the same storage.
        state: nested dicts, lists and tuples of modules, optimizers, schedulers, anything with ``state_dict``/``load_state_dict``,
            tensors, DTensors, numbers, strings, bytes, numpy values and :class:`ckpt.PerRank`. Values that are neither sharded
            nor ``PerRank`` must be equal on all ranks that have them. Values are text in the index: large arrays are better tensors
            (``torch.from_numpy``). Without tensors torch need not be installed.
        only: save a part: globs of names, as for :func:`load`. The checkpoint is marked as a part, and a strict load of it into a whole
            state is an error; load the base first, then the part with the same ``only=``.
        trainable: save a part: leave out parameters that do not require a gradient, and what an optimizer has for them. Load it with
            ``trainable=True``.
        layout: places for plain tensors that are parts of larger ones (Megatron-style models).
        check_replicas: compare the bytes of replicated tensors between ranks before committing.
        merge_flat_shards: store flat shards (ZeRO, Megatron's distributed optimizer, FSDP1) as whole rows: ranks send each other
            less than a row at each boundary. Without it each shard is stored as the boxes that it is made of, and nothing is sent.
        codec: ``"planes-zstd"`` (byte planes of floating-point numbers) or ``"zstd"``; chunks that do not shrink are stored as they are.
        reuse: an earlier checkpoint beside this one, in the same run. Chunks of frozen tensors that it has, bit for bit, are not written:
            the new checkpoint refers to its files, which have to stay (docs/guides/frozen-part-once.md). The earlier one must have been
            saved with ``reuse``, too. True: refer to none, and keep XXH3-128 digests of tensors that may stay as they are, so that a later
            save can name this one.
        job: which ranks take part, and how long they wait for each other.
        progress: a function that is called with the bytes that this rank has done and has to do in all, ten times a second at most, in a
            separate thread; or True for a bar on the terminal of the leading rank. If it raises, it is not called again.
        dry_run: plan the save on all ranks and write nothing: raise what cannot be saved, and report what would be written. Replicas are
            not compared. The estimate of seconds comes from the spans of the checkpoint at ``url`` or of a step beside it.

    Raises:
        StateError: a value cannot be stored.
        NamesError: a glob of ``only`` matches no name; or with ``trainable``, nothing requires a gradient.
        LayoutError: a tensor's place is not clear.
        MismatchError: the checkpoint of ``reuse`` has none of the state's tensors. Other errors of :func:`open`: it cannot be read.
        ConsistencyError: the ranks' states do not make one checkpoint; CoverageError for holes and overlaps, ReplicaError for replicas
            that differ.
        StorageError: the storage failed; NoSpaceError, AccessError, ConflictError tell how.
        RankFailedError, DeadlineError: another rank raised, died or hangs.
        ExchangeError: what another rank sent came damaged.
    """
    url = url_text(url)
    from ckpt.engine.save.job import wait_for_pending_save
    from ckpt.engine.save.save import save_state

    group = group_of(job)
    with group.fails_together("save", url):
        scheme_of(url)
        wait_for_pending_save(group)
        check_flags(dry_run=dry_run)
        given: SaveArguments = {
            "only": only,
            "trainable": trainable,
            "layout": layout,
            "check_replicas": check_replicas,
            "merge_flat_shards": merge_flat_shards,
            "codec": codec,
            "job": job,
            "progress": progress,
        }
        options = _save_options(group, url, given, reuse=reuse)
    if dry_run:
        from ckpt.engine import forecast as rehearsal

        return rehearsal.dry_run(url, state, group, options)
    return save_state(url, state, group, options, partial(_note_failure, group, url))


def save_async(
    url: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    capture: Literal["lazy", "eager"] = "lazy",
    when_busy: Literal["wait", "refuse"] = "wait",
    staging_bytes: int | None = None,
    reuse: bool | str | os.PathLike[str] = False,
    **arguments: Unpack[SaveArguments],
) -> SaveHandle:
    """Begin to save a state and return; the rest happens in the background. Collective like :func:`save`.

    The state's tensors are copied into host memory that is kept for the next save. With ``capture="lazy"`` that happens during the next
    forward and backward pass for what a ``torch.optim`` optimizer of the state steps: every such optimizer waits in ``step()`` until it is
    done. Code that changes these tensors in another way calls ``handle.fence()`` before. If one changes before it was captured, the save
    fails; only an uncounted write (``tensor.data``, numpy) to very few elements may stay unseen. Everything else, such as averages, frozen
    parameters, buffers and values that are not tensors, is captured before the call returns.

    An error is raised by the handle's methods and futures; if these are not called, the next call of :func:`save`, :func:`save_async` or
    :func:`load` of the same job raises it, on every rank. A program that ends waits for the save.

    Args:
        capture: ``"lazy"``, or ``"eager"``: when the call returns, the state may change in any way.
        when_busy: one save of a job is in flight at a time: ``"wait"`` for the one before, or ``"refuse"`` with :class:`BusyError`.
        staging_bytes: most host memory for the copy; by default as much as this rank writes. With less, capturing waits for writing.
        url, state, only, trainable, layout, check_replicas, merge_flat_shards, codec, reuse, job, progress: as for :func:`save`. What may
            be referred to is hashed before the call returns.

    Raises:
        BusyError: a save is in flight, and ``when_busy`` is ``"refuse"``.
        StateError, LayoutError, UsageError: as for :func:`save`. What else :func:`save` raises, the handle does.
    """
    url = url_text(url)
    from ckpt.engine.save.background import refuse_if_busy, start_save
    from ckpt.engine.save.job import wait_for_pending_save
    from ckpt.engine.save.options import check_capture

    group = group_of(arguments.get("job"))
    with group.fails_together("save", url):
        scheme_of(url)
        check_capture(capture, staging_bytes)
        if when_busy not in ("wait", "refuse"):
            raise UsageError(f"when_busy is 'wait' or 'refuse', not {when_busy!r}")
        options = _save_options(group, url, arguments, reuse=reuse, staging=staging_bytes)
    if when_busy == "refuse":
        refuse_if_busy(group, url, options.timeout)
    with group.fails_together("save", url):
        wait_for_pending_save(group)
    return start_save(url, state, group, options, capture, failed=partial(_note_failure, group, url))


def _note_failure(group: Group, url: str, error: BaseException, phase: str, seconds: float) -> None:
    """Note a failed save in the log of its run, if it has one."""
    from ckpt.runs.reporter import note_failed_save

    note_failed_save(group, url, error, phase, seconds)


def _save_options(
    group: Group, url: str, arguments: SaveArguments, *, reuse: bool | str | os.PathLike[str], staging: int | None = None
) -> SaveOptions:
    from ckpt.engine.save.options import SaveOptions

    if (layout := arguments.get("layout")) is not None:
        check_layout(layout, group.ranks)
    warn_if_others_are_missing(group)
    progress = arguments.get("progress")
    bar = None if progress is None else callback_of(progress=progress, leads=group.rank == group.leader, title=f"save {url}")
    base = None if isinstance(reuse, bool) else url_text(reuse)
    if not isinstance(reuse, bool) and not isinstance(base, str):
        raise UsageError(
            f"reuse= is the path or URL of an earlier checkpoint, True or False, not {reuse!r}", hint="an Anchor is for ckpt.Checkpointer"
        )
    return SaveOptions.of(arguments, progress=bar, base=base, reusable=reuse is True, staging=staging)


@gc_paused()
def load(
    url: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    only: str | Sequence[str] | None = None,
    trainable: bool = False,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    cast: bool = False,
    read: ReadOptions | None = None,
    layout: Layout | None = None,
    job: Job | None = None,
    progress: bool | ProgressCallback | None = None,
    dry_run: bool = False,
) -> LoadReport:
    """Load a checkpoint into a state, in place, whatever layout and number of ranks it was saved with. Collective like :func:`save`.

    Tensors are filled where they are; meta tensors that the checkpoint has get memory; an optimizer's state is created where it has
    none yet. Dicts, lists and sets stay the same objects, other values are replaced in them; a dict of plain values also takes the keys
    that only the checkpoint has. Nothing changes before every rank has found that everything fits.

    Args:
        url: the checkpoint. Of the step of a run of several jobs, that of one member: ``ckpt.open(url, member="trainer").url``.
        state: as for :func:`save`; its tensors say what this rank needs.
        only: globs of names in the state to load; all others are left alone.
        trainable: leave parameters alone that do not require a gradient, and what an optimizer has for them.
        rename: name or glob in the checkpoint → name or glob in the state; one ``*`` on each side stands for the same text, and the first
            rule that matches decides. The state of an optimizer has its own names: with ``"model.*": "net.*"`` goes
            ``"optimizer.state.model.*": "optimizer.state.net.*"``. Its groups follow their parameters. Names of parameters within their
            module, as DCP writes them, need no rule: the module in front is found after these renames.
        strict: whether missing and unexpected names are errors. They are in the report either way.
        cast: whether tensors of another dtype are converted, as ``Tensor.copy_`` does. Complex numbers do not become real ones.
        read: how it reads, and what it checks.
        progress: as for :func:`save`. Bytes are those of this rank's tensors; what other ranks read for it counts at the end.
        dry_run: plan the load on all ranks and change nothing: read the index and the headers of files only, raise what does not fit, and
            report what would be read. The estimate of seconds comes from the newest load in the run's log; without one, each rank reads a
            sample of its reads, for a quarter of a second. Objects of the state are not asked whether they take their values.
        layout, job: as for :func:`save`.

    Raises:
        NotFoundError, NotCommittedError, FormatError: there is no checkpoint that can be read.
        NamesError, ShapeError, MismatchError: it does not fit the state; nothing was changed, unless the message states that it is
            partly overwritten.
        StateError, LayoutError: as for :func:`save`; or something cannot be filled in place.
        CorruptError: bytes are damaged; the state may be partly overwritten; the message states it. Or it does not fit the state, and a
            rebuild could not recover all of it (``ckpt rebuild``); then nothing was changed.
        StorageError, RankFailedError, DeadlineError, ExchangeError: as for :func:`save`.
    """
    url = url_text(url)
    from ckpt.engine.load.fill import LoadOptions, ReadOptions
    from ckpt.engine.load.load import load_state
    from ckpt.io_backends.registry import is_file_system
    from ckpt.plan.match import Selection, globs_of_only, rules_of_rename

    group = group_of(job)
    with group.fails_together("load", url):
        scheme_of(url)
        job = Job.of(job)
        if group.saves:
            from ckpt.engine.save.job import wait_for_pending_save

            wait_for_pending_save(group)
        if layout is not None:
            check_layout(layout, group.ranks)
        check_flags(strict=strict, cast=cast, dry_run=dry_run, trainable=trainable)
        read = ReadOptions.of(read)
        selection = Selection(only=globs_of_only(only), rename=rules_of_rename(rename), trainable=trainable)
        options = LoadOptions(
            layout=layout,
            selection=selection,
            strict=strict,
            cast=cast,
            verify=read.verify,
            exchange="none" if read.exchange is False else "parts" if read.exchange is None and is_file_system(url) else "all",
            timeout=settings.timeout(job.timeout),
            threads=settings.threads(job.threads),
            sources=settings.sources(read.sources),
            progress=None if progress is None else callback_of(progress=progress, leads=group.rank == group.leader, title=f"load {url}"),
            dry_run=dry_run,
        )
    if dry_run:
        from ckpt.engine import dry_run_load as rehearsal

        return rehearsal.dry_run(url, state, group, options)
    return load_state(url, state, group, options)


def open(
    url: str | os.PathLike[str],
    *,
    member: str | None = None,
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
) -> View:
    """Look into a checkpoint, in one process. Reads the index; tensors are read when they are indexed.

    Args:
        member: of the step of a run of several jobs: whose checkpoint (docs/guides/joint-run.md).
        sources: directories or URLs below which the files may lie that a virtual checkpoint points into; ``()``: none, so virtual
            checkpoints are refused. By default as ``CKPT_SOURCES`` has it, and without it wherever the checkpoint points: it may name any
            file or URL that this process can read, so give ``sources`` for checkpoints of people whom you do not trust.

    Raises:
        NotFoundError, NotCommittedError, FormatError, CorruptError: there is no checkpoint that can be read.
        AccessError: when a tensor is read: its file does not lie below ``sources``.
    """
    url = url_text(url)
    from ckpt.engine.view import View
    from ckpt.formats.registry import open_catalog

    if member is not None:
        from ckpt.runs.members import member_url

        url = member_url(url, member)
    return View(open_catalog(url, sources=settings.sources(sources)))
