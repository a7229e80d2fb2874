"""The same bytes for all ranks of a group: the leader has them, and each rank gets them from one above it in a tree.

    leader ──► the first rank of each machine, FAN by FAN ──► the ranks of that machine, FAN by FAN

So a machine gets a value once over the network, and the job's store, which has one thread for all ranks, only says where a rank is reached.
A rank *asks*, with the digests of what it has: what it has is not sent. One that dies or hangs in the middle costs those below it
``SILENCE`` seconds; then they ask the next one above. What comes is compared with the leader's digest of it, and asked for elsewhere where
it is damaged. Whoever gets nothing from anybody reads what the leader read (``Call.broadcast``, ``Call.fetch``).

Until the machines are known (``know_machines``) each rank counts as one.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import xxhash

from ckpt.concurrency import when_dropped
from ckpt.errors import CkptError, DeadlineError
from ckpt.plan.machines import ancestors, has_descendants, numbers_of
from ckpt.text import parse_json

from .channel import longest_pause, looks
from .connections import ConnectionServer
from .endpoints import listen, network
from .store import Store
from .wire import Channel, dial, receive, receive_head, send

FAN = 8
"""Machines that one machine hands on to, and ranks of its machine that one rank does."""
BEAT, SILENCE = 0.25, 1.0
"""Seconds between two signs of a rank that is waited for, and without one after which it counts as lost."""
PATIENCE = 30.0
"""Most seconds until a rank does without the others."""
KEPT, MOST_KEPT = 32 << 20, 4096
"""Bytes and number of values that a rank keeps, for those below it and so that it need not get them again; the newest one in any case."""
_SAID = 64
"""Of so many, the newest, a rank says that it has them."""
_MOST, _MOST_REQUEST = 1 << 31, 1 << 22
_PURPOSE = "broadcast"

log = logging.getLogger("ckpt")


class DigestedBytes(NamedTuple):
    """Bytes and the digest that the leader gave them; None if there are none."""

    digest: str | None
    data: bytes | None

    def is_right(self) -> bool:
        """Whether there are none, or these are the leader's."""
        return self.digest is None or (self.data is not None and xxhash.xxh3_128_hexdigest(self.data) == self.digest)


class _Values:
    """What one rank has for those below it. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._digests: OrderedDict[str, str | None] = OrderedDict()
        """By name; a digest is the name of its bytes, too."""
        self._data: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def put(self, name: str, value: DigestedBytes) -> None:
        with self._changed:
            self._digests[name] = value.digest
            if value.digest is not None and value.data is not None:
                self._digests[value.digest] = value.digest
                self._drop(value.digest)
                self._data[value.digest] = value.data
                self._bytes += len(value.data)
            while len(self._data) > MOST_KEPT or (len(self._data) > 1 and self._bytes > KEPT):
                self._drop(next(iter(self._data)))
            while len(self._digests) > 2 * MOST_KEPT:
                self._digests.popitem(last=False)
            self._changed.notify_all()

    def get(self, name: str, seconds: float = 0.0) -> DigestedBytes | None:
        """The value of this name, after at most so many seconds; None if nothing is known of it yet."""
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._digests, seconds):
                return None
            digest = self._digests[name]
            return DigestedBytes(digest, None if digest is None else self._data.get(digest))

    def all(self) -> dict[str, bytes]:
        """Bytes by digest."""
        with self._changed:
            return dict(self._data)

    def drop(self, digest: str) -> None:
        with self._changed:
            self._drop(digest)

    def _drop(self, digest: str) -> None:
        self._bytes -= len(self._data.pop(digest, b""))


class BroadcastTree:
    """One rank's place in the tree of a group. Ranks go by their positions in ``ranks``; the leader's is 0."""

    def __init__(self, store: Store, position: int, ranks: Sequence[int]) -> None:
        self._store = store
        self._position = position
        self._ranks = ranks
        self._machines = numbers_of([1, len(ranks)], len(ranks))
        self._values = _Values()
        self._where: dict[int, Any] = {}
        """Where ranks above this one are reached."""
        self._joining = threading.Lock()
        self._joined = False

    def know_machines(self, spelled: Any) -> None:
        """From now on the ranks of a machine get from each other; ``spelled`` by ``ckpt.plan.machines.spell``, the same on all ranks."""
        self._machines = numbers_of(spelled, len(self._ranks))
        self.join()

    def join(self) -> None:
        """If there may be ranks below this one, let them reach it. Soon: they wait for it."""
        with self._joining:
            if self._joined or not has_descendants(self._position, self._machines, FAN):
                return
            self._joined = True
            secret, addresses = secrets.token_bytes(16), []
            try:
                ports = listen(self._store.host)
                addresses = [port.getsockname()[:2] for port in ports]
                serve = partial(_serve, self._values)  # not this tree: it ends with its group
                server = ConnectionServer(ports, secret, PATIENCE, purpose=_PURPOSE, name="ckpt-broadcast", serve=serve)
                when_dropped(self, server.close)
            except (CkptError, OSError) as err:  # those below ask the next one
                log.warning("rank %d hands on nothing to other ranks: %s", self._ranks[self._position], err)
            where = {"addresses": addresses, "network": network(), "secret": secret.hex()}
            self._store.set(f"tree/{self._position}", json.dumps(where).encode())

    def put(self, name: str, data: bytes | None) -> str | None:
        """Have bytes ready for those below, or say that there are none; their digest."""
        digest = None if data is None else xxhash.xxh3_128_hexdigest(data)
        self._values.put(name, DigestedBytes(digest, data))
        self.join()
        return digest

    def get(
        self, names: Iterable[str], alive: Callable[[], None], *, patience: float = PATIENCE, digests: bool = False
    ) -> dict[str, bytes]:
        """What the leader has put under these names, from here or from a rank above; without those that none of them gives.

        Every rank of the group asks for them, at about the same time, since those below this one ask this one. ``digests``: the names are
        digests; then a rank above that does not ask for them holds nobody up for long. ``alive`` is called while nothing comes; its error
        ends that.
        """
        self.join()
        values = {name: self._values.get(name) for name in names}
        lacking = [name for name, value in values.items() if value is None or not value.is_right()]
        broken: list[CkptError] = []

        def watched() -> None:
            try:
                alive()
            except CkptError as err:
                broken.append(err)
                raise

        end = time.monotonic() + patience
        late = time.monotonic() + SILENCE + 2 * longest_pause(len(self._ranks)) if digests else end
        for above in ancestors(self._position, self._machines, FAN):
            try:
                answers = self._ask(above, lacking, watched, end if above == 0 else min(end, late)) if lacking else {}
            except (CkptError, OSError) as err:
                if err in broken:
                    break
                self._where.pop(above, None)
                log.info("rank %d: rank %d hands nothing on: %s", self._ranks[self._position], self._ranks[above], err)
                continue
            for name, value in answers.items():
                if value.is_right() and (value.digest == name or not digests):
                    lacking.remove(name)
                    values[name] = value
                    if value.data is not None:
                        self._values.put(name, value)
                else:
                    log.warning(
                        "rank %d: what rank %d has of %s is damaged, or gone", self._ranks[self._position], self._ranks[above], name
                    )
        return {name: v.data for name, v in values.items() if v is not None and v.data is not None and name not in lacking}

    def _ask(self, position: int, names: Sequence[str], alive: Callable[[], None], end: float) -> dict[str, DigestedBytes]:
        where, here = self._find(position, alive, end), self._values.all()
        addresses = [(str(host), int(port)) for host, port in where["addresses"]]
        channel = dial(
            addresses,
            bytes.fromhex(where["secret"]),
            SILENCE * max(1, len(addresses) - 1),  # one of them is loopback
            peer=f"rank {self._ranks[position]}",
            purpose=_PURPOSE,
            alive=alive,
            same_network=where["network"] == network(),
        )
        try:
            channel.timeout = SILENCE
            send(channel, {"names": names, "here": [*here][-_SAID:]}, [])
            answer, _ = receive_head(channel, _MOST)
            while "values" not in answer:
                alive()
                if time.monotonic() > end:
                    raise DeadlineError("it does not have it yet", where=channel.peer)
                answer, _ = receive_head(channel, _MOST)
            values = {}
            for name, (digest, size) in zip(names, answer["values"], strict=True):
                values[name] = DigestedBytes(digest, here.get(digest) if size is None else channel.receive(min(int(size), _MOST)))
                if size is None and not values[name].is_right():  # damaged since it came: it is not said to be here again
                    self._values.drop(digest)
            return values
        finally:
            channel.close()

    def _find(self, position: int, alive: Callable[[], None], end: float) -> Any:
        """Where a rank is reached, once it has said so."""
        if position not in self._where:
            for _ in looks(len(self._ranks)):
                text = self._store.peek(f"tree/{position}")
                if text is not None:
                    self._where[position] = parse_json(text)
                    break
                alive()
                if time.monotonic() > end:
                    raise DeadlineError("it has not come", where=f"rank {self._ranks[position]}")
        return self._where[position]


def _serve(values: _Values, channel: Channel) -> None:
    """Give one rank what it asks for, when all of it is here."""
    request, _ = receive(channel, _MOST_REQUEST)
    given: list[DigestedBytes] = []
    for name in request["names"]:
        while (value := values.get(str(name), BEAT)) is None:
            send(channel, {"waits": True}, [])
        given.append(value)
    sent = [None if v.data is None or v.digest in request["here"] else v.data for v in given]
    answer = {"values": [[v.digest, None if data is None else len(data)] for v, data in zip(given, sent, strict=True)]}
    send(channel, answer, [data for data in sent if data is not None])
