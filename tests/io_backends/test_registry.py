"""URLs: which backend they open, how they are joined, and what is refused with which words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import UsageError
from ckpt.io_backends import Backend, FaultyBackend, InProcessBackend, PosixBackend, join_url, open_backend, wrap_backends
from ckpt.nodes.memory_backend import MemoryBackend
from tests.toy_plugins import installed


@pytest.mark.parametrize(
    ("url", "kind", "root"),
    [
        ("/a/b", PosixBackend, "/a/b"),
        ("file:///a/b", PosixBackend, "/a/b"),
        ("FILE:///a/b", PosixBackend, "/a/b"),
        ("/odd/x://y", PosixBackend, "/odd/x:/y"),
        ("/a:/b", PosixBackend, "/a:/b"),
        ("inprocess://name", InProcessBackend, "inprocess://name"),
        ("inprocess://name/step-1/", InProcessBackend, "inprocess://name/step-1"),
    ],
)
def test_opens(url: str, kind: type[Backend], root: str) -> None:
    backend = open_backend(url)
    assert type(backend) is kind
    assert backend.url == root


def test_memory_is_shared_by_name() -> None:
    InProcessBackend.reset()
    open_backend("inprocess://run").put_if("step-1/a", b"x", expected=None)
    assert open_backend("inprocess://run/step-1").read("a") == b"x"
    assert open_backend("inprocess://ru").list_dir() == []
    InProcessBackend.reset()
    assert open_backend("inprocess://run").list_dir() == []


@pytest.mark.parametrize("url", ["inprocess://", "inprocess:///a", "inprocess://a//b", "inprocess://a/../b"])
def test_no_inprocess_url(url: str) -> None:
    with pytest.raises(UsageError):
        open_backend(url)


def test_unknown_scheme_lists_the_known_ones() -> None:
    for url in ("gopher://x/y", "simplecache::inprocess://x"):
        with (
            installed({"ckpt.storage": {"other": "nowhere:Nothing"}}),
            pytest.raises(UsageError, match="known: file, inprocess, memory, other") as error,
        ):
            open_backend(url)
        assert url.partition("://")[0] in error.value.message
        assert error.value.hint is not None
        assert "ckpt.storage" in error.value.hint


def test_two_memories_are_told_apart() -> None:
    """Neither is a few letters from the other: one is lost with the process."""
    with pytest.raises(UsageError, match="no storage backend for mem://") as error:
        open_backend("mem://runs/a")
    assert "memory://" in str(error.value.hint) and "inprocess://" in str(error.value.hint)
    assert type(open_backend("memory://runs/a")) is MemoryBackend


@pytest.mark.parametrize("open_it", [open_backend, join_url])
def test_refuses_what_is_no_url(open_it: Callable[[Any], object]) -> None:
    with pytest.raises(UsageError, match="int"):
        open_it(7)
    with pytest.raises(UsageError, match="bytes"):
        open_it(b"/a")
    with pytest.raises(UsageError, match="empty"):
        open_it("")
    with pytest.raises(UsageError, match="lost a slash"):
        open_it(str(Path("s3://bucket/run")))
    with pytest.raises(UsageError, match="lost a slash"):
        open_it(Path("s3://bucket/run"))
    for url in ("inprocess:run", "mem:run", "memory:run", "s3:bucket/run"):
        with pytest.raises(UsageError, match="without its slashes") as caught:
            open_it(url)
        assert url.replace(":", "://") in str(caught.value.hint)


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        (("/a",), "/a"),
        (("/a", "b"), "/a/b"),
        (("/a/", "b/c", "d"), "/a/b/c/d"),
        (("/", "a"), "/a"),
        (("s3://bucket", "run", "step-1"), "s3://bucket/run/step-1"),
        (("inprocess://x/", "y"), "inprocess://x/y"),
        ((".", "a"), "./a"),
    ],
)
def test_join_url(parts: tuple[str, ...], joined: str) -> None:
    assert join_url(*parts) == joined


@pytest.mark.parametrize("part", ["", "/b", "b/", "..", "b/../../c"])
def test_join_url_stays_below_the_root(part: str) -> None:
    with pytest.raises(UsageError):
        join_url("/a", part)


def test_wrap_backends_nests_and_ends() -> None:
    with wrap_backends(FaultyBackend):
        with wrap_backends(FaultyBackend):
            outer = open_backend("inprocess://x")
            assert isinstance(outer, FaultyBackend)
            assert isinstance(outer._inner, FaultyBackend)
        assert type(open_backend("inprocess://x")._inner) is InProcessBackend  # type: ignore[attr-defined]
        with pytest.raises(UsageError), wrap_backends(FaultyBackend):
            open_backend("")
        assert type(open_backend("inprocess://x")._inner) is InProcessBackend  # type: ignore[attr-defined]
    assert type(open_backend("inprocess://x")) is InProcessBackend


def test_importing_is_light() -> None:
    heavy = "{'torch', 'numpy', 'pyarrow', 'pytest', 'fsspec', 'importlib.metadata'}"
    code = f"import sys, ckpt.io_backends as b; b.open_backend('/tmp'); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
