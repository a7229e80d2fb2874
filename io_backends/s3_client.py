"""The client of an object store, and checksums of bytes on their way to it, which it compares with what arrives.

A checksum is made of the memory that the bytes are sent from. The ways, the cheapest for us first:

``crc32``   a header of each request; parts and the whole object keep theirs
``sha256``  the body's hash is part of the signature: every store that checks signatures in full checks it
``md5``     ``Content-MD5``; and where an ETag is the MD5 of the bytes, it is compared, so that it does not take a store that checks

Which of them a store checks is tried (``probing``), since many take headers that they do not know without a word.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import CredentialRetrievalError

from ckpt import settings
from ckpt.concurrency import ProcessLock
from ckpt.errors import CkptError, StorageError

from .s3_tries import (
    DEFAULT,
    FAILURES,
    HALF_ANSWERS,
    Acquaintance,
    ChangedError,
    S3Options,
    Tries,
    TruncatedError,
    is_refused,
    is_stale_key,
    tag_of,
    translated,
)

Way = Literal["off", "crc32", "sha256", "md5"]
WAYS: tuple[Way, ...] = ("crc32", "sha256", "md5")

_MD5 = re.compile(r'"?([0-9a-f]{32}(-\d+)?)"?')


@dataclass(frozen=True, kw_only=True, slots=True)
class Checks:
    """How bytes are protected on their way into a bucket."""

    way: Way
    tags: bool = False
    """The ETag of bytes that are sent in one request is their MD5."""

    def of(self, data: memoryview | bytes) -> Sums:
        """What to send with ``data``."""
        if self.way == "crc32":
            crc = _base64(zlib.crc32(data).to_bytes(4, "big"))
            return Sums(names={"ChecksumCRC32": crc}, crc=crc)
        if self.way == "md5":
            md5 = hashlib.md5(data, usedforsecurity=False)
            return Sums(names={"ContentMD5": _base64(md5.digest())}, md5=md5.hexdigest() if self.tags else "")
        return Sums()

    def wrong(self) -> Sums:
        """Checksums that no bytes of a probe have."""
        return self.of(b"something else")

    @property
    def upload(self) -> dict[str, str]:
        """What the request says that begins an upload in parts."""
        return {"ChecksumAlgorithm": "CRC32"} if self.way == "crc32" else {}


OFF = Checks(way="off")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """The checksums of the bytes of one request."""

    names: Mapping[str, str] = field(default_factory=dict)
    """What botocore calls them."""
    crc: str = ""
    md5: str = ""
    """What the ETag has to be; empty where it is something else."""

    def check(self, tag: str) -> None:
        """Compare with the ETag of the answer."""
        stored = md5_in(tag)
        if self.md5 and stored and stored != self.md5:
            raise ChangedError(f"the store got other bytes than were sent: their MD5 is {stored}, not {self.md5}", tag=tag)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfirmedPart:
    """A part that the store has confirmed: its ETag, and its CRC-32 where it was sent with one."""

    tag: str
    crc: str = ""

    @property
    def text(self) -> str:
        return f"{self.tag} {self.crc}".rstrip()

    @staticmethod
    def of_text(text: str) -> ConfirmedPart:
        tag, _, crc = text.partition(" ")
        return ConfirmedPart(tag=tag, crc=crc)

    def named(self, number: int) -> dict[str, Any]:
        """As the request that completes the upload lists it."""
        return {"PartNumber": number, "ETag": self.tag, **({"ChecksumCRC32": self.crc} if self.crc else {})}


def check_whole(checks: Checks, parts: Sequence[ConfirmedPart], answer: Mapping[str, Any]) -> None:
    """Compare the checksum that the store gives of the whole object, if it gives one, with what its parts make."""
    suffix = f"-{len(parts)}"
    crc, tag = str(answer.get("ChecksumCRC32", "")), str(answer.get("ETag", "")).strip('"')
    if crc.endswith(suffix) and all(part.crc for part in parts):
        combined = zlib.crc32(b"".join(b64decode(part.crc) for part in parts))
        _compare("CRC-32", crc, _base64(combined.to_bytes(4, "big")) + suffix)
    if checks.tags and tag.endswith(suffix) and all(md5_in(part.tag) for part in parts):
        digests = b"".join(bytes.fromhex(md5_in(part.tag)) for part in parts)
        _compare("MD5", tag, hashlib.md5(digests, usedforsecurity=False).hexdigest() + suffix)


def _compare(what: str, stored: str, expected: str) -> None:
    if stored != expected:
        raise ChangedError(f"the store made another object of the parts: its {what} is {stored}, not {expected}")


def md5_in(tag: str) -> str:
    """The MD5 that an ETag may be; empty if it looks like something else."""
    match = _MD5.fullmatch(tag)
    return match[1] if match and not match[2] else ""


def _base64(digest: bytes) -> str:
    return b64encode(digest).decode()


# The client of an object store: botocore, set up by the variables and files that every other tool reads, and the tries of a request.
#
# One client for each setting of the environment and of storage options, shared by all threads; a forked child makes its own. botocore
# itself does not repeat requests here, so that we know of every one that failed.

# What requests send: memory, piece by piece.
#
# The standard library gives a socket one time-out for all that it is handed at once. Handed a whole part, that would end every upload
# over a slow line, however steadily it goes on; so a body is handed over in pieces, each with a time-out of its own.

PIECE = 256 << 10
"""Bytes that have to be taken by the network before a time-out is over."""


class Body:
    """A file of these bytes for one try, as botocore takes it: it is never copied. ``sent`` is told how many bytes were taken out of it,
    which are more than there are if they are hashed before they are sent."""

    def __init__(self, data: memoryview | bytes, sent: Callable[[int], None]) -> None:
        self._view = memoryview(data)
        self._at = 0
        self._taken = 0
        self._sent = sent

    def __len__(self) -> int:
        return self._view.nbytes

    def read(self, size: int = -1) -> memoryview | bytes:
        """The next piece; its length does not depend on ``size``: who sends asks for 16 KiB at a time, a call of the system for each."""
        del size
        piece = self._view[self._at : self._at + PIECE]
        self._at += piece.nbytes
        self._taken += piece.nbytes
        self._sent(self._taken)
        return piece if piece.nbytes else b""

    def seek(self, offset: int, whence: int = 0) -> int:
        """As for files."""
        self._at = offset + (0, self._at, self._view.nbytes)[whence]
        return self._at

    def tell(self) -> int:
        """As for files."""
        return self._at

    def getbuffer(self) -> memoryview:
        """All bytes."""
        return self._view


R = TypeVar("R")

STALL, PATIENCE = 30.0, 120.0
"""Seconds without a byte before a request counts as lost, and of trying one request. Less where a rank would count as dead before."""
CONNECTIONS = 128
LANES = 16
"""Parts that are sent at once, and calls that one process has going on."""
ROOM = 256 << 20
"""Bytes of longer objects that are gathered at once to be sent in one request each."""
_RENEW = 30.0
"""Seconds before credentials are looked up anew a second time."""


def environment() -> tuple[tuple[str, str], ...]:
    """All that decides what a client is like, as far as it is not in files."""
    names = ("HOME", "CKPT_TIMEOUT", "CKPT_S3_CHECKSUM", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
    return tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("AWS_") or k in names))


class Room:
    """So much memory for those who come first; others do with less. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Whether there was as much."""
        with self._lock:
            enough = self._free >= size
            self._free -= size if enough else 0
            return enough

    def give_back(self, size: int) -> None:
        """What was taken."""
        with self._lock:
            self._free += size


class S3Client:
    """Requests to one store with one identity, each with its tries."""

    def __init__(self, options: S3Options = DEFAULT) -> None:
        timeout = settings.timeout(None)
        self._options = options
        self.patience = min(PATIENCE, timeout / 2)
        self._stall = min(STALL, timeout / 4)
        self.lanes = threading.BoundedSemaphore(LANES)
        """For parts that are sent beside the caller: they are what is kept in memory."""
        self.room = Room(ROOM)
        """For objects that are gathered whole, and are longer than a part."""
        self.conditional: dict[str, bool] = {}
        """Buckets, and whether they keep the conditions of a request."""
        self.writable: set[tuple[str, str]] = set()
        """Buckets and prefixes below which an object could be written."""
        self.bare_tags: set[str] = set()
        """Buckets that compare ETags without the quotes that belong to them."""
        self.deletes_singly: set[str] = set()
        """Buckets whose store does not know the request that deletes many objects."""
        self.checks: dict[str, Checks] = {}
        """Buckets, and the checksums of whole objects that they compare."""
        self.part_checks: dict[str, Checks] = {}
        """The same for parts."""
        self.trying = threading.RLock()
        """Held while a bucket is tried: whether bodies are signed is one switch for all buckets, and a trial turns it."""
        self._store = Acquaintance(options=options)
        self._signs = False
        self._lock = threading.Lock()
        self._renewed = -_RENEW
        self._boto: Any = None
        self._checksums = False

    def attempt(self, what: str, where: str, request: Callable[[Any, Tries], R], *, over: Callable[[], bool] | None = None) -> R:
        """Give what ``request`` does with botocore's client; try again while that may help and ``over`` does not say stop."""
        tries = Tries(what, where, self.patience, self._store, over)
        # Which errors end the loop: one of ours (already explained), and one that ``Tries.again`` gives up on. New
        # credentials, after the old ones have expired, are no failed try.
        while True:
            boto = None
            try:
                boto = self._client()
                if not tries.failed:
                    tries.went_on()  # setting up the client took its time
                answer = request(boto, tries)
                self._store.note(None)
                return answer
            except CkptError:
                raise
            except FAILURES as err:
                if boto is None and not isinstance(err, CredentialRetrievalError):
                    raise translated(err, "set up the client", where, options=self._options) from err
                if self._has_new_keys(err, boto):
                    continue
                tries.again(err)
            except RecursionError as err:  # botocore asks for the bucket's region, is sent elsewhere again, and so on
                hint = "set AWS_ENDPOINT_URL to the endpoint that serves this bucket, and AWS_REGION to its region"
                raise StorageError(f"cannot {what}: the store answers every request with a redirect", where=where, hint=hint) from err
            except HALF_ANSWERS as err:
                if boto is None:
                    raise translated(err, "set up the client", where, options=self._options) from err
                tries.again(TruncatedError(f"half an answer: {type(err).__name__}: {err}"))

    def body(self, data: memoryview | bytes, tries: Tries) -> Body | bytes:
        """What botocore sends in one of these tries: with checksums of its own it takes bytes alone."""
        return bytes(data) if self._checksums else Body(data, tries.sent)

    def tag_of(self, answer: Mapping[str, Any]) -> str:
        """The ETag of an answer; raises what ``s3_errors.tag_of`` does. After the first one, an answer without an ETag was cut off."""
        tag = tag_of(answer)
        self._store.tagged = True
        return tag

    @property
    def endpoint(self) -> str:
        """The URL of the store, as we reach it."""
        return str(self._client().meta.endpoint_url)

    def secure(self) -> bool:
        """Whether TLS protects the way."""
        return self.endpoint.startswith("https:")

    def sign_bodies(self, *, on: bool) -> None:
        """Whether the hash of a body is part of the signature."""
        with self._lock:
            self._signs = on
            if self._boto is not None:
                _sign_bodies(self._boto, on=on)

    @property
    def signs(self) -> bool:
        """Whether it is."""
        return bool((self._client().meta.config.s3 or {}).get("payload_signing_enabled"))

    def _client(self) -> Any:
        with self._lock:
            if self._boto is None:
                self._boto = _make(self._stall, self._options)
                if self._signs:
                    _sign_bodies(self._boto, on=True)
                self._checksums = self._boto.meta.config.request_checksum_calculation != "when_required"
            return self._boto

    def _has_new_keys(self, err: Exception, boto: Any) -> bool:
        """Whether files and variables were read again, since the store does not take our credentials any more."""
        # If it never has, nobody waits for others; but whoever mends the settings and calls again in this process has them read.
        if is_stale_key(err) or (is_refused(err) and self._store.accepted):
            # Look credentials up anew; False if that was done just now and did not help
            with self._lock:
                # Many threads meet an expired key at once. The first one looks for new credentials; the others find
                # another client in its place and simply try again.
                if self._boto is not boto:
                    return True  # another thread did
                if time.monotonic() - self._renewed < _RENEW:
                    return False
                self._renewed = time.monotonic()
                self._boto = None
                return True
        if is_refused(err):
            with self._lock:
                self._boto = None if self._boto is boto else self._boto
        return False


def _make(stall: float, options: S3Options = DEFAULT) -> Any:
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config

    session = botocore.session.Session(profile=options.profile)
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_moment)
    profile = session.get_scoped_config()
    s3 = profile.get("s3", {}) if isinstance(profile.get("s3"), dict) else {}
    asked = "AWS_REQUEST_CHECKSUM_CALCULATION" in os.environ or "request_checksum_calculation" in profile
    checksums = {} if asked else {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    given = dict(options.config)
    styled: dict[str, Any] = given.pop("s3", None) or {}
    ours: dict[str, Any] = {} if "payload_signing_enabled" in s3 else {"payload_signing_enabled": False}
    unsigned = {"signature_version": UNSIGNED} if options.anonymous else {}

    def client(style: dict[str, str]) -> Any:
        defaults: dict[str, Any] = {
            "connect_timeout": min(10.0, stall),
            "read_timeout": stall,
            "max_pool_connections": CONNECTIONS,
            **checksums,
        }
        if session.get_config_variable("user_agent_appid") is None:  # which would be lost
            defaults["user_agent"] = session.user_agent()  # else it is put together anew for each request
        config = Config(
            parameter_validation=False,  # it knows no memoryview
            retries={"total_max_attempts": 1},
            s3={**ours, **style, **styled},
            **{**defaults, **given, **unsigned},
        )
        return session.create_client(
            "s3",
            **{"region_name": (os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"), **options.client},
            config=config,
        )

    # The endpoint is known only from a client. AWS needs the bucket in the host name; other stores rarely have such
    # names, so for these a second client is made with the bucket in the path.
    made = client({})
    host = urlsplit(made.meta.endpoint_url).hostname or ""
    if not ("addressing_style" in {**s3, **styled} or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))):
        made = client({"addressing_style": "path"})  # other stores seldom have a name for each bucket
    made.meta.events.register("before-call.s3", _expect_nothing)
    made.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
    if options.requester_pays:
        made.meta.events.register("before-call.s3", _pay)
    return made


def _moment(text: Any) -> datetime:
    """The time that an answer says; the standard library's parsers take a tenth of the time of botocore's, which stands in for others."""
    from botocore.utils import parse_timestamp

    try:
        moment = datetime.fromisoformat(text[:-1] + "+00:00") if text.endswith("Z") else parsedate_to_datetime(text)
    except (AttributeError, TypeError, ValueError):
        moment = None
    parsed: datetime = parse_timestamp(text) if moment is None or moment.tzinfo is None else moment
    return parsed


def _expect_nothing(params: dict[str, Any], **_: Any) -> None:
    """Files are sent with "Expect: 100-continue": one more way to the store and back, and a second where a store does not know it."""
    params["headers"].pop("Expect", None)


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    """This request must bear a checksum, and stores that do not know botocore's newer ones take this one."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = b64encode(digest).decode()


def _pay(params: dict[str, Any], **_: Any) -> None:
    """Before a request is signed."""
    params["headers"]["x-amz-request-payer"] = "requester"


def _sign_bodies(boto: Any, *, on: bool) -> None:
    """Each request asks its client's configuration."""
    boto.meta.config.s3 = {**(boto.meta.config.s3 or {}), "payload_signing_enabled": on}


_clients: dict[tuple[tuple[tuple[str, str], ...], str], S3Client] = {}
_clients_lock = ProcessLock(_clients.clear)
"""A forked child makes its own connections."""
_KEPT = 8


def client_of(options: S3Options = DEFAULT) -> S3Client:
    """The client for these options and the environment as it is now."""
    key = (environment(), options.token)
    with _clients_lock:
        client = _clients.pop(key) if key in _clients else S3Client(options)
        _clients[key] = client  # the last one that will be forgotten
        while len(_clients) > _KEPT:
            del _clients[next(iter(_clients))]
        return client
