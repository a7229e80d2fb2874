"""Collective calls of a job of any number of ranks, in one process. Two ranks run for real, the leader and the one after it; all others say
what that one says.

A store in memory is between them. Counted are the messages of both ranks, the bytes that they leave in the store, their requests to storage
and their CPU seconds; what the others cost is not in these figures.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import xxhash
from torch.distributed import HashStore

from ckpt.io_backends.faulty import FaultyBackend, FaultyProcess
from ckpt.io_backends.protocol import Backend, ObjectMeta
from ckpt.io_backends.registry import wrap_backends
from ckpt.net import call as call_module
from ckpt.net import group as group_module
from ckpt.net.call import Offers
from ckpt.net.channel import ControlChannel, Row
from ckpt.net.group import Group
from ckpt.net.store import Connection, KeyValues, Store
from ckpt.runs.events import ListenerThread

SIGNS = ("/beats/", "/sign", "/failed")
"""In the keys of signs of life, and of looks for failures."""
Share = Callable[[bytes], str]
Vary = Callable[[int, Row, Share], Row]
"""Makes the row of the rank at a position of the row of the first follower; ``Share`` as ``Call.share``."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a call cost. The first of each pair is the leader's, the second the follower's.

    ``messages`` to the store: of a question that is asked again and again, one counts, and of signs of life none. ``put`` and ``got`` are
    the bytes of them. ``requests`` to storage and ``cpu`` seconds are of both ranks."""

    messages: tuple[int, int]
    put: tuple[int, int]
    got: tuple[int, int]
    requests: int
    cpu: float
    results: tuple[Any, Any]


class _Counting:
    """A client of a store that counts what is asked."""

    def __init__(self, inner: Any) -> None:
        self.underlying_store = inner
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        self.writes, self.put = 0, 0
        self.answers: dict[tuple[str, str], int] = {}

    def has_extended_api(self) -> bool:
        return bool(self.underlying_store.has_extended_api())

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.underlying_store, name)

        def counted(keys: Any, *values: Any) -> Any:
            answer = method(keys, *values)
            if name == "delete_key" or any(sign in str(keys) for sign in SIGNS):  # as time allows, and as it passes
                return answer
            if name in ("set", "append"):
                self.writes += 1
                self.put += len(values[0])
            else:
                size = sum(map(len, answer)) if name == "multi_get" else len(answer) if isinstance(answer, bytes | str) else 0
                self.answers[name, str(keys)] = size
            return answer

        return counted


class _Storage(FaultyProcess):
    """Counts requests, and has data files of the ranks that are played, without their bytes."""

    def __init__(self, earlier: list[ObjectMeta]) -> None:
        super().__init__()
        self.files: list[ObjectMeta] = []
        self.earlier = earlier
        """Those of all calls of the job: what a save refers to is looked for below the run."""

    def wrap(self, inner: Backend) -> FaultyBackend:
        return _Pretending(inner, process=self)


class _Pretending(FaultyBackend):
    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        yield from super().list_prefix(prefix)
        storage = cast(_Storage, self.process)
        yield from (file for file in storage.files if file.path.startswith(prefix))
        step, data, _ = prefix.partition("/data/")
        if data:
            yield from (ObjectMeta(f"{step}/{file.path}", file.size) for file in storage.earlier)


class _Direct:
    """A part of a store, for ranks that are played: nothing is counted."""

    def __init__(self, values: KeyValues, prefix: str) -> None:
        self._values, self._prefix = values, prefix

    def set(self, key: str, value: bytes) -> None:
        self._values.set(self._prefix + key, value)

    def append(self, key: str, data: bytes) -> None:
        self._values.append(self._prefix + key, data)


def _alike(position: int, row: Row, share: Share) -> Row:
    return row


class PlayedJob:
    """A job of ``ranks``, of which two are threads. Its calls go on as in one job: what ranks keep from call to call, they have."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._base = HashStore()
        self._clients = [_Counting(self._base) for _ in range(2)]
        self._groups = [Group(rank, tuple(range(ranks)), self._store(client)) for rank, client in enumerate(self._clients)]
        self._pool = ThreadPoolExecutor(2)
        self._vary: Vary = _alike
        self.blobs: dict[str, bytes] = {}
        """What the two ranks have shared with the leader, by digest."""
        self._spent = 0.0
        self._pretended: list[ObjectMeta] = []

    @staticmethod
    def _store(client: _Counting) -> Store:
        return Store(Connection(lambda sockets: KeyValues(client), "here", None), timeout=120.0)

    def play(self, work: Callable[[int], Any], vary: Vary = _alike) -> Played:
        """Run ``work(rank)`` on both, for which ``ckpt`` takes them as ranks of the job."""
        self._vary = vary
        self._storage = _Storage(self._pretended)
        for client in self._clients:
            client.begin()
        with (
            patch.dict(os.environ, CKPT_PROGRESS="off"),
            wrap_backends(self._storage.wrap),
            patch.object(call_module, "ControlChannel", self._channel),
            # what a run notes belongs to the call, too, and is not left to a thread that no call waits for
            patch.object(ListenerThread, "post", lambda thread, noted: thread.listener(noted)),
            self._blobs_known(),
        ):
            self._spent, began = 0.0, time.process_time()
            results = tuple(self._pool.map(lambda rank: self._as_rank(rank, work), range(2)))
            for thread in threading.enumerate():  # what a save leaves to the background belongs to it
                if thread.name in ("ckpt-remove", "ckpt-retain", "ckpt-retain-root"):
                    thread.join()
            cpu = time.process_time() - began - self._spent
        for result in results:
            if isinstance(result, BaseException):
                raise result
        leader, follower = self._clients
        return Played(
            messages=(leader.writes + len(leader.answers), follower.writes + len(follower.answers)),
            put=(leader.put, follower.put),
            got=(sum(leader.answers.values()), sum(follower.answers.values())),
            requests=self._storage.operations,
            cpu=cpu,
            results=cast("tuple[Any, Any]", results),
        )

    def _as_rank(self, rank: int, work: Callable[[int], Any]) -> Any:
        group_module._alone.group = self._groups[rank]
        try:
            return work(rank)
        except BaseException as err:  # noqa: BLE001  it is raised once the other rank has ended, too
            return err

    def _channel(self, store: Store, number: str, position: int, size: int, remember: Callable[[str], None]) -> ControlChannel:
        if position != 1 or size != self.ranks:
            return ControlChannel(store, number, position, size, remember)
        return _Echoed(self, store, number, size, remember)

    @contextmanager
    def _blobs_known(self) -> Iterator[None]:
        share = Offers.share

        def known(offers: Offers, data: bytes) -> str:
            digest = share(offers, data)
            self.blobs[digest] = data
            return digest

        with patch.object(Offers, "share", known):
            yield

    def close(self) -> None:
        """End the threads of both ranks, and their connections to each other; the others end with the job."""
        self._pool.shutdown()
        for group in self._groups:
            if group.links is not None:
                group.links.close()

    def pretend(self, path: str, size: int) -> None:
        self._storage.files.append(ObjectMeta(path, size))
        self._pretended.append(self._storage.files[-1])

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self._spent += time.thread_time() - began


class _Echoed(ControlChannel):
    """The channel of the first follower: what it says, all that are played say too."""

    def __init__(self, job: PlayedJob, store: Store, number: str, size: int, remember: Callable[[str], None]) -> None:
        super().__init__(store, number, 1, size, remember)
        self._job = job
        direct = cast(Store, _Direct(KeyValues(job._base), store._prefix))
        with job.uncounted():
            self._others = [ControlChannel(direct, number, position, size, lambda key: None) for position in range(2, size)]

    def post(self, row: bytes, *, failed: bool = False) -> None:
        super().post(row, failed=failed)
        if failed:
            return
        with self._job.uncounted():
            message = json.loads(row)
            for position, channel in enumerate(self._others, 2):
                channel.turn = self.turn
                offers: dict[str, bytes] = {}

                def share(data: bytes, offers: dict[str, bytes] = offers) -> str:
                    digest = xxhash.xxh3_128_hexdigest(data)
                    offers[digest] = data
                    return digest

                varied = self._job._vary(position, message["row"], share)
                for digest, data in offers.items():
                    channel.give(digest, data)  # at once: it does not wait to be asked
                same = varied is message["row"]
                channel.post(row if same else json.dumps({**message, "row": varied, "offers": [*message["offers"], *offers]}).encode())

    def confirm(self) -> None:
        super().confirm()
        with self._job.uncounted():
            for channel in self._others:
                channel.confirm()
