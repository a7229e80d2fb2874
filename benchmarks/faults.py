"""What is lost by a fault: ``python -m benchmarks.faults``. Every contestant meets the same faults, on one rank, with a directory per step.

* killed: step 1 is saved, and the process gets SIGKILL while it saves step 2, at a random moment of what a warm save takes. A save that
  had ended by then is repeated. A resume takes the newest that loads.
* storage error: a limit on the size of files fails the save of step 2 at a random byte.
* flipped bit, truncated file: at a random byte of the files of step 1, in which all bytes are equally likely.

*whole*: the load has every byte of a step that was saved. *refused*: nothing loads. *wrong*: it returns other bytes.
``torch_checkpointing`` takes part where it is installed. Fails if a resume of ckpt is not whole, or a load of it is wrong.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click
import torch

from .contestants import CONTESTANTS, Contestant, Job
from .places import Place
from .report import aligned
from .states import State, digests_of, pattern

NAMES = ("ckpt", "dcp", "torch_checkpointing", "torch.save", "raw")
KINDS = ("killed", "storage error", "flipped bit", "truncated file")
TENSORS, SHAPE = 16, (256, 256)
LIMIT = 60
"""Seconds that a child has."""


def state(step: int) -> State:
    """Four megabytes, all of which follow from the step."""
    local = {f"model.t{i}": pattern(SHAPE, 1000 * step + i) for i in range(TENSORS)}
    size = sum(t.nbytes for t in local.values())
    tree = {"model": {name.removeprefix("model."): tensor for name, tensor in local.items()}}
    return State(tree=tree, local=local, replicated=False, start=0, total=size, digests=digests_of(local))


def job_of(taken: State) -> Job:
    return Job(state=taken, group=None, rank=0, ranks=1)


def load(contestant: Contestant, directory: str) -> str:
    """What a load of a directory gives: ``refused``, ``wrong``, or the step that it has."""
    into = state(0)
    into.clear()
    try:
        contestant.load(job_of(into), directory)
    except BaseException:  # noqa: BLE001  whatever a contestant raises, it has refused; DCP's errors are no Exceptions
        return "refused"
    loaded = digests_of(into.local)
    return next((str(step) for step in (1, 2) if loaded == state(step).digests), "wrong")


def resume(contestant: Contestant, root: str) -> str:
    """What the newest step that loads gives; ``refused`` if none does."""
    got = (load(contestant, f"{root}/{name}") for name in sorted(os.listdir(root), reverse=True))
    newest = next((one for one in got if one != "refused"), "refused")
    return "whole" if newest in ("1", "2") else newest


def start(work: Callable[[], str]) -> tuple[int, int]:
    """Begin ``work`` in a child; its number, and where its answer will be read."""
    answer, end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        try:
            os.write(end, work().encode())
        except BaseException:  # noqa: BLE001  the parent counts it
            os.write(end, b"refused")
        finally:
            os._exit(0)
    os.close(end)
    return child, answer


def finish(child: int, answer: int) -> str:
    """What a child answered; ``crashed`` if it died or took too long."""
    with os.fdopen(answer) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text or "crashed"


def save(contestant: Contestant, root: str, step: int, most: int = resource.RLIM_INFINITY) -> str:
    """Save a step while no file may grow beyond ``most`` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    contestant.save(job_of(state(step)), f"{root}/step-{step}")
    return "returned"


def killed(contestant: Contestant, root: str, chance: random.Random) -> None:
    """Save step 2 and die within the save. What is slow only once, such as imports, comes before it, in saves beside ``root``."""

    def work(ready: int) -> str:
        job = job_of(state(2))
        for _ in range(2):
            shutil.rmtree(f"{root}-warm", ignore_errors=True)
            began = time.monotonic()
            contestant.save(job, f"{root}-warm/step-2")
        os.write(ready, f"{time.monotonic() - began}".encode())
        contestant.save(job, f"{root}/step-2")
        return "returned"

    while True:
        heard, ready = os.pipe()
        child, answer = start(lambda ready=ready: work(ready))  # type: ignore[misc]
        os.close(ready)
        time.sleep(chance.uniform(0, float(os.read(heard, 64))))
        os.close(heard)
        os.kill(child, signal.SIGKILL)
        if finish(child, answer) == "crashed":
            return
        shutil.rmtree(f"{root}/step-2")


def damage(root: str, kind: str, chance: random.Random) -> None:
    """Flip one bit of all files below ``root``, or cut a file short there."""
    files = sorted(path for path in Path(root).rglob("*") if path.is_file())
    at = chance.randrange(sum(path.stat().st_size for path in files))
    for path in files:
        if at < path.stat().st_size:
            break
        at -= path.stat().st_size
    if kind == "truncated file":
        os.truncate(path, at)
        return
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def campaign(contestant: Contestant, kind: str, count: int, place: Place) -> Counter[str]:
    """The outcomes of ``count`` faults of one kind."""
    chance, outcomes = random.Random(f"{kind}"), Counter[str]()
    root, kept = place.fresh("run"), place.fresh("kept")
    os.mkdir(kept)
    if (first := finish(*start(lambda: save(contestant, kept, 1)))) != "returned":
        return Counter({f"save {first}": count})
    for _ in range(count):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(kept, root)
        if kind == "killed":
            killed(contestant, root, chance)
        elif kind == "storage error":
            most = chance.randrange(TENSORS * SHAPE[0] * SHAPE[1] * 4)
            if finish(*start(lambda most=most: save(contestant, root, 2, most))) == "returned":  # type: ignore[misc]
                shutil.rmtree(f"{root}/step-1")  # who says that step 2 is saved has to have it
        else:
            damage(root, kind, chance)
        outcomes[finish(*start(lambda: resume(contestant, root)))] += 1
    return outcomes


@click.command(context_settings={"show_default": True})
@click.option("--count", type=click.IntRange(1), default=100, help="Faults of each kind.")
@click.option("--dir", "directory", default="/dev/shm", type=click.Path(exists=True, file_okay=False), help="Where.")
def main(count: int, directory: str) -> None:
    """Inject faults into each contestant's saves and files, and count what is lost."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    rows = [("", *KINDS)]
    lost = False
    with Place(directory) as place:
        for name in NAMES:
            if name not in CONTESTANTS:
                continue
            results = []
            for kind in KINDS:
                results.append(campaign(CONTESTANTS[name], kind, count, place))
                click.echo(f"{name}, {kind}: {dict(results[-1])}", err=True)
            if name == "ckpt":
                lost = any(
                    set(r) - ({"whole"} if kind in KINDS[:2] else {"whole", "refused"}) for kind, r in zip(KINDS, results, strict=True)
                )
            rows.append((name, *(", ".join(f"{n} {what}" for what, n in sorted(result.items(), reverse=True)) for result in results)))
    click.echo("\n".join(aligned(rows)))
    sys.exit(lost)


if __name__ == "__main__":
    main()
