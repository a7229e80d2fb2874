"""Which functions and files of the package one call enters: ``python -m benchmarks.walks``.

Each operation runs twice on one rank, with four linear layers and AdamW's state; the profile function of every thread notes what the
second one enters. ``--list`` prints the functions, file by file. torch's own functions are not counted. ``load_columns`` and
``reshard`` are what the first of two processes enters, with rows on one side and columns on the other.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt

from .pool import Pool, Rank

ROOT = Path(__file__).parent.parent
MARKS = {
    "save": (220, 35),
    "load": (220, 35),
    "load_columns": (300, 45),
    "save_async": (280, 40),
    "restore": (330, 50),
    "convert": (270, 45),
    "open": (160, 25),
    "reshard": (300, 45),
}
"""Call → the most functions and files that it may enter."""
PACKAGES = tuple(f"{ROOT}/{name}/" for name in ("ckpt", "cli", "converters", "formats", "io_backends"))

Entered = dict[str, set[tuple[str, int]]]


def entered(call: Callable[[], object]) -> Entered:
    """File → the functions (name and first line) that a call enters, on any thread."""
    places: Entered = defaultdict(set)

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        path = str(Path(code.co_filename).resolve()) if event == "call" and "ckpt" in code.co_filename else ""
        if path.startswith(PACKAGES) and not code.co_name.startswith("<"):
            places[path.removeprefix(f"{ROOT}/")].add((code.co_name, code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return dict(places)


def calls(folder: str) -> dict[str, Callable[[], object]]:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    ckpt.save(f"{folder}/one", state)
    run = ckpt.Checkpointer(f"{folder}/run")
    run.save(1, state)
    run.wait()
    number = iter(range(9))
    return {
        "save": lambda: ckpt.save(f"{folder}/one", state),
        "load": lambda: ckpt.load(f"{folder}/one", state),
        "save_async": lambda: ckpt.save_async(f"{folder}/later", state).result(60),
        "restore": lambda: ckpt.Checkpointer(f"{folder}/run").restore(state),
        "convert": lambda: ckpt.convert(f"{folder}/one", f"{folder}/hf{next(number)}", to="hf"),
        "open": lambda: ckpt.open(f"{folder}/one")["model.0.weight"][0:3],
    }


def on_a_rank(rank: Rank, *, call: str, folder: str) -> Entered:
    """What the second such call enters on one of two ranks, with rows and columns of a model and its optimizer."""
    mesh = init_device_mesh("cpu", (2,))

    def sharded(dimension: int) -> dict[str, Any]:
        layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
        for layer in layers:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(dimension)]))
            layer.weight.grad = torch.ones_like(layer.weight)
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    rows, columns = sharded(0), sharded(1)

    def move() -> None:
        if call == "reshard":
            ckpt.live.reshard(rows, columns)
        else:
            ckpt.load(f"{folder}/rows", columns)

    if call == "load_columns":
        ckpt.save(f"{folder}/rows", rows)
    move()
    return entered(move)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("calls", nargs="*", metavar="CALL", help=f"of {', '.join(MARKS)}; without one: all")
    parser.add_argument("--list", action="store_true", help="print the functions too")
    arguments = parser.parse_args()
    if unknown := set(arguments.calls) - MARKS.keys():
        parser.error(f"no such call: {', '.join(sorted(unknown))}")
    folder = tempfile.mkdtemp(dir="/dev/shm")
    try:
        called = calls(folder)
        for name in arguments.calls or MARKS:
            if name not in called:
                with Pool(2) as pool:
                    places = pool.run(on_a_rank, on=2, call=name, folder=folder)[0]
            else:
                called[name]()
                places = entered(called[name])
            functions = sum(map(len, places.values()))
            most, files = MARKS[name]
            print(f"{name:13} {functions:4} functions (mark {most}) in {len(places):3} files (mark {files})")
            for path in sorted(places) if arguments.list else ():
                print(f"  {path}")
                print("".join(f"      {line:4} {function}\n" for function, line in sorted(places[path], key=lambda p: p[1])), end="")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
