"""Connections between processes: who may talk, and messages that wait for nobody longer than a deadline. No torch.

    client                                            server
    hello: magic, protocol, nonce ──────────────────►
           ◄────────────── hello: magic, protocol, nonce, proof      HMAC-SHA256 of both nonces under the job's secret
    proof, what it is for ──────────────────────────►
           ◄────────────── welcome

Both prove that they know the secret, and neither sends it; the two proofs are of different texts, so none can be sent back. Nothing that
comes is unpickled, and every length is compared with a limit before memory is asked for.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ckpt.errors import AccessError, CkptError, DeadlineError, FormatError
from ckpt.settings import MIB
from ckpt.text import address_text, number_of, parse_object, printable

from .endpoints import from_here, prepare, receive_exactly

T = TypeVar("T")
Address = tuple[str, int]

PROTOCOL = 1
_FRAME = struct.Struct("<II")
"""Bytes of JSON, and of what follows."""
_MAGIC = b"ckl1"
_NONCE = 32
_CLIENT = struct.Struct(f"<4sH{_NONCE}s")
_SERVER = struct.Struct(f"<4sH{_NONCE}s32s")
_PROOF = struct.Struct("<32s16s")
"""The client's proof, and what the connection is for."""
WELCOME, REFUSED = b"w", b"x"
_AT_ONCE = MIB
"""Bytes that a receiver of more waits for before it goes on."""
_SLICE = 0.2
"""Seconds after which a wait looks whether it should go on."""
_FIRST_TRY = 1.0
"""Seconds for the first try of an address, while there may be better ones; each round doubles it."""
_PAUSE, _LONGEST_PAUSE = 0.05, 0.4
"""Seconds before the next try where the other end has closed the connection; each try doubles it."""


def _nothing() -> None:
    """The default of what is called while a channel waits."""


@dataclass(eq=False)
class Channel:
    """One end of a stream to ``peer``. A wait ends after ``timeout`` seconds in which nothing moved; ``alive`` is called within waits, and
    an error of it ends them."""

    sock: socket.socket
    peer: str
    timeout: float
    alive: Callable[[], None] = _nothing
    _moved: float = field(default_factory=time.monotonic)
    _readable: select.poll = field(default_factory=select.poll)
    _wakes_for: int = 1

    def __post_init__(self) -> None:
        self.sock.settimeout(_SLICE)

    def send(self, *views: bytes | bytearray | memoryview) -> None:
        """Send all of these."""
        left = [memoryview(view).cast("B") for view in views if len(view)]
        self._moved = time.monotonic()
        while left:
            try:
                count = self.sock.sendmsg(left)
            except TimeoutError:
                self._wait("takes nothing")
                continue
            self._moved = time.monotonic()
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def receive(self, size: int, *, stranger: bool = False) -> bytes:
        """The next ``size`` bytes, which the caller has compared with a limit. From a ``stranger`` all must come within the timeout: one
        that sends byte by byte would hold the caller for as long as it likes."""
        data = bytearray(size)
        self.receive_into(memoryview(data), stranger=stranger)
        return bytes(data)

    def receive_into(self, view: memoryview, *, stranger: bool = False) -> None:
        """Fill ``view``; raises as :meth:`receive`."""
        self._moved = time.monotonic()
        quick = len(view) >= _AT_ONCE
        try:
            while len(view):
                self._wake_for(min(len(view), _AT_ONCE) if quick else 1)
                try:
                    count = self.sock.recv_into(view)
                except TimeoutError:
                    self._wait("sends nothing")
                    quick = False  # a slow sender: whatever came counts
                    continue
                if not count:
                    raise ConnectionError("the stream ended early")
                view = view[count:]
                if not stranger:
                    self._moved = time.monotonic()
                elif len(view):
                    self._wait("sends no whole answer")
        finally:
            self._wake_for(1)

    def await_next(self) -> bool:
        """Wait, however long, until something comes; False if the other end has closed."""
        while True:
            try:
                return bool(self.sock.recv(1, socket.MSG_PEEK))
            except TimeoutError:
                self.alive()
            except OSError:
                return False

    def check_open(self) -> None:
        """Look, without waiting, whether the other end is there; it was not expected to say anything now."""
        self._readable.register(self.sock, select.POLLIN)  # a socket with a timeout waits in recv, whatever its flags
        if self._readable.poll(0) and not self.sock.recv(1, socket.MSG_PEEK):
            raise ConnectionError("the stream ended early")

    def is_open(self) -> bool:
        """Whether the other end is there and says nothing, which it should not while nothing is asked."""
        if self.sock.fileno() < 0:  # closed, as in a process that was forked
            return False
        self._readable.register(self.sock, select.POLLIN)
        return not self._readable.poll(0)

    def _wake_for(self, size: int) -> None:
        """A wait ends when so many bytes are there, or the stream has ended: a wake-up for each packet would cost more than the bytes."""
        if size != self._wakes_for:
            with suppress(OSError):  # not on every system
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._wakes_for = size

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _wait(self, what: str) -> None:
        self.alive()
        if time.monotonic() - self._moved > self.timeout:
            message = f"{self.peer} {what} for {round(self.timeout, 1):g} s"
            raise DeadlineError(message, hint="look whether it died or hangs; a larger Job(timeout=) waits longer")


def dial(
    addresses: Sequence[Address],
    secret: bytes,
    timeout: float,
    *,
    peer: str,
    purpose: str,
    alive: Callable[[], None] = _nothing,
    same_network: bool = True,
    patient: bool = False,
) -> Channel:
    """Connect to one of ``addresses``, tried in turn until one answers, and prove to each other that both know ``secret``.

    ``peer`` is what messages call the other end; ``purpose``, at most 16 ASCII characters, is what it is to serve. ``patient``: where all
    addresses refuse, the other end may not have started yet, and they are tried until the deadline.
    """
    addresses, end, pause = from_here(list(addresses), same_network=same_network), time.monotonic() + timeout, _PAUSE
    while True:
        channel = Channel(_connected(addresses, end, timeout, peer, alive, patient=patient), peer, timeout, alive)
        try:
            prover = Prover(secret, purpose, peer)
            while not prover.done:
                channel.send(prover.send)
                prover.take(channel.receive(prover.missing, stranger=True))
        except BaseException as err:
            channel.close()
            # The other end may have had no room, among strangers who connect to it, too.
            if not isinstance(err, ConnectionError) or pause > _LONGEST_PAUSE or time.monotonic() + pause > end:
                raise
        else:
            return channel
        time.sleep(pause)
        pause *= 2


class Prover:
    """The client's part of the handshake, and what it says ``then``, step by step."""

    def __init__(self, secret: bytes, purpose: str, peer: str, then: bytes = b"") -> None:
        self._handshake = _client_handshake(secret, purpose, peer, then)
        self.send, self.missing = next(self._handshake)
        self._received = b""
        self.done = False

    def take(self, received: bytes) -> None:
        """The ``missing`` bytes have come; what is to be sent now is in ``send``."""
        try:
            self.send, self.missing = self._handshake.send(received)
        except StopIteration:
            self.send, self.missing, self.done = b"", 0, True

    def step(self, sock: socket.socket) -> None:
        """Go on without waiting; raises ConnectionError where the other end is not who it should be."""
        while not self.done:
            if self.send:
                sock.send(self.send)  # a connection that is new has room for it
                self.send = b""
            self._received = receive_exactly(sock, self.missing, self._received)
            if len(self._received) < self.missing:
                return
            received, self._received = self._received, b""
            try:
                self.take(received)
            except CkptError as err:
                raise ConnectionAbortedError(err.message) from err


def _client_handshake(secret: bytes, purpose: str, peer: str, then: bytes) -> Generator[tuple[bytes, int], bytes, None]:
    """Gives what to send and how many bytes are to come then, and takes these."""
    own = secrets.token_bytes(_NONCE)
    magic, protocol, theirs, proof = _SERVER.unpack((yield _CLIENT.pack(_MAGIC, PROTOCOL, own), _SERVER.size))
    _check_protocol(magic, protocol, peer)
    if not hmac.compare_digest(proof, _proof(secret, b"server", own, theirs)):
        raise _other_secret(peer)
    if (yield _PROOF.pack(_proof(secret, b"client", theirs, own), purpose.encode("ascii")) + then, 1) != WELCOME:
        raise _other_secret(peer)


class Proving:
    """The other end of it: a connection that was accepted and whose client has not proved itself yet. It must come for ``purpose`` and
    says ``behind`` bytes right after its proof: ``said``. ``began`` to be heard then; ``speaks`` once the first message has come, as those
    of strangers seldom do."""

    def __init__(self, sock: socket.socket, secret: bytes, purpose: str, behind: int) -> None:
        self.sock = sock
        self.began = time.monotonic()
        self.speaks = False
        self.said = b""
        self._purpose = purpose
        self._behind = behind
        self._handshake = _handshake(secret)
        self._proved = False
        _, self._missing = next(self._handshake)
        self._received = b""

    def step(self) -> bool:
        """Go on without waiting; whether the client has proved itself, and said all. Raises OSError if it is gone, or a stranger."""
        while self._missing:
            self._received = receive_exactly(self.sock, self._missing, self._received)
            if len(self._received) < self._missing:
                return False
            received, self._received = self._received, b""
            if self._proved:
                self.said = received
                break
            try:
                answer, self._missing = self._handshake.send(received)
            except StopIteration as end:
                self._proved, self._missing = True, self._behind
                self.sock.send(WELCOME)
                if end.value != self._purpose:
                    raise ConnectionAbortedError(f"it asks for {end.value!r}, and {self._purpose!r} are given here") from None
                continue
            except CkptError as err:
                if isinstance(err, AccessError):
                    self.sock.send(REFUSED)
                raise ConnectionAbortedError(err.message) from err
            self.sock.send(answer)  # a connection that is new has room for it
            self.speaks = True
        return True


def _handshake(secret: bytes) -> Generator[tuple[bytes, int], bytes, str]:
    """The server's part, likewise; gives the client's purpose."""
    magic, protocol, theirs = _CLIENT.unpack((yield b"", _CLIENT.size))
    if magic != _MAGIC:
        raise FormatError("it is not a client of ckpt")
    own = secrets.token_bytes(_NONCE)
    proof, purpose = _PROOF.unpack((yield _SERVER.pack(_MAGIC, PROTOCOL, own, _proof(secret, b"server", theirs, own)), _PROOF.size))
    _check_protocol(magic, protocol, "")
    if not hmac.compare_digest(proof, _proof(secret, b"client", own, theirs)):
        raise _other_secret("")
    return str(purpose.rstrip(b"\0").decode("ascii", "replace"))


def send(channel: Channel, message: Mapping[str, Any], views: Sequence[bytes | memoryview], *, more: int = 0) -> None:
    """One message, behind which the caller sends so many ``more`` bytes; raises as ``Channel.send``."""
    text = json.dumps(message).encode()
    channel.send(_FRAME.pack(len(text), sum(map(len, views)) + more), text, *views)


def receive(channel: Channel, most: int) -> tuple[dict[str, Any], bytes]:
    """The next message, of at most so many bytes; raises as ``receive_head``."""
    message, behind = receive_head(channel, most)
    return message, channel.receive(behind)


def receive_head(channel: Channel, most: int) -> tuple[dict[str, Any], int]:
    """The head of the next message, and the number of bytes behind it, which the caller receives; of each at most ``most`` bytes."""
    length, behind = _FRAME.unpack(channel.receive(_FRAME.size))
    if length > most or behind > most:
        raise FormatError(f"a message of {length + behind} bytes", where=channel.peer)
    try:
        return parse_object(channel.receive(length)), behind
    except ValueError as err:
        raise FormatError(f"a message that cannot be read: {err}", where=channel.peer) from err


def _proof(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, b"ckpt live " + role + b"".join(nonces), "sha256")


def _check_protocol(magic: bytes, protocol: int, peer: str) -> None:
    if magic != _MAGIC:
        raise FormatError("something else answers at this address", where=peer, hint="check the address")
    if protocol != PROTOCOL:
        raise FormatError(
            f"it speaks version {protocol} of the protocol, this release {PROTOCOL}",
            where=peer,
            hint="use the same release of ckpt at both ends",
        )


def _other_secret(peer: str) -> CkptError:
    return AccessError("the other end has another secret", where=peer, hint="give both the same secret= or CKPT_LIVE_SECRET")


def _connected(
    addresses: Sequence[Address], end: float, timeout: float, peer: str, alive: Callable[[], None], *, patient: bool
) -> socket.socket:
    """A connection to the first address that answers by ``end``. In each round every address has a moment, twice that of the round
    before."""
    patience = _FIRST_TRY
    outcomes: dict[Address, str] = {}
    while True:
        for host, port in addresses:
            alive()
            left = end - time.monotonic()
            if left <= 0:
                break
            try:
                sock = socket.create_connection((host, port), timeout=min(patience, left))
                prepare(sock, timeout)
                return sock
            except OSError as err:
                outcomes[host, port] = str(err)
        refused = outcomes and all("refused" in outcome for outcome in outcomes.values())
        if time.monotonic() >= end or (refused and not patient and patience > 4 * _FIRST_TRY) or not addresses:
            tried = ", ".join(f"{address_text(*address)}: {outcome}" for address, outcome in outcomes.items()) or "no address"
            raise DeadlineError(
                printable(f"{peer} cannot be reached ({tried})"),
                hint="look whether it runs, and whether its addresses lead there (CKPT_SOCKET_IFNAME chooses interfaces)",
            )
        patience *= 2
        time.sleep(min(0.05 * patience, 1.0, max(0.0, end - time.monotonic())))


# Whether a message from elsewhere has the members that it must have, each of its kind. What comes later need not look again.
#
# A kind is a class (``int`` takes no bool), ``None``, or a function that says whether a value is right;
# ``[kind]`` a list of any length, ``(kind, kind)`` a list of just these, ``{"name": kind}`` a mapping that has at least these members, and
# ``{str: kind}`` one of any names; ``Either(kind, kind)`` one of several.

Kind = Any


class Either(tuple[Kind, ...]):
    """One of these kinds."""

    __slots__ = ()

    def __new__(cls, *kinds: Kind) -> Either:
        return super().__new__(cls, kinds)


class WrongMemberError(ValueError):
    """What is wrong; :func:`checked` makes an error of it that says where it came from."""


def checked(message: Any, kind: Kind, what: str, where: str | None, hint: str = "use the same release of ckpt at both ends") -> Any:
    """The message, which is of this kind; ``what`` it should be."""
    try:
        check(message, kind)
    except WrongMemberError as err:
        raise FormatError(f"the received message is not a valid {what}: {err}", where=where, hint=hint) from None
    return message


def check(value: Any, kind: Kind, at: str = "it") -> None:
    """Raise WrongMemberError unless ``value``, which stands ``at``, is of this kind."""
    if isinstance(kind, Either):
        right = any(_is(value, each) for each in kind)
    elif isinstance(kind, tuple | list):
        right = isinstance(value, list | tuple) and (isinstance(kind, list) or len(value) == len(kind))
        for n, each in enumerate(value if right else ()):
            check(each, kind[0] if isinstance(kind, list) else kind[n], f"{at}[{n}]")
    elif isinstance(kind, Mapping):
        right = isinstance(value, Mapping)
        _check_members(value if right else {}, kind if right else {}, at)
    elif isinstance(kind, type):
        right = type(value) is kind
    else:
        right = value is None if kind is None else kind(value)
    if not right:
        raise WrongMemberError(f"{at} is {value!r:.80}")


def _is(value: Any, kind: Kind) -> bool:
    try:
        check(value, kind)
    except WrongMemberError:
        return False
    return True


def _check_members(value: Mapping[Any, Any], kinds: Mapping[Any, Kind], at: str) -> None:
    for name, kind in kinds.items():
        if name in (str, int):
            for each, member in value.items():
                check(member, kind, f"{at}.{each!s:.40}")
                if name is int:
                    check(str(each), _is_number, at)
        elif name not in value:
            raise WrongMemberError(f"{at} has no {name!r}")
        else:
            check(value[name], kind, f"{at}.{name}")


def is_count(value: object) -> bool:
    """A number from 0 on."""
    return type(value) is int and value >= 0


def _is_number(key: str) -> bool:
    try:
        return number_of(key) >= 0
    except ValueError:
        return False


def is_seconds(value: object) -> bool:
    """A number, not the NaN or infinity that JSON of Python has."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def is_hex(value: object) -> bool:
    """A token or a digest."""
    return isinstance(value, str) and len(value) <= 64 and len(value) % 2 == 0 and all(c in "0123456789abcdef" for c in value)


def is_host(value: object) -> bool:
    """An address of a machine, in numbers."""
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False


def is_port(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 16


ADDRESSES: Kind = [(is_host, is_port)]
"""Where a process listens."""


# Values that messages and small files have, by the types of their fields: a dataclass or a NamedTuple is an object, a tuple a list.


@cache
def _hints(record: Any) -> dict[str, Any] | None:
    """The types of the fields of a dataclass or a NamedTuple; None for any other type."""
    return get_type_hints(record, include_extras=True) if is_dataclass(record) or hasattr(record, "_fields") else None


@cache
def _is_plain(hint: Any) -> bool:
    """Whether values of this type are JSON as they are."""
    return get_origin(hint) in (None, Annotated, Literal) and _hints(hint) is None


def kind_of(hint: Any) -> Kind:
    """The kind of what :func:`encoded` makes of a value of this type; that of ``Annotated[str, is_hex]`` is ``is_hex``."""
    return _kind_of(hint)  # a cached function takes no class whose instances have no hash, by mypy


@cache
def _kind_of(hint: Any) -> Kind:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return arguments[1]
    if origin in (Union, UnionType):
        return Either(*map(kind_of, arguments))
    if origin is Literal:
        return lambda value: value in arguments
    if origin is tuple:
        return [kind_of(arguments[0])] if arguments[-1] is ... else tuple(map(kind_of, arguments))
    if origin is Mapping:
        return {arguments[0]: kind_of(arguments[1])}
    if isinstance(hint, type) and (hints := _hints(hint)) is not None:
        return {name: kind_of(each) for name, each in hints.items()}
    kinds: dict[Any, Kind] = {int: is_count, float: is_seconds, NoneType: None}
    return kinds.get(hint, hint)


def encoded(value: Any) -> Any:
    """As JSON. Equal for equal values: mappings by numbers in their order."""
    kind: Any = type(value)
    if kind in (int, str, float, bool, NoneType):
        return value
    if (hints := _hints(kind)) is not None:
        return {name: encoded(getattr(value, name)) for name in hints}
    if isinstance(value, Mapping):
        return {key: encoded(value[key]) for key in (sorted(value) if all(type(key) is int for key in value) else value)}
    return value if not value or type(value[0]) is int else [*map(encoded, value)]


def decoded(hint: Any, value: Any) -> Any:
    """The value of this type that :func:`encoded` made something of its kind of."""
    if _is_plain(hint):
        return value
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None else decoded(arguments[0], value)
    if origin is tuple:
        if arguments[-1] is ... and _is_plain(arguments[0]):
            return tuple(value)
        return tuple(map(decoded, arguments[:1] * len(value) if arguments[-1] is ... else arguments, value))
    if origin is Mapping:
        return {arguments[0](key): decoded(arguments[1], each) for key, each in value.items()}
    if (hints := _hints(hint)) is not None:
        return hint(**{name: value[name] if _is_plain(each) else decoded(each, value[name]) for name, each in hints.items()})
    return value


def record(cls: type[T], message: Any, what: str, where: str | None) -> T:
    """A message that is a ``cls``, whatever else it has; ``what`` it should be. FormatError if it is none."""
    hint: Any = cls
    made: T = decoded(hint, checked(message, kind_of(hint), what, where))
    return made
