"""How many requests checkpoints take on storages that only fsspec knows. More of them is a step back: thousands of ranks send theirs."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import StorageError
from ckpt.io_backends.registry import open_backend
from tests.faults.proxy import FaultProxy
from tests.io_backends.counted import CountedObjects, counting
from tests.s3.stores import ObjectStore

MOST = {"counted": {"save": 28, "restore": 15, "load": 6, "list": 5}, "local": {"save": 37, "restore": 18, "load": 6, "list": 5}}
"""Calls of the file system, of a run of two steps. A save asks of each object whether its name is free, and whether all of it arrived, and
the first of a job whether the run is that of a member; a restore leaves a note in the log of the run."""
MANY = 20_000


@pytest.fixture
def calls() -> Iterator[Counter[str]]:
    with counting() as found:
        yield found


def _cost(calls: Counter[str], act: Any) -> int:
    calls.clear()
    act()
    return calls.total()


@pytest.mark.parametrize("scheme", MOST)
def test_a_run_of_two_steps(scheme: str, tmp_path: Path, calls: Counter[str]) -> None:
    root = f"{scheme}://bucket/run" if scheme == "counted" else f"{scheme}://{tmp_path}/run"
    state: dict[str, Any] = {"w": torch.arange(4_000_000, dtype=torch.int32), "step": 0}
    found: dict[str, Any] = {"w": torch.zeros(4_000_000, dtype=torch.int32), "step": -1}

    def save(step: int) -> None:
        state["step"] = step
        with ckpt.Checkpointer(root) as c:
            c.save(step, state)

    def restore() -> None:
        with ckpt.Checkpointer(root) as c:  # at the end all is done, the note of the load too
            c.restore(found)

    save(1)
    cost = {
        "save": _cost(calls, lambda: save(2)),
        "restore": _cost(calls, restore),
        "load": _cost(calls, lambda: ckpt.load(f"{root}/step-00000001", {**found})),
        "list": _cost(calls, lambda: ckpt.list_steps(root)),
    }
    assert found["step"] == 2
    assert torch.equal(found["w"], state["w"])
    assert {what: n for what, n in cost.items() if n > MOST[scheme][what]} == {}, cost


def test_requests_do_not_grow_with_tensors(calls: Counter[str]) -> None:
    state = {f"t{i}": torch.full((16,), float(i)) for i in range(MANY)}
    found = {name: torch.zeros(16) for name in state}
    saved = _cost(calls, lambda: ckpt.save("counted://bucket/many", state))
    loaded = _cost(calls, lambda: ckpt.load("counted://bucket/many", found))
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert (saved, loaded) <= (26, 9)  # a save elsewhere than in a run looks whether it is above one


def test_listing_takes_two_requests_for_each_checkpoint_and_one_more(calls: Counter[str]) -> None:
    for step in range(12):
        ckpt.save(f"counted://bucket/run/step-{step}", {"n": step})
    calls.clear()
    assert [s.number for s in ckpt.list_steps("counted://bucket/run")] == list(range(12))
    assert calls == {"ls": 1, "info": 12, "cat_file": 12}


def test_a_load_over_http(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    state = {"w": torch.arange(4_000_000, dtype=torch.int32), "n": 7}
    ckpt.save(str(tmp_path / "step-1"), state)
    found = {"w": torch.zeros(4_000_000, dtype=torch.int32), "n": 0}
    with _files(tmp_path, ranges=True) as (url, asked):
        ckpt.load(f"{url}/step-1", found)
    assert found["n"] == 7
    assert torch.equal(found["w"], state["w"])
    assert len(asked) <= 20, asked


def test_a_server_without_ranges_is_named(tmp_path: Path) -> None:
    """It answers with the whole file, which was downloaded nine times, and blamed on somebody who replaces it."""
    pytest.importorskip("aiohttp")
    ckpt.save(str(tmp_path / "step-1"), {"w": torch.arange(100_000)})
    with _files(tmp_path, ranges=False) as (url, asked), pytest.raises(StorageError, match="does not know ranges"):
        ckpt.load(f"{url}/step-1", {"w": torch.zeros(100_000, dtype=torch.int64)})
    assert sum(line.startswith("GET") and ".safetensors" in line for line in asked) == 1


def test_a_run_over_s3fs(s3_url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real requests of s3fs, of which a call of the file system takes one or more."""
    pytest.importorskip("s3fs")
    root = s3_url.replace("s3://", "s3a://")
    state = {"w": torch.arange(4_000_000, dtype=torch.int32), "n": 1}
    found = {"w": torch.zeros(4_000_000, dtype=torch.int32), "n": 0}
    cost = []

    def restore() -> None:
        with ckpt.Checkpointer(root) as c:
            c.restore(found)

    with FaultProxy(object_store.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        ckpt.save(f"{root}/step-1", state)
        for act in (
            lambda: ckpt.save(f"{root}/step-2", state),
            restore,
            lambda: ckpt.list_steps(root),
        ):
            before = proxy.requests
            act()
            cost.append(proxy.requests - before)
    assert torch.equal(found["w"], state["w"])
    assert all(n <= most for n, most in zip(cost, (40, 18, 6), strict=True)), cost


@pytest.mark.parametrize("files", [3, 60])
def test_records_of_a_run_are_listed_without_its_data_files(files: int, calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps have many files: else a listing of everything takes fewer requests."""
    listed: list[str] = []

    def with_etags(store: CountedObjects, infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
        listed.extend(info["name"] for info in infos if "etag" not in info)  # older find() calls ls(), which has noted them
        return [info if info["type"] == "directory" else {**info, "etag": store.cat_file(info["name"]).hex()} for info in infos]

    ls, find = CountedObjects.ls, CountedObjects.find
    monkeypatch.setattr(CountedObjects, "ls", lambda self, path, detail=True: with_etags(self, ls(self, path, detail=True)))
    monkeypatch.setattr(
        CountedObjects,
        "find",
        lambda self, path, detail: {info["name"]: info for info in with_etags(self, [*find(self, path, detail=True).values()])},
    )
    backend = open_backend("counted://bucket/run")
    names = [f"step-{step}" for step in range(9)]
    for step in range(9):
        backend.put_if(f"step-{step}/mark", b"old", expected=None)
        for n in range(files):
            backend.put_if(f"step-{step}/data/{n}", b"", expected=None)
    before = backend.version_tokens(names, "mark", skip="/data/")
    backend.put_if("step-3/mark", b"new", expected=b"old")
    backend.delete("step-7/mark")
    calls.clear()
    listed.clear()
    after = backend.version_tokens(names, "mark", skip="/data/")
    assert before is not None and after is not None and before.keys() - after.keys() == {"step-7"}
    assert [name for name, token in after.items() if token != before[name]] == ["step-3"]
    assert calls["find"] + calls["ls"] == (2 if files == 3 else 1 + 9)
    assert sum("/data/" in name for name in listed) == (10 * files if files == 3 else files)


@contextmanager
def _files(directory: Path, *, ranges: bool) -> Iterator[tuple[str, list[str]]]:
    """A server of files, and the requests that it has had."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if span is None or not ranges:
                super().do_GET()
                return
            content = Path(self.translate_path(self.path)).read_bytes()
            part = content[int(span[1]) : int(span[2]) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {span[1]}-{int(span[1]) + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)

        def log_message(self, format: str, *args: Any) -> None:
            asked.append(str(args[0]))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(directory))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
