"""A local tier before the root: what is committed where, which copy a job goes on from, and what happens while the root is away."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.copy import copy_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import NotFoundError, StorageError, UsageError
from ckpt.formats.native.commit import COMMIT_PATH
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import AtSteps, Best, EverySteps, KeepPolicy, Latest, OnPreemption
from tests.distributed.ranks import Lost, Ranks


class Storage:
    """Stands before the backends below one root. While it is ``away`` every call to them raises, while it ``hangs`` every
    call waits, and so does each publish while the ``gate`` is closed. Calls of the method ``broken`` always raise."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.away = False
        self.broken = ""
        self.hangs = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.before_publish: Callable[[], None] = self.gate.wait

    @contextmanager
    def watched(self) -> Iterator[Storage]:
        with wrap_backends(self._wrap):
            yield self

    def _wrap(self, backend: Any) -> Any:
        return _Guarded(self, backend) if backend.url.startswith(self.root) else backend


class _Guarded:
    def __init__(self, storage: Storage, backend: Any) -> None:
        self._storage, self._backend = storage, backend

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            while self._storage.hangs.is_set():
                time.sleep(0.01)
            if self._storage.away:
                raise StorageError("the storage does not answer", where=self._storage.root)
            if name == self._storage.broken:
                raise StorageError("input/output error", where=self._storage.root)
            if name == "put_if":
                self._storage.before_publish()
            return found(*args, **options)

        return call


class Run:
    """A run with both tiers, whose state is one number all over."""

    def __init__(self, folder: Path) -> None:
        self.root, self.local = folder / "root", folder / "local"

    def open(self, **options: Any) -> ckpt.Checkpointer:
        local = ckpt.SharedLocal(self.local, keep=options.pop("local_keep")) if "local_keep" in options else str(self.local)
        return ckpt.Checkpointer(str(self.root), **{"local": local, "save": EverySteps(1), "job": ckpt.Job(timeout=5), **options})

    def train(self, steps: range, *, wait: bool = True, **options: Any) -> None:
        with self.open(**options) as c:
            for n in steps:
                c.step(n, state_of(n), metrics={"loss": abs(n - 2.5)})
                if wait:
                    c.wait()


def state_of(n: int) -> dict[str, Any]:
    return {"w": torch.full((300, 40), float(n)), "n": n}


def restored(c: ckpt.Checkpointer, **options: Any) -> int | None:
    """The step that was restored; its values are those of the step."""
    state = state_of(-1)
    step = c.restore(state, **options)
    if step is not None:
        assert state["n"] == step and torch.equal(state["w"], state_of(step)["w"])
    return step


def numbers(root: Path) -> list[int | None]:
    return [s.number for s in ckpt.list_steps(str(root)) if s.committed]


def wait_for(value: Callable[[], Any], wanted: Any, seconds: float = 30) -> None:
    """Wait until ``value()`` is ``wanted``, as it becomes in the background."""
    deadline = time.monotonic() + seconds
    while value() != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    assert value() == wanted


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def flip(checkpoint: Path) -> None:
    (path,) = checkpoint.glob("data/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def storage(run: Run) -> Iterator[Storage]:
    with Storage(run.root).watched() as found:
        yield found


# ---------------------------------------------------------------------------------------------------------- both tiers


def test_a_save_is_committed_locally_and_then_published_byte_for_byte(run: Run, storage: Storage) -> None:
    storage.gate.clear()
    with run.open() as c:
        c.save(1, state_of(1)).result()
        assert numbers(run.local) == [1] and numbers(run.root) == []
        storage.gate.set()
        c.wait()
        assert c.unpublished == ()
    assert files(run.root) == files(run.local) != {}
    assert verify(str(run.root / "step-00000001")).ok


def test_each_tier_keeps_by_its_own_policy(run: Run) -> None:
    run.train(range(1, 8), keep=Latest(2) | Best("loss", mode="min"), local_keep=Latest(1))
    assert (numbers(run.root), numbers(run.local)) == ([3, 6, 7], [7])
    with run.open() as c:
        assert [s.number for s in c.steps()] == [3, 6, 7] and c.latest == 7 and c.best("loss", mode="min") == 3
        assert [s.url.startswith(str(run.local)) for s in c.steps()] == [False, False, True]


def test_what_was_saved_meanwhile_is_published_as_far_as_it_is_there(run: Run, storage: Storage) -> None:
    """While step 1 is on its way, 2 to 5 are committed; then the newest goes first."""
    for local_keep, expected in ((Latest(1), [1, 5]), (Latest(3), [1, 3, 4, 5])):
        shutil.rmtree(run.root, ignore_errors=True)
        shutil.rmtree(run.local, ignore_errors=True)
        entered, order = threading.Event(), []

        def before(entered: threading.Event = entered, order: list[int] = order) -> None:
            entered.set()
            storage.gate.wait()
            order.append(len(order))

        storage.before_publish = before
        storage.gate.clear()
        with run.open(local_keep=local_keep) as c:
            c.save(1, state_of(1)).result()
            assert entered.wait(30)
            for n in range(2, 6):
                c.save(n, state_of(n)).result()
            # Step 1 is being published, so it stays; the others go in the background.
            wait_for(lambda: numbers(run.local), [1, 5] if local_keep == Latest(1) else [1, 3, 4, 5])
            storage.gate.set()
        assert numbers(run.root) == expected
        assert numbers(run.local) == ([5] if local_keep == Latest(1) else [3, 4, 5])


def test_only_what_the_root_would_keep_is_published(run: Run, storage: Storage) -> None:
    storage.away = True
    with run.open(keep=Latest(1), local_keep=Latest(3)) as c:
        for n in range(1, 4):
            c.save(n, state_of(n)).result()
        storage.away = False
        c.wait()
    assert numbers(run.root) == [3] and numbers(run.local) == [1, 2, 3]
    assert {p.name for p in run.root.iterdir()} == {"step-00000003"}


def test_a_step_that_is_saved_again_replaces_what_was_published(run: Run) -> None:
    run.train(range(1, 3))
    before = files(run.root / "step-00000002")
    with run.open() as c:
        assert restored(c, step=2) == 2
        c.save(2, {"w": torch.zeros(300, 40), "n": 2}).result()
    assert files(run.root / "step-00000002") == files(run.local / "step-00000002")
    assert not files(run.root / "step-00000002").keys() & (before.keys() - {COMMIT_PATH})


# ---------------------------------------------------------------------------------------------------------- the nearest copy


def test_the_local_copy_is_taken_first(run: Run, storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    run.train(range(1, 4))
    (run.root / "step-00000003" / "data").rename(run.root / "gone")
    with run.open() as c, caplog.at_level(logging.INFO, "ckpt"):
        assert restored(c) == 3
        assert c.restored_from is not None and c.restored_from.url == str(run.local / "step-00000003")
        assert f"going on from step 3: {run.local}" in caplog.text


@pytest.mark.parametrize("harm", ["flipped", "truncated", "no data", "unreadable record"])
def test_a_damaged_local_copy_gives_way_to_the_published_one(run: Run, caplog: pytest.LogCaptureFixture, harm: str) -> None:
    run.train(range(1, 4))
    step = run.local / "step-00000003"
    if harm == "flipped":
        flip(step)
    elif harm == "truncated":
        os.truncate(next(step.glob("data/*")), 100)
    elif harm == "no data":
        shutil.rmtree(step / "data")
    else:
        (step / COMMIT_PATH).write_text("{")
    with run.open() as c:
        assert restored(c) == 3
        assert c.restored_from is not None and c.restored_from.url == str(run.root / "step-00000003")
        assert f"{step} is passed over" in caplog.text
        if harm != "unreadable record":
            assert restored(c, step=3) == 3


def test_a_local_disk_that_cannot_be_read_gives_way(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.train(range(1, 3))
    with Storage(run.local).watched() as disk, run.open() as c:
        disk.broken = "read_into"
        assert restored(c) == 2 and c.restored_from is not None and c.restored_from.url == str(run.root / "step-00000002")
        assert "input/output error" in caplog.text
        disk.broken = ""


def test_a_local_disk_that_was_lost(run: Run) -> None:
    run.train(range(1, 4))
    shutil.rmtree(run.local)
    with run.open() as c:
        assert restored(c) == 3 and c.restored_from is not None and c.restored_from.url == str(run.root / "step-00000003")
        c.step(4, state_of(4))
    assert numbers(run.local) == [4] and numbers(run.root) == [1, 2, 3, 4]


def test_what_another_machine_has_published_since_is_newer(run: Run, tmp_path: Path) -> None:
    """The job went on elsewhere: to a later step, or through the same step once more."""
    run.train(range(1, 4))
    elsewhere = Run(tmp_path)
    elsewhere.local = tmp_path / "other disk"
    elsewhere.train(range(4, 6))
    with run.open() as c:
        assert restored(c) == 5 and c.restored_from is not None and c.restored_from.url == str(run.root / "step-00000005")
        c.wait()
        assert numbers(run.root) == [1, 2, 3, 4, 5]
    elsewhere.train(range(3, 4))
    id = {s.number: s.id for s in ckpt.list_steps(str(run.root))}[3]
    with run.open(local_keep=Latest(5)) as c:
        assert restored(c, step=3) == 3 and c.restored_from is not None and c.restored_from.url == str(run.root / "step-00000003")
        c.wait()
    assert {s.number: s.id for s in ckpt.list_steps(str(run.root))}[3] == id


def test_all_copies_damaged_sends_back_a_step(run: Run) -> None:
    run.train(range(1, 4), local_keep=Latest(2))
    flip(run.local / "step-00000003")
    flip(run.root / "step-00000003")
    with run.open() as c:
        assert restored(c) == 2 and c.restored_from is not None and c.restored_from.url == str(run.local / "step-00000002")


@pytest.mark.parametrize("restore", [True, False])
def test_a_damaged_local_checkpoint_is_not_published(
    run: Run, storage: Storage, caplog: pytest.LogCaptureFixture, *, restore: bool
) -> None:
    storage.away = True
    with pytest.raises(StorageError):
        run.train(range(1, 3), wait=False, publish_timeout=0.01, local_keep=Latest(2))
    storage.away = False
    flip(run.local / "step-00000002")
    with run.open(local_keep=Latest(3)) as c:
        if restore:
            assert restored(c) == 1 and f"{run.local}/step-00000002 is passed over" in caplog.text
            c.wait()
            assert numbers(run.root) == [1]
        c.save(3, state_of(3)).result()
        if not restore:
            with pytest.raises(StorageError, match="step 2 .* could not be published"):
                c.wait()
            assert "step 2 is not published" in caplog.text
    assert numbers(run.root) == [1, 3]


# ---------------------------------------------------------------------------------------------------------- the root is away


def test_training_goes_on_while_the_root_is_away(run: Run, storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    run.train(range(1, 3))
    storage.away = True
    with run.open(publish_timeout=0.2) as c:
        for n in range(3, 8):
            c.step(n, state_of(n))
            assert c.handle is not None
            c.handle.result()
            wait_for(lambda: len(numbers(run.local)) <= 2, True)  # what is not kept goes in the background
        with pytest.raises(StorageError, match="step 7 is committed in .*, but could not be published: the storage does not answer"):
            c.wait()
        assert "step 7 is not published: the storage does not answer" in caplog.text
        assert c.unpublished == (7,)
        storage.away = False
        c.step(8, state_of(8))
    assert numbers(run.local) == [8] and numbers(run.root) == [1, 2, 8]


def test_no_save_waits_for_a_root_that_hangs(run: Run, storage: Storage) -> None:
    """It hangs in whatever is asked of it, the listing too."""
    run.train(range(1, 2))
    storage.hangs.set()
    with run.open() as c:
        for n in range(2, 6):
            c.step(n, state_of(n))
            assert c.handle is not None and c.handle.wait(30)
        end = time.monotonic() + 20  # nobody waits for what removes old steps
        while numbers(run.local) != [5]:
            assert time.monotonic() < end
            time.sleep(0.02)
        storage.hangs.clear()
    assert numbers(run.root) == [1, 5]


def test_unpublished_steps_are_told(run: Run, storage: Storage) -> None:
    storage.gate.clear()
    entered = threading.Event()
    storage.before_publish = lambda: (entered.set(), storage.gate.wait())[0]
    with run.open(local_keep=Latest(2)) as c:
        c.save(1, state_of(1)).result()
        assert entered.wait(30)
        assert c.unpublished == (1,)
        storage.gate.set()
        c.wait()
        assert c.unpublished == ()


def test_waiting_goes_on_until_the_root_is_back(run: Run, storage: Storage) -> None:
    storage.away = True
    with run.open(publish_timeout=20) as c:
        c.save(1, state_of(1)).result()
        threading.Timer(0.4, setattr, (storage, "away", False)).start()
        c.wait()
        assert numbers(run.root) == [1]


def test_the_end_says_that_the_last_step_is_not_published(run: Run, storage: Storage) -> None:
    storage.away = True
    with pytest.raises(StorageError, match="could not be published") as raised, run.open(publish_timeout=0.05) as c:
        c.step(1, state_of(1))
    assert str(run.local) in str(raised.value) and "ckpt cp" in str(raised.value.hint)
    storage.away = False
    with run.open() as c:
        assert restored(c) == 1
    assert numbers(run.root) == [1]


def test_nobody_guesses_what_is_newest_while_the_root_is_away(run: Run, storage: Storage) -> None:
    run.train(range(1, 4))
    storage.away = True
    with run.open() as c:
        with pytest.raises(StorageError, match="newer checkpoints than step 3") as raised:
            restored(c)
        assert "restore(state, step=3)" in str(raised.value.hint)
        with pytest.raises(StorageError):
            restored(c, step=2)
        assert restored(c, step=3) == 3 and c.restored_from is not None and c.restored_from.url == str(run.local / "step-00000003")
        storage.away = False
    assert numbers(run.root) == [1, 2, 3]


@pytest.mark.parametrize("away", [False, True])
def test_the_last_save_before_a_stop_waits_to_be_published(
    run: Run, storage: Storage, caplog: pytest.LogCaptureFixture, *, away: bool
) -> None:
    storage.away = away
    c = run.open(save=EverySteps(100) | OnPreemption(), publish_timeout=0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert c.step(1, state_of(1)) and c.preempted
    assert numbers(run.local) == [1] and (run.root / "step-00000001" / COMMIT_PATH).exists() != away
    assert ("could not be published" in caplog.text) == away
    if away:
        with pytest.raises(StorageError):
            c.close()
    else:
        c.close()


# ---------------------------------------------------------------------------------------------------------- killed in between


def killed_before_publishing(root: str, local: str) -> None:
    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    run = Run(Path(root).parent)
    with Storage(Path(root)).watched() as storage, run.open() as c:
        c.save(1, state_of(1)).result()
        c.wait()
        storage.before_publish = end
        c.save(2, state_of(2)).result()
        c.wait()


def test_killed_between_the_local_commit_and_the_publish(run: Run) -> None:
    (lost,) = Ranks(1).run(1, killed_before_publishing, str(run.root), str(run.local), process_group=False, allow_death=True)
    assert isinstance(lost, Lost) and lost.exitcode == -signal.SIGKILL
    assert numbers(run.root) == [1] and 2 in numbers(run.local)
    with run.open() as c:
        assert restored(c) == 2 and c.restored_from is not None and c.restored_from.url == str(run.local / "step-00000002")
    assert numbers(run.root) == [1, 2]
    assert files(run.root / "step-00000002") == files(run.local / "step-00000002")
    assert verify(str(run.root / "step-00000002")).ok


# ---------------------------------------------------------------------------------------------------------- what is asked for


def test_a_local_tier_is_a_directory_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="directory"):
        ckpt.Checkpointer(str(tmp_path), local="s3://bucket/run")
    with pytest.raises(UsageError, match="same place"):
        ckpt.Checkpointer(str(tmp_path), local=f"{tmp_path}/")
    with pytest.raises(UsageError, match="policies"):
        ckpt.SharedLocal(f"{tmp_path}/x", keep=EverySteps)  # type: ignore[arg-type]


def test_nothing_to_go_on_from(run: Run) -> None:
    with run.open() as c:
        assert restored(c) is None and c.restored_from is None and c.latest is None
        with pytest.raises(NotFoundError):
            restored(c, step=1)


def test_local_checkpoints_can_be_copied_by_hand(run: Run, storage: Storage) -> None:
    storage.away = True
    with pytest.raises(StorageError), run.open(publish_timeout=0.01) as c:
        c.step(1, state_of(1))
    storage.away = False
    copy_checkpoint(str(run.local / "step-00000001"), str(run.root / "step-00000001"))
    with run.open() as c:
        assert restored(c) == 1
        c.wait()
        assert c.unpublished == ()


def test_policies_of_both_tiers_can_be_any(run: Run) -> None:
    keep: KeepPolicy = EverySteps(2) | Latest(1)
    run.train(range(1, 6), keep=keep, local_keep=keep)
    assert numbers(run.root) == [2, 4, 5] == numbers(run.local)


def test_steps_of_a_job_that_did_not_see_this_tier_are_not_undone_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One machine has step 9 in a tier of its own; the job went on elsewhere, from an earlier step, and has published step 7 since."""
    root, local, state = str(tmp_path / "run"), str(tmp_path / "local"), {"x": torch.zeros(2)}
    ckpt.save(f"{local}/step-00000009", state)
    ckpt.save(f"{root}/step-00000007", state)
    with ckpt.Checkpointer(root, local=local, save=AtSteps(99)) as c:
        assert c.restore(state) == 9 == c.restore(state)
    warned = [r.getMessage() for r in caplog.records if "was saved after it" in r.getMessage()]
    assert len(warned) == 1 and "step-00000009" in warned[0] and "restore(state, step=7)" in warned[0]
    caplog.clear()
    with ckpt.Checkpointer(str(tmp_path / "usual"), local=str(tmp_path / "usual-local"), save=AtSteps(99)) as c:
        c.save(7, state)
        c.save(9, state)
        c.wait()
    with ckpt.Checkpointer(str(tmp_path / "usual"), local=str(tmp_path / "usual-local")) as c:
        assert c.restore(state) == 9
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
