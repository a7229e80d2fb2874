"""moto's server in a process of its own: what the tests use where Ceph cannot run. It keeps S3's rules, but is a program in Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import pytest

from tests.ports import free_ports
from tests.s3.rgw import NotStartedError, answers

SECONDS = 60.0


@contextmanager
def serve() -> Iterator[tuple[str, str]]:
    """Endpoint and version of a server that runs until the block ends; skips where moto is not installed."""
    pytest.importorskip("moto", reason="needs radosgw or moto")
    (port,) = free_ports(1)
    guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    command = [*guard, sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + SECONDS
        while not answers(endpoint):
            if process.poll() is not None or time.monotonic() > deadline:
                raise NotStartedError("moto does not serve")
            time.sleep(0.1)
        yield endpoint, version("moto")
    finally:
        process.kill()
        process.wait()
