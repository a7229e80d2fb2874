"""``python -m benchmarks.live_delta``: how small deltas are and how fast, beside the XOR of both versions through zstd.

A matrix in bfloat16 of which a share of elements changes at random places, as in a step of fine-tuning: sizes in percent of the matrix, and
GB of the matrix in a second of CPU time, medians, contestants in turn. *ours* is what ``ckpt.export(since=…)`` and ``Source(delta=True)``
send; *xor* compresses the XOR with zstd at level 1, as slime and NeMo-RL do; *pairs* is four bytes of index and the value, as verl does.
*compare* is the comparing pass of ours alone, over all of the matrix; *floor* reads both versions once (numpy's equality).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard

from ckpt.formats.deltas.changes import apply_section, encode_run, find_changes, pack, unpack

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")
RUN = 4 << 20
"""Bytes of a run: a piece between jobs; windows of exports have twice as many."""


def versions(nbytes: int, share: float) -> tuple[Bytes, Bytes]:
    """Weights of a layer in bfloat16, and the same with a share of them moved by one step of the mantissa."""
    rng = np.random.default_rng(7)
    base = (rng.standard_normal(nbytes // 2, dtype=np.float32) * 0.02).view(np.uint32) >> 16
    base16 = base.astype(np.uint16)
    new = base16.copy()
    new[rng.random(len(new), dtype=np.float32) < share] += 1
    return base16.view(np.uint8), new.view(np.uint8)


def runs(data: Bytes) -> list[Bytes]:
    return [data[at : at + RUN] for at in range(0, len(data), RUN)]


def ours(base: Bytes, new: Bytes) -> list[bytes]:
    return [pack(encode_run(a, b, 2)) for a, b in zip(runs(base), runs(new), strict=True)]


def apply_ours(base: Bytes, sent: list[bytes]) -> Bytes:
    into = base.copy()
    for run, data in zip(runs(into), sent, strict=True):
        apply_section(run.data, unpack(data, ""), 2, "")
    return into


def xor(base: Bytes, new: Bytes) -> list[bytes]:
    coder = zstandard.ZstdCompressor(level=1)
    return [coder.compress((a.view(np.uint64) ^ b.view(np.uint64)).data) for a, b in zip(runs(base), runs(new), strict=True)]


def apply_xor(base: Bytes, sent: list[bytes]) -> Bytes:
    coder, into = zstandard.ZstdDecompressor(), base.copy()
    for run, data in zip(runs(into), sent, strict=True):
        run.view(np.uint64)[:] ^= np.frombuffer(coder.decompress(data), np.uint64)
    return into


def pairs(base: Bytes, new: Bytes) -> list[bytes]:
    places = np.flatnonzero(base.view(np.uint16) != new.view(np.uint16))
    return [places.astype(np.int32).tobytes(), new.view(np.uint16)[places].tobytes()]


def apply_pairs(base: Bytes, sent: list[bytes]) -> Bytes:
    into = base.copy()
    into.view(np.uint16)[np.frombuffer(sent[0], np.int32)] = np.frombuffer(sent[1], np.uint16)
    return into


def timed(took: dict[str, list[float]], name: str, work: Callable[..., T], *given: Any) -> T:
    """What ``work`` gives, and its CPU time."""
    began = time.process_time()
    made = work(*given)
    took.setdefault(name, []).append(time.process_time() - began)
    return made


def compare(base: Bytes, new: Bytes) -> int:
    return sum(len(find_changes(a, b, 2).indices) for a, b in zip(runs(base), runs(new), strict=True))


def floor(base: Bytes, new: Bytes) -> int:
    one, other = base.view(np.uint64), new.view(np.uint64)
    step = 16 << 10
    return sum(np.array_equal(one[at : at + step], other[at : at + step]) for at in range(0, len(one), step))


CONTESTANTS = {"ours": (ours, apply_ours), "xor": (xor, apply_xor), "pairs": (pairs, apply_pairs)}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256, help="MB of the matrix")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(given)
    nbytes = (arguments.mb << 20) // RUN * RUN
    print(f"{nbytes / 1e6:.0f} MB in bfloat16, {arguments.rounds} rounds; GB/s of one core\n")
    print("changed   contestant   size %    encode   apply")
    for share in (0.0, 0.001, 0.01, 0.03, 0.1, 1.0):
        base, new = versions(nbytes, share)
        took: dict[str, list[float]] = {}
        sent: dict[str, list[bytes]] = {}
        for _ in range(arguments.rounds):
            for name, (encode, apply) in CONTESTANTS.items():
                sent[name] = timed(took, name, encode, base, new)
                assert np.array_equal(timed(took, f"{name} apply", apply, base, sent[name]), new), name
            timed(took, "compare", compare, base, new)
            timed(took, "floor", floor, base, new)
        speed = {name: nbytes / 1e9 / max(statistics.median(times), 1e-9) for name, times in took.items()}
        for name in CONTESTANTS:
            size = 100 * sum(map(len, sent[name])) / nbytes
            print(f"{share:7.1%}   {name:10} {size:8.2f} {speed[name]:9.2f} {speed[f'{name} apply']:7.2f}")
        print(f"          compare             {speed['compare']:8.2f}\n          floor               {speed['floor']:8.2f}")


if __name__ == "__main__":
    main()
