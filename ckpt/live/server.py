"""Gives pieces of the boxes that this rank holds to whoever asks and knows the secret. No torch.

A thread waits for connections, and one serves each: it packs the boxes of a piece into a slot of shared memory, hashes them while they are
in the cache, and says so; a receiver on another machine gets the bytes in the stream. All slots together bound the memory. A receiver has
few of them at a time, so one that hangs leaves the others theirs; at the deadline it is dropped, and what it was reading is marked as over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import xxhash

from ckpt.errors import CkptError, DeadlineError, FormatError, NotFoundError
from ckpt.net.connections import PATIENCE, ConnectionServer
from ckpt.net.endpoints import listen, network
from ckpt.net.shared_memory import ANNOUNCEMENT_BYTES, PAUSE, SlotPool, machine
from ckpt.net.streams import ALIVE, IN_STREAM, RECORD
from ckpt.net.wire import Channel
from ckpt.plan.transfers import MOST_PIECE, RequestList, digest_of

from .holdings import Holdings, Packable
from .pieces import (
    CHANGES,
    DIGESTS,
    DIGESTS_KIND,
    KNOWN,
    LENGTH,
    MACHINE,
    MOST_LIST,
    MOST_MACHINE,
    MOST_VERSION,
    OPENED,
    PULL,
    PULL_KIND,
    PURPOSE,
    UNKNOWN,
    WHOLE,
    WHOLE_NOT_KEPT,
    BoxDigests,
    PieceComparer,
    send_error,
)

SLOTS = 12
"""Pieces that are packed and not yet taken, of all receivers together: 48 MiB."""
IN_FLIGHT = 4
"""Of these, what one receiver has at most: one that is being packed, one that waits, one that is copied, and one more."""
_SIGN_SECONDS = 1.0
_LOOK_SECONDS = 0.05
"""Between two looks whether a receiver that copies nothing is still there."""
_LONGEST_PAUSE = 0.001
"""Between two looks whether a slot is back: less than a receiver takes for the slots that it still has."""

log = logging.getLogger("ckpt")


class PieceServer:
    """Serves ``holdings(version)``, which raises NotFoundError where there is no such version. ``addresses`` are where it listens."""

    def __init__(
        self, holdings: Callable[[str], Packable], secret: bytes, timeout: float, *, store: str | None = None, delta: bool = False
    ) -> None:
        """``store``: the host of the job's store, if it has one: the addresses that lead there come first. ``delta``: who has
        a version that is still here, and lies on another machine, gets what changed since."""
        self._holdings = holdings
        self._pool = SlotPool(SLOTS, MOST_PIECE, 1, shared=True, timeout=timeout)
        self._lists = _Lists()
        self._comparer = PieceComparer() if delta else None
        self._digests = BoxDigests()
        self._lock = threading.Lock()
        self._rests = threading.Condition(self._lock)
        self._sent = 0
        self._serving = 0
        """Pulls that go on."""
        self.network = network()
        ports = listen(store)
        self.addresses: list[tuple[str, int]] = [port.getsockname()[:2] for port in ports]
        self._connections = ConnectionServer(ports, secret, timeout, purpose=PURPOSE, name="ckpt-serve", serve=self.serve)

    @property
    def bytes_sent(self) -> int:
        """Bytes of boxes that receivers were given, without padding."""
        return self._sent

    def is_alive(self) -> bool:
        """Whether it still listens: not in a process that was forked."""
        return self._connections.is_alive()

    def rest(self) -> bool:
        """Wait a moment until nobody is given anything; whether that is so: then what was served may be freed."""
        with self._rests:
            return self._rests.wait_for(lambda: not self._serving, PATIENCE)

    def close(self) -> None:
        """Stop listening, and drop who is connected."""
        self._pool.stop()
        self._connections.close()
        self._pool.close()

    def serve(self, channel: Channel) -> None:
        """Serve one receiver, which has proved itself, until it closes the connection."""
        (length,) = MACHINE.unpack(channel.receive(MACHINE.size))
        if length > MOST_MACHINE:
            raise FormatError(f"a machine's name of {length} bytes", where=channel.peer)
        near = channel.receive(length).decode("utf-8", "replace") == machine()
        channel.send(self._pool.announcement().pack() if near and self._pool.file >= 0 else bytes(ANNOUNCEMENT_BYTES))
        outlet = _Outlet(channel, self._pool, opened=channel.receive(1) == OPENED)
        while channel.await_next():
            with self._lock:
                self._serving += 1
            try:
                self._answer(channel, outlet)
            finally:
                outlet.abandon()
                with self._rests:
                    self._serving -= 1
                    self._rests.notify_all()

    def _answer(self, channel: Channel, outlet: _Outlet) -> None:
        """One pull. What goes wrong with the version or a box is told, and ends the pull alone."""
        kind, length, base_length, digest = PULL.unpack(channel.receive(PULL.size))
        if kind not in (PULL_KIND, DIGESTS_KIND) or length > MOST_VERSION or base_length > MOST_VERSION:
            raise FormatError(f"a message of kind {kind}, names of {length} and {base_length} bytes", where=channel.peer)
        version = channel.receive(length).decode("utf-8", "replace")
        base_version = channel.receive(base_length).decode("utf-8", "replace")
        requests = self._lists.get(digest)
        channel.send(UNKNOWN if requests is None else KNOWN)
        if requests is None:
            (size,) = LENGTH.unpack(channel.receive(LENGTH.size))
            if size > MOST_LIST:
                raise FormatError(f"a list of requests of {size} bytes", where=channel.peer)
            requests = self._lists.add(digest, channel.receive(size))
        try:
            holdings = self._holdings(version)
            base = self._base(base_version) if base_version and not outlet.opened else None
        except Exception as err:  # noqa: BLE001  a version that is not sealed in time, too: the receiver hears why
            _send_failure(channel, err)
            return
        try:
            for piece in range(len(requests.pieces)):
                if kind == DIGESTS_KIND:
                    outlet.put_beside(DIGESTS, piece, self._digests.of_piece(version, holdings, requests, piece))
                    continue
                outlet.await_ready(holdings, requests, piece)
                with self._lock:  # first: who has the last piece may look at it
                    self._sent += requests.bytes_of(piece)
                parcel = WHOLE if base is not None or not base_version else WHOLE_NOT_KEPT
                if base is not None and self._comparer is not None and isinstance(holdings, Holdings):
                    changes = self._comparer.changes(base, holdings, requests, piece)
                    if isinstance(changes, bytes):
                        outlet.put_beside(CHANGES, piece, changes)
                        continue
                    parcel = changes
                outlet.put(holdings, requests, piece, parcel, most=max(1, min(IN_FLIGHT, SLOTS // self._serving)))
            outlet.settle(0)
        except (DeadlineError, ConnectionError):
            raise
        except Exception as err:  # noqa: BLE001  the receiver raises it, with this rank's name
            outlet.settle(0)
            _send_failure(channel, err)

    def _base(self, version: str) -> Holdings | None:
        """What a receiver says that it has; None if changes since then cannot be told."""
        if self._comparer is None:
            return None
        try:
            holdings = self._holdings(version)
        except NotFoundError:
            return None
        return holdings if isinstance(holdings, Holdings) else None


def _send_failure(channel: Channel, err: Exception) -> None:
    if not isinstance(err, CkptError):
        log.error("live: a piece for %s could not be packed", channel.peer, exc_info=err)
    send_error(channel, err)


class _Outlet:
    """Where the pieces for one receiver go. ``opened``: it can read the slots of the pool."""

    def __init__(self, channel: Channel, pool: SlotPool, *, opened: bool) -> None:
        self._channel = channel
        self._pool = pool
        self.opened = opened
        self._lent: deque[int] = deque()
        self._sign_at = 0.0

    def put(self, holdings: Packable, requests: RequestList, piece: int, parcel: int, *, most: int) -> None:
        """Pack a piece, once this receiver has fewer than ``most`` slots, and give it; ``parcel`` says why it comes whole."""
        self.settle(most - 1)
        self._sign_at = time.monotonic() + _SIGN_SECONDS
        slot = self._pool.take(self._wait)
        try:
            view = self._pool.data(slot).data
            if self.opened:
                digest = xxhash.xxh3_64_intdigest(view[: holdings.pack(requests, piece, view)])
                self._lent.append(slot)
                generation = self._pool.lend(slot, (), (0,))
                self._channel.send(RECORD.pack(parcel, piece, slot, generation, digest))
            else:
                views = holdings.views(requests, piece, view)
                of_all = xxhash.xxh3_64()
                for each in views:
                    of_all.update(each)
                self._channel.send(RECORD.pack(parcel, piece, IN_STREAM, sum(map(len, views)), of_all.intdigest()), *views)
        finally:
            if slot not in self._lent:
                self._pool.release(slot)

    def put_beside(self, parcel: int, piece: int, data: bytes) -> None:
        """Give what makes a piece of the receiver's base (``CHANGES``), or the digests of its boxes (``DIGESTS``)."""
        self._channel.send(RECORD.pack(parcel, piece, IN_STREAM, len(data), xxhash.xxh3_64_intdigest(data)), data)

    def await_ready(self, holdings: Packable, requests: RequestList, piece: int) -> None:
        """Wait until a piece is here: a relay may still be taking it."""
        end = time.monotonic() + self._channel.timeout
        while not holdings.ready(requests, piece, _SIGN_SECONDS):
            if time.monotonic() > end:
                raise NotFoundError(f"a piece has not come here within {self._channel.timeout:g} s", hint="take it from another rank")
            self._channel.check_open()
            self._channel.send(RECORD.pack(ALIVE, 0, IN_STREAM, 0, 0))

    def settle(self, most: int) -> None:
        """Wait until the receiver has at most so many slots."""
        since = look_at = time.monotonic()
        pause = PAUSE
        while len(self._lent) > most:
            now = time.monotonic()
            if self._collect():
                since, pause = now, PAUSE
            elif now - since > self._channel.timeout:
                raise DeadlineError(f"{self._channel.peer} copies nothing for {self._channel.timeout:g} s")
            else:
                if now >= look_at:
                    self._channel.check_open()
                    look_at = now + _LOOK_SECONDS
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def abandon(self) -> None:
        """The receiver is gone, or dropped: its slots are over."""
        while self._lent:
            slot = self._lent.popleft()
            self._pool.take_back(slot)
            self._pool.release(slot)

    def _collect(self) -> bool:
        """Take back what has been copied, in its order; whether there was any."""
        before = len(self._lent)
        while self._lent and self._pool.is_back(self._lent[0]):
            self._pool.release(self._lent.popleft())
        return len(self._lent) < before

    def _wait(self) -> None:
        """No slot is free: other receivers have them all."""
        self._collect()
        self._channel.check_open()
        if time.monotonic() >= self._sign_at:
            self._sign_at = time.monotonic() + _SIGN_SECONDS
            self._channel.send(RECORD.pack(ALIVE, 0, IN_STREAM, 0, 0))
        time.sleep(PAUSE)


class _Lists:
    """The lists of requests that receivers have sent, by digest; those that were asked for longest ago are forgotten first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[RequestList, int]] = OrderedDict()
        self._bytes = 0

    def get(self, digest: bytes) -> RequestList | None:
        with self._lock:
            known = self._known.get(digest)
            if known is None:
                return None
            self._known.move_to_end(digest)
            return known[0]

    def add(self, digest: bytes, data: bytes) -> RequestList:
        """Raises:
        FormatError: it is no list, or not the one that has this digest."""
        if digest_of(data) != digest:
            raise FormatError("a list of requests came damaged", hint="try again")
        requests = RequestList.from_bytes(data)
        with self._lock:
            if digest not in self._known:
                self._known[digest] = requests, len(data)
                self._bytes += len(data)
            while self._bytes > MOST_LIST and len(self._known) > 1:
                _, (_, size) = self._known.popitem(last=False)
                self._bytes -= size
        return requests
