"""Live states between hosts: only what is needed goes over the network, and a host that is cut off is named while the old version stays."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError
from ckpt.live.pull import PieceClient
from tests.machines.bed import Bed
from tests.machines.jobs import Job

pytestmark = pytest.mark.alone

TIMEOUT = 4.0
SHAPE = (2048, 1024)
"""Of float32: eight megabytes."""


LARGE = (8 * 1024, 1024)
"""32 megabytes: more than the kernel keeps of connections that are cut off in the middle."""


def whole(version: int, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) + 1000 * version


def publish(group: dist.ProcessGroup, address: str) -> None:
    """Rows of three versions, each when the one before is taken."""
    rank = dist.get_rank()
    rows = slice(rank * SHAPE[0] // 2, (rank + 1) * SHAPE[0] // 2)
    state = {"w": whole(1)[rows].clone()}
    layout = ckpt.Layout({"dp": 2}, [("w", ckpt.Shard(0, "dp"))])
    with ckpt.live.Source(
        f"tcp://{address}:0/hosts", state, layout=layout, job=ckpt.Job(process_group=group, timeout=TIMEOUT), secret="s"
    ) as source:
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
    with ckpt.live.Sink(_get("address"), state, job=ckpt.Job(process_group=group, timeout=TIMEOUT), secret="s") as sink:
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
    assert seconds < 2.5 * TIMEOUT
    assert kept and last


def publish_to_two(group: dist.ProcessGroup, address: str) -> tuple[list[str], float]:
    """Three versions. The states of the sinks once one of them was cut off in the middle of the second, and how many seconds that took."""
    rank = dist.get_rank()
    rows = slice(rank * LARGE[0] // 2, (rank + 1) * LARGE[0] // 2)
    state = {"w": whole(1, LARGE)[rows].clone()}
    layout = ckpt.Layout({"dp": 2}, [("w", ckpt.Shard(0, "dp"))])
    states, seconds = list[str](), 0.0
    with ckpt.live.Source(
        f"tcp://{address}:0/hosts", state, layout=layout, job=ckpt.Job(process_group=group, timeout=TIMEOUT), secret="s"
    ) as source:
        if rank == 0:
            _put("address", source.address)
        for version in (1, 2, 3):
            state["w"].copy_(whole(version, LARGE)[rows])
            source.publish(version, capture="eager").result()
            if rank == 0:
                _put(f"published-{version}")
            if version == 2 and rank == 0:
                _get("cut")
                began = time.monotonic()
                while "lost" not in (states := [sink.state for sink in source.report().sinks]) and time.monotonic() - began < 30:
                    time.sleep(0.05)
                seconds = time.monotonic() - began
            for who in ("whole", "victim"):
                _get(f"{who}-{version}")
    return states, seconds


def take_three(group: dist.ProcessGroup) -> list[bool]:
    """A sink that nobody cuts off: whether it got each version."""
    state, right = {"w": torch.zeros(LARGE)}, []
    with ckpt.live.Sink(_get("address"), state, job=ckpt.Job(process_group=group, timeout=TIMEOUT), secret="s") as sink:
        for version in (1, 2, 3):
            sink.take(newer_than=sink.version, timeout=30)
            right.append(torch.equal(state["w"], whole(version, LARGE)))
            _put(f"whole-{version}")
    return right


def take_and_be_cut_off(group: dist.ProcessGroup) -> tuple[str, float, bool, bool]:
    """A sink that is cut off when it has three pieces of the second version: its error, after how many seconds, whether its state was still
    the first version, and whether the third came once it was back."""
    Path("/proc/sys/net/ipv4/tcp_rmem").write_text("4096 131072 1048576")  # of this host: little is here already when it is cut off
    state = {"w": torch.zeros(LARGE)}
    pieces, real = count(1), PieceClient._check

    def check(client: PieceClient, view: memoryview, digest: int) -> None:
        if sink.version is not None and next(pieces) == 3:
            _put("midway")
            _get("cut")
        real(client, view, digest)

    with ckpt.live.Sink(_get("address"), state, job=ckpt.Job(process_group=group, timeout=TIMEOUT), secret="s") as sink:
        first = sink.take(timeout=30)
        _put("victim-1")
        _get("published-2")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PieceClient, "_check", check)
            with pytest.raises(CkptError) as caught:
                sink.take(newer_than=first, timeout=30)
        seconds = time.time() - Path("cut").stat().st_mtime
        kept = torch.equal(state["w"], whole(1, LARGE)) and sink.version == first
        _put("victim-2")
        _get("joined")
        _get("published-3")
        version = sink.take(newer_than=first, timeout=30)
        back = version.step == 3 and torch.equal(state["w"], whole(3, LARGE))
        _put("victim-3")
        return str(caught.value), seconds, kept, back


def push_to_two(address: str) -> object:
    source, one, other = dist.new_group([0, 1]), dist.new_group([2]), dist.new_group([3])
    rank = dist.get_rank()
    return publish_to_two(source, address) if rank < 2 else take_three(one) if rank == 2 else take_and_be_cut_off(other)


def test_a_sink_that_is_cut_off_in_the_middle_keeps_its_version_and_holds_up_nobody(bed: Bed) -> None:
    with Job(bed, push_to_two, bed.address(0), hosts=(0, 0, 1, 2)) as job:
        job.await_file("midway")
        bed.cut(2)
        (job.folder / "cut").touch()
        try:
            job.await_file("whole-2")  # while the other is cut off
            job.await_file("victim-2")
            # The third version is published when both have come back from the second, and the source has noticed who is gone.
            job.await_file("published-3")
        finally:
            bed.join(2)
        (job.folder / "joined").touch()
        (states, noticed), _, right, (text, seconds, kept, back) = job.results()
    assert right == [True] * 3
    assert states.count("lost") == 1 and noticed < 2.5 * TIMEOUT, states
    assert "rank 0" in text or "rank 1" in text, text
    assert bed.address(0) in text and seconds < 2.5 * TIMEOUT, (text, seconds)
    assert kept and back


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
