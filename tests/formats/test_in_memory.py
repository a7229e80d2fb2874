"""A storage with one file more: both can be read, and nothing can be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import AccessError, CorruptError
from ckpt.formats.external import WithFile
from ckpt.io_backends.registry import open_backend


@pytest.fixture
def backend(tmp_path: Path) -> WithFile:
    (tmp_path / "there").write_bytes(b"0123456789")
    return WithFile(open_backend(str(tmp_path)), "more", b"abcdef")


def test_both_are_read(backend: WithFile) -> None:
    out = bytearray(3)
    for path, whole in (("there", b"0123456789"), ("more", b"abcdef")):
        backend.read_into(path, 2, memoryview(out))
        assert (backend.read(path), backend.size(path), bytes(out)) == (whole, len(whole), whole[2:5])
    assert backend.list_dir() == ["there"]
    with pytest.raises(CorruptError, match="bytes 4 to 8 of 6"):
        backend.read("more", 4, 4)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.create("there", 1),
        lambda b: b.put_if("new", b"", expected=None),
        lambda b: b.delete("there"),
        lambda b: b.prepare(),
    ],
)
def test_nothing_is_written(backend: WithFile, tmp_path: Path, change: Callable[[WithFile], object]) -> None:
    with pytest.raises(AccessError, match="is not written to") as refused:
        change(backend)
    assert refused.value.hint == "write to a URL of its own"
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"there": b"0123456789"}
