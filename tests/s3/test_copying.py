"""``ckpt cp`` and ``ckpt gc`` on a real object store."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ckpt.engine.copy import copy_checkpoint
from ckpt.io_backends import Backend, open_backend
from ckpt.io_backends.conformance.reading import everything
from ckpt.io_backends.registry import wrap_backends
from ckpt.runs.orphans import find_orphans, remove_orphans
from tests.cli.checkpoints import sample, write_checkpoint
from tests.cli.running import run
from tests.failures.flips import Flip
from tests.formats import oracle


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A checkpoint whose first file takes several parts of an upload."""
    url = str(tmp_path / "source")
    large = np.random.default_rng(0).integers(0, 1 << 60, (5_000_000,), dtype=np.int64)
    write_checkpoint(url, {**sample(), "large": large}, ranks=1)
    return url


def test_there_and_back(tmp_path: Path, source: str, s3_url: str) -> None:
    expected = everything(open_backend(source))
    assert copy_checkpoint(source, f"{s3_url}/a").committed
    assert copy_checkpoint(f"{s3_url}/a", f"{s3_url}/run/step-7").committed
    generic = f"{s3_url}/b".replace("s3://", "s3a://")  # the same store, through fsspec
    assert copy_checkpoint(f"{s3_url}/run/step-7", generic).committed
    assert copy_checkpoint(generic, str(tmp_path / "back")).committed
    for url in (f"{s3_url}/a", f"{s3_url}/run/step-7", f"{s3_url}/b", str(tmp_path / "back")):
        assert everything(open_backend(url)) == expected
    assert oracle.read(tmp_path / "back") == oracle.read(source)
    assert list(open_backend(s3_url).pending_uploads()) == []


def test_a_bit_that_flips_after_a_part_was_sent(source: str, s3_url: str) -> None:
    """The chunk is read again, but what was sent of it shares its parts with other bytes."""
    (file,) = (Path(source) / "data").iterdir()
    flip = Flip(str(file), 20_000_000)
    with wrap_backends(flip.wrap):
        assert copy_checkpoint(source, f"{s3_url}/a").committed
    assert flip.happened == 1
    assert everything(open_backend(f"{s3_url}/a")) == everything(open_backend(source))
    assert list(open_backend(s3_url).pending_uploads()) == []


def test_killed_while_copying(source: str, s3_url: str) -> None:
    """The process is gone when the first file is there, then when an upload has begun; the next copy ends it, and gc finds the upload."""
    target, backend = f"{s3_url}/run/step-1", open_backend(s3_url)
    for operation in ("PutObject", "CreateMultipartUpload"):
        copying = subprocess.run([sys.executable, "-c", DYING, operation, "cp", "-q", source, target], timeout=120, check=False)
        assert copying.returncode == -signal.SIGKILL
        assert "checkpoint.json" not in everything(open_backend(target))
    report = copy_checkpoint(source, target)
    assert report.copied_files < report.files
    assert everything(open_backend(source)).items() <= everything(open_backend(target)).items()
    assert list(backend.pending_uploads()), "the upload of the process that was killed"
    remove_orphans(backend, find_orphans(backend, older_than=0, now=time.time()))
    assert list(backend.pending_uploads()) == []
    assert everything(open_backend(target)) == everything(open_backend(source))


DYING = """
import os, signal, sys
from ckpt.cli.start import main
from ckpt.io_backends import s3_client as client
from ckpt.io_backends.s3_backend import S3Backend

make, operation = client._make, sys.argv.pop(1)

def die(http_response, **_):
    if "/.prepare-" not in http_response.url:
        os.kill(os.getpid(), signal.SIGKILL)

def made(*args):
    boto = make(*args)
    boto.meta.events.register(f"after-call.s3.{operation}", die)
    return boto

S3Backend.__init__.__kwdefaults__["single"] = 16 << 20
client._make = made
main()
"""
"""Runs a command and is killed by the first answer to one operation, the trial of what the store can do apart."""


def _leave_an_upload(backend: Backend, path: str) -> None:
    """As a killed process would: some parts are there, and nobody ends it."""
    size = 70 << 20
    writer = backend.create(path, size)
    writer.write(0, [bytes(16 << 20)])
    deadline = time.monotonic() + 20
    while not list(backend.pending_uploads()) and time.monotonic() < deadline:
        time.sleep(0.05)


def test_gc(s3_url: str) -> None:
    root = f"{s3_url}/run"
    for n in (1, 2, 3):
        write_checkpoint(f"{root}/step-{n}", {"x": np.full(9, n)})
    write_checkpoint(f"{root}/step-4", {"x": np.ones(9)}, commit=False)
    backend = open_backend(root)
    _leave_an_upload(backend, "step-4/data/0mwpsxo3h46af2rm-00000.safetensors")
    found = json.loads(run("gc", root, "--keep", "latest=1", "--json").stdout)
    assert [(s["step"], s["outcome"]) for s in found["steps"]] == [(1, "removed"), (2, "removed"), (3, "kept"), (4, "kept")]
    assert [(d["what"], d["outcome"]) for d in found["orphans"]] == [("save", "kept"), ("upload", "kept")]
    before = everything(backend)
    later = find_orphans(backend, older_than=3600, now=time.time() + 7200)
    assert [d.removable for d in later] == [True, True]
    assert everything(backend) == before
    assert run("gc", root, "--keep", "latest=1", "--older-than", "0", "--yes").exit_code == 0
    assert everything(backend) == {p: d for p, d in before.items() if p.startswith("step-3/")}
    assert list(backend.pending_uploads()) == []
