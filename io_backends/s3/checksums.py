"""Checksums of bytes on their way to an object store, which compares them with what arrives. No requests.

A checksum is made of the memory that the bytes are sent from. The ways, the cheapest for us first:

``crc32``   a header of each request; parts and the whole object keep theirs
``sha256``  the body's hash is part of the signature: every store that checks signatures in full checks it
``md5``     ``Content-MD5``; and where an ETag is the MD5 of the bytes, it is compared, so that it does not take a store that checks

Which of them a store checks is tried (``probing``), since many take headers that they do not know without a word.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .tries import ChangedError

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
