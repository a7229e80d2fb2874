"""What a save keeps for the next one is used only as long as it is right: each change of a state shows in the next checkpoint."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import NotFoundError
from ckpt.io_backends.fsspec_errors import fsspec_errors
from ckpt.io_backends.posix_files import storage_errors
from ckpt.net.group import Group, current_group

State = dict[str, Any]


def made() -> State:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, 3), "a.b": torch.zeros(2)}
    return {"model": model, "optimizer": optimizer, "tensors": tensors, "step": 1, "seed": ckpt.PerRank(5)}


def _free(state: State) -> None:
    state["tensors"]["a"].untyped_storage().resize_(0)
    state["tensors"]["a"].untyped_storage().resize_(24)
    state["tensors"]["a"].fill_(9)


def _set(key: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    def change(state: State) -> None:
        state["tensors"][key] = value(state["tensors"][key])

    return change


def _data(value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    def change(state: State) -> None:
        state["tensors"]["a"].data = value(state["tensors"]["a"])

    return change


CHANGES: dict[str, Callable[[State], object]] = {
    "value in place": lambda s: s["tensors"]["a"].add_(1),
    "replaced": _set("a", lambda t: t + 1),
    "other shape": _set("a", lambda t: t[:4].clone()),
    "same elements, other shape": _set("a", lambda t: t.view(2, 3)),
    "other dtype": _set("a", lambda t: t.to(torch.float64)),
    "same bytes, other dtype": _set("a", lambda t: t.view(torch.int32)),
    "other strides": _set("b", lambda t: torch.arange(6.0).view(3, 2).T),
    "a part of a larger one": _set("a", lambda t: torch.arange(20.0)[7:13]),
    "negated view": _set("a", lambda t: torch.view_as_complex(torch.arange(12.0).view(6, 2)).conj().imag),
    "a parameter": _set("a", lambda t: nn.Parameter(t + 2)),
    "requires_grad": lambda s: s["tensors"]["a"].requires_grad_(),
    "other memory": _data(lambda t: t + 3),
    "resized": lambda s: s["tensors"]["a"].resize_(8).fill_(4),
    "freed and back": _free,
    "tied": lambda s: s["tensors"].update(b=s["tensors"]["a"]),
    "added": lambda s: s["tensors"].update(c=torch.ones(5)),
    "removed": lambda s: s["tensors"].pop("b"),
    "other order": lambda s: s.update(tensors=dict(reversed(s["tensors"].items()))),
    "True for 1": lambda s: s.update(step=True),
    "1.0 for 1": lambda s: s.update(step=1.0),
    "other step": lambda s: s.update(step=2),
    "other value of a rank": lambda s: s.update(seed=ckpt.PerRank(6)),
    "True of a rank": lambda s: s.update(seed=ckpt.PerRank(True)),
    "a number for a tensor": lambda s: s["tensors"].update(a=3),
    "param group": lambda s: s["optimizer"].param_groups[0].update(lr=0.5),
    "frozen parameter": lambda s: s["model"][0].weight.requires_grad_(False),
    "parameter's data": lambda s: setattr(s["model"][0].weight, "data", torch.full((4, 3), 7.0)),
    "optimizer's state": lambda s: s["optimizer"].state[s["model"][0].weight].update(exp_avg=torch.full((4, 3), 8.0)),
    "step of the optimizer": lambda s: s["optimizer"].state[s["model"][0].bias]["step"].add_(1),
}


@pytest.mark.parametrize("way", ["save", "lazy"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows_in_the_next_checkpoint(tmp_path: Path, change: str, way: str) -> None:
    state = made()
    urls = [str(tmp_path / name) for name in "abcd"]
    for url in urls[:2]:
        _save(url, state, way)
    CHANGES[change](state)
    _save(urls[2], state, way)
    _save(urls[3], state, "save")
    assert told(ckpt.open(urls[2])) == told(ckpt.open(urls[3])) == expected(state)


def _save(url: str, state: State, way: Any) -> None:
    if way == "save":
        ckpt.save(url, state)
    else:
        ckpt.save_async(url, state, capture=way).result(30)


def told(view: ckpt.View) -> dict[str, str]:
    """Everything in a checkpoint, as text that tells 1 from True."""
    values = view.state()
    a = values["tensors"].get("a")
    found = {name: _text(view[name][...]) for name in view}
    lr = [group["lr"] for group in values["optimizer"]["param_groups"]]
    return {
        **found,
        "step": repr(values["step"]),
        "a": repr(a) * isinstance(a, int),
        "seed": repr(view.per_rank("seed", 0)),
        "lr": repr(lr),
    }


def expected(state: State) -> dict[str, str]:
    """The same, from the state itself."""
    model, optimizer, tensors = state["model"], state["optimizer"], state["tensors"]
    found: dict[str, torch.Tensor] = {f"model.{n}": p for n, p in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"optimizer.state.model.{name}.{key}": value for key, value in optimizer.state[param].items()}
    found |= {f"tensors.{n}": t for n, t in tensors.items() if isinstance(t, torch.Tensor)}
    a, seed = tensors.get("a"), state["seed"].value
    lr = [group["lr"] for group in optimizer.param_groups]
    texts = {name: _text(t) for name, t in found.items()}
    return {**texts, "step": repr(state["step"]), "a": repr(a) * isinstance(a, int), "seed": repr(seed), "lr": repr(lr)}


def _text(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {tensor.tolist()}"


# ------------------------ What a save or load held of a state is free when it is over, without waiting for the collector of cyclic garbage.


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


OPERATIONS: dict[str, Callable[[str, Any], object]] = {
    "save": ckpt.save,
    "lazy": lambda url, state: ckpt.save_async(url, state).result(30),
    "eager": lambda url, state: ckpt.save_async(url, state, capture="eager").result(30),
    "load": ckpt.load,
}


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_memory_is_free_afterwards(tmp_path: Path, operation: str) -> None:
    url = str(tmp_path / "a")
    state = {"x": torch.arange(4.0), "nested": {"y": torch.ones(3)}, "big": torch.ones(1 << 18), "step": 1}
    if operation == "load":
        ckpt.save(url, state)
    else:
        ckpt.save(url, {"x": torch.zeros(1)})
    OPERATIONS[operation](url, state)
    OPERATIONS[operation](url, state)  # what is kept between calls is in use now
    tensors = [weakref.ref(t) for t in (state["x"], state["nested"]["y"], state["big"])]  # type: ignore[index]
    del state
    end = time.monotonic() + 30  # a thread of the save may still be on its way out
    while any(ref() is not None for ref in tensors) and time.monotonic() < end:
        time.sleep(0.01)
    assert [ref() for ref in tensors] == [None] * 3


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("errors", [storage_errors, fsspec_errors])
def test_what_a_reader_of_an_absent_file_has_is_free(errors: Callable[..., AbstractContextManager[None]], tmp_path: Path) -> None:
    """A first save looks for the one before. From Python 3.12 on frames of generators keep those that called them."""

    def read() -> None:
        with errors("w", "read", reading=True):
            (tmp_path / "absent").read_bytes()

    def save() -> weakref.ref[torch.Tensor]:
        state = torch.ones(3)
        with pytest.raises(NotFoundError):
            read()
        return weakref.ref(state)

    assert save()() is None


def test_the_group_of_a_job_is_free_although_its_last_handle_is_kept(tmp_path: Path) -> None:
    """A group keeps the job's store, and the leader's is a server. Each thread without torch.distributed has a group of its own."""
    handles: list[ckpt.SaveHandle] = []
    groups: list[weakref.ref[Group]] = []

    def job() -> None:
        handles.append(ckpt.save_async(tmp_path / "a", {"x": torch.ones(3)}))
        handles[0].result(30)
        groups.append(weakref.ref(current_group()))

    thread = threading.Thread(target=job)
    thread.start()
    thread.join(30)
    end = time.monotonic() + 30  # the thread of the save may still be on its way out
    while groups[0]() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert groups[0]() is None
    assert handles[0].progress().phase == "done"


# --------------------------------------------------------------------------------- Threads that save at once with what one thread has made.

JOBS, STEPS = range(3), range(1, 25)


@pytest.fixture
def many_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def state_of(job: int, step: int) -> dict[str, Any]:
    return {"step": step, "t": torch.full((3 + job,), 100.0 * job + step), "queue": list(range(7 * job))}


@pytest.mark.usefixtures("many_switches")
def test_checkpointers_that_one_thread_made_save_in_several(tmp_path: Path) -> None:
    """Memory for copies was shared: a save had another's tensors, with digests that agreed."""
    checkpointers = [ckpt.Checkpointer(tmp_path / f"{job}") for job in JOBS]

    def loop(job: int) -> None:
        for step in STEPS:
            checkpointers[job].save(step, state_of(job, step))
            if step % 2:
                checkpointers[job].wait()
        checkpointers[job].wait()

    with ThreadPoolExecutor(len(JOBS)) as pool:
        list(pool.map(loop, JOBS))
    for job in JOBS:
        for step in STEPS:
            expected, loaded = state_of(job, step), {"step": 0, "t": torch.zeros(3 + job), "queue": []}
            ckpt.load(tmp_path / f"{job}" / f"step-{step:08}", loaded)
            assert torch.equal(loaded.pop("t"), expected.pop("t")), (job, step)
            assert loaded == expected
