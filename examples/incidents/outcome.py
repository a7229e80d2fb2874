"""How the incidents of this folder are played: each is a script that says what came of it elsewhere and with ckpt."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

import ckpt

Outcomes = tuple[str, str]
"""Elsewhere, which begins with "mended" if the package no longer does what the report says; and with ckpt, empty if it does not hold."""


def show(play: Callable[[Path], Outcomes], *packages: str) -> None:
    """Play an incident in a folder of its own and print it. The process ends with 1 if ckpt does not hold, or if an error ends the play."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    warnings.simplefilter("ignore")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        streams = [os.dup(1), os.dup(2)]
        os.dup2(log.fileno(), 1)  # what the packages print
        os.dup2(log.fileno(), 2)
        try:
            elsewhere, ours = play(Path(folder))
        except Exception:  # noqa: BLE001  shown below, after what the packages printed
            elsewhere, ours = f"an error ends the play\n{(Path(folder) / 'log').read_text()[-2000:]}\n{traceback.format_exc()}", ""
        finally:
            sys.stdout.flush()
            for number, stream in enumerate(streams, 1):
                os.dup2(stream, number)
    rows = {", ".join(f"{package} {version(package)}" for package in packages): elsewhere, f"ckpt {ckpt.__version__}": ours}
    print(" ".join((sys.modules["__main__"].__doc__ or "").split("\n\n")[0].split()))
    print("".join(f"  {name}: {outcome}\n" for name, outcome in rows.items()), flush=True)
    sys.exit(not ours)


def refused(act: Callable[[], object]) -> str:
    """The head of the error that ckpt raises; an empty text if it raises none."""
    try:
        act()
    except ckpt.CkptError as err:
        return f"{type(err).__name__}: " + " ".join(line.strip() for line in str(err).splitlines()[:3])
    return ""


def on_ranks(number: int, work: Callable[[Path], None], folder: Path) -> None:
    """Run ``work(folder)`` on ranks with a gloo group; a rank may die or raise."""
    with tempfile.TemporaryDirectory() as store:
        context = mp.get_context("spawn")
        ranks = [context.Process(target=_rank, args=(rank, number, f"file://{store}/store", work, folder)) for rank in range(number)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


def _rank(rank: int, number: int, store: str, work: Callable[[Path], None], folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store, rank=rank, world_size=number)
    work(folder)
