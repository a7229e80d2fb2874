"""Sources: a trainer publishes versions of its state, and sinks take them when they want. It never waits for them.

every rank   publish(step): state ──► segment (lazy: optimizer.step() waits for the copy), digests, seal
leader       all have sealed, and it makes one state ──► manifest ──► the version is there; the oldest is dropped
sinks        ask the leader for the newest version, and take its pieces from the ranks themselves
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Literal

from ckpt import settings
from ckpt.concurrency import Pending, when_dropped
from ckpt.engine.save.options import check_capture
from ckpt.errors import CkptError, NotFoundError, UsageError
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.net.connections import ConnectionServer
from ckpt.net.group import Job, group_of
from ckpt.net.shared_memory import machine
from ckpt.plan.layout.layout import Layout, check_layout
from ckpt.settings import check_flags
from ckpt.state.collect import collect
from ckpt.state.shard_table import ShardCache
from ckpt.state.torch_objects import check_state
from ckpt.telemetry.progress import ProgressCallback, callback_of, reported
from ckpt.telemetry.spans import Spans, Stall
from ckpt.text import parse_json

from .control import (
    PURPOSE,
    SourceStatus,
    answer_questions,
    ask_status,
    fingerprint,
    forget_secret,
    given_secret,
    listen_at,
    new_secret,
    split_address,
    with_port,
)
from .holdings import Holdings, Version
from .publication import (
    ImagePlan,
    PreparedImage,
    Publication,
    VersionLeader,
    capture_image,
    conclude,
    not_sealed,
    prepare_image,
    replica_digests,
    seal_image,
    settle,
)
from .registry import VersionRegistry
from .segment import PublishedSegment, SegmentPool
from .server import PieceServer

log = logging.getLogger("ckpt")


class Source:
    """Where sinks take versions of a state from. Collective: every rank of the trainer makes it, and publishes in the same order.

    Args:
        address: ``"tcp://host:port/name"``: where the leader listens for sinks. Port 0 is any free one; ``address`` has the real one.
        state: as for ``ckpt.save``. It is read at each ``publish``.
        layout: places for plain tensors that are parts of larger ones.
        keep: how many versions are there at most. Each is a copy of this rank's part in host memory; one more is being captured.
        delta: a sink on another machine gets only the elements that changed since the version that it has, as long as that one is kept.
        check_replicas: compare the bytes of replicated tensors between the ranks that have them before a version is there.
        secret: what sinks must know; by default ``CKPT_LIVE_SECRET``, or else a file that only this account on the leader's machine reads.
        job: which ranks take part, and how long they wait for each other.

    Raises:
        UsageError: the address, or an argument, cannot be meant.
        StorageError: the leader cannot listen there.
        RankFailedError, DeadlineError: another rank failed, died or hangs.
    """

    def __init__(
        self,
        address: str,
        state: Mapping[str, Any],
        *,
        layout: Layout | None = None,
        keep: int = 2,
        delta: bool = False,
        check_replicas: bool = True,
        secret: str | bytes | None = None,
        job: Job | None = None,
    ) -> None:
        if type(keep) is not int or keep < 1:
            raise UsageError(f"keep is how many versions a source keeps, at least 1, not {keep!r}")
        job = Job.of(job)
        check_flags(delta=delta, check_replicas=check_replicas)
        check_state(state)
        self._state = state
        self._layout = layout
        self._keep = keep
        self._delta = delta
        self._timeout = settings.timeout(job.timeout)
        self._threads = settings.threads(job.threads)
        base = group_of(job)
        self._check_replicas = check_replicas and base.size > 1
        self._group = base.apart()
        if layout is not None:
            check_layout(layout, base.ranks)
        self._shards = ShardCache()
        self._pool = SegmentPool()
        self._image: ImagePlan | None = None
        self._count = 0
        self._last: Publication | None = None
        self._lock = threading.Condition()
        self._published: dict[int, PublishedSegment] = {}
        self._steps: dict[int, int] = {}
        """Of the versions that are kept, by number."""
        self._numbers: tuple[str, Mapping[str, int]] = "", {}
        """Of the tensors in the catalog of the newest version, with the digest of their names."""
        self._closed = False
        self._process = os.getpid()
        self._server: PieceServer | None = None
        self._leader: VersionLeader | None = None
        self._control: ConnectionServer | None = None
        given = given_secret(secret)
        call = self._group.call("live source", address, self._timeout)
        port = self._listen(call, address, given)
        try:
            self._serve(call, port, base.store.host if base.store is not None else None)
            self._group.connect(call, self._lose)
        except BaseException:
            if port is not None:
                port.close()
            self.close()
            raise
        log.info("live: rank %d serves %s", self._group.rank, self.address)

    def _listen(self, call: Call, address: str, given: bytes | None) -> socket.socket | None:
        """Agree on address, run and secret; on the leader, the socket that sinks connect to."""
        port: socket.socket | None = None
        with call.phase("listen"):
            if call.is_leader:
                port = listen_at(address)
                address = with_port(address, port)
            row: Row = {"secret": fingerprint(given), "options": [self._keep, self._delta, self._check_replicas], "empty": not self._state}

            def begin(rows: dict[int, Row]) -> Row:
                if all(each["empty"] for each in rows.values()):
                    raise UsageError("the state of the source is empty on all ranks", hint='publish what engines need: {"model": model}')
                if len({row["secret"] for row in rows.values()}) > 1:
                    raise UsageError("the ranks of the source were given different secrets", hint="give the same secret= on every rank")
                if any(each["options"] != row["options"] for each in rows.values()):
                    message = "the ranks of the source were given different options"
                    raise UsageError(message, hint="give the same keep=, delta= and check_replicas= on every rank")
                known = new_secret(address) if given is None else given
                return {"address": address, "run": secrets.token_hex(8), "secret": known.hex()}

            try:
                agreed = call.agree(row, begin)
            except BaseException:
                if port is not None:
                    port.close()
                raise
        self.address: str = agreed["address"]
        """With the real port; what sinks are given."""
        self._run: str = agreed["run"]
        self._secret = bytes.fromhex(agreed["secret"])
        self._secret_file = given is None
        return port

    def _serve(self, call: Call, port: socket.socket | None, store: str | None) -> None:
        """Give pieces to sinks, and on the leader, versions."""
        with call.phase("serve"):
            server = self._server = PieceServer(self._holdings, self._secret, self._timeout, store=store, delta=self._delta)
            row: Row = {"addresses": server.addresses, "network": server.network, "machine": machine(), "pid": os.getpid()}
            row |= {"domain": settings.domain(), "delta": self._delta}
            if port is None:
                call.follow(row)
                return
            endpoints = call.lead(row, lambda rows: dict(rows), lambda rows: None)
            registry = VersionRegistry(split_address(self.address)[2], self._run, self._keep)
            self._leader = VersionLeader(registry, endpoints)
            serve = partial(answer_questions, registry.handle)
            self._control = ConnectionServer(
                [port], self._secret, self._timeout, purpose=PURPOSE, name="ckpt-versions", serve=serve, gone=registry.gone
            )

    def _lose(self, rank: int) -> None:
        """A rank of the source has died; the leader says so to whoever asks."""
        if self._leader is not None:
            self._leader.registry.lose(rank)

    # ---- publishing

    def publish(
        self, step: int, *, capture: Literal["lazy", "eager"] = "lazy", again: bool = False, progress: bool | ProgressCallback | None = None
    ) -> Publication:
        """Make the state the version ``step``. Collective.

        ``capture``: with ``"lazy"`` what an optimizer steps is copied during the next forward and backward pass, and its step waits for
        the rest; all else is copied in the call. The optimizer must be in the state, or have stepped since the first publication. Who
        changes stepped parameters by hand calls ``publication.fence()`` before. ``"eager"`` returns when all is copied.

        ``again``: a version of this step may be kept already; this is a newer one. Without it that is an error: most likely the step
        was not increased.

        ``progress``: as for :func:`ckpt.save`: the bytes of this rank that are captured, and in all.

        Sinks see the version when every rank has sealed its part; ``publication.report`` then has the duration of each phase. Waits for
        the publication before, which has had a step's time.

        Raises:
            UsageError, StateError, LayoutError: the state cannot be published, as for ``ckpt.save``; or this step is kept (``again``).
            RankFailedError: another rank has died, or has closed the source.
            CkptError: there is no memory for it; or the publication before has failed, and its result was not read: this is reported
                once, and ``step`` is being published all the same.
        """
        if self._closed:
            raise UsageError("the source is closed", where=self.address)
        if self._process != os.getpid():
            raise UsageError(
                "this process was forked from the one that made the source, and sinks do not know it",
                where=self.address,
                hint="publish in the process that made the source, or make one here",
            )
        watcher = callback_of(progress=progress, leads=self._group.rank == self._group.leader, title=f"publish {step}")
        began, stall = time.perf_counter(), Stall()
        with stall:
            return self._publish(step, capture, watcher, began, stall, again=again)

    def __repr__(self) -> str:
        return f"<ckpt.live.Source at {self.address}{': closed' if self._closed else ''}>"

    def _publish(
        self, step: int, capture: str, watcher: ProgressCallback | None, began: float, stall: Stall, *, again: bool
    ) -> Publication:
        earlier: BaseException | None = None
        if self._last is not None:
            last, self._last = self._last, None
            try:
                settle(last)
            except Exception as err:  # noqa: BLE001  raised below
                earlier = err
        spans = Spans(on=settings.spans() == "on")
        # What goes wrong on this rank alone has to end the call that the others make: a rank that left it out would be one call behind them
        # for ever. So this version is published, too, before this rank hears of the one before: others may have heard by its result.
        call = self._group.call("publish", self.address, self._timeout)
        number = self._count = self._count + 1
        try:
            check_capture(capture, None)
            if type(step) is not int or step < 0:
                raise UsageError(f"a step is a number from 0 on, not {step!r}", where=self.address)
            if step in self._steps.values() and not again:
                hint = "count steps; or pass again=True, where the same step has another state on purpose"
                raise UsageError(f"step {step} is published already", where=self.address, hint=hint)
            call.check_departed()
            with spans.span("plan"):
                collected = collect(self._state, rank=self._group.rank, ranks=self._group.ranks, layout=self._layout, shards=self._shards)
                if len(self._shards.known) > 4 * len(collected.shard_table.tensors) + 1000:
                    self._shards.known.clear()  # of states that are not published any more
                if self._image is None or not self._image.fits(collected):
                    self._image = ImagePlan.of(collected, self._group.rank, check_replicas=self._check_replicas)
            prepared = prepare_image(
                collected,
                self._image,
                self._pool.take,
                self.address,
                lazy=capture == "lazy",
                threads=self._threads,
                beat=call.heartbeat,
                spans=spans,
                stall=stall,
                began=began,
            )
        except BaseException as err:
            call.fail("seal", err)
            raise
        publication = self._last = Publication(step, prepared.fence)
        prepared.fence.up(on_devices=prepared.on_devices)
        reporting = ExitStack()
        reporting.enter_context(reported(watcher, prepared.counts))
        if capture == "eager":
            prepared.fence.backoff.haste.set()
            capture_image(prepared, self._threads, call.heartbeat)
        arguments = publication, prepared, call, number, reporting
        threading.Thread(target=self._finish, args=arguments, name="ckpt-publish").start()
        if earlier is not None:
            raise earlier
        return publication

    def _finish(self, publication: Publication, prepared: PreparedImage, call: Call, number: int, reporting: ExitStack) -> None:
        """Everything that needs no caller: in a thread of its own."""
        try:
            with reporting:
                if not publication.captured.done():
                    Pending(lambda: capture_image(prepared, 1, call.heartbeat), "ckpt-capture").wait()
                version = self._seal(publication.step, prepared, call, number)
        except BaseException as err:  # noqa: BLE001  raised by the publication, or by the next call
            log.error("live: publishing step %d at %s failed: %s", publication.step, self.address, err)
            if not publication.captured.done():
                prepared.fence.down(err)
            publication.sealed.set_exception(err)
        else:
            conclude(publication, version, prepared)

    def _seal(self, step: int, prepared: PreparedImage, call: Call, number: int) -> Version:
        rank = self._group.rank
        with call.phase("seal"):
            prepared.capture.result()
            replicas = replica_digests(prepared, call, self._threads)
            published = seal_image(prepared, call, self._threads)
            when_dropped(published, self._pool.give, prepared.segment)
            address = prepared.segment.address()
            row: Row = {
                "step": step,
                "table": call.share(prepared.image.table),
                "state": call.share(prepared.state),
                "own": call.share(prepared.own) if prepared.own else None,
                "segment": [prepared.segment.capacity, published.digest],
                "replicas": replicas,
                "at": [address.file, address.token],
            }
            with self._lock:
                self._published[number] = published  # before the others know: a sink may ask for it before this rank hears
            del published
            try:
                with prepared.spans.span("agree"):
                    agreed = call.agree(row, lambda rows: self._completed(call, number, rows))
                if agreed["names"] != self._numbers[0]:
                    names = parse_json(call.fetch(agreed["names"]))
                    self._numbers = agreed["names"], {name: n for n, name in enumerate(names)}
            except BaseException:
                with self._lock:
                    del self._published[number]
                    self._lock.notify_all()
                raise
            with self._lock:
                self._published[number].numbers = self._numbers[1]
                self._steps = {n: s for n, s in self._steps.items() if n >= agreed["oldest"]} | {number: step}
                # Not only what was dropped this time: a rank whose publication failed late has not heard of the last drop.
                for old in [each for each in self._published if each < agreed["oldest"]]:
                    del self._published[old]
                self._lock.notify_all()
        self._pool.prepare(prepared.segment.capacity)
        log.debug("live: rank %d has sealed step %d", rank, step)
        return Version.from_json(agreed["version"])

    def _completed(self, call: Call, number: int, rows: dict[int, Row]) -> Row:
        """Leader: all have sealed."""
        assert self._leader is not None
        return self._leader.complete(call, number, rows)

    # ---- serving

    def _holdings(self, name: str) -> Holdings:
        """What this rank has of a version, for one pull of a sink."""
        run, _, spelled = name.rpartition("/")
        if run != self._run or not spelled.isdigit() or len(spelled) > 18:
            raise NotFoundError(f"this source has no version {name!r:.80}", hint="take again")
        number, seconds = int(spelled), min(self._timeout, 10.0)

        def known() -> bool:
            """Sinks may hear of a version before this rank hears that all have sealed theirs."""
            published = self._published.get(number)
            return published is None or published.numbers is not None

        with self._lock:
            if not self._lock.wait_for(known, seconds):
                raise not_sealed(name, seconds)
            published = self._published.get(number)
            if published is None:
                raise NotFoundError(f"version {name!r} was dropped", hint="take again: there is a newer one")
            return published.holdings()

    # ---- for the caller

    def report(self, step: int | None = None) -> SourceStatus:
        """Who has taken the version ``step``, or all that are kept, how many bytes in how many seconds, and who was lost. Any rank may ask.

        Raises:
            NotFoundError: no such version is kept.
            GroupError: the leader is gone.
        """
        status = ask_status(self.address, self._secret, self._timeout)
        return status if step is None else status.of_step(step)

    def close(self) -> None:
        """Wait for the publication in progress, and end. Sinks that are taking a version get an error; what they have is theirs."""
        if self._closed:
            return
        self._closed = True
        if self._process != os.getpid():  # the secret's file and the threads that serve are the parent's
            return
        try:
            if self._last is not None:
                settle(self._last)
        finally:
            if self._control is not None:
                self._control.close()
                if self._secret_file:
                    forget_secret(self.address, self._secret)
            if self._server is not None:
                self._server.close()
            if self._group.links is not None:
                self._group.links.close()
            with self._lock:
                self._published.clear()
                self._lock.notify_all()
            self._pool.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except CkptError:
            if error is None:
                raise
