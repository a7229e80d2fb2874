"""``python -m benchmarks.xor_planes DIRECTORY``: what it saves to store a step of a training run as its difference from an earlier one.

Three runs of a language model (``trained_states``) are saved early and late, and 1, 10, 100 and 1000 steps after that. States that are in
the directory already are not trained again. For each kind of tensor: the size in byte planes alone (``planes-zstd``), as differences
throughout (XOR, then byte planes), and as ``xor-planes-zstd`` stores it: a chunk is a difference only where that is over 10 % smaller.
All in percent of the plain bytes. Then the CPU seconds that each takes, in one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import ckpt
from ckpt.formats.native.coding.codecs import decode, encode, encode_difference

from .trained_states import KINDS, State, Training, train

PLANES, XOR = "planes-zstd", "xor-planes-zstd"
ANCHORS = (100, 1100)
DISTANCES = (1, 10, 100, 1000)
RUNS = (
    Training(name="lr1e-3", lr=1e-3),
    Training(name="lr1e-4", lr=1e-4),
    Training(name="lr1e-5", lr=1e-5, sources="purelib", begin_from="lr1e-3"),
)
Row = dict[str, str | int | float]


def train_missing(directory: Path) -> None:
    """Make the states that are not there yet."""
    steps = {anchor + distance for anchor in ANCHORS for distance in (0, *DISTANCES)}
    for run in RUNS:
        if (place(directory, run.name, max(steps)) / "checkpoint.json").exists():
            continue
        begin = read(place(directory, run.begin_from, max(steps)))["masters"] if run.begin_from is not None else None
        for step, loss, state in train(run, steps, begin):
            ckpt.save(place(directory, run.name, step), state)
            print(f"{run.name}: step {step}, loss {loss:.3f}", flush=True)


def place(directory: Path, run: str, step: int) -> Path:
    """Where a state is saved."""
    return directory / run / f"step-{step:08d}"


def read(url: Path) -> State:
    """A saved state."""
    view = ckpt.open(url)
    return {kind: {n.removeprefix(f"{kind}."): view[n][...] for n in view if n.startswith(f"{kind}.")} for kind in KINDS}


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes."""
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().reshape(-1))


def sizes(directory: Path) -> Iterator[Row]:
    """A row for each run, anchor, distance and kind."""
    for run in RUNS:
        for anchor in ANCHORS:
            earlier = read(place(directory, run.name, anchor))
            for distance in DISTANCES:
                later = read(place(directory, run.name, anchor + distance))
                for kind in KINDS:
                    pairs = [(raw(t), raw(earlier[kind][name]), t.element_size()) for name, t in later[kind].items()]
                    yield {"run": run.name, "anchor": anchor, "distance": distance, "kind": kind, **ratios(pairs)}


def ratios(pairs: list[tuple[memoryview, memoryview, int]]) -> Row:
    """Bytes over plain bytes, of chunks, their anchors and the bytes of an element."""
    plain = planes = differences = stored = 0
    for chunk, anchor, itemsize in pairs:
        difference = np.frombuffer(chunk, np.uint8) ^ np.frombuffer(anchor, np.uint8)
        alone, xor = encoded_size(chunk, itemsize), encoded_size(difference.data, itemsize)
        chosen = encode_difference(chunk, memoryview(bytearray(anchor)), itemsize)
        plain, planes, differences = plain + len(chunk), planes + alone, differences + xor
        stored += alone if chosen is None else len(chosen)
    return {"planes": planes / plain, "xor": differences / plain, "stored": stored / plain}


def encoded_size(chunk: memoryview, itemsize: int) -> int:
    """In byte planes, or as it is."""
    blob = encode(PLANES, chunk, itemsize)
    return len(chunk) if blob is None else len(blob)


def speeds(directory: Path, repeat: int) -> Row:
    """Seconds of CPU for a GB of masters that lie 10 steps apart: the least of some repetitions."""
    run, anchor = RUNS[-1].name, ANCHORS[-1]
    chunk, other = (
        raw(torch.cat([t.reshape(-1) for t in read(place(directory, run, at))["masters"].values()])) for at in (anchor + 10, anchor)
    )
    alone, difference = encode(PLANES, chunk, 4), encode_difference(chunk, memoryview(bytearray(other)), 4)
    assert alone is not None and difference is not None
    room = memoryview(bytearray(len(chunk)))

    def cost(work: Callable[[], object]) -> float:
        spent = []
        for _ in range(repeat):
            began = time.thread_time()
            work()
            spent.append(time.thread_time() - began)
        return min(spent) / len(chunk) * 1e9

    return {
        "encode planes": cost(lambda: encode(PLANES, chunk, 4)),
        "encode xor": cost(lambda: encode_difference(chunk, memoryview(bytearray(other)), 4)),
        "decode planes": cost(lambda: decode(PLANES, alone, room, 4)),
        "decode xor": cost(lambda: decode(XOR, difference, room, 4, other)),
    }


def table(rows: list[Row]) -> Iterator[str]:
    """Percentages, by kind: in byte planes → as it is stored, and in brackets as differences throughout."""
    yield f"| run | anchor | steps later | {' | '.join(KINDS)} |"
    yield f"|{'---|' * (3 + len(KINDS))}"
    for at in range(0, len(rows), len(KINDS)):
        first = rows[at]
        cells = [f"{row['planes']:.0%} → {row['stored']:.0%} ({row['xor']:.0%})" for row in rows[at : at + len(KINDS)]]
        yield f"| {first['run']} | {first['anchor']} | {first['distance']} | {' | '.join(cells)} |"


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the states are, or will be: 0.2 GB")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="of the training (1)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    train_missing(given.directory)
    rows = list(sizes(given.directory))
    print(*table(rows), sep="\n")
    seconds = speeds(given.directory, given.repeat)
    print("CPU seconds per GB: " + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items()))
    print(json.dumps({"rows": rows, "seconds": seconds}))


if __name__ == "__main__":
    main()
