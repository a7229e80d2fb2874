"""Sinks that pass on what they take: a tree below one source."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from ckpt.errors import CkptError, NotFoundError, UsageError
from ckpt.live import Sink, Source, Version
from ckpt.live.relay import RelayedVersion
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Boxes
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.transfers import RequestList
from ckpt.state.sharded import Sharded
from tests.distributed.ranks import at_once

TIMEOUT = 20.0
ROWS = 4096


@pytest.fixture(autouse=True)
def _far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody is on another machine."""
    monkeypatch.setenv("CKPT_LIVE_LOCAL", "off")


def values(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 512, dtype=torch.float32).reshape(ROWS, 512) + step


def empty() -> dict[str, Any]:
    return {"t": torch.zeros(ROWS, 512), "n": 0}


def take_all(sinks: list[Sink], version: Version | None) -> list[Version | Exception]:
    """All at once."""
    results: list[Version | Exception] = [RuntimeError("nothing")] * len(sinks)

    def take(number: int) -> None:
        try:
            results[number] = sinks[number].take(newer_than=version, timeout=TIMEOUT)
        except CkptError as err:
            results[number] = err

    threads = [threading.Thread(target=take, args=(number,)) for number in range(len(sinks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_eight_sinks_take_at_once_and_the_source_sends_less_than_three_states() -> None:
    state: dict[str, Any] = {"t": values(1), "n": 1}
    states = [empty() for _ in range(8)]
    needed = state["t"].nbytes
    with Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source, ExitStack() as stack:
        sinks = [stack.enter_context(Sink(source.address, each, relay=True, job=ckpt.Job(timeout=TIMEOUT))) for each in states]
        version: Version | None = None
        assert source._server is not None
        for step in (1, 2):
            state["t"].copy_(values(step))
            state["n"] = step
            before = source._server.bytes_sent
            version = source.publish(step, capture="eager").result()
            assert take_all(sinks, None if step == 1 else sinks[0].version) == [version] * 8
            for each in states:
                assert torch.equal(each["t"], values(step)) and each["n"] == step
            sent = source._server.bytes_sent - before
            assert needed <= sent <= 3 * needed, sent / needed
            reports = [sink.report for sink in sinks]
            assert all(r is not None and r.needed == sum(r.received.values()) + sum(r.relayed.values()) for r in reports)
            assert sum(sum(r.relayed.values()) for r in reports if r is not None) == 8 * needed - sent


def relayed_bytes(sink: Sink) -> int:
    assert sink.report is not None
    return sum(sink.report.relayed.values())


def test_who_took_from_whom_is_shown() -> None:
    state: dict[str, Any] = {"t": values(1), "n": 1}
    first, second = empty(), empty()
    with (
        Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source,
        Sink(source.address, first, relay=True, job=ckpt.Job(timeout=TIMEOUT)) as relay,
        Sink(source.address, second, switch="in-place", job=ckpt.Job(timeout=TIMEOUT)) as leaf,
    ):
        source.publish(1).result()
        relay.take()
        leaf.take()
        assert torch.equal(second["t"], values(1))
        one, two = source.report().sinks
        assert one.relays and one.took_from == {"source": values(1).nbytes} and not two.relays
        assert two.took_from.keys() == {"source", one.sink} and sum(two.took_from.values()) == values(1).nbytes
        assert two.took_from[one.sink] == relayed_bytes(leaf) == relay._relay.bytes_sent > 0  # type: ignore[union-attr]
        table = CliRunner().invoke(cli, ["live", "status", source.address]).stdout
        assert f"{one.sink} 4." in table.splitlines()[-1]
        shown = json.loads(CliRunner().invoke(cli, ["live", "--json", "status", source.address]).stdout)
        assert shown["sinks"][1]["took_from"] == two.took_from
        source.publish(2).result()
        assert [s.relays for s in source.report().sinks] == [True, False]
    with pytest.raises(UsageError, match="has no copy to pass on"):
        Sink(source.address, empty(), switch="in-place", relay=True, secret="s")


def test_what_a_relay_gives_is_compared_with_what_the_source_has_published() -> None:
    """The memory of a relay is damaged, and the digest that it keeps of it too: only the source knows."""
    state: dict[str, Any] = {"t": values(1), "n": 1}
    into = empty()
    with (
        Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source,
        Sink(source.address, empty(), relay=True, job=ckpt.Job(timeout=TIMEOUT)) as relay,
        Sink(source.address, into, job=ckpt.Job(timeout=TIMEOUT)) as leaf,
    ):
        source.publish(1).result()
        relay.take()
        assert relay._relay is not None
        current = relay._relay._current
        assert current is not None
        damaged = RelayedVersion()
        damaged.name = current.name
        for key, (box, _) in current._boxes.items():
            box[7] ^= 1
            damaged._boxes[key] = box, xxhash.xxh3_64_intdigest(box)
        relay._relay._current = damaged
        leaf.take()
        assert torch.equal(into["t"], values(1))
        report = leaf.report
        assert report is not None and not report.relayed and not report.lost
        (why,) = report.lost_relays.values()
        assert "other bytes than the source has published" in why


def test_a_relay_whose_memory_changes_says_so_itself() -> None:
    version = RelayedVersion()
    requests = requests_of(4)
    version.add(requests, 0, memoryview(bytearray(range(32))))
    out = memoryview(bytearray(32))
    assert version.ready(requests, 0, 0.0) and version.pack(requests, 0, out) == 32 and bytes(out) == bytes(range(32))
    version._memory[0][9] ^= 1
    with pytest.raises(CkptError, match="has changed since"):
        version.pack(requests, 0, out)


def requests_of(count: int) -> RequestList:
    """Boxes of eight bytes each, all in one piece."""
    places = np.arange(count, dtype=np.int64).reshape(count, 1)
    ones = np.ones(count, dtype=np.int64)
    return RequestList(numbers=0 * ones, offsets=8 * places, shapes=8 * ones.reshape(count, 1), nbytes=8 * ones, piece=4096)


def test_who_waits_for_a_piece_gets_it_when_it_comes_and_hears_when_it_will_not() -> None:
    version, requests = RelayedVersion(), requests_of(2)
    assert not version.ready(requests, 0, 0.01)
    timer = threading.Timer(0.05, version.add, (requests, 0, memoryview(bytearray(16))))
    timer.start()
    assert version.ready(requests, 0, TIMEOUT)
    other = requests_of(3)
    threading.Timer(0.05, version.close).start()
    with pytest.raises(NotFoundError, match="has moved"):
        version.ready(other, 0, TIMEOUT)


def test_a_relay_stands_in_for_a_rank_of_the_source_that_is_gone_and_the_source_for_a_relay() -> None:
    def check(switch: Any) -> None:
        state: dict[str, Any] = {"t": values(1), "n": 1}
        into, late = empty(), empty()
        with (
            Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source,
            Sink(source.address, empty(), relay=True, job=ckpt.Job(timeout=TIMEOUT)) as gone,
            Sink(source.address, empty(), relay=True, job=ckpt.Job(timeout=TIMEOUT)) as relay,
            Sink(source.address, into, switch=switch, job=ckpt.Job(timeout=TIMEOUT)) as leaf,
            Sink(source.address, late, switch=switch, job=ckpt.Job(timeout=TIMEOUT)) as last,
        ):
            source.publish(1).result()
            gone.take()
            relay.take()
            assert gone._relay is not None and source._server is not None
            gone._relay.close()  # its leader still tells the source that it is there
            leaf.take()
            assert torch.equal(into["t"], values(1)) and leaf.report is not None
            assert len(leaf.report.lost_relays) == 1 and not leaf.report.lost and relayed_bytes(leaf) > 0
            source._server.close()
            last.take()
            assert torch.equal(late["t"], values(1)) and last.report is not None
            assert list(last.report.lost) == [0] and relayed_bytes(last) == values(1).nbytes

    at_once(check, [("double",), ("in-place",)])


def test_relays_of_a_source_with_delta_pass_on_what_changes_made() -> None:
    """Who has a kept version takes changes from the source; who has none, or an older one, takes from relays too."""
    state: dict[str, Any] = {"t": values(1), "n": 1}
    nbytes = state["t"].nbytes
    first, late, old = empty(), empty(), empty()
    with (
        Source("tcp://127.0.0.1:0/a", state, delta=True, job=ckpt.Job(timeout=TIMEOUT)) as source,
        Sink(source.address, first, relay=True, job=ckpt.Job(timeout=TIMEOUT)) as relay,
        Sink(source.address, old, job=ckpt.Job(timeout=TIMEOUT)) as behind,
        Sink(source.address, late, relay=True, job=ckpt.Job(timeout=TIMEOUT)) as joined,
    ):
        for step in (1, 2, 3):
            state["t"][step, :7] = -step
            state["n"] = step
            source.publish(step, capture="eager").result()
            relay.take()
            assert torch.equal(first["t"], state["t"]) and relay.report is not None
            assert relay.report.dense == ({"first version": nbytes} if step == 1 else {}) and not relay.report.relayed
            assert (relay.report.transferred < nbytes / 10) == (step > 1)
            if step == 1:
                behind.take()
        for sink, into, why in ((joined, late, "first version"), (behind, old, "base not kept")):
            sink.take()
            assert torch.equal(into["t"], state["t"]) and into["n"] == 3 and sink.report is not None
            assert sink.report.dense == {why: nbytes} and not sink.report.lost_relays
            assert relayed_bytes(sink) > 0
        assert [s.dense for s in source.report().sinks] == [{}, {"base not kept": nbytes}, {"first version": nbytes}]
        rows = CliRunner().invoke(cli, ["live", "status", source.address]).stdout.splitlines()
        assert [("first version" in row, "base not kept" in row) for row in rows[-3:]] == [(False, False), (False, True), (True, False)]
        state["t"][0] = 9
        version = source.publish(4, capture="eager").result()
        assert take_all([relay, joined], None) == [version] * 2
        for sink, into in ((relay, first), (joined, late)):
            assert torch.equal(into["t"], state["t"]) and sink.report is not None
            assert not sink.report.dense and not sink.report.relayed and sink.report.transferred < nbytes / 10


def test_who_wants_parts_of_the_boxes_that_a_relay_has_takes_them_from_the_source() -> None:
    state = {"t": values(1), "u": torch.arange(1000.0)}
    half = torch.zeros(ROWS // 2, 512)
    layout = TensorLayout(Mesh(("engine",), (1,), (0,)), (Boxes("engine", ((((0, 0), (ROWS // 2, 512)),),)),))
    parts = {"t": Sharded(half, (ROWS, 512), layout, (half,))}
    into = {"u": torch.zeros(1000)}
    with (
        Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source,
        Sink(source.address, {n: torch.zeros_like(t) for n, t in state.items()}, relay=True, job=ckpt.Job(timeout=TIMEOUT)) as relay,
        Sink(source.address, parts, only="t", relay=True, job=ckpt.Job(timeout=TIMEOUT)) as engine,
        Sink(source.address, into, only="u", job=ckpt.Job(timeout=TIMEOUT)) as leaf,
    ):
        source.publish(1).result()
        for sink in (relay, engine, leaf):
            sink.take()
            assert sink.report is not None and not sink.report.relayed and not sink.report.lost_relays
            assert sum(sink.report.received.values()) == sink.report.needed
        assert torch.equal(half, values(1)[: ROWS // 2]) and torch.equal(into["u"], state["u"])


def test_the_nearest_relay_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {"t": values(1), "n": 1}
    into = empty()
    with Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source, ExitStack() as stack:
        source.publish(1).result()
        for domain in ("a", "b"):
            monkeypatch.setenv("CKPT_DOMAIN", domain)
            relay = stack.enter_context(Sink(source.address, empty(), relay=True, job=ckpt.Job(timeout=TIMEOUT)))
            relay.take()
        with Sink(source.address, into, job=ckpt.Job(timeout=TIMEOUT)) as leaf:
            leaf.take()
            assert leaf.report is not None and torch.equal(into["t"], values(1))
            near = next(s.sink for s in source.report().sinks if s.sink == relay._source._who["sink"])
            assert leaf.report.relayed == {near: values(1).nbytes} and not leaf.report.received
