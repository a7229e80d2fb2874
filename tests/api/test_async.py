"""Saves in the background of one process: what is stored is what the state was at the call, whatever the program does meanwhile."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import ckpt
from ckpt.engine.save import staging
from ckpt.engine.save.capture import Capture
from ckpt.engine.save.job import save_cache
from ckpt.engine.save.staging import Arena
from ckpt.engine.save.tensor_source import ChunkSource
from ckpt.errors import BusyError, CancelledError, ConsistencyError, NotFoundError, StateError, UsageError
from ckpt.net.group import current_group

BIG = 300_000
"""Elements of a float tensor that is too large to be set aside at the call."""


class Gate:
    """Holds every capture until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def passed(self) -> None:
        self.reached.set()
        assert self._open.wait(30), "nobody opened the gate"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """From here on captures wait for ``gate.open()``."""
    gate = Gate()
    fill = Capture._fill

    def held(self: Capture, *args: Any) -> None:
        gate.passed()
        fill(self, *args)

    monkeypatch.setattr(Capture, "_fill", held)
    yield gate
    gate.open()
    handle = save_cache(current_group()).in_flight
    if handle is not None:
        handle.wait(30)


@contextmanager
def soon(act: Callable[[], None], seconds: float = 0.2) -> Iterator[None]:
    timer = threading.Timer(seconds, act)
    timer.start()
    yield
    timer.join()


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 700), nn.BatchNorm1d(700), nn.Linear(700, 640), nn.Linear(640, 3))


class Training:
    """A model with buffers that a forward pass changes, trained with AdamW."""

    def __init__(self) -> None:
        self.model = network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.forward_backward()
        self.optimizer.step()

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64)).square().mean().backward()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def copy(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint has, by name, copied by torch."""
        found = {f"model.{n}": t.detach().clone() for n, t in self.model.state_dict().items()}
        names = {p: n for n, p in self.model.named_parameters()}
        for param, values in self.optimizer.state.items():
            found |= {f"optimizer.state.model.{names[param]}.{k}": v.clone() for k, v in values.items()}
        return found


def stored(url: str) -> dict[str, torch.Tensor]:
    view = ckpt.open(url)
    return {name: view[name].read() for name in view}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def stepped(*names: str) -> dict[str, Any]:
    """A state whose tensors are captured after the call: an optimizer of it steps them."""
    weights = nn.ParameterDict({name: torch.ones(BIG) for name in names})
    return {"w": weights, "optimizer": torch.optim.SGD(weights.parameters())}


def by_hand(state: dict[str, Any], name: str) -> None:
    state["w"][name].detach().add_(1)


def hooks() -> int:
    return len(torch_optimizer._global_optimizer_pre_hooks)


# ------------------------------------------------------------------------------------------------------------ capture


@pytest.mark.parametrize("codec", [None, "zstd", "planes-zstd"])
def test_training_goes_on_while_the_state_of_the_call_is_saved(url: str, gate: Gate, codec: Any) -> None:
    job = Training()
    wanted = job.copy()
    handle = ckpt.save_async(url, job.state(), codec=codec)
    assert not handle.captured.done() and not handle.done()
    job.forward_backward()  # changes the buffers of the norm
    assert not torch.equal(job.model[1].running_mean, wanted["model.1.running_mean"])
    with soon(gate.open):
        job.optimizer.step()  # waits
        assert handle.captured.done()
    assert not torch.equal(job.model[0].weight, wanted["model.0.weight"])
    report = handle.result(30)
    assert report.url == url and all(report.id in name for name in files(url))
    assert_same(stored(url), wanted)


def test_several_saves_in_a_row_each_have_the_state_of_their_call(root: str) -> None:
    job = Training()
    wanted = []
    for n in range(4):
        wanted.append(job.copy())
        ckpt.save_async(f"{root}/{n}", job.state())
        job.forward_backward()
        job.optimizer.step()
    ckpt.save(f"{root}/4", job.state())  # waits for the last one
    for n, each in enumerate([*wanted, job.copy()]):
        assert_same(stored(f"{root}/{n}"), each)


def test_an_eager_save_lets_the_state_change_at_once(url: str) -> None:
    tensors = {f"t{i}": torch.randn(BIG) for i in range(8)}
    wanted = {name: t.clone() for name, t in tensors.items()}
    handle = ckpt.save_async(url, tensors, capture="eager")
    assert handle.captured.done()
    for t in tensors.values():
        t.zero_()
    handle.result(30)
    assert_same(stored(url), wanted)


def test_after_a_fence_the_state_may_be_changed_by_hand(url: str) -> None:
    tensors = {"a": torch.randn(BIG), "b": torch.randn(3)}
    wanted = {name: t.clone() for name, t in tensors.items()}
    handle = ckpt.save_async(url, tensors)
    handle.fence()
    assert handle.captured.done()
    tensors["a"].add_(1)
    tensors["b"].add_(1)
    handle.result(30)
    assert_same(stored(url), wanted)


def test_what_no_optimizer_steps_and_plain_values_may_change_at_once(url: str, gate: Gate) -> None:
    state = {"small": torch.arange(5), "step": 7, "list": [1, 2], "big": torch.ones(BIG)}
    handle = ckpt.save_async(url, state)
    state["small"].zero_()
    state["step"] = 8
    state["list"].append(3)
    state["big"].numpy()[:] = 0
    gate.open()
    handle.result(30)
    back: dict[str, Any] = {"small": torch.zeros(5, dtype=torch.int64), "step": 0, "list": [], "big": torch.zeros(BIG)}
    ckpt.load(url, back)
    assert back["small"].tolist() == [0, 1, 2, 3, 4] and back["step"] == 7 and back["list"] == [1, 2]
    assert back["big"].eq(1).all()


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_change_before_the_capture_fails_the_save(url: str, gate: Gate, codec: Any) -> None:
    state = stepped("a", "b")
    ckpt.save(url, state)
    before = files(url)
    handle = ckpt.save_async(url, state, codec=codec)
    by_hand(state, "b")
    gate.open()
    with pytest.raises(ConsistencyError, match=r"tensor w\.b was changed before"):
        handle.fence()
    with pytest.raises(ConsistencyError, match=r"tensor w\.b was changed before"):
        handle.result(30)
    assert_same(stored(url), {"w.a": torch.ones(BIG), "w.b": torch.ones(BIG)})
    assert files(url) == before
    ckpt.save(url, state)  # told already
    assert stored(url)["w.b"].eq(2).all()


def files(url: str) -> list[str]:
    """The data files below a checkpoint's directory."""
    return sorted(os.listdir(f"{url}/data")) if os.path.isdir(f"{url}/data") else []


def test_a_change_after_the_bytes_but_before_the_check_is_found(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes may be whole or torn then: nobody knows."""
    state = stepped("a")
    fill = Capture._fill

    def late(self: Any, *args: Any) -> None:
        fill(self, *args)
        by_hand(state, "a")

    monkeypatch.setattr(Capture, "_fill", late)
    handle = ckpt.save_async(url, state)
    with pytest.raises(ConsistencyError, match=r"tensor w\.a was changed"):
        handle.result(30)
    assert files(url) == [] and not os.path.exists(f"{url}/checkpoint.json")


def test_a_parameter_changed_by_hand_is_found(url: str, gate: Gate) -> None:
    job = Training()
    handle = ckpt.save_async(url, job.state())
    with torch.no_grad():
        job.model[2].weight.mul_(2)
    gate.open()
    with pytest.raises(ConsistencyError, match=r"tensor model\.2\.weight was changed"):
        handle.result(30)


def test_the_hook_of_optimizers_is_one_for_all_saves(root: str) -> None:
    job = Training()
    ckpt.save_async(f"{root}/0", job.state()).result(30)
    before = hooks()
    for n in range(5):
        ckpt.save_async(f"{root}/{n}", job.state()).result(30)
    assert hooks() == before
    assert not staging._capturing


# ------------------------------------------------------------------------------------------------------------- handle


def test_progress_grows_to_the_total(url: str, gate: Gate) -> None:
    state = stepped(*[f"t{i}" for i in range(20)])
    total = 20 * BIG * 4
    handle = ckpt.save_async(url, state)
    seen = [handle.progress()]
    assert seen[0].phase == "capture" and seen[0].captured == 0 and seen[0].total == total and "capture" in repr(handle)
    gate.open()
    while not handle.wait(0.0005):
        seen.append(handle.progress())
    seen.append(handle.progress())
    for a, b in itertools.pairwise(seen):
        assert a.captured <= b.captured and a.written <= b.written and b.written <= b.captured <= total
    last = seen[-1]
    assert (last.captured, last.written, last.total, last.phase) == (total, total, total, "done")
    assert handle.captured.done() and handle.captured.result() is None and handle.done()


def test_result_gives_up_after_its_timeout(url: str, gate: Gate) -> None:
    handle = ckpt.save_async(url, stepped("a"))
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    assert not handle.wait(0.01)
    gate.open()
    assert handle.result(30).tensor_bytes == BIG * 4


def test_when_busy_says_whether_a_second_save_waits(root: str, gate: Gate) -> None:
    state = stepped("a")
    first = ckpt.save_async(f"{root}/1", state)
    with pytest.raises(BusyError, match="still in progress"):
        ckpt.save_async(f"{root}/2", state, when_busy="refuse")
    with soon(gate.open):
        second = ckpt.save_async(f"{root}/2", state)
        assert first.done()
    assert second.result(30).url.endswith("/2") and first.result().url.endswith("/1")
    assert ckpt.save_async(f"{root}/3", state, when_busy="refuse").result(30).url.endswith("/3")


@pytest.mark.parametrize("what", ["load", "save"])
def test_the_next_call_waits_for_the_save(url: str, gate: Gate, what: str) -> None:
    state = stepped("a")
    handle = ckpt.save_async(url, state)
    with soon(gate.open):
        if what == "load":
            back = {"w": {"a": torch.zeros(BIG)}}
            ckpt.load(url, back, only="w.*")
            assert back["w"]["a"].eq(1).all()
        else:
            ckpt.save(f"{url}-2", state)
        assert handle.done()


def test_cancel_ends_the_save_and_leaves_nothing(url: str, gate: Gate) -> None:
    handle = ckpt.save_async(url, stepped("a"))
    handle.cancel()
    gate.open()
    with pytest.raises(CancelledError, match="was cancelled"):
        handle.result(30)
    assert handle.progress().phase == "failed"
    assert files(url) == [] and not os.path.exists(f"{url}/checkpoint.json")
    handle.cancel()  # does nothing now
    assert ckpt.save_async(url, {"a": torch.ones(BIG)}).result(30).tensor_bytes == BIG * 4


def test_a_save_of_nothing_can_be_cancelled_or_ends(url: str) -> None:
    handle = ckpt.save_async(url, {"step": 1})
    assert handle.result(30).tensor_bytes == 0 and handle.progress().total == 0


def test_the_futures_cannot_be_cancelled(url: str, gate: Gate) -> None:
    handle = ckpt.save_async(url, stepped("a"))
    assert not handle.durable.cancel() and not handle.captured.cancel()
    gate.open()
    handle.result(30)


@pytest.mark.parametrize("ask", ["result", "fence", "durable", "captured", "exception"])
def test_an_error_that_somebody_asked_for_is_not_raised_again(url: str, gate: Gate, ask: str) -> None:
    state = stepped("a")
    handle = ckpt.save_async(url, state)
    by_hand(state, "a")
    gate.open()
    handle.wait()
    handle.progress()
    if ask == "exception":
        assert isinstance(handle.durable.exception(), ConsistencyError)
    else:
        with pytest.raises(ConsistencyError):
            {"result": handle.result, "fence": handle.fence, "durable": handle.durable.result, "captured": handle.captured.result}[ask]()
    ckpt.save(url, state)
    assert stored(url)["w.a"].eq(2).all()


@pytest.mark.parametrize("call", ["save", "save_async", "load"])
def test_an_error_that_nobody_asked_for_is_raised_once_by_the_next_call(url: str, root: str, gate: Gate, call: str) -> None:
    state = stepped("a")
    ckpt.save(f"{root}/good", state)
    handle = ckpt.save_async(url, state)
    by_hand(state, "a")
    gate.open()
    handle.wait(30)
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: ckpt.save(f"{root}/next", state),
        "save_async": lambda: ckpt.save_async(f"{root}/next", state).result(30),
        "load": lambda: ckpt.load(f"{root}/good", state),
    }
    with pytest.raises(ConsistencyError, match=r"tensor w\.a was changed"):
        calls[call]()
    assert not os.path.exists(f"{root}/next")
    calls[call]()
    if call != "load":
        assert stored(f"{root}/next")["w.a"].eq(2).all()


# ------------------------------------------------------------------------------------------------------------- memory


def test_many_saves_leave_no_threads_or_files_and_use_the_same_memory(root: str) -> None:
    state = {"a": torch.ones(BIG), "b": torch.ones(10)}
    ckpt.save_async(f"{root}/x", state).result(30)
    arena = save_cache(current_group()).arena
    standing = set(threading.enumerate())  # of the save above, and whatever earlier tests left in this process
    before = fds(), arena._memory.data_ptr(), hooks()
    for n in range(200):
        state["b"].fill_(n)
        handle = ckpt.save_async(f"{root}/x", state)
    handle.result(30)
    end = time.monotonic() + 30
    while (left := set(threading.enumerate()) - standing) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left
    gc.collect()
    assert fds() <= before[0] and (arena._memory.data_ptr(), hooks()) == before[1:]
    assert stored(f"{root}/x")["b"].eq(199).all()


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("capture", ["lazy", "eager"])
def test_a_small_staging_budget_gives_the_same_bytes(url: str, capture: Any, codec: Any) -> None:
    """Small tensors, which are set aside at the call, lie in parts of the file that have to wait for room."""
    tensors = {f"t{i:02}": torch.randn(BIG if i % 2 else 11) for i in range(40)}
    wanted = {name: t.clone() for name, t in tensors.items()}
    budget = 6 << 20
    handle = ckpt.save_async(url, tensors, capture=capture, staging_bytes=budget, codec=codec)
    handle.fence()
    for t in tensors.values():
        t.zero_()
    handle.result(30)
    assert save_cache(current_group()).arena.nbytes >= budget - 2 * 4096
    assert_same(stored(url), wanted)


def test_a_staging_budget_that_is_too_small_is_refused(url: str) -> None:
    state = {"a": torch.ones(BIG)}
    with pytest.raises(UsageError, match=r"staging_bytes=8192 is too small: this state needs at least \d+"):
        ckpt.save_async(url, state, staging_bytes=8192)
    with pytest.raises(UsageError, match="whole number of at least 1"):
        ckpt.save_async(url, state, staging_bytes=0)
    assert not os.path.exists(f"{url}/checkpoint.json")
    ckpt.save_async(url, state).result(30)


def test_arguments_and_states_that_cannot_be_are_raised_by_the_call(url: str) -> None:
    for wrong in ({"capture": "later"}, {"when_busy": "never"}, {"codec": "gzip"}):
        with pytest.raises(UsageError):
            ckpt.save_async(url, {"a": torch.ones(2)}, **wrong)  # type: ignore[arg-type]
    with pytest.raises(StateError):
        ckpt.save_async(url, {"a": object()})
    ckpt.save_async(url, {"a": torch.ones(2)}).result(30)


def test_a_save_in_the_background_leaves_the_garbage_collector_on(url: str, gate: Gate) -> None:
    handle = ckpt.save_async(url, stepped("a"))
    assert gate.reached.wait(30) and gc.isenabled()
    gate.open()
    handle.result(30)


def test_views_and_strange_strides_are_captured(url: str) -> None:
    base = torch.randn(700, 600)
    z = torch.randn(400, 400, dtype=torch.complex64)
    state = {
        "t": base.t(),
        "s": base[::2, ::3],
        "e": torch.ones(1).expand(500, 500),
        "c": z.conj(),
        "bf": base.bfloat16(),
        "n": torch.randn(()),
    }
    wanted = {name: t.clone().contiguous().resolve_conj() for name, t in state.items()}
    handle = ckpt.save_async(url, state)
    handle.fence()
    base.zero_()
    z.zero_()
    handle.result(30)
    assert_same(stored(url), wanted)


def test_inference_tensors_have_no_version_and_are_set_aside(url: str, gate: Gate) -> None:
    with torch.inference_mode():
        state = {"a": torch.ones(BIG)}
        handle = ckpt.save_async(url, state)
        state["a"].add_(1)
    gate.open()
    handle.result(30)
    assert stored(url)["a"].eq(1).all()


def test_a_change_that_is_going_on_while_the_state_is_captured() -> None:
    """torch counts a change only when the operation is over: what is captured meanwhile is neither the old nor the new."""
    for turn in range(8):
        state, url = stepped("a", "b"), f"inprocess://going-on/{turn}"
        handle = ckpt.save_async(url, state)
        by_hand(state, "b")
        handle.wait()
        if handle.durable.exception() is None:
            assert ckpt.open(url)["w.b"][...].eq(1).all()


# -------------------------------------- Memory under a save in the background: freed before it was captured, or shared with a forked child.


@pytest.fixture
def held_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Captures wait until it is set."""
    opened, fill = threading.Event(), ChunkSource.fill_batch

    def held(self: ChunkSource, *args: Any, **more: Any) -> None:
        assert opened.wait(30)
        fill(self, *args, **more)

    monkeypatch.setattr(ChunkSource, "fill_batch", held)
    return opened


def test_memory_that_is_freed_before_it_was_captured(tmp_path: Path, held_writes: threading.Event) -> None:
    model = torch.nn.Linear(1024, 1024, bias=False)  # what is small is captured in the call
    handle = ckpt.save_async(str(tmp_path / "a"), {"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    model.weight.untyped_storage().resize_(0)
    held_writes.set()
    with pytest.raises(ConsistencyError, match=r"model\.weight was freed or moved"):
        handle.result(30)
    with pytest.raises(NotFoundError):
        ckpt.open(str(tmp_path / "a"))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_its_parents_save(tmp_path: Path, held_writes: threading.Event) -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ckpt.save_async(str(tmp_path / "a"), {"model": model, "optimizer": optimizer})
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends the child if it hangs
        ckpt.fence()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    held_writes.set()
    handle.result(30)


def test_a_forked_child_does_not_write_into_its_parents_arena() -> None:
    memory = Arena().reserve(1 << 16)
    memory.fill_(1)
    child = os.fork()
    if not child:
        memory.numpy()[:] = 9  # numpy's: torch's threads do not live on in a child
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.eq(1).all()
