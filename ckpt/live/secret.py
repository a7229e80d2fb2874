"""The secret of a source: what it and its sinks prove to each other that they know. No torch."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from ckpt import settings
from ckpt.errors import AccessError, UsageError
from ckpt.memory.place import check_private, write_private
from ckpt.transport.interfaces import interface_addresses, is_loopback

from .control import split_address

_BYTES = 32
_HINT = "give secret= or CKPT_LIVE_SECRET to the source and its sinks; or let XDG_RUNTIME_DIR name a folder of this account"
_REPLACE = f"remove it, and start the source again; or {_HINT}"


def given_secret(secret: str | bytes | None) -> bytes | None:
    """What the caller or ``CKPT_LIVE_SECRET`` says."""
    text = settings.live_secret() if secret is None else secret
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
                hint="give secret= or CKPT_LIVE_SECRET, the same as for the source; by itself it is found on its machine, in its account",
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
