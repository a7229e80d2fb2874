"""What processes without torch do in ``test_dry_runs.py``: nothing here imports it."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
from ckpt.errors import UsageError
from ckpt.policies import EverySteps, Latest

NAMES = ("trainer", "buffer")


class Counter:
    """An object with a state, as a queue or a scheduler has one."""

    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "seen": np.arange(self.n)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"].tobytes() == np.arange(state["n"]).tobytes()
        self.n = state["n"]


def values(n: int) -> dict[str, Any]:
    """A state without tensors; of another ``n`` all of it differs."""
    return {
        "queue": [f"é{n}", b"\x00\xff" * n, {"deep": (n, None, 2.5 * n)}],
        "arrays": {"half": np.full((2, 3), n, np.float16), "empty": np.zeros((0, n), np.int64), "bits": np.array([n > 1])},
        "ordered": OrderedDict(a=n, b={n}),
        "counter": Counter(n),
        "own": ckpt.PerRank({"rank": n}),
    }


def plain(state: Any) -> Any:
    """What a state has, to be compared: arrays with dtype, shape and bytes."""
    if isinstance(state, np.ndarray):
        return str(state.dtype), state.shape, state.tobytes()
    if isinstance(state, Counter):
        return "counter", state.n
    if isinstance(state, ckpt.PerRank):
        return "own", plain(state.value)
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, (list, tuple)) else state


def alone(root: str) -> None:
    """Save and load; what is at ``theirs`` was saved by a process with torch. Then a run whose newest step is damaged."""
    ckpt.save(f"{root}/now", values(3))
    ckpt.save_async(f"{root}/later", values(3)).result()
    for name in ("now", "later", "theirs"):
        state = values(0)
        ckpt.load(f"{root}/{name}", state, dry_run=True)
        assert plain(state) == plain(values(0))
        ckpt.load(f"{root}/{name}", state)
        assert plain(state) == plain(values(3)), name
    assert ckpt.open(f"{root}/theirs").state()["queue"] == values(3)["queue"]
    assert ckpt.verify(f"{root}/now").ok
    work = ckpt.training.Inflight(list("abcd"))
    state = {**values(1), "work": work}
    with ckpt.Checkpointer(f"{root}/run", save=EverySteps(1), keep=Latest(2)) as c:
        assert c.restore(state) is None
        for n in (1, 2, 3):
            ticket = work.take()
            assert ticket is not None
            state["counter"].n = n
            c.step(n, state)
            if n < 3:
                work.finish([ticket.number])
        c.wait()
        assert [step.number for step in c.steps()] == [2, 3]
    Path(f"{root}/run/step-00000003/checkpoint.json").write_text("{")
    work = ckpt.training.Inflight(list("abcd"))
    state = {**values(1), "work": work}
    with ckpt.Checkpointer(f"{root}/run") as c:
        assert c.restore(state) == state["counter"].n == 2
    assert ckpt.latest(f"{root}/run") == f"{root}/run/step-00000002"
    print(*(ticket.item for ticket in iter(work.take, None) if ticket))


def refused(url: str) -> None:
    """Ask for what has tensors, or values of torch."""

    def ask(call: Callable[..., object], *args: object, **options: object) -> None:
        try:
            call(*args, **options)
        except UsageError as err:
            print(err.message)

    state = {"a": 1, "counter": Counter(1), "dtype": None, "own": ckpt.PerRank(5)}
    before = plain(state)
    for name in ("counter", "dtype", "own"):
        ask(ckpt.load, url, state, only=["a", name, f"{name}.*"])
        assert plain(state) == before
    view = ckpt.open(url)
    assert view["w"].shape == (3,)
    ask(view["w"].read)
    ask(view.state)
    ask(lambda: ckpt.training.Generators())
    ckpt.load(url, state, only="a")
    assert state["a"] == 2


def buffer(root: str) -> None:
    """A member that saves a step when it is asked to."""
    state = values(0)
    with ckpt.Checkpointer(root, member=ckpt.Member("buffer", of=NAMES), job=ckpt.Job(timeout=60)) as c:
        start = c.restore(state) or 0
        print(start, plain(state) == plain(values(start)))
        while (n := c.requested()) is None:
            time.sleep(0.05)
        c.save(n, values(n))


if __name__ == "__main__":
    {"alone": alone, "refused": refused, "buffer": buffer}[sys.argv[1]](sys.argv[2])
    assert sys.modules.get("torch") is None
