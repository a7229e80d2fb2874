"""What the scenarios share: a job trains, is saved and dies; a new process goes on, and is compared with one that was never interrupted.

    python -m tests.trainers.lives SCENARIO LIFE FOLDER    # what one rank of one life does; ``__main__.py`` starts them

A scenario is a module beside this one with ``CASES``: names, and functions that make a job from a seed. What is drawn from the seed must
come back from the checkpoint. ``WORLDS`` has the number of ranks that train, then those on which the checkpoint is loaded as well.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import ckpt

SAVED, END = 2, 4
"""Steps: the checkpoint is saved after the one, the job ends after the other."""


class Job:
    """A tiny job. A scenario whose framework has the loop, or its own way to save, overrides the methods."""

    def __init__(self, state: dict[str, Any], step: Callable[[int], None], **options: Any) -> None:
        self.state, self.step, self.options = state, step, options

    def train(self, begin: int, end: int) -> None:
        for number in range(begin, end):
            torch.manual_seed(number)
            self.step(number)

    def save(self, url: str) -> None:
        ckpt.save(url, self.state, **self.options)

    def load(self, url: str) -> None:
        ckpt.load(url, self.state, **self.options)

    def digests(self) -> dict[str, str]:
        return digests(self.state)


Maker = Callable[[int], Job]


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Tensors and plain values by path, without code of the package: the state that torch's own ``state_dict`` gives."""
    if not isinstance(value, torch.Tensor) and hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = dict(enumerate(value)).items()
    else:
        return {path: value}
    return {name: leaf for key, inner in pairs for name, leaf in leaves(inner, f"{path}.{key}").items()}


def digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if hasattr(value, "__tensor_flatten__"):
        return " ".join(digest(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    plain = value.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{plain.dtype} {tuple(plain.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def digests(state: Any) -> dict[str, str]:
    return {name: digest(leaf) for name, leaf in leaves(state).items()}


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def whole(make: Maker, url: str) -> dict[str, Any]:
    """The job that is never interrupted: its digests after SAVED steps, and at its end."""
    job = make(1)
    job.train(0, SAVED)
    before = job.digests()
    job.train(SAVED, END)
    return {"saved": before, "end": job.digests()}


def first(make: Maker, url: str) -> dict[str, Any]:
    job = make(1)
    job.train(0, SAVED)
    return _tried("save", job.save, url)


def again(make: Maker, url: str) -> dict[str, Any]:
    job = make(2)
    if problem := _tried("load", job.load, url):
        return problem
    loaded = job.digests()
    job.train(SAVED, END)
    return {"saved": loaded, "end": job.digests()}


def elsewhere(make: Maker, url: str) -> dict[str, Any]:
    """On another number of ranks: what was loaded, and that a step can be made."""
    job = make(2)
    if problem := _tried("load", job.load, url):
        return problem
    loaded = job.digests()
    job.train(SAVED, SAVED + 1)
    return {"saved": loaded}


def _tried(phase: str, call: Callable[[str], None], url: str) -> dict[str, Any]:
    try:
        call(url)
    except ckpt.errors.CkptError as err:
        return {"outcome": f"{type(err).__name__} at {phase}", "text": str(err)}
    return {}


def compared(never_interrupted: dict[str, Any], *lives: dict[str, Any]) -> tuple[str, str]:
    """The outcome of a case in one or two words, and what there is to tell about it."""
    for life in (never_interrupted, *lives):
        if "outcome" in life:
            return life["outcome"], life["text"]
        for moment in life:
            expected, actual = never_interrupted[moment], life[moment]
            if wrong := [name for name in expected | actual if expected.get(name) != actual.get(name)]:
                return "differs", f"after {moment}: {len(wrong)} of {len(expected)}: {', '.join(wrong[:4])}"
    return "resumes", ""


LIVES = {"whole": whole, "first": first, "again": again, "elsewhere": elsewhere}


def main(name: str, life: str, folder: Path) -> None:
    """All cases of a scenario in one process of each rank. The first life ends as a job does whose machine is lost."""
    rank = os.environ.get("RANK", "0")
    results = {}
    for case, make in importlib.import_module(f"tests.trainers.{name}").CASES.items():
        try:
            results[case] = LIVES[life](make, str(folder / case))
        except Exception as err:  # noqa: BLE001  the other cases are run all the same
            traceback.print_exc()
            results[case] = {"outcome": f"{type(err).__name__} in {life}", "text": str(err)}
        print(case, results[case].get("outcome", "ok"), flush=True)
    (folder / f"{life}-{world()}-{rank}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    if life == "first":
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # else a rank that is done takes the others' save with it
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)  # gloo's threads abort now and then on the interpreter's own way out


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
