"""An environment without credentials or endpoint, in which every request to another machine is seen."""

from __future__ import annotations

import os
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.s3.stores import NO_FILES


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    requests: list[str]


class _Record(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Proxy)
        self.server.requests.append(self.rfile.readline().decode("latin-1").strip())


@contextmanager
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Inside the block requests that are not for 127.0.0.1 end at a proxy that notes them and hangs up. Gives the list of them."""
    for name in [n for n in os.environ if n.startswith(("AWS_", "FSSPEC_")) or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with _Proxy(("127.0.0.1", 0), _Record) as server:
        server.requests = []
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_address[1]}")
        for name, value in {**NO_FILES, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "CKPT_TIMEOUT": "20"}.items():
            monkeypatch.setenv(name, value)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server.requests
        finally:
            server.shutdown()
            thread.join()
