"""The training loop's face: when to save, what to keep, and where to go on.

Invariant: what is newest is found by listing commit records; no file that says "latest" is ever written or trusted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ckpt import settings
from ckpt.api import load
from ckpt.catalog import Catalog
from ckpt.engine.load.fill import LoadArguments, LoadReport, ReadOptions, check_load_arguments
from ckpt.engine.load.load import opened, recorded
from ckpt.engine.save.background import SaveHandle, start_save, stats_of
from ckpt.engine.save.base import SaveBase
from ckpt.engine.save.job import wait_for_pending_save
from ckpt.engine.save.options import SaveArguments, SaveOptions, SaveReport, check_capture
from ckpt.errors import CkptError, CoverageError, NotFoundError, StorageError, UsageError
from ckpt.formats.native.commit import Branches
from ckpt.net.call import grouped
from ckpt.net.group import Group, Job, current_group, group_of, warn_if_others_are_missing
from ckpt.plan.layout.layout import check_layout
from ckpt.plan.tables import ranks_text
from ckpt.policies import All, Anchor, Best, EverySteps, KeepPolicy, SavePolicy, TrustFrozen
from ckpt.policies.both import check_arguments
from ckpt.settings import check_positive
from ckpt.state.torch_objects import check_state, plain_parameters
from ckpt.telemetry.progress import callback_of
from ckpt.telemetry.spans import Row
from ckpt.text import url_text

from .events import Alerts, Listener
from .lineage import Bases, Lineage, run_options
from .members import Member, MemberChanges
from .membership import Membership
from .node_tier import Memory, NodeLocal, SharedLocal
from .reporter import Reporter
from .save_schedule import FailedSaves, SaveSchedule, State, check_step, metric_values, state_of
from .step_listing import Step, step_url
from .tier_chain import BeginFrom, LoadedCopy, RestoredFrom, TierChain, origin_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpt.testing.witness import Witness

log = logging.getLogger("ckpt")

C = TypeVar("C", bound="Checkpointer")


class Checkpointer:
    """Saves a training job's state by policy, in the background, and resumes from the newest checkpoint.

    ``root`` holds a directory for each step. All ranks of a job make it alike and call its methods in the same order; a context manager,
    so that the last save is waited for. One job at a time saves to a root.

    Args:
        root: path or URL of the run.
        save: when :meth:`step` saves (docs/policies.md).
        keep: what stays; the newest checkpoint and tagged ones always do.
        local: a directory that all ranks see, on a fast disk: saves are committed there and then published to ``root`` in the background
            (docs/storage.md). :class:`ckpt.SharedLocal` also selects what stays there. Or :class:`ckpt.NodeLocal`, a directory on a disk of
            each node.
        memory: saves into the memory of the job's machines, with copies on others (docs/storage.md). With ``local``, what ``save`` asks
            for goes from there to the local tier, and on to ``root``.
        publish_timeout: seconds for which :meth:`wait`, :meth:`close` and the last save before a stop keep trying to publish; by default
            the timeout of ``job``.
        give_up_after: how many saves in a row the storage has to fail before the failure is raised. Until then training continues: each
            failed save is an error in the log and an event, and the policy decides when the next one is due. A save that succeeds ends the
            row. So it is with what :meth:`wait` cannot publish. :meth:`close` raises if the last save failed. Other errors are raised at
            once.
        on_event: called for saves and loads as they happen, in a separate thread, on the leading rank: a function of one
            :class:`ckpt.monitors.Event`, one of :mod:`ckpt.monitors`, or several of these (docs/observing.md).
        alerts: whether the log, and ``on_event``, hear of what needs looking at, such as saves that get slower.
        reuse: whether a save refers to the one before for chunks of frozen tensors that have not changed, in place of writing them again
            (docs/guides/frozen-part-once.md). The first save is whole, and so is one after a save that failed. A checkpoint that others
            refer to stays as long as they do. Not with ``local``. A :class:`ckpt.policies.TrustFrozen`: the same, and frozen tensors that
            torch has not seen change are hashed by every so many saves only. You vouch that nothing writes to them past torch.
            A :class:`ckpt.policies.Anchor`: the same, and some saves are anchors; those between are stored as differences from the last
            one, chunk by chunk, where that is more than 10 % smaller (docs/guides/smaller-saves.md). It has its own codec.
        member: this job is one of several that make up a run, such as a trainer and its replay buffer. A step exists once every member has
            saved it, within the timeout of ``job``; :meth:`restore` gives all of them the same. The first member leads: its ``keep``
            decides what stays, and the others hear of its saves by :meth:`requested` (docs/guides/joint-run.md).
        only, trainable: as for :func:`ckpt.save`; :meth:`restore` loads the same part. ``begin_from`` is its base, and is loaded whole, at
            every start.
        capture, staging_bytes, layout, check_replicas, merge_flat_shards, codec, job, progress: as for :func:`ckpt.save_async`;
            ``progress`` also for :meth:`restore`.
    """

    restored_from: RestoredFrom | None = None
    """What :meth:`restore` has loaded, and how many bytes from where."""
    handle: SaveHandle | None = None
    """The last save that was begun, until somebody was told how it ended."""
    _memory: SaveSchedule | None = None
    """When to save into memory."""
    _joint: Membership | None = None
    _witness: Witness | None = None
    """Notes the steps of a job that is being proved (``ckpt.testing``)."""
    _gave_up = False
    """Nothing was saved since publishing was given up."""
    _closed = _connected = False

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save: SavePolicy = EverySteps(1000),  # noqa: B008  a value
        keep: KeepPolicy = All(),  # noqa: B008  a value
        capture: Literal["lazy", "eager"] = "lazy",
        staging_bytes: int | None = None,
        reuse: bool | TrustFrozen | Anchor = False,
        local: str | os.PathLike[str] | SharedLocal | NodeLocal | None = None,
        memory: Memory | None = None,
        publish_timeout: float | None = None,
        give_up_after: int = 1,
        on_event: Listener | Sequence[Listener] | None = None,
        alerts: bool | Alerts = True,
        member: Member | None = None,
        **arguments: Unpack[SaveArguments],
    ) -> None:
        root = url_text(root)
        check_arguments(save=save, keep=keep)
        tiers = local is not None or memory is not None
        options = self._options = run_options(arguments, reuse=reuse, staging=staging_bytes, root=root, tiers=tiers)
        self._progress = arguments.get("progress")
        callback_of(progress=self._progress, leads=False, title="")  # whether it is one
        check_capture(capture, staging_bytes)
        self._job = Job.of(arguments.get("job"))
        self._group = group_of(self._job)
        if settings.variable("CKPT_PROVE"):
            from ckpt.testing.witness import attended

            self._witness, root = attended(root, self._group, options.layout, joint=member is not None)
            local, memory = None, None
        if member is not None:
            self._joint = Membership(root, member, self._group, options.timeout, keep)
            root, keep = self._joint.own_root, All()  # what stays is decided for all members together
        self.root = root
        self._policy, self._keep, self._capture = save, keep, capture
        self._bases, self._timeout = Bases(reuse if isinstance(reuse, Anchor) else None), options.timeout
        if options.layout is not None:
            check_layout(options.layout, self._group.ranks)
        warn_if_others_are_missing(self._group)
        self._tiers = TierChain(root, keep, local, memory, self._group, options)
        if isinstance(reuse, Anchor):  # else the base is the newest checkpoint, which always stays
            self._tiers.later.base = lambda: self._bases.base.url if self._bases.base is not None else None
        if memory is not None:
            self._memory = SaveSchedule(memory.every, self._group, self._timeout)
        self._lineage = Lineage(self._tiers.later.look, lambda n, why: self._reporter.alert("unrestored", n, self._place(n), why))
        published = local is not None and memory is None
        self._reporter = Reporter(root, self._group, on_event, alerts=alerts, tiers=published, keeps_log=settings.run_log() == "on")
        self._tiers.report_to(self._reporter, self._on_published)
        if self._joint is not None:
            self._joint.reporter = self._reporter
        if self._tiers.uploader is not None:
            alone = partial(self._tiers.later.check_no_member, asked=True)
            self._tiers.uploader.check = alone if self._joint is None else self._joint.check_not_restarted
        leads = self._group.rank == self._group.leader
        self._failed_saves, self._failed_publishing = (FailedSaves(give_up_after, leads=leads) for _ in range(2))
        self._patience = self._timeout if publish_timeout is None else publish_timeout
        check_positive(self._patience, "publish_timeout", zero=True)
        # Last: what is refused above leaves no handler of a signal behind, which would keep a notice from ending the process.
        self._schedule = SaveSchedule(save, self._group, self._timeout)

    def __repr__(self) -> str:
        return f"<ckpt.Checkpointer of {self.root}: saves {self._policy!r}, keeps {self._keep!r}{'; closed' if self._closed else ''}>"

    def _prove(self, witness: Witness, n: int, state: State, metrics: Mapping[str, float] | None) -> None:
        """Note step ``n``; end the process if the run of the proof ends here."""
        if witness.note(n, state, metrics):
            if witness.plan.saves:
                _raise(self._begin(n, state, metrics)[0])
                self.wait()
            witness.leave()

    # ---- going on

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        begin_from: str | os.PathLike[str] | BeginFrom | None = None,
        members: MemberChanges | None = None,
        **options: Unpack[LoadArguments],
    ) -> int | None:
        """Load the newest checkpoint that is committed and intact, or that of ``step``, and give its step; None if there is none.

        Newest is the highest step of the branch that was written last: saves that follow ``restore(state, step=800)`` begin a branch, and
        later restarts take it up, whatever higher steps the run had before. These are abandoned (docs/training-loop.md).

        With a local tier the newest of both, from the local copy if that is whole; :attr:`restored_from` names it. A damaged
        checkpoint is passed over, with a warning and the reason; another copy or the next older step is loaded instead. So is one that
        ``ckpt rebuild`` recovered without something that the state needs, even with ``strict=False``, unless ``step`` asks for it.
        ``options`` are those of :func:`ckpt.load`.

        Of a run of several jobs it loads the step from which all members continue, and waits for them; ``members`` has changes.

        ``begin_from`` is loaded only while the run has no checkpoint yet, whole or damaged: one of DCP, Megatron, DeepSpeed, or of
        another run, by its path, its URL or as :class:`ckpt.BeginFrom`. The step that it was saved after is given then, and policies count
        from it. With ``only`` or ``trainable``, the run's checkpoints are parts: then ``begin_from`` is their base, and is loaded at every
        start, before the part.

        Raises:
            NotFoundError: ``step`` is not there; or ``begin_from`` is not.
            CorruptError: the checkpoint of ``step`` is damaged, or all are.
            FormatError: another release wrote the newest one: going back behind it would lose what it has.
            MismatchError: the checkpoint does not fit the state: an older one is not tried.
            StorageError: the storage failed. With a local tier: it is unknown whether the root has something newer.
            CoverageError: the run has no checkpoint, and the ranks have different parameters without a ``layout``, such as stages of a
                pipeline: the first save would fail.
            UsageError: ranks do not see each other's files in the local tier; or which step ``begin_from`` was saved after is not clear.
            ConflictError: the other members of the run did not come within ``timeout``.
        """
        self._check_open()
        if self._joint is None:
            if members is not None:
                raise UsageError("members= is for a run of several jobs", hint="Checkpointer(root, member=ckpt.Member(name, of=names))")
            return self._restore(state, step, begin_from, options)

        def load_own(n: int | None, url: str | None, id: str | None) -> int | None:
            if n is None or url is None:  # the run has no step, whatever this member has saved alone; or the member is new
                return self._restore(state, None, begin_from, options, id="")
            if url != self.url(n):  # it had another name
                return self._restore(state, None, BeginFrom(url, step=n), options, id="")
            if self._restore(state, n, None, options, id=id) is None:
                raise NotFoundError(f"the save {id} of step {n} is not there", where=url, hint="`ckpt ls` lists the checkpoints there")
            return n

        return self._joint.restore(load_own, step, members)

    def _restore(
        self,
        state: Mapping[str, Any],
        step: int | None,
        begin_from: str | os.PathLike[str] | BeginFrom | None,
        options: Mapping[str, Any],
        id: str | None = None,
    ) -> int | None:
        """As :meth:`restore`, of this job alone; ``id``: of the save that is to be loaded, or empty for none."""
        self._connect()
        origin: BeginFrom | None = None

        def check() -> Row:
            nonlocal origin
            check_state(state)
            if step is not None:
                check_step(step)
            origin = origin_of(step, begin_from, options)
            check_load_arguments(options)
            group = Job.of(options.get("job")).process_group
            if group is not None and current_group(group) is not self._group:
                raise UsageError("a Checkpointer restores on the ranks that it was made with", hint="leave process_group= out of restore")
            stated = self._group.size == 1 or self._options.layout is not None or self._options.part is not None
            return {} if stated else plain_parameters(state)

        different = self._group.call("restore", self.root, self._timeout).map_reduce("begin", check, _different_parameters)
        began, reports = time.perf_counter(), list[LoadReport]()
        spans, catalogs = dict[int, Row](), list[Catalog]()
        wanted, taken = recorded.set(spans), opened.set(catalogs if self._options.reusable else None)
        for spread in self._tiers.spreads:
            spread.forget_sources()
        try:
            own, restored = self._load(state, step, origin, options, id, reports)
        except CkptError as err:
            self._reporter.restored(step, None, time.perf_counter() - began, None, err)
            raise
        finally:
            recorded.reset(wanted)
            opened.reset(taken)
        if own is None:
            self._lineage.restored(None)
        else:
            self._lineage.restored(own.step, own.branches)
        if restored is not None:
            self._schedule.resumed(restored.step, saved=own is not None)
            if self._memory is not None:
                self._memory.resumed(restored.step, saved=own is not None)
            sources = self._tiers.sources() if self._tiers.spreads else {}
            self.restored_from = RestoredFrom(step=restored.step, url=restored.lasting, sources=sources)
            if self._options.reusable:
                self._bases.restored(restored.url if own is not None else None, catalogs)
            self._reporter.restored(restored.step, restored.url, time.perf_counter() - began, reports[-1].bytes_needed, spans=spans)
        if restored is None and different is not None:  # now, not at the first save
            raise CoverageError(different, where=self.root, hint="give stages of a pipeline a layout=: docs/layouts.md#pipelines")
        if self._tiers.uploader is not None:
            for spread in self._tiers.spreads:
                spread.add()
            self._tiers.publish()
        if self._witness is not None and restored is not None:
            self._witness.note(restored.step, state, restored=True)
        return restored.step if restored is not None else None

    def _load(
        self,
        state: Mapping[str, Any],
        step: int | None,
        origin: BeginFrom | None,
        options: Mapping[str, Any],
        id: str | None,
        reports: list[LoadReport],
    ) -> tuple[LoadedCopy | None, LoadedCopy | None]:
        """Load a checkpoint of this run, and where there is none ``origin``; gives the run's own, and what was loaded last."""
        given = {"progress": self._progress, "layout": self._options.layout}
        job = Job.of(options.get("job"))
        own_job = Job(  # the ranks are those of this Checkpointer, whatever else is given for this load
            process_group=self._job.process_group,
            timeout=self._timeout if job.timeout is None else job.timeout,
            threads=self._job.threads if job.threads is None else job.threads,
        )

        def load_one(url: str, **more: Any) -> None:
            if "sources" in more:
                more["read"] = replace(ReadOptions.of(options.get("read")), sources=more.pop("sources"))
            reports.append(load(url, state, **{**given, **options, **more, "job": own_job}))

        part = self._options.part
        same_part: dict[str, Any] = {} if part is None else {"only": part.only or None, "trainable": part.trainable}
        # The checkpoints of the run lack what they are no part of: it comes from the origin at every start, and they go over it.
        base = self._tiers.load_origin(origin, load_one) if origin is not None and part is not None else None
        own: LoadedCopy | None = None
        if id != "":
            own = self._tiers.load_nearest(partial(load_one, **{**same_part, **options}), step, id)
        if own is None and origin is not None:
            return None, base or self._tiers.load_origin(origin, load_one)
        return own, own

    # ---- saving

    def step(
        self, n: int, state: Mapping[str, Any] | Callable[[], Mapping[str, Any]], *, metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Report that training step ``n`` is over; saves if the policy requests it. Returns whether it began to.

        ``state`` may be a function that makes it, which is called only if a save is due. ``metrics`` are kept with the checkpoint, for
        ``keep=Best(...)``; the leading rank's count. When nothing is due it costs no message.

        Raises:
            CkptError: an earlier save failed, which is reported once (see ``give_up_after``); a save that is due now begins all the same.
                Or what :func:`ckpt.save_async` raises.
            UsageError: ``n`` is not an int of at least 0, ``state`` no dict, or a metric no number; or this is closed.
        """
        self._check_open()
        self._check_step(n)
        if self._witness is not None:
            self._prove(self._witness, n, state_of(state), metrics)
            return False
        # The order of the three things below keeps ranks in step: decide, begin the save that is due, and only then
        # raise what an earlier save failed with. A rank that raised first would miss a save that the others begin.
        with self._schedule.timed(step=True):
            due = self._schedule.due(n)
            if due is None and (self._memory is None or self._memory.due(n) is None):
                if self.handle is not None and self.handle.done():
                    _raise(self._ended())
                return False
            if due is not None:
                log.info("step %d is saved: %s", n, due.reason)
            try:
                failed, _ = self._begin(n, state, metrics, publish=due is not None)
            except CkptError as err:
                _raise(self._failed_saves.count(f"step {n} is not saved", err))
                return False
            if due is not None and due.final:
                ended, unpublished = self._ended(), self._published()
                _raise(ended)
                if unpublished is not None:  # what counts is committed
                    log.warning("%s", unpublished)
                if self._joint is not None:
                    self._joint.wait()
                self._schedule.answered = self._failed_saves.passed_over is None
            _raise(failed)
            return True

    @property
    def preempted(self) -> bool:
        """The job will be stopped, and its last save is durable: leave the loop and end the program."""
        return self._schedule.answered

    def save(
        self, n: int, state: Mapping[str, Any] | Callable[[], Mapping[str, Any]], *, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle:
        """Begin to save step ``n`` now, regardless of the policy. Waits for the save before it. ``state`` may be a function that makes it:
        if that raises on one rank, the save fails on all.

        Raises:
            CkptError: an earlier save failed, which is reported once; step ``n`` is being saved all the same (:attr:`handle`). Or what
                :func:`ckpt.save_async` raises.
        """
        self._check_open()
        self._check_step(n)
        if self._witness is not None:
            self._prove(self._witness, n, state_of(state), metrics)
        with self._schedule.timed():
            failed, handle = self._begin(n, state, metrics)
        _raise(failed)
        return handle

    def _check_step(self, n: object) -> None:
        """Raise UsageError unless ``n`` is a step, and have the save fail with it that the others begin, now or next: a rank that left it
        out would be one call behind them for ever."""
        try:
            check_step(n)
        except UsageError as err:
            if self._group.size > 1:
                self._group.call("save", self.root, self._timeout).fail("begin", err)
                if self._connected:  # as where any other save fails
                    self._finish_begin(None, publish=self._memory is None)
            raise

    def _connect(self) -> None:
        """Once: see whether the ranks share the local tier. Collective."""
        self._tiers.check()
        self._connected = True

    def _begin(
        self, n: int, state: State | Callable[[], State], metrics: Mapping[str, float] | None, *, publish: bool = True
    ) -> tuple[BaseException | None, SaveHandle]:
        """Begin to save; gives what the save before it failed with, if nobody was told. ``publish``: also to the root."""
        # Ranks may be told at different steps, since their saves do not end at one moment; so being told must not
        # keep one of them from a save that the others begin.
        try:
            self._connect()
        except CkptError as err:
            self._count_step(n, publish=publish)
            self._not_begun(n, err)
            raise
        failed = self._ended()
        # What goes wrong on this rank alone, such as in a function that makes the state, has to end the call that the others make: a rank
        # that left it out would be one call behind them for ever.
        ready: tuple[State, SaveOptions] | BaseException
        try:
            ready = self._ready(n, state, metrics)
        except BaseException as err:  # noqa: BLE001  raised below
            ready = err
        self._count_step(n, publish=publish)
        durable: Future[Any] | None = None
        try:
            if isinstance(ready, BaseException):
                self._group.call("save", self._place(n), self._timeout).fail("begin", ready)
                raise ready
            made, options = ready
            then = self._tiers.nearest.retain_after_save
            handle = start_save(self._place(n), made, self._group, options, self._capture, then=then)
            self.handle, durable = handle, handle.durable
            if publish:
                self._schedule.costs.begun(stats_of(handle), self._schedule.now)
            self._reporter.begun(n, handle)
            if self._joint is not None and self._tiers.uploader is None:
                handle.durable.add_done_callback(partial(self._on_durable, n))
        except BaseException as err:
            self._not_begun(n, err)
            if failed is not None and self._failed_saves.tolerates(err):  # training would go on, and nobody would hear of the first
                raise failed from err
            raise
        finally:
            self._finish_begin(durable, publish=publish)
        return failed, handle

    def _count_step(self, n: int, *, publish: bool) -> None:
        if publish:
            self._schedule.begun(n)
        if self._memory is not None:
            self._memory.begun(n)

    def _not_begun(self, n: int, error: BaseException) -> None:
        self._save_failed(error)
        self._bases.ended(None)
        self._reporter.not_begun(n, self._place(n), error)

    def _finish_begin(self, durable: Future[Any] | None, *, publish: bool) -> None:
        """Whatever became of a save: all ranks begin the same rounds of publishing and copying after it."""
        if self._tiers.uploader is not None and publish:
            self._tiers.publish(durable)
            self._gave_up = False
        if self._tiers.spread is not None:
            self._tiers.spread.add(durable)

    def _ready(self, n: int, state: State | Callable[[], State], metrics: Mapping[str, float] | None) -> tuple[State, SaveOptions]:
        """The state and the options of a save that is to begin, of which no other rank knows yet."""
        if self._joint is not None:
            self._joint.begin(n)
        made, given = state_of(state), self._options
        # Mirrors make the same files: not of replicas that may differ, nor of chunks that each rank codes or refers to as it sees fit.
        # Then all copies go over the network.
        mirrored = self._tiers.spread is not None and given.check_replicas and given.codec is None and not given.reusable
        options = replace(
            self._bases.of(self._place(n), given),
            metrics=metric_values(metrics),
            earlier=partial(self._earlier, n) if self._tiers.uploader is not None or self._joint is not None else None,
            branches=partial(self._branches, n),
            mirrors=self._tiers.spread.placement if self._tiers.spread is not None and mirrored else None,
            progress=callback_of(progress=self._progress, leads=self._group.rank == self._group.leader, title=f"save {self._place(n)}"),
        )
        wait_for_pending_save(self._group)
        return made, options

    def _branches(self, n: int) -> Branches:
        """On the leader: what led to step ``n``."""
        if self._joint is None:
            self._tiers.later.check_no_member()
        return self._lineage.of(n)

    def _earlier(self, n: int, replaced: str | None) -> str | None:
        """The id of a save that the one of step ``n`` comes after, beside that which it has ``replaced``."""
        earlier = self._tiers.later.earlier(n) if self._tiers.uploader is not None else None
        if self._joint is not None and (replaced is not None or earlier is not None):
            self._joint.check_not_restarted()
        return earlier

    def _on_durable(self, n: int, durable: Future[SaveReport]) -> None:
        if self._joint is not None and durable.exception() is None:
            self._joint.saved(n, durable.result().id, durable.result().tensor_bytes)

    def _on_published(self, n: int, url: str, id: str | None) -> None:
        self._reporter.published(n, url, id)
        if self._joint is not None and id is not None:
            self._joint.saved(n, id, 0)

    def requested(self) -> int | None:
        """The step that the leading member of a run of several jobs asks this one to save; None if it asks for none. Every rank calls it;
        it looks once a second at most.

        Raises:
            UsageError: this is not a member of a run of several jobs.
        """
        self._check_open()
        if self._joint is None:
            raise UsageError(
                "only a member of a run of several jobs is asked to save",
                where=self.root,
                hint='member=ckpt.Member("buffer", of=("trainer", "buffer"))',
            )
        return self._joint.requested()

    def _place(self, n: int) -> str:
        """Where step ``n`` is committed first."""
        return self._tiers.nearest.place(n)

    def url(self, n: int) -> str:
        """Where step ``n`` is saved, in the end; :attr:`restored_from` and the handle of a save say more."""
        check_step(n)
        return step_url(self.root, n)

    def wait(self) -> None:
        """Wait until the last save is committed, and what ``keep`` does not keep is removed; with a local tier, until it is published, too.
        Every rank calls it. In a run of more than 4,000 steps, ``keep`` is applied after several saves together, and by :meth:`close`.

        Raises:
            CkptError: it failed.
            StorageError: it could not be published within ``publish_timeout``.
        """
        with self._schedule.timed():
            ended, unpublished = self._ended(), self._published()
            self._tiers.settle()
            given_up = self._joint.wait() if self._joint is not None else None
        _raise(ended or self._failed_publishing.count(f"checkpoints of {self.root} are not published", unpublished) or given_up)

    def _published(self) -> StorageError | None:
        """Wait until everything is published; gives why it could not be."""
        # Having waited once in vain, it tries but once more.
        error = self._tiers.finish(0.0 if self._gave_up else self._patience)
        self._gave_up = error is not None
        return error

    @property
    def uncopied(self) -> tuple[int, ...]:
        """Steps of which this node has still to give files to another one, or could not when it tried last (:class:`ckpt.NodeLocal`)."""
        return self._tiers.uncopied

    @property
    def unpublished(self) -> tuple[int, ...]:
        """Steps that are committed in the local tier and not at the root, as far as the last attempt to publish knows. Costs nothing."""
        return self._tiers.uploader.unpublished if self._tiers.uploader is not None else ()

    def _ended(self) -> BaseException | None:
        """Wait for the last save; gives what it failed with, once."""
        if self.handle is None:
            return None
        handle, self.handle = self.handle, None
        handle.wait()
        error = handle.durable.exception()
        if error is not None:
            self._save_failed(error)
        saved: SaveBase | None = None
        if error is None and self._options.reusable:
            saved = SaveBase(url=handle.url, id=handle.durable.result().id, required=False)
        self._bases.ended(saved)
        return self._failed_saves.count(f"the save of {handle.url} failed", error, level=logging.INFO)  # the save itself has warned

    def _save_failed(self, error: BaseException) -> None:
        # Where training goes on, the step counts as dealt with: else the next ones would try in vain, one after the other.
        if not self._failed_saves.tolerates(error):
            self._schedule.failed()
        if self._joint is not None:
            self._joint.failed()

    # ---- what is there

    def steps(self) -> list[Step]:
        """The committed checkpoints of both tiers, the lowest step first. Every rank may ask; it talks to the storage alone."""
        self._check_nodes()
        return self._joint.steps() if self._joint is not None else self._tiers.later.steps()

    @property
    def latest(self) -> int | None:
        """The highest committed step of the branch that was written last."""
        self._check_nodes()
        if self._joint is not None:
            return max((s.number for s in self.steps() if s.number is not None and s.abandoned is None), default=None)
        return self._tiers.later.latest()

    def best(self, metric: str, *, mode: Literal["min", "max"]) -> int | None:
        """The committed step with the lowest or highest ``metric``, which the policy ``Best`` would keep; None if none has a finite one."""
        rule = Best(metric, mode=mode)
        values = {s.number: s.metrics[metric] for s in self.steps() if s.number is not None and metric in s.metrics}
        return next(iter(rule.ranked(values)), None)

    # ---- the end

    def close(self) -> None:
        """Wait for the last save as :meth:`wait` does, and stop watching signals. Nothing can be saved or restored afterwards."""
        try:
            self.wait()
            self._tiers.settle(rest=True)
            _raise(self._failed_saves.passed_over or self._failed_publishing.passed_over)  # no training goes on any more
        finally:
            self._stop()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this Checkpointer is closed", where=self.root, hint="use it inside its with block, or make a new one")

    def _check_nodes(self) -> None:
        """What is on the nodes of a job is known only while it is connected to them."""
        if self._tiers.spreads:
            self._check_open()

    def _stop(self) -> None:
        self._closed = True
        if self._tiers.spreads:  # whose connections are closed
            self._tiers.settle()
        self._schedule.stop()
        self._reporter.close()
        for spread in self._tiers.spreads:
            spread.close()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            if self.handle is not None and not self.handle.wait(self._timeout):
                log.error("the save of %s is still going on", self.handle.url)
            else:
                self._ended()  # what it failed with is logged; what training raised matters more
            if self._tiers.uploader is not None and not self._tiers.uploader.idle(self._patience):
                log.error("steps are not published yet: %s", self.unpublished)
        finally:
            self._stop()


def _different_parameters(rows: Mapping[int, Row]) -> str | None:
    """On the leader: why a state cannot be saved whose plain parameters the ranks do not have alike; None if they do."""
    if not all("parameters" in row for row in rows.values()):
        return None
    groups = grouped(rows, "parameters")
    if len(groups) < 2:
        return None
    each = [f"{rows[ranks[0]]['shown']} on {ranks_text(ranks)}" for _, ranks in groups[:3]]
    shown = "; ".join([*each, *["…"] * (len(groups) > 3)])
    return f"the ranks have different parameters, and no layout says where these lie, so nothing can be saved: {shown}"


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def job_of(checkpointer: Checkpointer) -> tuple[Group, float]:
    """The ranks that save together, and for how long they wait for each other; for the adapters of trainers."""
    return checkpointer._group, checkpointer._timeout


def agreed_latest(checkpointer: Checkpointer) -> int | None:
    """The newest committed step as the leading rank sees it; collective. Listings of shared storage may differ for a while."""
    group, timeout = job_of(checkpointer)
    call = group.call("latest", checkpointer.root, timeout)
    latest = call.map_reduce("latest", dict, lambda rows: checkpointer.latest)
    return None if latest is None else int(latest)
