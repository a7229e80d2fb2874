"""A trainer publishes, engines take: other layouts, other numbers of ranks, jobs that share nothing but an address."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from ckpt.errors import AccessError, CkptError, ConsistencyError, DeadlineError, MismatchError, NotFoundError, UsageError
from ckpt.live import Sink, Source, Version
from ckpt.live.control import new_secret
from ckpt.live.offered import SourceConnection
from ckpt.live.take import Puller
from ckpt.training import Generators
from tests.distributed.ranks import Ranks, at_once, in_process
from tests.live.jobs import Job, full, leave, local_of, step_of, tp_state, train, until, wait_for
from tests.ports import free_ports

TIMEOUT = 20.0


def engine(folder: Path, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> list[tuple[int | None, int, int]]:
    """Takes three versions; of each the step, and bytes that were mapped and received."""
    state = tp_state(dtype)
    taken: list[tuple[int | None, int, int]] = []
    with Sink(wait_for(folder / "address"), state, job=ckpt.Job(timeout=TIMEOUT), **options) as sink:
        assert sink.version is None and step_of(state) is None
        version: Version | None = None
        plans: set[int] = set()
        for step in (1, 2, 3):
            if dist.get_rank() == 0:
                leave(folder / f"go-{step}", "")
            version = sink.take(newer_than=version)
            assert version == sink.version and version.step == step
            report = sink.report
            assert report is not None and report.needed == report.mapped + sum(report.received.values())
            plans.add(id(sink._cache.plan.transfers))
            taken.append((step_of(state), report.mapped, sum(report.received.values())))
        assert len(plans) == 1  # the same tensors, so no other plan
    return taken


@pytest.mark.parametrize("switch", ["double", "in-place"])
def test_four_ranks_by_rows_become_two_by_columns(ranks: Ranks, tmp_path: Path, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Job(ranks, 4, train, tmp_path, 3)
    taken = ranks.run(2, engine, tmp_path, {"switch": switch})
    leave(tmp_path / "stop", "")
    trainer.result()
    for of_rank in taken:
        assert [step for step, _, _ in of_rank] == [1, 2, 3]
        assert all(mapped and not received for _, mapped, received in of_rank)  # of one machine, so nothing was sent


def far_engine(folder: Path, options: dict[str, Any]) -> list[tuple[int | None, int, int]]:
    import os

    os.environ["CKPT_LIVE_LOCAL"] = "off"
    return engine(folder, options, torch.bfloat16)


@pytest.mark.parametrize("switch", ["double", "in-place"])
def test_over_the_network_and_in_another_dtype(ranks: Ranks, tmp_path: Path, switch: str) -> None:
    trainer = Job(ranks, 4, train, tmp_path, 3, "replicated_state")
    taken = ranks.run(3, far_engine, tmp_path, {"switch": switch, "cast": True})
    leave(tmp_path / "stop", "")
    trainer.result()
    assert all(not mapped and received for of_rank in taken for _, mapped, received in of_rank)
    assert {step for of_rank in taken for step, _, _ in of_rank} == {1, 2, 3}


def forgetful_engine(folder: Path) -> list[int | None]:
    """As ``engine``, where rank 1 has missed the end of the first take, and with it what the version referred to."""
    state = tp_state()
    taken: list[int | None] = []
    with Sink(wait_for(folder / "address"), state, job=ckpt.Job(timeout=TIMEOUT)) as sink:
        version: Version | None = None
        for step in (1, 2):
            if dist.get_rank() == 0:
                leave(folder / f"go-{step}", "")
            version = sink.take(newer_than=version)
            taken.append(step_of(state))
            if dist.get_rank() == 1:
                sink._blobs = {}
    return taken


def test_a_rank_that_missed_the_end_of_a_take_is_given_all_again(ranks: Ranks, tmp_path: Path) -> None:
    trainer = Job(ranks, 2, train, tmp_path, 2)
    taken = ranks.run(2, forgetful_engine, tmp_path)
    leave(tmp_path / "stop", "")
    trainer.result()
    assert taken == [[1, 2], [1, 2]]


# ---- one process


class Model(torch.nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 300)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(fill)


def test_a_lazy_version_has_the_values_of_its_call_though_training_goes_on() -> None:
    model = Model(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    other = Model(0.0)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    steps = {"done": 0}
    state = {"model": model, "optimizer": optimizer, "steps": steps, "rng": Generators()}
    mirrored: dict[str, Any] = {"model": other, "optimizer": other_optimizer, "steps": {"done": -1}, "rng": Generators()}
    with (
        Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source,
        Sink(source.address, mirrored, job=ckpt.Job(timeout=TIMEOUT)) as sink,
    ):
        version = None
        for step in range(1, 4):
            publication = source.publish(step)
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model.inner(torch.ones(2, 64)).sum().backward()
            optimizer.step()  # waits for the copy
            assert publication.captured.done()
            steps["done"], model.count = step, model.count + 1
            version = sink.take(newer_than=version)
            assert version == publication.result() and version.step == step
            assert all(torch.equal(tensor, expected[name]) for name, tensor in other.state_dict().items())
            assert mirrored["steps"] == {"done": step - 1}
        assert other_optimizer.param_groups[0]["lr"] == 0.1
        moment = other_optimizer.state[other.inner.weight]["exp_avg"]
        assert moment.abs().sum() > 0 and not torch.equal(moment, optimizer.state[model.inner.weight]["exp_avg"])


def test_a_change_before_the_copy_fails_the_version_and_leaves_the_ones_before(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.ParameterDict({"t": torch.zeros(5_000_000)})
    optimizer = torch.optim.SGD(model.parameters())
    with Source("tcp://127.0.0.1:0/a", {"m": model}, job=ckpt.Job(timeout=TIMEOUT)) as source:
        publication = source.publish(1)
        model["t"].data.mul_(2)  # no optimizer has stepped it: it was captured at the call
        before = publication.result()
        optimizer.step()  # from here on it is known to wait
        publication = source.publish(2)
        model["t"].detach().add_(1)
        with pytest.raises(Exception, match="was changed before it was captured"):
            publication.result()
        into = {"m.t": torch.ones(5_000_000)}
        with Sink(source.address, into, job=ckpt.Job(timeout=TIMEOUT)) as sink:
            assert sink.take() == before and not into["m.t"].any()
        files: list[int] = []
        step = 3
        while len(files) < 4:
            with caplog.at_level(logging.CRITICAL, logger="ckpt"):  # else the record of the error keeps all that it came from
                publication = source.publish(step)
                model["t"].detach().add_(1)
                try:
                    assert publication.result().step == step < 60
                    failed = False  # on a busy machine the copy may come first
                except ConsistencyError:
                    failed = True
            del publication
            for thread in threading.enumerate():
                if thread.name == "ckpt-publish":
                    thread.join()
            gc.collect()
            files = [*files, segment_files()] if failed else []
            step += 1
        assert files[-1] == files[0], "versions that failed keep their memory"
        assert source.publish(step).result().step == step
    gc.collect()
    assert segment_files() < files[0]


def segment_files() -> int:
    """Open files of this process that keep the memory of a segment."""
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(file))
    return sum("ckpt-segment" in link for link in links)


def test_a_version_that_is_dropped_while_its_values_are_asked_for_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {"t": torch.zeros(1000), "step": 0}
    into: dict[str, Any] = {"t": torch.ones(1000), "step": -1}
    with (
        Source("tcp://127.0.0.1:0/a", state, keep=1, job=ckpt.Job(timeout=TIMEOUT)) as source,
        Sink(source.address, into, job=ckpt.Job(timeout=TIMEOUT)) as sink,
    ):
        source.publish(1).result()
        newest = SourceConnection.newest

        def newest_of_before(*args: Any, **options: Any) -> Any:
            answer = newest(*args, **options)
            if state["step"] == 0:
                state["step"] = 2
                source.publish(2).result()
            return answer

        monkeypatch.setattr(SourceConnection, "newest", newest_of_before)
        assert sink.take().step == 2 and into["step"] == 2


def test_what_sinks_took_is_forgotten_with_the_version() -> None:
    state = {"t": torch.zeros(100)}
    with (
        Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source,
        Sink(source.address, {"t": torch.ones(100)}, job=ckpt.Job(timeout=TIMEOUT)) as sink,
    ):
        for step in range(5):
            source.publish(step).result()
            sink.take()
        assert source._leader is not None
        (record,) = source._leader.registry._sinks.values()
        assert len(record.took) == 2


def test_old_versions_go_and_their_memory_is_used_again_but_not_while_somebody_reads_it() -> None:
    state = {"t": torch.zeros(1_000_000)}
    with Source("tcp://127.0.0.1:0/a", state, keep=1, job=ckpt.Job(timeout=TIMEOUT)) as source:
        source.publish(1).result()
        first = next(iter(source._published.values())).segment
        files = {first._file}
        for step in range(2, 8):
            state["t"] = torch.full((1_000_000,), float(step))
            source.publish(step).result()
            files |= {p.segment._file for p in source._published.values()}
        assert len(files) == 2  # one that is there, one that is being filled
        status = source.report()
        assert [v.step for v in status.versions] == [7]
        with pytest.raises(NotFoundError, match="no version of step 3 is kept"):
            source.report(3)


def test_a_source_is_reached_by_the_name_of_its_machine() -> None:
    state, into = {"t": torch.ones(5)}, {"t": torch.zeros(5)}
    with Source("tcp://localhost:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source:
        assert source.address.startswith("tcp://localhost:")
        source.publish(1).result()
        with Sink(source.address, into, job=ckpt.Job(timeout=TIMEOUT)) as sink:
            assert sink.take().step == 1 and into["t"].all()
        assert [sink_status.step for sink_status in source.report().sinks] == [1]
        assert CliRunner().invoke(cli, ["live", "-q", "status", source.address]).output == "1\n"
    with (
        Sink("tcp://nobody.invalid:1/a", into, secret="s", job=ckpt.Job(timeout=0.5)) as sink,
        pytest.raises(DeadlineError, match=r"the name 'nobody\.invalid' .* leads nowhere"),
    ):
        sink.take()


def test_a_sink_that_publishes_what_it_took_serves_the_next() -> None:
    first, second, third = ({"t": torch.full((70_000,), float(i))} for i in range(3))
    with (
        Source("tcp://127.0.0.1:0/first", first, job=ckpt.Job(timeout=TIMEOUT)) as source,
        Sink(source.address, second, job=ckpt.Job(timeout=TIMEOUT)) as sink,
        Source("tcp://127.0.0.1:0/second", second, job=ckpt.Job(timeout=TIMEOUT)) as relay,
        Sink(relay.address, third, job=ckpt.Job(timeout=TIMEOUT)) as leaf,
    ):
        version = None
        for step in (5, 6):
            first["t"].fill_(step)
            source.publish(step).result()
            relay.publish(sink.take().step).result()
            version = leaf.take(newer_than=version)
            assert version.step == step and bool((third["t"] == step).all())


def publish_before(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, state: dict[str, Any], source: Source) -> None:
    """Before the first call of a method, the source drops all versions that there were by publishing the next one."""
    original = getattr(owner, method)
    left = [2.0]

    def late(*args: Any, **options: Any) -> Any:
        if left:
            state["n"] = state["t"].fill_(left[0])[0].item()
            source.publish(int(left.pop()), capture="eager").result()
        return original(*args, **options)

    monkeypatch.setattr(owner, method, late)


@pytest.mark.parametrize(("owner", "method"), [(SourceConnection, "blobs"), (Puller, "pull")])
@pytest.mark.parametrize("switch", ["double", "in-place"])
def test_a_version_that_is_dropped_while_it_is_taken_makes_room_for_the_next(
    owner: Any, method: str, switch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LIVE_LOCAL", "off")
    state: dict[str, Any] = {"t": torch.ones(1000), "n": 1.0}
    into: dict[str, Any] = {"t": torch.zeros(1000), "n": 0.0}
    with Source("tcp://127.0.0.1:0/a", state, keep=1, job=ckpt.Job(timeout=TIMEOUT)) as source:
        source.publish(1).result()
        with Sink(source.address, into, switch=switch, job=ckpt.Job(timeout=TIMEOUT)) as sink:
            publish_before(monkeypatch, owner, method, state, source)
            assert sink.take() == sink.version
            assert sink.version is not None and sink.version.step == 2
            assert bool((into["t"] == 2).all()) and into["n"] == 2


def test_whoever_has_taken_what_is_reported() -> None:
    state = {"t": torch.zeros(1000)}
    with Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source:
        source.publish(1).result()
        with Sink(source.address, {"t": torch.ones(1000)}, job=ckpt.Job(timeout=TIMEOUT)) as sink:
            version = sink.take()
            source.publish(2).result()
            (seen,) = source.report(1).sinks
            assert (seen.state, seen.step, seen.late, [t[:2] for t in seen.took]) == ("waiting", 1, True, [(version.digest, 4000)])
            (kept,) = source.report(1).versions
            assert kept.bytes == 4000 and kept.taken_by == (seen.sink,)
            sink.take(newer_than=version)
            assert not source.report().sinks[0].late
            result = CliRunner().invoke(cli, ["live", "status", source.address])
            head, versions, newest, oldest, _, sinks, row = (line.split() for line in result.stdout.splitlines())
            assert head[-4:] == ["2", "versions,", "1", "sink"] and versions[-2:] == ["TAKEN", "BY"] and sinks[0] == "SINK"
            assert (newest[0], newest[-1], oldest[0], oldest[-1], row[0], row[2]) == ("2", "1", "1", "1", seen.sink, "2")
            shown = json.loads(CliRunner().invoke(cli, ["live", "--json", "status", source.address]).stdout)
            assert [v["step"] for v in shown["versions"]] == [1, 2] and shown["sinks"][0]["sink"] == seen.sink
            assert CliRunner().invoke(cli, ["live", "-q", "status", source.address]).stdout == "2\n"
    result = CliRunner().invoke(cli, ["live", "status", source.address])
    assert result.exit_code == 30 and "no secret is known for this source" in result.stderr


@pytest.mark.parametrize(("local", "switch"), [("on", "double"), ("off", "double"), ("off", "in-place")])
def test_a_take_says_how_far_it_is_and_where_its_time_went(local: str, switch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_LIVE_LOCAL", local)
    monkeypatch.setattr("ckpt.telemetry.progress.INTERVAL", 0.0)
    state = {f"t{i}": torch.full((1 << 20,), float(i)) for i in range(16)}
    total, counts = 64 << 20, []
    with Source("tcp://127.0.0.1:0/a", state, secret="s", job=ckpt.Job(timeout=TIMEOUT)) as source:
        source.publish(1).result()
        with Sink(
            source.address, {name: torch.zeros(1 << 20) for name in state}, secret="s", switch=switch, job=ckpt.Job(timeout=TIMEOUT)
        ) as sink:
            sink.take(progress=lambda done, total: counts.append((done, total)))
            report = sink.report
            with pytest.raises(UsageError, match="progress= takes True or a function"):
                sink.take(progress=3)  # type: ignore[arg-type]
    assert counts == sorted(counts) and counts[-1] == (total, total) and any(0 < done < total for done, _ in counts)
    assert report is not None and report.took_from == {"source": total}
    sums = report.spans.sums
    assert sums.keys() == {"match", "plan", "verify", "switch"} | ({"pull"} if local == "off" else set())
    assert sums["verify"].nbytes == total and sums["switch"].seconds <= report.seconds
    assert local == "on" or sums["pull"].nbytes == report.transferred == total


@pytest.mark.parametrize("capture", ["eager", "lazy"])
def test_a_publication_says_how_far_it_is_and_where_its_time_went(capture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.telemetry.progress.INTERVAL", 0.0)
    model = torch.nn.Module()
    for i in range(16):  # a buffer, which is captured in the call, lies between parameters, which may be captured later
        model.register_parameter(f"t{i}", torch.nn.Parameter(torch.full((1 << 20,), float(i))))
        model.register_buffer(f"t{i}b", torch.full((2025 + i,), -float(i)))
    state = {"m": model, "optimizer": torch.optim.SGD(model.parameters())}
    counts: list[tuple[int, int]] = []
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    taken = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    with Source("tcp://127.0.0.1:0/a", state, secret="s", job=ckpt.Job(timeout=TIMEOUT)) as source:
        publication = source.publish(1, capture=capture, progress=lambda done, total: counts.append((done, total)))
        end = time.monotonic() + TIMEOUT
        while not publication.done() and time.monotonic() < end:
            time.sleep(0.01)
        version = publication.result()
        report = publication.report
        with pytest.raises(UsageError, match="progress= takes True or a function"):
            source.publish(2, progress=3)  # type: ignore[arg-type]
        with Sink(source.address, {"m": taken}, strict=False, secret="s", job=ckpt.Job(timeout=TIMEOUT)) as sink:
            assert sink.take() == version, "each block has the digest of what was captured"
        assert all(torch.equal(tensor, taken[name]) for name, tensor in model.state_dict().items())
        assert source.publish(2).result().step == 2
    assert counts == sorted(counts) and counts[-1] == (total, total) and any(0 < done < total for done, _ in counts)
    assert report is not None and (report.version, report.bytes) == (version, total)
    sums = report.spans.sums
    assert sums.keys() >= {"plan", "capture", "digest", "replicas", "agree"}
    assert sums["capture"].nbytes == total
    assert sums["digest"].nbytes == (total if capture == "eager" else 0), "nobody waited, so it was hashed while it was captured"
    assert 0 < report.blocked <= report.seconds


def take_and_die(_: Connection, address: str) -> None:
    sink = Sink(address, {"t": torch.zeros(9)}, secret="s", job=ckpt.Job(timeout=30))
    sink.take()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_sink_that_died_is_lost_and_late_and_one_that_was_closed_is_not() -> None:
    with Source("tcp://127.0.0.1:0/a", {"t": torch.zeros(9)}, secret="s", job=ckpt.Job(timeout=TIMEOUT)) as source:
        source.publish(1).result()
        with Sink(source.address, {"t": torch.ones(9)}, secret="s", job=ckpt.Job(timeout=TIMEOUT)) as sink:
            sink.take()
        dying, _ = in_process(take_and_die, source.address)
        dying.join(4 * TIMEOUT)
        assert dying.exitcode == -signal.SIGKILL
        source.publish(2).result()
        end = time.monotonic() + TIMEOUT
        while (seen := source.report().sinks)[-1].state != "lost" and time.monotonic() < end:
            time.sleep(0.01)
    assert [(sink_status.state, sink_status.step, sink_status.late) for sink_status in seen] == [("left", 1, False), ("lost", 1, True)]


def test_what_does_not_fit_is_said_at_once_and_changes_nothing() -> None:
    state = {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(5)}
    with Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source:
        source.publish(1).result()
        into = {"a": torch.ones(3, dtype=torch.float64), "b": torch.ones(9), "d": torch.ones(1)}
        with Sink(source.address, into, job=ckpt.Job(timeout=TIMEOUT)) as sink:
            with pytest.raises(MismatchError) as caught:
                sink.take()
            assert sink.version is None
        for name in ("the source does not fit the state", "a: dtype", "b: shape", "d", "c"):
            assert name in caught.value.message
        table = CliRunner().invoke(cli, ["live", "status", source.address, "--timeout", "5s"]).stdout
        assert "MismatchError: the source does not fit the state" in table and "a: dtype" not in table  # --json has all of it
        assert all(bool((t == 1).all()) for t in into.values())
        (seen,) = source.report().sinks
        assert seen.error is not None and "MismatchError" in seen.error


def test_what_cannot_be_meant_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"t": torch.zeros(3)}
    for address in ("actor", "tcp://host/x", "http://h:1/x", "tcp://h:99999/x"):
        with pytest.raises(UsageError, match="is not the address of a source"):
            Source(address, state)
    for make in (Source, Sink):
        with pytest.raises(UsageError, match=r"'tcp://127.0.0.1:4000/' has no name"):
            make("tcp://127.0.0.1:4000/", state)
    with pytest.raises(UsageError, match="the state of the source is empty on all ranks"):
        Source("tcp://127.0.0.1:0/a", {}, job=ckpt.Job(timeout=TIMEOUT))
    with Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT), secret="right") as source:
        with pytest.raises(AccessError, match="no secret is known"):
            Sink(source.address, state).take(timeout=0.2)
        with pytest.raises(AccessError, match="another secret"):
            Sink(source.address, state, secret="wrong", job=ckpt.Job(timeout=TIMEOUT)).take()
        with pytest.raises(NotFoundError, match="there is no source 'b' here, but 'a'"):
            Sink(source.address[:-1] + "b", state, secret="right", job=ckpt.Job(timeout=TIMEOUT)).take()
        with pytest.raises(DeadlineError, match="has no version yet"):
            Sink(source.address, state, secret="right", job=ckpt.Job(timeout=TIMEOUT)).take(timeout=0.1)
        monkeypatch.setenv("CKPT_LIVE_SECRET", "right")
        source.publish(1).result()
        with Sink(source.address, state, job=ckpt.Job(timeout=TIMEOUT)) as sink:
            assert sink.take().step == 1
            with pytest.raises(UsageError, match="newer_than= is a version, not 1"):
                sink.take(newer_than=1)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="timeout= is a number of seconds, not '5'"):
                sink.take(timeout="5")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="the sink is closed"):
            sink.take()
        with pytest.raises(UsageError, match="the state must be a dict, not Tensor"):
            Sink(source.address, state["t"])  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="'double' or 'in-place'"):
            Sink(source.address, state, switch="other")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="a step is a number"):
            source.publish(-1)
        with pytest.raises(UsageError, match="a step is a number"):
            source.publish(True)
    mistakes: list[tuple[str, dict[str, Any]]] = [
        (r"keep is .* not 1\.5", {"keep": 1.5}),
        ("delta= is True or False, not 'no'", {"delta": "no"}),
        ("secret= is text or bytes, not int", {"secret": 7}),
        ("the state must be a dict, not Tensor", {"state": state["t"]}),
    ]
    for message, given in mistakes:
        with pytest.raises(UsageError, match=message):
            Source("tcp://127.0.0.1:0/a", **{"state": state, **given})
    with pytest.raises(DeadlineError, match="cannot be reached"):
        Sink(source.address, state, job=ckpt.Job(timeout=2)).take()


def test_the_secret_of_a_source_is_for_its_account_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    state = {"t": torch.zeros(3)}
    with Source("tcp://127.0.0.1:0/a b", state, job=ckpt.Job(timeout=TIMEOUT)) as source:
        (file,) = (p for p in tmp_path.rglob("*") if p.is_file())
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
        file.chmod(0o644)
        with pytest.raises(AccessError, match="others than this account"):
            Sink(source.address, state).take()
    assert not file.exists()


def test_a_secret_that_has_no_place_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"t": torch.zeros(3)}
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(AccessError, match="(?s)secret cannot be left.*CKPT_LIVE_SECRET") as caught:
        Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT))
    assert "XDG_RUNTIME_DIR" in str(caught.value)
    (tmp_path / f"ckpt-live-{os.getuid()}").write_text("a file in the place of the folder")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(AccessError, match="CKPT_LIVE_SECRET"):
        Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT))
    with pytest.raises(AccessError, match="CKPT_LIVE_SECRET"):
        Sink("tcp://127.0.0.1:9/a", state).take()
    if os.getuid() == 0:  # a folder of somebody else
        (tmp_path / f"ckpt-live-{os.getuid()}").unlink()
        (tmp_path / f"ckpt-live-{os.getuid()}").mkdir(mode=0o700)
        os.chown(tmp_path / f"ckpt-live-{os.getuid()}", 12345, 12345)
        with pytest.raises(AccessError, match="others than this account"):
            Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT))


def test_values_of_single_ranks_and_tied_tensors_come_along() -> None:
    import ckpt

    shared = torch.arange(6.0)
    state = {"a": shared, "b": shared, "own": ckpt.PerRank({"seed": 7, "t": torch.full((3,), 5.0)})}
    here = torch.zeros(6)
    into: dict[str, Any] = {"a": here, "b": here, "own": ckpt.PerRank({"seed": 0, "t": torch.zeros(3)})}
    with (
        Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source,
        Sink(source.address, into, job=ckpt.Job(timeout=TIMEOUT)) as sink,
    ):
        version = source.publish(1).result()
        assert sink.take() == version
        assert torch.equal(here, shared) and into["own"].value["seed"] == 7 and bool((into["own"].value["t"] == 5).all())
        state["own"] = ckpt.PerRank({"seed": 8, "t": torch.full((3,), 6.0)})
        source.publish(2).result()
        sink.take(newer_than=version)
        assert into["own"].value["seed"] == 8 and bool((into["own"].value["t"] == 6).all())


def test_the_helpers_see_a_mix() -> None:
    state = {name: full(name, 2) for name in ("up", "down")}
    assert step_of(state) == 2
    local_of(state["down"])[3, 3] += 1
    with pytest.raises(AssertionError, match="down: not all of it is of step 2"):
        step_of(state)


def test_a_forked_process_can_neither_publish_nor_end_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    state = {"x": torch.arange(4.0)}
    with Source("tcp://127.0.0.1:0/forked", state, job=ckpt.Job(timeout=TIMEOUT)) as source:
        child = os.fork()
        if not child:
            try:
                source.publish(1)
            except UsageError as err:
                source.close()
                os._exit(7 if "forked" in str(err) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        source.publish(2).result()
        target = {"x": torch.zeros(4)}
        with Sink(source.address, target, job=ckpt.Job(timeout=TIMEOUT)) as sink:  # by the secret of the file, which is still there
            assert sink.take().step == 2
        assert torch.equal(target["x"], state["x"])


def test_an_engine_that_polls_and_is_closed_has_left() -> None:
    """A take that found nothing newer in time has not ended its connection; and one that broke off is made up for."""
    state = {"t": torch.arange(3.0)}
    with Source("tcp://127.0.0.1:0/a", state, job=ckpt.Job(timeout=TIMEOUT)) as source:
        source.publish(1).result()
        for breaks in (False, True):
            sink = Sink(source.address, {"t": torch.zeros(3)}, job=ckpt.Job(timeout=TIMEOUT))
            version = sink.take()
            with pytest.raises(DeadlineError, match="no version newer"):
                sink.take(newer_than=version, timeout=0.2)
            assert source.report().sinks[-1].state == "waiting"
            if breaks:
                assert sink._source._client is not None
                sink._source._client.close()
                until(lambda: source.report().sinks[-1].state == "lost")
            sink.close()
            until(lambda: source.report().sinks[-1].state == "left")


def test_an_engine_that_starts_before_its_trainer_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as it was told to, and not where the trainer was there before: that one has ended. ``None``: the trainer leaves a secret
    of its own in a file, another one each time, and that of a trainer that was killed may be there still."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def check(secret: str | None, port: int) -> None:
        address = f"tcp://127.0.0.1:{port}/a"
        into = {"t": torch.zeros(3)}
        began, started = time.monotonic(), list[Source]()
        with Sink(address, into, secret=secret, relay=True, job=ckpt.Job(timeout=TIMEOUT)) as sink:
            with pytest.raises(CkptError, match="no secret is known" if secret is None else "cannot be reached"):
                sink.take(timeout=1.5)
            assert time.monotonic() - began >= 1.5
            if secret is None:
                new_secret(address)

            def start(step: int) -> None:
                time.sleep(1.5)  # by then, a connection that was refused was given up before
                started.append(Source(address, {"t": torch.full((3,), float(step))}, secret=secret, job=ckpt.Job(timeout=TIMEOUT)))
                started[-1].publish(step).result()

            trainer = threading.Thread(target=start, args=(1,))
            trainer.start()
            assert sink.take(timeout=60).step == 1
            trainer.join()
            started[0].close()
            began = time.monotonic()
            with pytest.raises(CkptError):
                sink.take(timeout=300)
            assert time.monotonic() - began < 60
            start(2)
            assert sink.take(timeout=60).step == 2 and into["t"].tolist() == [2, 2, 2]
            if secret is None:
                with Sink(address, {"t": torch.zeros(3)}, relay=True, job=ckpt.Job(timeout=TIMEOUT)) as other:  # also by way of the first
                    assert other.take(timeout=60).step == 2
            started[1].close()

    at_once(check, zip(("s", None), free_ports(2), strict=True))
    # of another machine: no secret will come here
    elsewhere = Sink("tcp://192.0.2.1:1/a", {"t": torch.zeros(3)}, job=ckpt.Job(timeout=TIMEOUT))
    with pytest.raises(AccessError, match="no secret is known"):
        elsewhere.take()
