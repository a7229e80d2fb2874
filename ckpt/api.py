"""save, load and open: wiring only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from . import settings
from .errors import UsageError
from .group import Group, current_group
from .rules import Layout
from .view import View

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .engine.load import LoadReport
    from .engine.save import SaveReport


def save(
    url: str,
    state: Mapping[str, Any],
    *,
    layout: Layout | None = None,
    check_replicas: bool = True,
    timeout: float | None = None,
    threads: int | None = None,
    process_group: ProcessGroup | None = None,
) -> SaveReport:
    """Save a state as one checkpoint. Collective: every rank of the job calls it; without torch.distributed, one process does.

    When it returns, the checkpoint is committed and durable. Whatever stood at ``url`` stays readable until then and is then
    replaced. If it raises, what stood there is untouched.

    Args:
        url: where: a path, or a URL of a known backend. All ranks must see the same storage.
        state: nested dicts, lists and tuples of modules, optimizers, schedulers, anything with ``state_dict``/``load_state_dict``,
            tensors, DTensors, numbers, strings, bytes, numpy values and :class:`ckpt.PerRank`. What is not sharded and not ``PerRank``
            must be equal on all ranks that have it.
        layout: places for plain tensors that are parts of larger ones (Megatron-style models).
        check_replicas: compare the bytes of replicated tensors between ranks before committing.
        timeout: seconds without a sign of life after which a rank counts as dead (``CKPT_TIMEOUT``, 600).
        threads: threads that this rank writes with (``CKPT_THREADS``, 4).
        process_group: the ranks that take part, if not all.

    Raises:
        StateError: a value cannot be stored.
        LayoutError: a tensor's place is not clear.
        ConsistencyError: the ranks' states do not make one checkpoint; CoverageError for holes and overlaps, ReplicaError for replicas
            that differ.
        StorageError: the storage failed; NoSpaceError, AccessError, ConflictError tell how.
        RankFailedError, DeadlineError: another rank raised, died or hangs.
    """
    from .engine.save import SaveOptions, save_state

    group = current_group(process_group)
    with _told(group, "save", url):
        _check_layout(layout, group)
        options = SaveOptions(
            layout=layout, timeout=settings.timeout(timeout), check_replicas=check_replicas, threads=settings.threads(threads)
        )
    return save_state(url, state, group, options)


def load(
    url: str,
    state: Mapping[str, Any],
    *,
    only: str | Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: Literal["full", "partial", "off"] = "full",
    layout: Layout | None = None,
    timeout: float | None = None,
    threads: int | None = None,
    process_group: ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint into a state, in place, whatever layout and number of ranks it was saved with. Collective like :func:`save`.

    Tensors are filled where they are; meta tensors that the checkpoint has get memory; an optimizer's state is created where it has
    none yet. Dicts, lists and sets stay the same objects, other values are replaced in them; a dict of plain values also takes the keys
    that only the checkpoint has. Nothing changes before every rank has found that everything fits.

    Args:
        url: the checkpoint.
        state: as for :func:`save`; its tensors say what this rank needs.
        only: globs of names in the state to load; all others are left alone.
        rename: name or glob in the checkpoint → name or glob in the state; one ``*`` on each side stands for the same text, and the first
            rule that matches decides. The state of an optimizer has names of its own: with ``"model.*": "net.*"`` goes
            ``"optimizer.state.model.*": "optimizer.state.net.*"``. Its groups follow their parameters.
        strict: whether missing and unexpected names are errors. They are in the report either way.
        cast: whether tensors of another dtype are converted, as ``Tensor.copy_`` does. Complex numbers do not become real ones.
        verify: ``"full"`` reads every touched chunk whole and checks it; ``"partial"`` reads only what is needed and checks the chunks that
            are needed whole; ``"off"`` checks nothing.
        layout, timeout, threads, process_group: as for :func:`save`.

    Raises:
        NotFoundError, NotCommittedError, FormatError: there is no checkpoint that can be read.
        NamesError, ShapeError, MismatchError: it does not fit the state; nothing was changed, unless the message says that the state is
            partly overwritten.
        StateError, LayoutError: as for :func:`save`; or something cannot be filled in place.
        CorruptError: bytes are damaged; the state may be partly overwritten, as the message says.
        StorageError, RankFailedError, DeadlineError: as for :func:`save`.
    """
    from .engine.load import LoadOptions, load_state
    from .plan.match import Selection

    group = current_group(process_group)
    with _told(group, "load", url):
        _check_layout(layout, group)
        if verify not in ("full", "partial", "off"):
            raise UsageError(f"verify must be 'full', 'partial' or 'off', not {verify!r}")
        selection = Selection(only=(only,) if isinstance(only, str) else tuple(only or ()), rename=tuple((rename or {}).items()))
        options = LoadOptions(
            layout=layout,
            selection=selection,
            strict=strict,
            cast=cast,
            verify=verify,
            timeout=settings.timeout(timeout),
            threads=settings.threads(threads),
        )
    return load_state(url, state, group, options)


def open(url: str) -> View:
    """Look into a checkpoint, in one process. Reads the index; tensors are read when they are indexed.

    Raises:
        NotFoundError, NotCommittedError, FormatError, CorruptError: there is no checkpoint that can be read.
    """
    from .formats.registry import open_catalog

    return View(open_catalog(url))


def _check_layout(layout: Layout | None, group: Group) -> None:
    if layout is None:
        return
    if not isinstance(layout, Layout):
        raise UsageError(f"layout must be a ckpt.Layout, not {type(layout).__name__}", hint="see docs/layouts.md")
    layout.check_ranks(group.ranks)


@contextmanager
def _told(group: Group, kind: str, url: str) -> Iterator[None]:
    """A mistake in one rank's arguments ends the call on all ranks; each has made one call then, and the next one finds them in step."""
    try:
        yield
    except UsageError as err:
        mistake = err

        def fail() -> dict[str, Any]:
            raise mistake

        group.call(kind, url, settings.DEFAULT_TIMEOUT).agree("options", fail, lambda rows: None)
