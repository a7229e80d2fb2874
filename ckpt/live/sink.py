"""Sinks: an engine takes versions of a source's state into its own, whatever the layouts of both.

A sink's ranks are a group of their own. Their leader talks to the leader of the source; each rank takes its pieces from the ranks that have
them. All ranks switch to a version, or none: nothing of the state changes before all of them have all of it, compared with its digests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Protocol

import torch

from ckpt import settings
from ckpt.converters.mapping.convention import Translation, check_translation
from ckpt.engine.load.fill import LoadJob, LoadOptions, accept, nothing
from ckpt.errors import DeadlineError, GroupError, NotFoundError, RankFailedError, TornError, UsageError
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.net.group import Job, group_of
from ckpt.net.shared_memory import machine
from ckpt.plan.layout.layout import Layout, check_layout
from ckpt.plan.match import Selection, globs_of_only, rules_of_rename
from ckpt.settings import check_flags
from ckpt.state.tensors import torch_dtype
from ckpt.state.torch_objects import check_state
from ckpt.telemetry.progress import ProgressCallback, callback_of, reported
from ckpt.telemetry.spans import Spans

from .control import SinkSecret, split_address
from .filling import in_other_names
from .holdings import Version
from .offered import DROPS, OfferedVersion, SourceConnection, find_newest
from .pull import Pulled
from .relay import Relay, RelayedVersion
from .take import Puller, bytes_that_came, dropped_anywhere, match_take, plan_take, stage_take, switch_take
from .take_phases import MatchedTake, PlannedTake, SinkCache, StagedTake, StateVersion, SwitchedTake, TakeMeter, TakeReport

log = logging.getLogger("ckpt")


class Sink:
    """Takes versions of a source into a state. Collective: every rank of the engine makes it, and takes in the same order.

    Args:
        address: of the source, ``"tcp://host:port/name"``.
        into: a state as for ``ckpt.load``; its tensors say what this rank needs.
        layout: places for plain tensors that are parts of larger ones.
        switch: ``"double"``: what comes from other machines is kept beside the state until all ranks have all of theirs. ``"in-place"``
            needs no memory for that: it goes straight into the state, which is torn if the update breaks off (``version``).
        relay: other sinks whose ranks want the same boxes take from this one too, so that the source sends less. It keeps what came from
            other machines until the next update, beside the state; so ``switch`` must be ``"double"``.
        only, rename, strict, cast: as for ``ckpt.load``.
        translation: the source's state in other names; ``rename`` and ``only`` speak of these.
        secret: as the source's; by default ``CKPT_LIVE_SECRET``, or what a source on this machine has left in a file of this account.
        job: which ranks the engine has, and after how many seconds without a sign of life one of them, or the source, counts as dead.

    Raises:
        UsageError: the address, or an argument, cannot be meant; or there is no such translation.
    """

    def __init__(
        self,
        address: str,
        into: Mapping[str, Any],
        *,
        layout: Layout | None = None,
        switch: Literal["double", "in-place"] = "double",
        relay: bool = False,
        only: str | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
        cast: bool = False,
        translation: Translation | None = None,
        secret: str | bytes | None = None,
        job: Job | None = None,
    ) -> None:
        if switch not in ("double", "in-place"):
            raise UsageError(f"switch is 'double' or 'in-place', not {switch!r}")
        if relay and switch != "double":
            raise UsageError(
                "a sink that takes in place has no copy to pass on", hint='relay=True needs switch="double"; any sink may take from relays'
            )
        job = Job.of(job)
        check_flags(relay=relay, strict=strict, cast=cast)
        check_translation(translation)
        check_state(into)
        base = group_of(job)
        if layout is not None:
            check_layout(layout, base.ranks)
        self.address = address
        split_address(address)  # before anything is done for it
        self._state = into
        self._in_place = switch == "in-place"
        self._views = None if translation is None else translation.views()
        self._options = LoadOptions(
            layout=layout,
            selection=Selection(only=globs_of_only(only), rename=rules_of_rename(rename)),
            strict=strict,
            cast=cast,
            verify="full",
            timeout=settings.timeout(job.timeout),
            threads=settings.threads(job.threads),
        )
        self._group = base.apart()
        self._secret = SinkSecret(secret, address)
        self._cache = SinkCache()
        self._blobs: dict[str, bytes] = {}
        """What the last version that all ranks have taken refers to."""
        self._source = SourceConnection(address, self._secret, self._options.timeout, self._group.size, relays=relay)
        self._relays = relay
        self._relay: Relay | None = None
        self._state_version = StateVersion()
        self._closed = False
        self._connected = False
        """Whether the ranks have tried to connect to each other, in their first take."""
        self.report: TakeReport | None = None
        """Of the last take."""

    def __repr__(self) -> str:
        return f"<ckpt.live.Sink of {self.address}{': closed' if self._closed else ''}>"

    @property
    def version(self) -> Version | None:
        """The version that the state is; None before the first update.

        Raises:
            TornError: the last update broke off while it changed the state. The next one repairs it.
        """
        if self._state_version.torn is not None:
            raise TornError(self._state_version.torn, where=self.address, hint="take again before the state is used")
        return self._state_version.version

    def take(
        self, newer_than: Version | None = None, timeout: float | None = None, *, progress: bool | ProgressCallback | None = None
    ) -> Version:
        """Bring the newest version into the state; collective. Which one that is.

        Args:
            newer_than: wait for another one than this, usually ``sink.version``. None: the newest that there is.
            timeout: seconds to wait for it, and first, for a source that has not started yet. By default as long as for a sign
                of life.
            progress: as for :func:`ckpt.load`: the bytes that this rank has of the version, and needs.

        Raises:
            UsageError: ``newer_than`` is not a version, or the sink is closed.
            DeadlineError: there is no such version in time, or nothing was heard of a rank or the source; nothing was changed.
            NamesError, ShapeError, MismatchError: it does not fit the state, or the translation does not fit it; nothing was changed.
            AccessError: there is no secret, or the source has another one.
            NotFoundError, FormatError: the source has another name, or it is something else.
            CorruptError, RankFailedError, ExchangeError: bytes were damaged, or a rank was lost, that no other rank had. Nothing was
                changed, unless ``version`` raises TornError.
        """
        patience = self._patience(timeout)
        if newer_than is not None and not isinstance(newer_than, Version):
            raise UsageError(f"newer_than= is a version, not {newer_than!r}", where=self.address, hint="newer_than=sink.version")
        watcher = callback_of(progress=progress, leads=self._group.rank == self._group.leader, title=f"take {self.address}")
        meter = TakeMeter(Spans(on=settings.spans() == "on"))
        with reported(watcher, meter.counts):
            return self._take_newest(newer_than, patience, meter)

    def _take_newest(self, newer_than: Version | None, patience: float, meter: TakeMeter) -> Version:
        """Take the newest version; if it is dropped meanwhile, the one after it."""
        began = time.monotonic()
        for tries in range(DROPS):
            call = self._call("take")
            offered = self._find(call, newer_than, began + patience)
            waited = time.monotonic() - began
            try:
                taken = self._take(call, offered, waited, meter, last=tries == DROPS - 1)
            except BaseException as err:
                self._source.tell(offered.version, "failed", error=f"{type(err).__name__}: {err}")
                raise
            finally:
                self._cache.mappings.end()
            if taken is not None:
                self.report = taken
                self._blobs = dict(offered.blobs)
                self._source.tell_taken(offered.version, taken.took_from, taken.dense, taken.seconds)
                return offered.version
            log.info("live: %s was dropped before it was taken; looking for a newer one", offered.version)
        raise AssertionError("the last try returns or raises")

    def _patience(self, timeout: float | None) -> float:
        """Seconds to wait for a version."""
        if self._closed:
            raise UsageError("the sink is closed", where=self.address, hint="make a new one")
        if timeout is not None and (not isinstance(timeout, int | float) or not timeout >= 0):
            raise UsageError(f"timeout= is a number of seconds, not {timeout!r}", where=self.address)
        return self._options.timeout if timeout is None else timeout

    def _call(self, kind: str) -> Call:
        """Begin a collective call; in the first one the ranks connect to each other."""
        call = self._group.call(kind, self.address, self._options.timeout)
        if not self._connected:
            self._connected = True
            self._group.connect(call, self._source.tell_lost)
        return call

    def tensors(self, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """What the newest version has, by the names that this sink gives it (``names``, ``rename``, ``only``): tensors of the meta device,
        with shapes and dtypes; collective. No byte of them moves, and the state stays as it is.

        Args:
            timeout: seconds to wait for a version. By default as long as for a sign of life.

        Raises:
            as :meth:`take`.
        """
        end = time.monotonic() + self._patience(timeout)
        call = self._call("tensors")
        offered = self._find(call, None, end)
        with call.phase("names"):
            catalog, selection = self._cache.catalog_of(offered), self._options.selection
            if self._views is not None:
                catalog = in_other_names(catalog, self._views, strict=False)
            named = selection.view({name: entry for name, entry in catalog.tensors.items() if entry.rank is None})
            call.agree({}, nothing)
        call.drain()
        return {
            name: torch.empty(entry.logical or entry.shape, dtype=torch_dtype(entry.dtype), device="meta")
            for name, entry in named.items()
            if selection.wants(name)
        }

    def run_on_all(self, work: Callable[[], object]) -> None:
        """Run ``work``, which changes the state further, on every rank of the sink; collective. An error of one is an error on all.

        Raises:
            RankFailedError, DeadlineError: it failed on another rank, which died or hangs.
            whatever ``work`` raises here.
        """

        def local() -> Row:
            work()
            return {}

        self._group.call("finish", self.address, self._options.timeout).map_reduce("finish", local, nothing)

    def close(self) -> None:
        """End the connection to the source. The state stays as it is."""
        self._closed = True
        if self._group.links is not None:
            self._group.links.close()
        self._cache.mappings.close()
        self._cache.checks.close()
        self._source.leave()
        if self._relay is not None:
            self._relay.close()

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- find

    def _find(self, call: Call, newer_than: Version | None, end: float) -> OfferedVersion:
        """The newest version, and all that its manifest refers to."""
        return find_newest(call, self._source, self._blobs, newer_than, end, base=self._state_version.delta_base, checks=self._cache.checks)

    # ---- take

    def _take(self, call: Call, offered: OfferedVersion, waited: float, meter: TakeMeter, *, last: bool) -> TakeReport | None:
        """Take the version that is offered; None if it was dropped meanwhile."""
        began = time.monotonic()
        self._source.tell(offered.version, "taking")
        job = LoadJob(call=call, options=replace(self._options, spans=meter.spans))
        matched = match_take(job, offered, self._state, self._cache, self._views)
        puller = Puller(
            secret=self._secret(),
            timeout=self._options.timeout,
            threads=self._options.threads,
            receiver=-1 - self._group.position,
            local=machine() if settings.live_local() == "on" else None,
            base=self._state_version.base,
            no_base=self._state_version.no_base,
            alive=call.check_failures,
            meter=meter,
        )
        staged = self._stage(job, matched, puller, last=last)
        if staged is None:
            return None
        switched = self._switch(job, staged, puller, last=last)
        if switched is None:
            return None
        done = time.monotonic()
        call.drain()
        return TakeReport.of(staged, switched, waited=waited, seconds=done - began, switch=done - switched.began, spans=meter.spans.table())

    def _stage(self, job: LoadJob, matched: MatchedTake, puller: Puller, *, last: bool) -> StagedTake | None:
        """Bring everything here; None on all ranks if the version was dropped for one of them. ``last``: then that is an error."""
        relayed, planned = None, None
        if self._relays:
            if self._relay is None or self._relay.secret != puller.secret:  # a source that has started again has another one
                if self._relay is not None:
                    self._relay.close()
                self._relay = Relay(puller.secret, self._options.timeout)
            relayed, planned = self._offer(job, self._relay, matched, puller)
        with job.call.phase("stage"):
            staged: StagedTake | None = None
            try:
                if planned is None:
                    planned = plan_take(matched, puller, self._cache, in_place=self._in_place)
                staged = stage_take(planned, puller, self._cache, in_place=self._in_place, relayed=relayed)
            except NotFoundError:
                if last:
                    raise
            finally:
                if staged is None and self._relay is not None:  # who waits for what does not come asks others
                    self._relay.end()
            agreed = job.call.agree({"dropped": staged is None}, dropped_anywhere)
        return None if agreed["dropped"] else staged

    def _offer(self, job: LoadJob, relay: Relay, matched: MatchedTake, puller: Puller) -> tuple[RelayedVersion | None, PlannedTake]:
        """Before anything comes: let other sinks take it from the ranks of this one. Ranks that read memory of the source's machine have
        nothing that others could not have from there."""
        with job.call.phase("offer"):
            for memory in relay.end():
                self._cache.give(memory)
            planned = plan_take(matched, puller, self._cache, in_place=False)
            relayed = None if planned.mapped or not planned.left.shares else relay.begin()
            row = {} if relayed is None else relay.row(relayed, planned.plan.transfers.wanted)
            version = matched.offered.version
            job.call.agree(row, lambda rows: self._source.offer(version, [each for each in rows.values() if each]))
        return relayed, planned

    def _switch(self, job: LoadJob, staged: StagedTake, puller: Puller, *, last: bool) -> SwitchedTake | None:
        """All ranks have all of it: bring it into the state. What breaks off here leaves a mix of versions, and that is known.

        None on all ranks if an in-place take lost its version on the way: the state is torn then, and the next try brings another one.
        """
        matched = staged.planned.matched
        torn = self._state_version.mixed_with(matched.offered.version)
        setters = self._accept(job, matched, torn)
        began = time.monotonic()
        with job.call.phase("switch"):
            self._state_version.torn = torn
            pulled: Pulled | None = None
            try:
                with job.span("switch"):
                    pulled = switch_take(staged, puller, self._cache, setters, self.address)
                self._state_version.become(matched.offered.version, matched.offered.manifest.name, staged.planned.why_whole)
            except NotFoundError:
                if last or not self._in_place:
                    raise
            try:
                row: Row = {"dropped": pulled is None, "from": {}, "dense": {}}
                if pulled is not None:
                    row |= {"from": staged.came_from(pulled), "dense": staged.came_whole(pulled)}
                agreed = job.call.agree(row, bytes_that_came)
            except GroupError as err:
                # A rank died or hangs, with all that it needs: what is here is whole. One that raised may have only a part.
                if isinstance(err, DeadlineError) or (isinstance(err, RankFailedError) and err.cause is None):
                    self._state_version.torn = None if not self._in_place else torn
                raise
        if pulled is None or agreed["dropped"]:
            return None
        self._state_version.torn = None
        return SwitchedTake(began=began, pulled=pulled, took_from=agreed["from"], dense=agreed["dense"])

    def _accept(self, job: LoadJob, matched: MatchedTake, torn: str) -> Sequence[Callable[[], None]]:
        """Objects of the state may refuse theirs: where there are any, all ranks hear of it before a tensor changes."""
        if not matched.fit.verdict["objects"]:
            return accept(matched.fit)
        with job.call.phase("accept"):
            self._state_version.torn = torn
            setters = accept(matched.fit)
            job.call.agree({}, nothing)
        return setters


class Taker(Protocol):
    """A :class:`Sink`, or what takes by one."""

    def take(
        self, newer_than: Version | None = None, timeout: float | None = None, *, progress: bool | ProgressCallback | None = None
    ) -> Version: ...


def take_step(
    sink: Taker,
    step: int | None,
    timeout: float | None = None,
    *,
    newer_than: Version | None = None,
    progress: bool | ProgressCallback | None = None,
) -> Version:
    """Take versions newer than ``newer_than`` until one is of ``step`` or a later one: engines' requests name steps. None: the next one.

    ``timeout``: seconds for all of it; None: for each version what the sink waits by default. Raises as ``take``.
    """
    end = None if timeout is None else time.monotonic() + timeout
    version = sink.take(newer_than, timeout, progress=progress)
    while step is not None and version.step < step:
        version = sink.take(version, None if end is None else max(0.0, end - time.monotonic()), progress=progress)
    return version
