"""Saves, restores and copies to a real object store through a network that fails all the time: nothing is lost, no success is false.

A save that returns is committed and whole. One that raises leaves what was committed before, or, if only the answer to its last request was
lost, itself; whole in either case. A restore gives the saved bits or raises.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.engine.copy import copy_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import CkptError, StorageError
from ckpt.formats.native.commit import INLINE_LIMIT
from ckpt.io_backends import open_backend
from ckpt.io_backends.conformance.reading import everything
from ckpt.runs.orphans import find_orphans, remove_orphans
from tests.cli.checkpoints import sample, write_checkpoint
from tests.faults.proxy import KINDS, FaultProxy, Schedule
from tests.formats import oracle
from tests.s3.stores import ObjectStore

RATE = 0.015
"""Chance of each kind of fault, per request."""
PLACES = 4
"""So many checkpoints are there; all later saves replace one of the same shapes."""


@pytest.fixture
def proxy(object_store: ObjectStore, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    schedule = Schedule(rates=dict.fromkeys(KINDS, RATE), seed=20, burst=6, stall=0.6, trickle=0.0005)
    with FaultProxy(object_store.endpoint, schedule) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        monkeypatch.setenv("CKPT_TIMEOUT", "2")  # half a second of silence is a stall, a second of failing a failure
        yield found


def state_of(number: int) -> dict[str, Any]:
    """A state that no other number has; every fourth is large enough to be sent in parts."""
    made = torch.Generator().manual_seed(number)
    size = 4_500_000 if number % PLACES == PLACES - 1 else 5000
    return {"w": torch.randn(size, generator=made), "b": torch.randint(0, 99, (7, 3), generator=made), "n": number}


def number_of(state: dict[str, Any]) -> int | None:
    """Which state this is, bit for bit; None if it is none."""
    expected = state_of(int(state["n"]))
    same = all(torch.equal(state[k].view(torch.uint8), expected[k].view(torch.uint8)) for k in ("w", "b"))
    return int(state["n"]) if same else None


def loaded(url: str, like: int) -> int | None:
    state = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else -1 for k, v in state_of(like).items()}
    ckpt.load(url, state)
    return number_of(state)


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_saves_and_restores(proxy: FaultProxy, s3_url: str, rounds: int) -> None:
    held: dict[str, int | None] = {}
    told: Counter[str] = Counter()
    for number in range(rounds):
        url = f"{s3_url}/step-{number % PLACES}"
        before = held.get(url)
        try:
            ckpt.save(url, state_of(number))
            held[url], word = number, "saved"
        except CkptError:
            with proxy.calm():
                held[url] = loaded(url, number) if any(s.committed for s in ckpt.list_steps(url)) else None
            assert held[url] in (before, number)
            word = "failed, but committed" if held[url] == number else "failed"
        told[word] += 1
        if held[url] is not None:
            told[_restored(url, number, held[url])] += 1
    with proxy.calm():
        for url, number in held.items():
            assert number is None or (verify(url).ok and loaded(url, number) == number)
        _nothing_is_left_but(s3_url, [url for url, number in held.items() if number is not None])
    print(f"{dict(told)} in {proxy.requests} requests with {dict(proxy.injected)}")
    assert told["saved"] > 0.3 * rounds
    assert told["restored"] > 0.3 * rounds
    assert rounds < 100 or proxy.injected.keys() == KINDS.keys()
    assert proxy.injected.total() > rounds


def _restored(url: str, like: int, expected: int | None) -> str:
    try:
        assert loaded(url, like) == expected
    except CkptError:
        return "not restored"
    return "restored"


def _nothing_is_left_but(root: str, urls: list[str]) -> None:
    """Orphans can all be found, and what is left are the checkpoints."""
    backend = open_backend(root)
    remove_orphans(backend, find_orphans(backend, older_than=0, now=0))
    assert list(backend.pending_uploads()) == []
    assert find_orphans(backend, older_than=0, now=0) == []
    expected = {f"{url.rpartition('/')[2]}/{path}" for url in urls for path in _reached(url)}
    kept = {p for p in everything(backend) if not p.endswith("/spans.json") and p != "ckpt-log.json"}  # of saves that failed
    assert kept == expected


def _reached(url: str) -> set[str]:
    catalog: Any = ckpt.open(url)._catalog
    return {"checkpoint.json", *(f.path for f in catalog.files), *(f.path for f in catalog.record.index.values())}


def test_copies_go_on_until_they_are_whole(proxy: FaultProxy, s3_url: str, tmp_path: Path) -> None:
    source = str(tmp_path / "source")
    random = np.random.default_rng(3)
    write_checkpoint(source, {**sample(), "large": random.standard_normal((500, 1200))}, ranks=4)
    expected = everything(open_backend(source))
    proxy.schedule = Schedule(rates=dict.fromkeys(KINDS.keys() - {"slow", "stall"}, 0.06), seed=4)
    up = _until_done(source, f"{s3_url}/a")
    down = _until_done(f"{s3_url}/a", str(tmp_path / "b"))
    print(f"{up} attempts up, {down} down, {dict(proxy.injected)}")
    assert everything(open_backend(str(tmp_path / "b"))) == expected
    assert oracle.read(tmp_path / "b") == oracle.read(source)
    with proxy.calm():
        assert everything(open_backend(f"{s3_url}/a")) == expected
    assert proxy.injected


def _until_done(source: str, target: str) -> int:
    for attempt in range(1, 20):
        try:
            copy_checkpoint(source, target, threads=3)
            return attempt
        except StorageError:
            continue
    raise AssertionError("no attempt succeeded")


def test_the_endpoint_is_the_proxy(proxy: FaultProxy, s3_url: str) -> None:
    """Else all of the above says nothing."""
    assert os.environ["AWS_ENDPOINT_URL"] == proxy.url
    before = proxy.requests
    with proxy.calm():
        assert open_backend(s3_url).list_dir() == []
    assert proxy.requests > before


@pytest.mark.parametrize("repeated", [0, INLINE_LIMIT])
def test_no_restore_goes_back_a_step_for_a_flipped_bit(
    proxy: FaultProxy, s3_url: str, repeated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each kind of file that is read: what is stored is right. Of so small an index the record repeats all files, unless it may not."""
    proxy.schedule = None
    monkeypatch.setattr("ckpt.formats.native.writer.INLINE_LIMIT", repeated)
    run = f"{s3_url}/run"
    for number in (1, 2):
        ckpt.save(f"{run}/step-{number}", state_of(number))
    index = () if repeated else ("tensors.arrow", "grids.arrow", "files.arrow", "state.json")
    kinds = ("checkpoint.json", *index, ".safetensors")
    for round_, kind in enumerate(kinds * 2):
        target = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else -1 for k, v in state_of(2).items()}
        proxy.flip = kind
        with ckpt.Checkpointer(run) as checkpointer:
            assert checkpointer.restore(target) == 2, kind
        assert number_of(target) == 2 and proxy.injected["flip"] == round_ + 1
