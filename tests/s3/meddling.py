"""Stands between our client and the network: sees every request, and answers some itself or loses what the store answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError
from botocore.httpsession import URLLib3Session

from ckpt.io_backends import s3_client as s3_client


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A request as it was sent."""

    operation: str
    request: Any

    @property
    def path(self) -> str:
        return str(urlsplit(self.request.url).path)

    @property
    def is_part(self) -> bool:
        """A part of an object, not of the trial of what the store can do."""
        return self.operation == "UploadPart" and "/.prepare-" not in self.path


Meddler = Callable[[Seen], Any]
"""Gives an answer in place of the store's, or None to send the request on."""


def watch(monkeypatch: pytest.MonkeyPatch, meddler: Meddler = lambda seen: None) -> list[Seen]:
    """All requests from now on, in a list that grows."""
    seen: list[Seen] = []
    make = s3_client._make

    def on_send(request: Any, event_name: str, **_: Any) -> Any:
        seen.append(Seen(operation=event_name.rpartition(".")[2], request=request))
        return meddler(seen[-1])

    def watched(*args: Any) -> Any:
        boto = make(*args)
        boto.meta.events.register("before-send.s3", on_send)
        return boto

    monkeypatch.setattr(s3_client, "_make", watched)
    monkeypatch.setattr(s3_client, "_clients", {})
    return seen


def answer(request: Any, status: int, code: str) -> AWSResponse:
    """An error as a store would answer it."""
    return AWSResponse(request.url, status, {}, _Raw(f"<Error><Code>{code}</Code><Message>meddled</Message></Error>".encode()))


def lost_answer(request: Any) -> Any:
    """Let the request have its effect, and fail."""
    URLLib3Session().send(request)
    raise ConnectionClosedError(endpoint_url=request.url)


def lost_request(request: Any) -> Any:
    """Fail without any effect."""
    raise ConnectionClosedError(endpoint_url=request.url)


class _Raw:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self._data


@contextmanager
def cutting(endpoint: str, cuts: list[int]) -> Iterator[str]:
    """The endpoint of a proxy that breaks off its first connections after so many bytes of the store's answers; later ones go through."""
    target = urlsplit(endpoint)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_accept, args=(server, (target.hostname, target.port), cuts), daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


@contextmanager
def slow(endpoint: str, speed: int) -> Iterator[str]:
    """The endpoint of a proxy that takes so many bytes a second of what a client sends on one connection."""
    target = urlsplit(endpoint)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        threading.Thread(target=_accept, args=(server, (target.hostname, target.port), [], speed), daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def _accept(server: socket.socket, target: Any, cuts: list[int], speed: int = 0) -> None:
    with suppress(OSError):
        while True:
            client, _ = server.accept()
            store = socket.create_connection(target)
            threading.Thread(target=_pump, args=(client, store, 1 << 62, speed), daemon=True).start()
            threading.Thread(target=_pump, args=(store, client, cuts.pop(0) if cuts else 1 << 62), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, left: int, speed: int = 0) -> None:
    with suppress(OSError):
        while left > 0 and (data := source.recv(min(1 << 16, left))):
            sink.sendall(data)
            left -= len(data)
            if speed:
                time.sleep(len(data) / speed)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
