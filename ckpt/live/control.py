"""What sinks, and ``ckpt live status``, ask the leader of a source: small messages of JSON, each with bytes behind it if it needs some;
the secret that proves who may ask, and what a source says of itself.

Nobody waits for anybody else: an answer that is not there yet is asked for again. A secret proves who may ask. No torch.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ckpt import settings
from ckpt.concurrency import when_dropped
from ckpt.errors import (
    AccessError,
    CkptError,
    DeadlineError,
    GroupError,
    NotFoundError,
    StorageError,
    UsageError,
    error_from_json,
    error_to_json,
)
from ckpt.net.channel import Row
from ckpt.net.endpoints import close_when_forked, interface_addresses, is_loopback, own_addresses
from ckpt.net.wire import Channel, dial, receive, record, send
from ckpt.nodes.memory_connection import check_private, write_private
from ckpt.text import address_text

PURPOSE = "versions"
_MOST_ASKED = settings.MIB
"""Bytes of a question."""
_MOST_ANSWER = 256 * settings.MIB
"""Bytes of an answer: tables of very many tensors."""


def split_address(address: str) -> tuple[str, int, str]:
    """Host, port and name of ``tcp://host:port/name``."""
    try:
        parts = urlsplit(address)
        host, port, name = parts.hostname, parts.port, parts.path.strip("/")
    except (ValueError, AttributeError) as err:
        raise _no_address(address) from err
    if parts.scheme != "tcp" or not host or port is None or parts.query or parts.fragment or parts.username:
        raise _no_address(address)
    if not name:
        hint = f'write it as "tcp://{address_text(host, port)}/name": whoever comes to a port that now is another source\'s is told so'
        raise UsageError(f"{address!r} has no name", hint=hint)
    return host, port, name


def listen_at(address: str) -> socket.socket:
    """The socket of a source at its address; on any free port if that is 0."""
    host, port, _ = split_address(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.create_server((str(where[0]), port), family=family, backlog=1024)
    except OSError as err:
        raise StorageError(
            f"the leader cannot listen there: {err}", where=address, hint="use an address of the leader's machine and a free port"
        ) from err
    close_when_forked(sock)
    return sock


def with_port(address: str, port: socket.socket) -> str:
    """The address with the port that it really is."""
    host, _, name = split_address(address)
    return f"tcp://{address_text(host, port.getsockname()[1])}/{name}"


def own_address(name: str) -> str:
    """Where a source of this machine may listen: any free port of the interface that others reach (``CKPT_SOCKET_IFNAME``)."""
    return f"tcp://{address_text(own_addresses(None)[0], 0)}/{name}"


def _reached_at(address: str, end: float, alive: Callable[[], None]) -> list[tuple[str, int]]:
    """Where connections to a source go: all addresses of its host, which may be a name that is known only once that machine is there,
    until ``end``."""
    host, port, _ = split_address(address)
    while True:
        try:
            known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except (OSError, UnicodeError) as err:
            if isinstance(err, UnicodeError) or time.monotonic() >= end:
                hint = "check the address, or give that of the machine in numbers"
                raise DeadlineError(f"the name {host!r} of the source's machine leads nowhere: {err}", where=address, hint=hint) from err
        alive()
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))
    return list(dict.fromkeys((str(where[0]), port) for *_, where in known))


def _no_address(address: object) -> UsageError:
    return UsageError(f"{address!r} is not the address of a source", hint='write it as "tcp://host:port/name"; port 0 means any free one')


Answer = tuple[Row, Sequence[bytes | memoryview]]


def answer_questions(handle: Callable[[str, Row], Answer], channel: Channel) -> None:
    """Answer what one peer asks by ``handle``, which gets the name of the peer, too."""
    while channel.await_next():
        asked, _ = receive(channel, _MOST_ASKED)
        try:
            answer, views = handle(channel.peer, asked)
        except CkptError as err:
            answer, views = {"error": error_to_json(err)}, ()
        send(channel, answer, views)


class ControlClient:
    """A connection to the leader of a source."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        timeout: float,
        alive: Callable[[], None] = lambda: None,
        *,
        reach: float | None = None,
        patient: bool = False,
    ) -> None:
        """``reach``: the seconds in which it must be reached, if not ``timeout``. ``patient``: it may start within them."""
        self.address = address
        end = time.monotonic() + (timeout if reach is None else reach)
        peer = f"the source at {address}"
        with _naming(address):
            reached_at = _reached_at(address, end if patient else 0.0, alive)
            left = max(1.0, end - time.monotonic())
            self._channel = dial(reached_at, secret, left, peer=peer, purpose=PURPOSE, alive=alive, patient=patient)
        self._channel.timeout = timeout
        self._close = when_dropped(self, self._channel.close)

    def ask(self, question: Row, alive: Callable[[], None] = lambda: None) -> tuple[Row, bytes]:
        """What it answers. ``alive`` is called while it does not. The connection is closed if there is no answer."""
        self._channel.alive = alive
        try:
            with _naming(self.address):
                send(self._channel, question, ())
                answer, data = receive(self._channel, _MOST_ANSWER)
        except BaseException:
            self.close()  # the answer to another question might come first
            raise
        if "error" in answer:
            error = error_from_json(answer["error"])
            error.where = error.where or self.address
            raise error
        return answer, data

    def hurry(self, seconds: float) -> None:
        """Wait no longer than this for answers."""
        self._channel.timeout = min(self._channel.timeout, seconds)

    @property
    def closed(self) -> bool:
        return self._channel.sock.fileno() < 0

    def close(self) -> None:
        self._close()


@contextmanager
def _naming(address: str) -> Iterator[None]:
    """Errors of the connection say whose it was."""
    try:
        yield
    except CkptError:
        raise
    except OSError as err:
        hint = "look whether the trainer still runs, and take again"
        raise GroupError(f"the leader of the source is gone: {err}", where=address, hint=hint) from err


# The secret of a source: what it and its sinks prove to each other that they know.

_BYTES = 32
_HINT = "give secret= or CKPT_LIVE_SECRET to the source and its sinks; or let XDG_RUNTIME_DIR name a folder of this account"
_REPLACE = f"remove it, and start the source again; or {_HINT}"


def given_secret(secret: str | bytes | None) -> bytes | None:
    """What the caller or ``CKPT_LIVE_SECRET`` says."""
    text = secret if secret is not None else settings.variable("CKPT_LIVE_SECRET") or None
    if text is None:
        return None
    if not isinstance(text, str | bytes):
        raise UsageError(f"secret= is text or bytes, not {type(text).__name__}")
    if not text:
        raise UsageError("an empty secret protects nothing", hint="give a long random one, or none: then a file in your account has it")
    return text.encode() if isinstance(text, str) else text


def fingerprint(secret: bytes | None) -> str | None:
    """By which ranks compare what they were given, without showing it."""
    return None if secret is None else hashlib.sha256(b"ckpt live" + secret).hexdigest()


def new_secret(address: str) -> bytes:
    """Make one, and leave it in a file that only this account reads, for sinks of this machine."""
    made = secrets.token_hex(_BYTES)
    path = _path(address)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        check_private(path.parent, _REPLACE)
        write_private(path, made)
    except AccessError:
        raise
    except OSError as err:
        raise AccessError(f"the source's secret cannot be left for sinks of this machine: {err}", where=str(path), hint=_HINT) from err
    return made.encode()


def forget_secret(address: str, secret: bytes) -> None:
    """The source ends: remove its file, unless another one has its place."""
    path = _path(address)
    with suppress(OSError):
        if path.read_bytes() == secret:
            path.unlink()


class SinkSecret:
    """What a sink proves that it knows: what the caller says, or what a source on this machine has left. One that starts again leaves
    another, so it is asked for before each use."""

    def __init__(self, secret: str | bytes | None, address: str) -> None:
        self._given = given_secret(secret)
        self._address = address
        self._left: bytes | None = None

    def __call__(self) -> bytes:
        """The secret; that of the source before, where none is there now."""
        secret = self.find()
        if secret is None:
            raise AccessError(
                "no secret is known for this source",
                where=self._address,
                hint="set CKPT_LIVE_SECRET (or secret=) to that of the source; while it runs, its own account finds on its machine "
                "one that it made itself",
            )
        return secret

    def find(self) -> bytes | None:
        """The same, or None if there is none."""
        if self._given is not None:
            return self._given
        path = _path(self._address)
        try:
            check_private(path.parent, _REPLACE)
            check_private(path, _REPLACE)
            self._left = path.read_bytes()
        except FileNotFoundError:
            pass
        except AccessError:
            raise
        except OSError as err:
            raise AccessError(f"the source's secret cannot be read: {err}", where=str(path), hint=_HINT) from err
        return self._left

    def may_come(self) -> bool:
        """Whether a source that has not started yet may still leave one: only on this machine."""
        host, port, _ = split_address(self._address)
        try:
            known = {str(where[0]) for *_, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        except (OSError, UnicodeError):
            return False
        own = {address.host for address in interface_addresses()}
        return any(is_loopback(each) or each in own for each in known)


def _path(address: str) -> Path:
    _, port, name = split_address(address)
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    spelled = "".join(c if c.isalnum() or c in "-_" else f"%{ord(c):02x}" for c in name)
    return Path(folder) / f"ckpt-live-{os.getuid()}" / f"{port}-{spelled or '-'}"


# What a source says of itself: versions, and which sink has which.


@dataclass(frozen=True, kw_only=True)
class VersionStatus:
    """A version that is kept: its ``bytes`` in all, replicas included, over so many ``ranks``, and the seconds since it was there."""

    step: int
    digest: str
    bytes: int
    ranks: int
    age: float
    taken_by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SinkStatus:
    """A sink: ``state`` is ``"waiting"``, ``"taking"``, ``"left"`` (it was closed) or ``"lost"`` (its connection broke, or some of its
    ranks died: ``lost_ranks``); ``step`` is of the version that it has. ``late``: there is a newer one, and it has not left. ``seconds``
    since it began to take a version. ``took``: digest, bytes and seconds of each kept version that it has taken; ``took_from``: the bytes
    of the last of these by whom they came from, ``"source"`` or another sink, and ``dense``: what of them came whole from a source with
    ``delta=True``, by why (``TakeReport``). ``relays``: it passes the version on that it has, or takes.
    ``error`` of its last update, or None."""

    sink: str
    ranks: int
    state: str
    step: int | None
    late: bool
    seconds: float | None
    took: tuple[tuple[str, int, float], ...]
    took_from: Mapping[str, int]
    relays: bool
    error: str | None
    lost_ranks: tuple[int, ...] = ()
    dense: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SourceStatus:
    """All that the leader of a source knows; versions are the oldest first. ``lost_ranks`` of the source itself have died: it publishes
    nothing any more."""

    address: str
    run: str
    versions: tuple[VersionStatus, ...]
    sinks: tuple[SinkStatus, ...]
    lost_ranks: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, address: str, data: Any) -> SourceStatus:
        """Raises:
        FormatError: it is something else."""
        return record(cls, {**data, "address": address} if isinstance(data, dict) else data, "status", address)

    def of_step(self, step: int) -> SourceStatus:
        """The same of one version.

        Raises:
            NotFoundError: it is not kept.
        """
        versions: Sequence[VersionStatus] = [v for v in self.versions if v.step == step]
        if not versions:
            raise NotFoundError(f"no version of step {step} is kept", where=self.address, hint=f"kept: {[v.step for v in self.versions]}")
        digests = {v.digest for v in versions}
        sinks = tuple(replace(s, took=tuple(t for t in s.took if t[0] in digests)) for s in self.sinks)
        return replace(self, versions=tuple(versions), sinks=sinks)


def ask_status(address: str, secret: bytes, timeout: float) -> SourceStatus:
    """Ask the leader of the source at ``address``."""
    client = ControlClient(address, secret, timeout)
    try:
        answer, _ = client.ask({"op": "status", "name": split_address(address)[2]})
    finally:
        client.close()
    return SourceStatus.from_json(address, answer)
