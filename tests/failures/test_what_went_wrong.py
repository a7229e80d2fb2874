"""What a user is told: for each thing that can be wrong the class, the exit code, what and where it is, and what to do.

``ckpt.load``, ``ckpt.open``, ``ckpt verify`` and ``ckpt inspect`` must say the same.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import (
    AccessError,
    CkptError,
    CorruptError,
    FormatError,
    NoSpaceError,
    NotCommittedError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ckpt.io_backends.faulty import Fault, FaultyProcess
from ckpt.io_backends.registry import wrap_backends
from tests.cli.running import run
from tests.failures.damage import INDEX, change_record, data_file, edit, flip, header, index_file
from tests.failures.states import blank, state, stored

Where = Callable[[Path], object]
"""Spoils the checkpoint in a directory."""


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A checkpoint that cannot be used: ``spoil`` it (or give another URL), and this is raised, with these texts in the message.

    ``index_only``: whoever reads only the index does not meet it: ``ckpt.open`` itself and ``ckpt inspect``.
    """

    name: str
    spoil: Where
    error: type[CkptError]
    says: tuple[str, ...]
    index_only: bool = False


def first_chunk(directory: Path) -> int:
    """Where the bytes of ``model.w`` are."""
    entries, start = header(data_file(directory).read_bytes())
    return start + int(entries["model.w"]["data_offsets"][0])


def no_longer_a_checkpoint(directory: Path) -> None:
    for path in (directory / "checkpoint.json", data_file(directory), *(directory / "data").parent.glob("index-*/*")):
        path.unlink()
    (directory / "data").rmdir()
    for index in directory.glob("index-*"):
        index.rmdir()
    (directory / "notes.txt").write_text("mine")


def a_run(directory: Path) -> None:
    no_longer_a_checkpoint(directory)
    ckpt.save(str(directory / "step-00000010"), {"a": 1})


def flip_the_date(directory: Path) -> None:
    """The commit record stays JSON."""
    path = directory / "checkpoint.json"
    flip(path, path.read_bytes().index(b'"created": "') + 12)


def cut(path: Path, by: int = 1) -> None:
    edit(path, lambda data: data[:-by])


WRONG = [
    Wrong(name="scheme", spoil=lambda d: "nowhere://bucket/x", error=UsageError, says=("nowhere://", "memory")),
    Wrong(name="empty URL", spoil=lambda d: "", error=UsageError, says=("URL", "empty")),
    Wrong(name="absent", spoil=lambda d: str(d / "x"), error=NotFoundError, says=("no checkpoint", "/c/x")),
    Wrong(name="a file", spoil=lambda d: str(d / "checkpoint.json"), error=NotFoundError, says=("no checkpoint", "checkpoint.json")),
    Wrong(name="uncommitted", spoil=lambda d: (d / "checkpoint.json").unlink(), error=NotCommittedError, says=("did not finish", "/c")),
    Wrong(name="no checkpoint", spoil=no_longer_a_checkpoint, error=FormatError, says=("notes.txt", "/c")),
    Wrong(name="a run", spoil=a_run, error=FormatError, says=("step-00000010",)),
    Wrong(name="version", spoil=lambda d: change_record(d, version=2), error=FormatError, says=("version 2", "checkpoint.json")),
    Wrong(name="version text", spoil=lambda d: change_record(d, version="1"), error=FormatError, says=("version '1'",)),
    Wrong(name="feature", spoil=lambda d: change_record(d, features=["holograms"]), error=FormatError, says=("'holograms'",)),
    Wrong(name="other format", spoil=lambda d: change_record(d, format="other"), error=FormatError, says=("'other'", "checkpoint.json")),
    Wrong(name="record flipped", spoil=flip_the_date, error=CorruptError, says=("checkpoint.json", "digest")),
    Wrong(name="record cut", spoil=lambda d: cut(d / "checkpoint.json", 5), error=CorruptError, says=("checkpoint.json", "JSON")),
    Wrong(name="record empty", spoil=lambda d: edit(d / "checkpoint.json", lambda _: b""), error=CorruptError, says=("checkpoint.json",)),
    *[
        Wrong(name=f"{n} flipped", spoil=lambda d, n=n: flip(index_file(d, n), 9), error=CorruptError, says=(n, "index-"))  # type: ignore[misc]
        for n in INDEX
    ],
    *[
        Wrong(name=f"{n} missing", spoil=lambda d, n=n: index_file(d, n).unlink(), error=CorruptError, says=(n, "missing"))  # type: ignore[misc]
        for n in INDEX
    ],
    *[
        Wrong(name=f"{n} cut", spoil=lambda d, n=n: cut(index_file(d, n)), error=CorruptError, says=(n, "bytes"))  # type: ignore[misc]
        for n in INDEX
    ],
    Wrong(name="header flipped", spoil=lambda d: flip(data_file(d), 30), error=CorruptError, says=("data/", "header"), index_only=True),
    Wrong(
        name="header length",
        spoil=lambda d: edit(data_file(d), lambda data: (1 << 60).to_bytes(8, "little") + data[8:]),
        error=CorruptError,
        says=("data/", "header"),
        index_only=True,
    ),
    Wrong(
        name="chunk flipped",
        spoil=lambda d: flip(data_file(d), first_chunk(d)),
        error=CorruptError,
        says=("data/", "model.w", "[0:40,0:8]", "digest"),
        index_only=True,
    ),
    Wrong(name="data cut", spoil=lambda d: cut(data_file(d)), error=CorruptError, says=("data/", "bytes"), index_only=True),
    Wrong(name="data grown", spoil=lambda d: edit(data_file(d), lambda b: b + b"x"), error=CorruptError, says=("data/",), index_only=True),
    Wrong(name="data missing", spoil=lambda d: data_file(d).unlink(), error=CorruptError, says=("data/", "missing"), index_only=True),
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    ckpt.save(str(tmp_path / "c"), state(1))
    return tmp_path / "c"


def read_all(url: str) -> None:
    for tensor in ckpt.open(url).tensors():
        tensor.read()


def check(error: CkptError, wrong: Wrong) -> None:
    assert type(error) is wrong.error and error.hint, repr(error)
    assert [text for text in wrong.says if text not in str(error)] == [], str(error)


@pytest.mark.parametrize("wrong", WRONG, ids=[w.name for w in WRONG])
def test_reading_says_what_is_wrong(wrong: Wrong, checkpoint: Path) -> None:
    other = wrong.spoil(checkpoint)
    url = other if isinstance(other, str) else str(checkpoint)
    with pytest.raises(CkptError) as loaded:
        ckpt.load(url, blank())
    check(loaded.value, wrong)
    with pytest.raises(CkptError) as opened:
        (read_all if wrong.index_only else ckpt.open)(url)
    check(opened.value, wrong)
    if wrong.index_only:
        assert "model.w" in ckpt.open(url)


@pytest.mark.parametrize("wrong", WRONG, ids=[w.name for w in WRONG])
def test_the_commands_say_the_same(wrong: Wrong, checkpoint: Path) -> None:
    other = wrong.spoil(checkpoint)
    url = other if isinstance(other, str) else str(checkpoint)
    verified = run("verify", url)
    assert verified.exit_code == wrong.error.exit_code, verified.output
    assert wrong.says[0] in verified.output  # the place; verify lists what is damaged in its own words
    inspected = run("inspect", url)
    assert inspected.exit_code == (0 if wrong.index_only else wrong.error.exit_code), inspected.output
    if not wrong.index_only:
        assert [t for t in wrong.says if t not in inspected.stderr] == [] and "  try: " in inspected.stderr
        said = json.loads(run("inspect", "--json", url).stdout)["error"]
        assert (said["type"], said["exit_code"]) == (wrong.error.__name__, wrong.error.exit_code) and said["hint"]


# ------------------------------------------------------------------------------------------------------------ the storage


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, root: Path, code: int, names: tuple[str, ...]) -> Iterator[None]:
    """Calls of ``os`` on paths below ``root`` give this error: root may write everywhere, so modes would prove nothing."""
    for name in names:
        real = getattr(os, name)

        def refused(path: Any, *args: Any, real: Any = real, **more: Any) -> Any:
            if str(path).startswith(str(root)):
                raise OSError(code, os.strerror(code), path)
            return real(path, *args, **more)

        monkeypatch.setattr(os, name, refused)
    try:
        yield
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize(("code", "error"), [(errno.EACCES, AccessError), (errno.EPERM, AccessError), (errno.EIO, StorageError)])
def test_a_storage_that_refuses_to_be_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[CkptError]) -> None:
    url = str(checkpoint)
    with refusing(monkeypatch, checkpoint, code, ("open",)):
        for call in (lambda: ckpt.load(url, blank()), lambda: ckpt.open(url)):
            with pytest.raises(error, match=os.strerror(code)) as caught:
                call()
            assert type(caught.value) is error and caught.value.hint and "checkpoint.json" in str(caught.value)
        for command in ("inspect", "verify"):
            result = run(command, url)
            assert result.exit_code == 30 and os.strerror(code) in result.stderr and "  try: " in result.stderr
    assert stored(url) == 1


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (errno.EACCES, AccessError),
        (errno.EROFS, AccessError),
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.EIO, StorageError),
    ],
)
@pytest.mark.parametrize("name", ["open", "mkdir", "link", "rename"])
def test_a_storage_that_refuses_to_be_written(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, error: type[CkptError]
) -> None:
    url = str(checkpoint) if name == "rename" else str(checkpoint / "new")
    before = sorted(checkpoint.rglob("*"))
    with refusing(monkeypatch, checkpoint, code, (name,)), pytest.raises(error, match=os.strerror(code)) as caught:
        ckpt.save(url, state(2))
    assert type(caught.value) is error and caught.value.hint and str(checkpoint) in str(caught.value)
    assert [p for p in sorted(checkpoint.rglob("*")) if p not in before and p.is_file()] == []
    assert stored(str(checkpoint)) == 1


def test_a_limit_of_file_size(checkpoint: Path) -> None:
    """A real refusal by the kernel, in the middle of the data."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StorageError, match="File too large") as caught:
            ckpt.save(str(checkpoint), {"a": torch.zeros(2 << 20, dtype=torch.uint8)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "data/" in str(caught.value) and "ulimit" in str(caught.value.hint)
    assert stored(str(checkpoint)) == 1 and data_file(checkpoint)


@pytest.mark.parametrize(
    ("below", "says"),
    [("checkpoint.json", "not a directory"), ("checkpoint.json/x", "a part of the path is a file"), ("x" * 300, "shorter")],
)
def test_a_place_that_cannot_be_a_directory(checkpoint: Path, below: str, says: str) -> None:
    with pytest.raises(StorageError) as caught:
        ckpt.save(str(checkpoint / below), state(2))
    assert type(caught.value) is StorageError and says in str(caught.value) and below in str(caught.value)
    assert stored(str(checkpoint)) == 1


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_storage_that_fails_at_each_operation_ends_a_command_with_its_code(checkpoint: Path, command: str) -> None:
    counted = FaultyProcess()
    with wrap_backends(counted.wrap):
        assert run(command, str(checkpoint)).exit_code == 0
    for n, what in enumerate(counted.log):
        with wrap_backends(FaultyProcess(Fault(at=n, kind="error")).wrap):
            result = run(command, str(checkpoint), "--json", *(["--threads", "1"] if command == "verify" else []))
        found = json.loads(result.stdout)
        if what.startswith("read_into"):
            assert (result.exit_code, found["ok"]) == (0, True), "a failed read of many chunks is repeated chunk by chunk"
        elif "data/" in what:  # one file among others: verify goes on and lists it
            assert (result.exit_code, found["ok"]) == (20, False) and "injected fault" in result.stdout, what
        else:
            assert result.exit_code == found["error"]["exit_code"] == 30 and found["error"]["hint"], what
