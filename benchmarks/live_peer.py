"""A whole state from one process to another in the same layout, beside torchft 0.2.0: ``python -m benchmarks.live_peer --peers DIR``.

``pip install --no-deps --target DIR torchft==0.2.0`` is enough; what it needs for telemetry is left out. *torchft http* is its default
transport in one stream, *torchft http 10* in ten chunks, *torchft pg* its ``PGTransport`` over gloo into tensors that are there. It checks
no bytes, and unpickles what it gets. *reshard* is ours. *sockets* and *memcpy* are the floors.
"""

from __future__ import annotations

import gc
import socket
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import click
import torch
import torch.distributed as dist

from .findings import medians
from .measure import RankCost, Sample, cost_of
from .pool import Pool, Rank
from .report import aligned
from .scenarios import turns

TIMEOUT = timedelta(seconds=120)
PIECE = 4 << 20
TENSORS = 100


@click.command(context_settings={"show_default": True})
@click.option("--peers", type=click.Path(exists=True, file_okay=False, resolve_path=True), help="Where torchft is installed.")
@click.option("--size", type=click.IntRange(1), default=1000, help="MB of the state.")
@click.option("--repeat", type=click.IntRange(1), default=5, help="Repetitions that count, after one that does not.")
def main(*, peers: str | None, size: int, repeat: int) -> None:
    """Compare ckpt with torchft and, without --peers, with the floors alone."""
    names = [name for name in CONTESTANTS if peers or "torchft" not in name]
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with Pool(2) as pool:
        pool.run(prepare, on=2, nbytes=size * 1_000_000, peers=peers)
        pool.run(connect, on=2, port=pool.run(listen, on=2)[0])
        for step, (repetition, name) in enumerate(turns(names, repeat)):
            address = pool.run(offer, on=2, name=name, step=step + 1)[0]
            sample = Sample.of(pool.run(move, on=2, name=name, step=step + 1, address=address))
            click.echo(f"{name}: {sample.wall:.2f} s, {sample.cpu:.2f} s CPU", err=True)
            if repetition > 0:
                samples[name].append({"wall": sample.wall, "cpu": sample.cpu})
    mine = {name: medians(s) for name, s in samples.items()}
    floors = [name for name in ("torchft http", "sockets", "memcpy") if name in mine]
    click.echo(f"{size} MB of bfloat16 in {TENSORS} tensors from one process to another; medians of {repeat}")
    rows = [(n, f"{m['wall']:.3f}", f"{m['cpu']:.2f}", *(f"{m['wall'] / mine[f]['wall']:.2f}" for f in floors)) for n, m in mine.items()]
    for line in aligned([("", "wall s", "CPU s", *(f"/ {f}" for f in floors)), *rows]):
        click.echo(line)


# ------------------------------------------------------------------------------------------------------------ in a rank


def prepare(rank: Rank, *, nbytes: int, peers: str | None) -> None:
    """The same state on both sides; where torchft is, its transports."""
    columns = max(1, nbytes // TENSORS // 2 // 1000)
    rank.kept["state"] = {f"w{i:03}": torch.full((1000, columns), 1 + rank.number + i, dtype=torch.bfloat16) for i in range(TENSORS)}
    rank.kept["copy"] = {name: t.clone() for name, t in rank.kept["state"].items()}
    if peers is not None:
        sys.path.insert(0, peers)
        silent = sys.modules["torchft.otel"] = types.ModuleType("torchft.otel")
        silent.setup_logger = lambda *args, **options: None  # type: ignore[attr-defined]
        from torchft.checkpointing.http_transport import HTTPTransport
        from torchft.checkpointing.pg_transport import PGTransport
        from torchft.process_group import ProcessGroupGloo

        for name, chunks in (("torchft http", 0), ("torchft http 10", 10)):
            rank.kept[name] = HTTPTransport(TIMEOUT, num_chunks=chunks)
        group = ProcessGroupGloo(TIMEOUT)
        store = dist.distributed_c10d._get_default_store()
        rank.kept["store"] = server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank.number == 0 else None  # type: ignore[attr-defined]
        if server is not None:
            store.set("torchft", str(server.port))
        group.configure(f"127.0.0.1:{store.get('torchft').decode()}/peer", "peer", rank.number, 2)
        rank.kept["torchft pg"] = PGTransport(group, TIMEOUT, torch.device("cpu"), state_dict=lambda: rank.kept["state"])
    gc.collect()
    gc.freeze()


def listen(rank: Rank) -> int:
    rank.kept["listener"] = listener = socket.create_server(("127.0.0.1", 0))
    return int(listener.getsockname()[1])


def connect(rank: Rank, *, port: int) -> None:
    rank.kept["stream"] = socket.create_connection(("127.0.0.1", port)) if rank.number else rank.kept["listener"].accept()[0]


def offer(rank: Rank, *, name: str, step: int) -> str:
    """New values at the source, wrong ones at the target; HTTP servers stage what they give, which is not counted."""
    for i, tensor in enumerate(rank.kept["state"].values()):
        tensor.fill_(0 if rank.number else (step + i) % 200 + 1)
    if name.startswith("torchft http") and rank.number == 0:
        rank.kept[name].disallow_checkpoint()
        rank.kept[name].send_checkpoint([1], step, rank.kept["state"], TIMEOUT)
        return str(rank.kept[name].metadata()).replace(socket.gethostname(), "localhost")
    return ""


class WrongStateError(RuntimeError):
    """The other process has other values."""


def move(rank: Rank, *, name: str, step: int, address: str) -> RankCost:
    """One transfer.

    Raises:
        WrongStateError: it did not bring the values.
    """
    gc.collect()
    dist.barrier(rank.groups[2])
    cost = cost_of(lambda: CONTESTANTS[name](rank, step, address) or {})
    dist.barrier(rank.groups[2])
    if rank.number and name not in ("memcpy", "sockets"):
        state = rank.kept.pop("new", rank.kept["state"])
        wrong = [n for i, (n, t) in enumerate(state.items()) if not torch.equal(t, torch.full_like(t, (step + i) % 200 + 1))]
        if wrong:
            raise WrongStateError(f"{name} brought other values of {wrong[0]} and {len(wrong) - 1} more")
    return cost


def _resharded(rank: Rank, step: int, address: str) -> None:
    from ckpt.live import reshard

    state = {"model": rank.kept["state"]}
    old, new = (None, state) if rank.number else (state, None)
    reshard(old, new, process_group=rank.groups[2], timeout=60)


def _http(name: str) -> Callable[[Rank, int, str], None]:
    def act(rank: Rank, step: int, address: str) -> None:
        if rank.number:
            rank.kept["new"] = rank.kept[name].recv_checkpoint(0, address, step, TIMEOUT)

    return act


def _group(rank: Rank, step: int, address: str) -> None:
    transport = rank.kept["torchft pg"]
    if rank.number:
        transport.recv_checkpoint(0, "", step, TIMEOUT)
    else:
        transport.send_checkpoint([1], step, rank.kept["state"], TIMEOUT)


def _sent(rank: Rank, step: int, address: str) -> None:
    stream: socket.socket = rank.kept["stream"]
    for tensor in rank.kept["state"].values():
        view = memoryview(tensor.view(torch.uint8).numpy()).cast("B")
        for start in range(0, len(view), PIECE):
            part = view[start : start + PIECE]
            if rank.number == 0:
                stream.sendall(part)
            while rank.number and part:
                part = part[stream.recv_into(part) :]


def _copied(rank: Rank, step: int, address: str) -> None:
    for name, tensor in rank.kept["state"].items() if rank.number else ():
        tensor.copy_(rank.kept["copy"][name])


CONTESTANTS: dict[str, Callable[[Rank, int, str], Any]] = {
    "reshard": _resharded,
    "torchft http": _http("torchft http"),
    "torchft http 10": _http("torchft http 10"),
    "torchft pg": _group,
    "sockets": _sent,
    "memcpy": _copied,
}

if __name__ == "__main__":
    main()
