"""A save of one process that fails, or dies, at each operation on the storage in turn: the old checkpoint stays or the new one is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest

import ckpt
from ckpt.errors import NoSpaceError, NotCommittedError, NotFoundError, StorageError
from ckpt.io_backends.faulty import Fault, FaultyProcess, SimulatedCrash
from ckpt.io_backends.registry import open_backend, wrap_backends
from tests.failures.states import copy, state, stored

T = TypeVar("T")

BEFORE, NEW, LATER = 1, 2, 3
ERRORS = {"error": StorageError, "short_write": StorageError, "no_space": NoSpaceError, "crash": SimulatedCrash}
FILES = 6
"""Of one checkpoint of one rank: what killed saves left is gone after the next one."""
NOT_OURS = "data/notes.txt"
SAVES = ["replacing", "at a new URL"]
MOMENTS = ["before", "after"]


def on_each_backend(*choices: Sequence[str]) -> list[Any]:
    """Every combination: by default those of one colour on a file system, and those of the other in memory, so that all pairs are there."""
    return [
        pytest.param(root, *(value for _, value in each), marks=() if sum(number for number, _ in each) % 2 == colour else pytest.mark.slow)
        for colour, root in enumerate(("posix", "memory"))
        for each in product(*(list(enumerate(choice)) for choice in choices))
    ]


def save(url: str, number: int, fault: Fault | None = None, threads: int = 1) -> tuple[BaseException | None, FaultyProcess]:
    """Save state ``number`` with a fault. Gives what was raised, and the operations."""
    process = FaultyProcess(fault)
    try:
        with wrap_backends(process.wrap):
            ckpt.save(url, state(number), job=ckpt.Job(threads=threads))
    except (ckpt.CkptError, SimulatedCrash) as err:
        return err, process
    return None, process


def files(url: str) -> dict[str, int]:
    return {entry.path: entry.size for entry in open_backend(url).list_prefix()}


def found(url: str) -> int | None:
    """The number of the state at ``url``; None if there is no checkpoint, which must show as one of the two errors for that."""
    try:
        return stored(url)
    except (NotFoundError, NotCommittedError):
        return None


def operations(root: str, kind: str) -> tuple[str, ...]:
    """What one such save does, ids left out."""
    url = f"{root}/counted"
    if kind == "replacing":
        save(url, BEFORE)
    error, process = save(url, NEW)
    assert error is None
    return process.log


def prepared(root: str, kind: str, n: int) -> tuple[str, int | None, dict[str, int]]:
    """A fresh URL, what is saved there, and its files."""
    url = f"{root}/{n}"
    if kind == "at a new URL":
        return url, None, {}
    if not files(f"{root}/before"):
        assert save(f"{root}/before", BEFORE)[0] is None
    copy(f"{root}/before", url)
    return url, BEFORE, files(url)


def test_a_save_does_what_these_tests_believe(root: str) -> None:
    """If a save had fewer operations than it needs, the loops below would prove nothing."""
    names = [line.partition(" ")[0] for line in operations(root, "replacing")]
    assert names.count("put_if") == 1 and names.count("create") == names.count("commit") == 5  # four index files and a data file
    after = names[names.index("put_if") + 1 :]
    looks = ["list_prefix", "list_prefix"]  # whether all files are there
    older = ["list_prefix"]  # the files of older saves; there are some in data/, so it is no link
    neighbours = ["list_dir", "version_tokens"]  # of which there are none
    assert after == looks + older + neighbours + ["delete"] * 5 + ["pending_uploads"]
    last = [line.split()[0] for line in operations(root + "/new", "at a new URL")[-4:]]
    assert last == [*looks, *older, "pending_uploads"]


def test_spans_harm_nothing(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a save took is written after the commit: whatever happens then, the new checkpoint is there."""
    monkeypatch.setenv("CKPT_SPANS", "on")
    log = operations(root, "replacing")
    assert [line.partition(" ")[0] for line in log if "spans.json" in line] == ["create", "write", "commit", "abort", "delete"]
    for n in range(log.index("put_if checkpoint.json") + 1, len(log)):
        url, _, _ = prepared(root, "replacing", n)
        error, _ = save(url, NEW, Fault(at=n, kind="error"))
        assert error is None and found(url) == NEW
        ckpt.save(url, state(LATER))
        assert stored(url) == LATER and len(files(url)) == FILES + 1


@pytest.mark.parametrize(("root", "moment", "lost", "kind"), on_each_backend(MOMENTS, ["process", "power"], SAVES), indirect=["root"])
def test_a_crash_leaves_the_old_or_the_new_checkpoint(root: str, moment: str, lost: str, kind: str) -> None:
    after, lose = moment == "after", lost == "power"
    log = operations(root, kind)
    publish = log.index("put_if checkpoint.json")
    for n, what in enumerate(log):
        url, before, _ = prepared(root, kind, n)
        error, process = save(url, NEW, Fault(at=n, kind="crash", after=after, lose_unsynced=lose, seed=n))
        assert isinstance(error, SimulatedCrash) and process.crashed, what
        committed = n > publish or (n == publish and after)
        assert found(url) == (NEW if committed else before), f"crash {'after' if after else 'before'} operation {n}, {what}"
        open_backend(url).put_if(NOT_OURS, b"", expected=None)
        ckpt.save(url, state(LATER))
        assert stored(url) == LATER and NOT_OURS in files(url) and len(files(url)) == FILES + 1, f"{what}: {sorted(files(url))}"


ERROR_AT = ["error before", "error after", "no_space before", "no_space after", "short_write before"]


@pytest.mark.parametrize(("root", "error_at", "kind"), on_each_backend(ERROR_AT, SAVES), indirect=["root"])
def test_an_error_leaves_the_old_checkpoint_and_nothing_else(root: str, error_at: str, kind: str) -> None:
    fault, _, moment = error_at.partition(" ")
    after = moment == "after"
    log = operations(root, kind)
    publish = log.index("put_if checkpoint.json")
    raised = 0
    for n, what in enumerate(log):
        if fault == "short_write" and not what.startswith("write"):
            continue
        url, before, was_there = prepared(root, kind, n)
        error, _ = save(url, NEW, Fault(at=n, kind=fault, after=after))  # type: ignore[arg-type]
        where = f"{fault} {'after' if after else 'before'} operation {n}, {what}"
        if error is None:
            assert n >= publish, f"{where}: nothing was raised"
            assert stored(url) == NEW, where
        else:
            raised += 1
            assert type(error) is ERRORS[fault] and error.hint and error.where, f"{where}: {error!r}"
            assert found(url) == before, where
            assert files(url) == was_there, f"{where}: orphans"
        ckpt.save(url, state(LATER))
        assert stored(url) == LATER and len(files(url)) == FILES, f"{where}: {sorted(files(url))}"
    assert raised >= 5


def test_with_several_threads_too(root: str) -> None:
    """The order of operations is then open, so every fault is tried at every number."""
    count = len(operations(root, "replacing"))
    for n in range(count):
        for turn, kind in enumerate(("crash", "error")):
            url, _, was_there = prepared(root, "replacing", 2 * n + turn)
            error, process = save(url, NEW, Fault(at=n, kind=kind, lose_unsynced=True, seed=n), threads=4)  # type: ignore[arg-type]
            held = found(url)
            assert held == NEW if error is None else held in (BEFORE, NEW), f"{kind} at {process.log[n]}"
            if kind == "error" and error is not None:
                assert held == BEFORE and files(url) == was_there, f"orphans after an error at {process.log[n]}"


@pytest.mark.parametrize("kind", ["error", "crash"])
def test_a_load_that_fails_raises_and_the_next_one_works(root: str, kind: str) -> None:
    url = f"{root}/a"
    ckpt.save(url, state(NEW))
    counted = FaultyProcess()
    with wrap_backends(counted.wrap):
        stored(url)
    assert counted.operations >= 8  # record, four index files, size and header and data
    for n, what in enumerate(counted.log):
        process = FaultyProcess(Fault(at=n, kind=kind))  # type: ignore[arg-type]
        with wrap_backends(process.wrap), pytest.raises(ERRORS[kind]) as caught:
            stored(url, job=ckpt.Job(threads=1))
        if what.startswith("read_into"):
            assert "partly overwritten" in str(caught.value) or kind == "crash"
        assert stored(url) == NEW


class Interrupted(FaultyProcess):
    """Before operation number ``at`` something else happens, once."""

    def __init__(self, at: int, other: Callable[[], object]) -> None:
        super().__init__()
        self.at = at
        self.other = other
        self.inside = False

    def operate(self, what: str, effect: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        if self.inside:
            return effect()
        if self.operations == self.at:
            self.inside = True
            self.other()
            self.inside = False
        return super().operate(what, effect, half)


def test_two_saves_at_once_never_make_one_checkpoint(root: str) -> None:
    """Another whole save runs before each operation of a save: one of the two is there then, whole, and the other knows that it is not."""
    log = operations(root, "replacing")
    publish, read = log.index("put_if checkpoint.json"), log.index("read checkpoint.json")
    for n, what in enumerate(log):
        url, _, _ = prepared(root, "replacing", n)
        process = Interrupted(n, lambda url=url: ckpt.save(url, state(LATER)))  # type: ignore[misc]
        with wrap_backends(process.wrap):
            try:
                ckpt.save(url, state(NEW), job=ckpt.Job(threads=1))
                error = None
            except StorageError as err:
                error = err
        where = f"another save before operation {n}, {what}"
        assert (error is None) == (n <= read or n > publish), f"{where}: {error!r}"
        assert error is None or error.hint, where
        assert stored(url) == (NEW if n <= read else LATER), where
        assert len(files(url)) == FILES, f"{where}: {sorted(files(url))}"
