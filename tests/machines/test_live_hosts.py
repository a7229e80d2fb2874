"""Live states between hosts: only what is needed goes over the network, and a host that is cut off is named while the old version stays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError
from tests.machines.bed import Bed
from tests.machines.jobs import Job

pytestmark = pytest.mark.alone

TIMEOUT = 4.0
SHAPE = (2048, 1024)
"""Of float32: eight megabytes."""


def whole(version: int) -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + 1000 * version


def publish(group: dist.ProcessGroup, address: str) -> None:
    """Rows of three versions, each when the one before is taken."""
    rank = dist.get_rank()
    rows = slice(rank * SHAPE[0] // 2, (rank + 1) * SHAPE[0] // 2)
    state = {"w": whole(1)[rows].clone()}
    layout = ckpt.Layout({"dp": 2}, [("w", ckpt.Shard(0, "dp"))])
    with ckpt.live.Source(f"tcp://{address}:0/hosts", state, layout=layout, process_group=group, secret="s", timeout=TIMEOUT) as source:
        if rank == 0:
            _put("address", source.address)
        for version in (1, 2, 3):
            state["w"].copy_(whole(version)[rows])
            source.publish(version, capture="eager").result()
            if rank == 0:
                _put(f"published-{version}")
            _get(f"taken-{version}")


def take(group: dist.ProcessGroup) -> tuple[int, str, float, bool, bool]:
    """The bytes that came with the second version; what was said of the third while a host was cut off, in how many seconds, whether the
    second was whole then, and whether the third came once the host was back."""
    state = {"w": torch.zeros(SHAPE)}
    with ckpt.live.Sink(_get("address"), state, process_group=group, secret="s", timeout=TIMEOUT) as sink:
        sink.take(timeout=30)
        _put("taken-1")
        _get("published-2")
        before = _received()
        second = sink.take(newer_than=sink.version, timeout=30)
        came = _received() - before
        _put("taken-2")
        _get("published-3")
        _put("ready")
        _get("cut")
        began = time.monotonic()
        with pytest.raises(CkptError) as caught:
            sink.take(newer_than=second, timeout=30)
        seconds = time.monotonic() - began
        kept = torch.equal(state["w"], whole(2)) and sink.version == second
        _put("named")
        _get("joined")
        sink.take(newer_than=second, timeout=30)
        _put("taken-3")
        return came, str(caught.value), seconds, kept, torch.equal(state["w"], whole(3))


def push(address: str) -> object:
    """Two ranks publish, the third takes."""
    source, sink = dist.new_group([0, 1]), dist.new_group([2])
    return publish(source, address) if dist.get_rank() < 2 else take(sink)


def test_a_host_that_is_cut_off_is_named_and_the_old_version_stays(bed: Bed) -> None:
    with Job(bed, push, bed.address(0), hosts=(0, 1, 2)) as job:
        job.await_file("ready")
        bed.cut(1)
        (job.folder / "cut").touch()
        try:
            job.await_file("named")
        finally:
            bed.join(1)
        (job.folder / "joined").touch()
        came, text, seconds, kept, last = job.results()[2]
    nbytes = 4 * SHAPE[0] * SHAPE[1]
    assert nbytes <= came <= 1.02 * nbytes + 50_000, came  # headers of packets and the manifest, too
    assert "rank 1" in text and bed.address(1) in text, text
    assert seconds < TIMEOUT + 4
    assert kept and last


def _received() -> int:
    """Bytes that have come in by this host's card."""
    row = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(row.replace(":", " ").split()[1])


def _put(name: str, text: str = "") -> None:
    part = Path(f".{name}")
    part.write_text(text)
    part.rename(name)


def _get(name: str, seconds: float = 60.0) -> str:
    end = time.monotonic() + seconds
    while not Path(name).exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{name} does not come")
        time.sleep(0.01)
    return Path(name).read_text()
