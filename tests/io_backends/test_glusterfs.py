"""GlusterFS: three replicas on this machine, mounted with FUSE. Large files, direct writes, and checkpoints that are replaced meanwhile.
Opt-in: it needs root, /dev/fuse and `apt-get install glusterfs-server`."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.io_backends import posix_direct as posix_probe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
VOLUME = f"ckpt{os.getpid()}"


def gluster(*words: str) -> None:
    subprocess.run(["gluster", "--mode=script", "volume", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if os.geteuid() or not os.path.exists("/dev/fuse") or not shutil.which("glusterd") or not shutil.which("gluster"):
        pytest.skip("needs root, /dev/fuse and glusterfs-server")
    root = tmp_path_factory.mktemp("gluster")
    daemon = subprocess.Popen(["glusterd", "--no-daemon", "-l", f"{root}/glusterd.log", "-p", f"{root}/glusterd.pid"])
    try:
        time.sleep(3)
        host = subprocess.run(["hostname", "-I"], check=True, capture_output=True, text=True).stdout.split()[0]
        gluster("create", VOLUME, "replica", "3", *(f"{host}:{root}/brick{i}" for i in range(3)), "force")
        gluster("start", VOLUME)
        mount = root / "mount"
        mount.mkdir()
        time.sleep(2)
        subprocess.run(["glusterfs", f"--volfile-server={host}", f"--volfile-id={VOLUME}", str(mount)], check=True, timeout=60)
        time.sleep(1)
        yield mount
        subprocess.run(["umount", "-l", str(mount)], check=False)
        gluster("stop", VOLUME)
        gluster("delete", VOLUME)
    finally:
        daemon.terminate()
        daemon.wait(30)


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_a_large_save(mounted: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    """Tensors whose memory begins and ends anywhere."""
    monkeypatch.setenv("CKPT_DIRECT", mode)
    monkeypatch.setattr(posix_probe, "_known", {})
    caplog.set_level(logging.WARNING)
    state = {f"w{i}": torch.full((2_000_003 + i,), float(i)) for i in range(9)} | {"big": torch.arange(6_000_001.0)}
    url = f"{mounted}/{mode}"
    ckpt.save(url, state, job=ckpt.Job(threads=4))
    found = {name: torch.zeros_like(t) for name, t in state.items()}
    ckpt.load(url, found)
    assert all(torch.equal(found[name], t) for name, t in state.items())
    assert caplog.records == []


READER = """
import sys, time, torch, ckpt
url, seconds = sys.argv[1], float(sys.argv[2])
end, seen, replaced = time.monotonic() + seconds, 0, 0
while time.monotonic() < end:
    view = ckpt.open(url)
    try:
        found = {view[f"w{i}"].read()[0].item() for i in range(4)}
    except ckpt.errors.ConflictError as err:
        assert "replaced by another save while it was read" in str(err), err
        replaced += 1
        continue
    assert len(found) == 1, found
    target = {f"w{i}": torch.zeros(5000) for i in range(4)}
    ckpt.load(url, target)
    assert len({t[0].item() for t in target.values()}) == 1
    seen += 1
print(seen, replaced)
"""


def test_a_checkpoint_that_is_replaced_while_it_is_read(mounted: Path) -> None:
    url = f"{mounted}/replaced"

    def save(number: int) -> None:
        ckpt.save(url, {f"w{i}": torch.full((5000,), float(number)) for i in range(4)})

    save(0)
    reader = subprocess.Popen([sys.executable, "-c", READER, url, "20"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    number = 0
    while reader.poll() is None:
        number += 1
        save(number)
    out, err = reader.communicate()
    assert reader.returncode == 0, err[-3000:]
    assert int(out.split()[0]) > 3 and number > 3
