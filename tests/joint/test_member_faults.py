"""One member of a run loses its storage or stands still: it hears so, the others give up in time, and nothing is visible in part."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.errors import CkptError, ConflictError, StorageError
from ckpt.io_backends.faulty import FaultyBackend, FaultyProcess
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import wrap_backends
from ckpt.runs import joint
from ckpt.runs.members import Generation
from ckpt.runs.step_listing import list_steps
from tests.api.checked import empty_directory
from tests.distributed.ranks import fork_server
from tests.joint.test_many_members import Member, T, each, have_marks, made, polls_until

NAMES = ("trainer", "buffer", "rollouts")


class Cut(FaultyProcess):
    """The storage as one member sees it. Once ``when`` is true of an operation, before it or ``after`` it, none succeeds."""

    when: Callable[[str], bool] = staticmethod(lambda what: False)
    after = cut = False

    def operate(self, what: str, effect: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        hit = self.when(what)
        if self.cut or (hit and not self.after):
            self.cut = True
            error = StorageError("the storage is cut off", where=what)
            error.errno = errno.EIO
            raise error
        result = super().operate(what, effect, half)
        self.cut = self.cut or hit
        return result

    def mend(self) -> None:
        self.when, self.cut = lambda what: False, False


@pytest.fixture
def root() -> Iterator[str]:
    with empty_directory() as path:
        yield path


@pytest.fixture
def cut(root: str) -> Iterator[Cut]:
    """Of the member ``buffer``, for all that is opened below its directory; ``members_of`` adds the root."""
    cut = Cut()

    def wrap(inner: Backend) -> Backend:
        return FaultyBackend(inner, process=cut) if f"{root}/buffer" in inner.url else inner

    with wrap_backends(wrap):
        yield cut


def members_of(root: str, cut: Cut) -> list[Member]:
    members = made(root, NAMES)
    for m in members:
        if m.name == "buffer":
            m.run._backend = FaultyBackend(m.run._backend, process=cut)
    return members


def ends(do: Callable[[Member], Any]) -> Callable[[Member], Any]:
    """What ``do`` gives, or the error that it ends with."""

    def run(m: Member) -> Any:
        try:
            return do(m)
        except CkptError as err:
            return err

    return run


def save(n: int) -> Callable[[Member], Any]:
    return ends(lambda m: m.save(n))


@pytest.mark.parametrize(
    ("moment", "when", "after", "commits"),
    [
        pytest.param("while it saves", lambda what: what.startswith("create "), False, False, marks=pytest.mark.slow),
        pytest.param("before it commits", lambda what: what == "put_if checkpoint.json", False, False, marks=pytest.mark.slow),
        ("before it is prepared", lambda what: "/members/" in what, False, False),
        ("once it is prepared", lambda what: what.startswith("put_if") and "/members/" in what, True, True),
    ],
)
def test_a_member_whose_storage_is_cut_off_while_it_saves(
    moment: str, when: Callable[[str], bool], after: bool, commits: bool, root: str, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, events = members_of(root, cut), list[tuple[str, str, int | None]]()
    assert each(members, Member.restore) == [None] * 3
    assert each(members, save(1)) == [None] * 3
    for m in members:
        assert m.checkpointer._joint is not None and m.checkpointer._joint.reporter is not None
        tell, name = m.checkpointer._joint.reporter.tell, m.name

        def told(kind: str, step: int | None, *more: Any, tell: Any = tell, name: str = name, **values: Any) -> None:
            events.append((name, kind, step))
            tell(kind, step, *more, **values)

        m.checkpointer._joint.reporter.tell = told  # type: ignore[method-assign]
    cut.when, cut.after, record = when, after, Path(root, "step-00000002", "checkpoint.json")

    def over() -> bool:
        return cut.cut and (record.exists() if commits else have_marks(root, 2, ("trainer", "rollouts")))

    with monkeypatch.context() as patch:
        patch.setattr(joint, "_polls", polls_until(over))
        ended = dict(zip(NAMES, each(members, save(2)), strict=True))
    assert cut.cut and isinstance(ended["buffer"], StorageError) and "cut off" in str(ended["buffer"]), ended
    others = None if commits else "step 2 was given up: buffer did not save it within 300 s"
    assert (ended["trainer"], ended["rollouts"]) == (others, others)
    kind = "save.joint" if commits else "save.given_up"
    assert {(name, kind, 2) for name in ("trainer", "rollouts")} <= set(events)
    cut.mend()
    assert [s.number for s in list_steps(root) if s.committed] == [1, 2][: 1 + commits]
    assert each(members, save(3)) == [None] * 3, "what follows works"
    for m in members:
        m.checkpointer.close()
    assert each(made(root, NAMES), Member.restore) == [3] * 3


@pytest.mark.parametrize(
    "when",
    [
        pytest.param(lambda what: what == "read joint.json", marks=pytest.mark.slow, id="joins"),
        pytest.param(lambda what: what.startswith("read") and ("index-" in what or ".safetensors" in what), id="loads"),
        pytest.param(lambda what: what == "put_if joint.json", marks=pytest.mark.slow, id="says so"),
    ],
)
def test_a_member_whose_storage_is_cut_off_while_it_restores(
    when: Callable[[str], bool], root: str, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = members_of(root, cut)
    assert each(members, Member.restore) == [None] * 3
    for n in (1, 2):
        assert each(members, save(n)) == [None] * 3
    for m in members:
        m.checkpointer.close()
    members, cut.when = members_of(root, cut), when
    with monkeypatch.context() as patch:
        patch.setattr(joint, "_polls", polls_until(lambda: cut.cut))
        ended = dict(zip(NAMES, each(members, ends(Member.restore)), strict=True))
    assert cut.cut and isinstance(ended["buffer"], StorageError), ended
    for name in ("trainer", "rollouts"):
        assert isinstance(ended[name], ConflictError) and "buffer" in str(ended[name]), "it says who is awaited"
    cut.mend()
    for m in members:
        m.checkpointer.close()
    members = members_of(root, cut)
    assert each(members, Member.restore) == [2] * 3, "nobody went back for what was out of reach"


def frozen_member(root: str, moment: str, out: str) -> None:
    """The member ``buffer``: it stops itself once, after it has learned what to load or after it has loaded it."""
    state = {"w": np.zeros(3, np.int64), "name": "buffer"}
    with ckpt.Checkpointer(root, member=ckpt.Member("buffer", of=NAMES), job=ckpt.Job(timeout=240)) as c:
        assert c._joint is not None
        run = c._joint._run
        join, loaded, stopped = run.join, run.loaded, list[bool]()

        def stop() -> None:
            if not stopped:
                stopped.append(True)
                os.kill(os.getpid(), signal.SIGSTOP)

        def join_and_stop(*arguments: Any) -> Generation:
            decided = join(*arguments)
            if moment == "before it loads":
                stop()
            return decided

        def stop_and_say() -> bool:
            stop()
            return loaded()

        run.join, run.loaded = join_and_stop, stop_and_say  # type: ignore[method-assign]
        try:
            result: object = c.restore(state)
            assert state["w"].tolist() == [result] * 3
        except ConflictError as err:
            result = err.message
    Path(out).write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("moment", "replaced"),
    [
        ("after it has loaded", True),
        pytest.param("after it has loaded", False, marks=pytest.mark.slow),
        pytest.param("before it loads", True, marks=pytest.mark.slow),
        pytest.param("before it loads", False, marks=pytest.mark.slow),
    ],
)
def test_a_member_that_stands_still_in_its_restore_is_named_and_goes_on_with_the_others_or_ends(
    moment: str, replaced: bool, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, out = made(root, NAMES), tmp_path / "out"
    assert each(members, Member.restore) == [None] * 3
    for n in (1, 2):
        assert each(members, save(n)) == [None] * 3
    for m in members:
        m.checkpointer.close()

    def others_have_loaded() -> bool:
        joined = json.loads(Path(root, "joint.json").read_bytes())["joined"]
        return all(joined.get(name, {}).get("state") in ("loaded", "ready") for name in ("trainer", "rollouts"))

    process = fork_server().Process(target=frozen_member, args=(root, moment, str(out)))
    process.start()
    assert process.pid is not None
    try:
        end = time.monotonic() + 120
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end and process.is_alive()
            time.sleep(0.02)
        others = [m for m in members_of(root, Cut()) if m.name != "buffer"]
        with monkeypatch.context() as patch:
            patch.setattr(joint, "_polls", polls_until(others_have_loaded))
            errors = each(others, ends(Member.restore))
        for err in errors:
            assert isinstance(err, ConflictError) and "buffer did not load step 2 within 300 s" in err.message
            again = [m for m in made(root, NAMES) if replaced or m.name != "buffer"]
        if not replaced:
            os.kill(process.pid, signal.SIGCONT)
        assert each(again, Member.restore) == [2] * len(again)
        if replaced:
            assert each(again, save(3)) == [None] * 3
            os.kill(process.pid, signal.SIGCONT)
        process.join(120)
    finally:
        process.kill()
        process.join()
    assert json.loads(out.read_text()) == ("another process restores as member buffer" if replaced else 2)
    assert [s.number for s in list_steps(root) if s.committed] == ([2, 3] if replaced else [1, 2])
