"""Checkpoints in an object store, through the public face: the same bytes back, few requests, and what a killed save leaves."""

from __future__ import annotations

import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import cli
from ckpt.engine.verify import verify
from ckpt.errors import GroupError, NotCommittedError, NotFoundError
from ckpt.formats.native.paths import PROGRESS
from ckpt.io_backends import FaultyProcess, join_url, open_backend, wrap_backends
from tests.distributed.ranks import Lost, Ranks, at_once
from tests.s3 import exporting as work
from tests.s3 import rank_work
from tests.s3.meddling import watch
from tests.s3.stores import ObjectStore


def trained(seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(70, 300), nn.Linear(300, 1_000))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 70)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed}


def tensors(state: dict[str, object]) -> list[torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    return [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]


def run(*args: str) -> str:
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("codec", [None, pytest.param("planes-zstd", marks=pytest.mark.slow)])
def test_save_replace_and_load(s3_url: str, codec: str | None) -> None:
    url = f"{s3_url}/step-1"
    for seed in (1, 2):
        saved = trained(seed)
        ckpt.save(url, saved, codec=codec)
        loaded = trained(7)
        report = ckpt.load(url, loaded)
        assert loaded["step"] == seed
        assert all(torch.equal(a, b) for a, b in zip(tensors(saved), tensors(loaded), strict=True))
        assert report.bytes_unverified == 0
    names = [e.path for e in open_backend(url).list_prefix()]
    assert len([n for n in names if n.startswith("data/")]) == 1  # what the first save wrote is gone
    assert list(open_backend(url).pending_uploads()) == []


def test_tools(s3_url: str) -> None:
    ckpt.save(f"{s3_url}/step-1", trained(1))
    ckpt.save(f"{s3_url}/step-2", trained(2))
    assert [row["step"] for row in json.loads(run("ls", "--json", s3_url))["steps"]] == [1, 2]
    assert "model.0.weight" in run("inspect", "-q", f"{s3_url}/step-2")
    assert json.loads(run("verify", "--json", f"{s3_url}/step-1"))["problems"] == []
    view = ckpt.open(f"{s3_url}/step-2")
    wanted = dict(trained(2)["model"].state_dict())  # type: ignore[attr-defined]
    assert torch.equal(torch.as_tensor(np.asarray(view["model.1.weight"][10:20])), wanted["1.weight"][10:20])


def test_nothing_there(s3_url: str) -> None:
    with pytest.raises(NotFoundError):
        ckpt.load(f"{s3_url}/step-1", {"a": 1})


def test_a_save_takes_ten_requests_a_load_four_and_a_restore_eight(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them is a step back, whatever it is good for: thousands of ranks send theirs at once. The first save also tries the store."""
    state = {"w": torch.arange(16_000_000, dtype=torch.int32)}
    found = {"w": torch.zeros_like(state["w"])}
    seen = watch(monkeypatch)
    counts: list[Counter[str]] = []
    for step in (1, 2, 2, 2):
        seen.clear()
        ckpt.save(f"{s3_url}/step-{step}", state)
        counts.append(Counter(s.operation for s in seen))
    first, again, _, replaced = counts
    assert again == {"GetObject": 1, "PutObject": 7, "ListObjectsV2": 2}
    assert first - again <= Counter(PutObject=7, DeleteObject=1, ListMultipartUploads=1)
    # What replaces a step reads who refers to it or points into it: two listings, and the records of the run that are new to this process.
    assert replaced - again == {"GetObject": 1, "DeleteObjects": 1, "ListObjectsV2": 2}
    seen.clear()
    ckpt.load(f"{s3_url}/step-2", found)
    assert Counter(s.operation for s in seen) == {"GetObject": 4}
    assert torch.equal(found["w"], state["w"])
    seen.clear()
    with monkeypatch.context() as without_log:
        without_log.setenv("CKPT_RUN_LOG", "off")
        with ckpt.Checkpointer(s3_url) as c:
            assert c.restore(found) == 2
    assert Counter(s.operation for s in seen) == {"ListObjectsV2": 2, "GetObject": 6}
    seen.clear()
    with ckpt.Checkpointer(s3_url) as c:  # reads the log of the run and adds the load, when that is over
        assert c.restore(found) == 2
    assert Counter(s.operation for s in seen) == {"ListObjectsV2": 2, "GetObject": 7, "PutObject": 1}


def test_index_files_that_the_record_repeats_are_still_verified(s3_url: str, object_store: ObjectStore) -> None:
    """A load does not miss them; `verify` does, and so does a reader that knows nothing of what the record repeats."""
    url = f"{s3_url}/step-1"
    ckpt.save(url, {"w": torch.arange(10), "n": 3})
    backend = open_backend(url)
    (state,) = [e.path for e in backend.list_prefix() if e.path.endswith("state.json")]
    content = backend.read(state)
    backend.delete(state)
    found = {"w": torch.zeros(10, dtype=torch.int64), "n": 0}
    ckpt.load(url, found)
    assert found["n"] == 3
    assert [(p.kind, p.file) for p in verify(url).problems] == [("missing", state)]
    backend.put_if(state, content[:-1] + b" ", expected=None)
    assert [(p.kind, p.file) for p in verify(url).problems] == [("index", state)]


def test_only_the_leader_tries_the_store(ranks: Ranks, bucket: str, object_store: ObjectStore) -> None:
    leader, other = ranks.run(2, rank_work.seen_while_saving, object_store.environment, f"{bucket}/run/step-1", 3)
    assert sum(".prepare-" in each for each in leader) >= 4
    assert [each.partition(" ")[0] for each in other] == ["PutObject"]
    assert [right for right, _ in ranks.run(2, rank_work.load_sharded, object_store.environment, f"{bucket}/run/step-1", 3)] == [True] * 2


def test_inspecting_many_tensors_takes_five_requests(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save(s3_url, {f"layers.{i}.weight": torch.full((3,), float(i)) for i in range(4_000)})
    seen = watch(monkeypatch)
    shown = run("inspect", "-q", s3_url)
    assert shown.count("layers.") == 4_000
    assert len(seen) <= 5, [f"{s.operation} {s.path}" for s in seen]


def test_two_hundred_checkpoints_are_listed_with_a_request_each_and_one_more(
    s3_url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.save(f"{s3_url}/step-0", {"n": 0})
    record = open_backend(f"{s3_url}/step-0").read("checkpoint.json")
    assert len(record) < 12_000  # which a listing reads of each
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    for step in range(1, 200):
        object_store.client.put_object(Bucket=bucket, Key=f"{prefix}/step-{step}/checkpoint.json", Body=record)
    seen = watch(monkeypatch)
    assert [s.number for s in ckpt.list_steps(s3_url) if s.committed] == list(range(200))
    assert Counter(s.operation for s in seen) == {"ListObjectsV2": 1, "GetObject": 200}


def test_thousands_of_small_tensors_take_as_many_requests_as_a_few(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"t{i}": torch.full((16,), float(i)) for i in range(8_000)}
    found = {name: torch.zeros(16) for name in state}
    seen = watch(monkeypatch)
    ckpt.save(s3_url, state)
    beside = (".prepare-", PROGRESS)  # the trial of the store, and how far a slow save is
    saved = Counter(s.operation for s in seen if not any(name in s.path for name in beside))
    assert saved.pop("ListMultipartUploads", 0) <= 1  # in the first save of a process
    assert saved == {"GetObject": 1, "PutObject": 7, "ListObjectsV2": 3}  # one for the look whether this is a run
    seen.clear()
    ckpt.load(s3_url, found)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert Counter(s.operation for s in seen) == {"GetObject": 5}


def test_listing_a_run_takes_one_request_for_each_checkpoint_and_one_more(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(12):
        ckpt.save(f"{s3_url}/step-{step}", {"n": step})
    seen = watch(monkeypatch)
    steps = ckpt.list_steps(s3_url)
    assert [(s.number, s.committed) for s in steps] == [(n, True) for n in range(12)]
    assert Counter(s.operation for s in seen) == {"ListObjectsV2": 1, "GetObject": 12}
    assert [s.number for s in ckpt.list_steps(f"{s3_url}/step-3")] == [3]


def test_a_load_reads_small_tensors_together(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"layers.{i}.weight": torch.full((300,), float(i)) for i in range(2_000)}
    ckpt.save(s3_url, state)
    seen = watch(monkeypatch)
    found = {k: torch.zeros(300) for k in state}
    ckpt.load(s3_url, found)
    assert all(torch.equal(found[k], state[k]) for k in state)
    assert len(seen) <= 10, [f"{s.operation} {s.path}" for s in seen]


def test_two_ranks(ranks: Ranks, s3_url: str, object_store: ObjectStore) -> None:
    environment = object_store.environment
    ranks.run(2, rank_work.save_sharded, environment, s3_url, 3)
    assert [right for right, _ in ranks.run(2, rank_work.load_sharded, environment, s3_url, 3)] == [True] * 2
    assert [right for right, _ in ranks.run(3, rank_work.load_sharded, environment, s3_url, 3)] == [True] * 3
    assert json.loads(run("verify", "--json", s3_url))["problems"] == []


def test_replicas_are_downloaded_once(ranks: Ranks, s3_url: str, object_store: ObjectStore) -> None:
    tensors = {"w": rank_work.whole(5), "b": rank_work.whole(6)}
    report = ckpt.save(s3_url, tensors)
    found = ranks.run(4, rank_work.load_replicated, object_store.environment, s3_url, 5)
    assert [right for right, _ in found] == [True] * 4
    stored = sum(t.nbytes for t in tensors.values())
    headers = 4 * (report.rank_bytes - stored)  # each rank reads for itself where the chunks are
    assert stored <= sum(asked for _, asked in found) <= stored + headers


@pytest.mark.parametrize(("operation", "at"), [pytest.param("UploadPart", 1, marks=pytest.mark.slow), ("CompleteMultipartUpload", 0)])
def test_a_killed_save_leaves_the_previous_checkpoint(
    ranks: Ranks, s3_url: str, object_store: ObjectStore, operation: str, at: int
) -> None:
    environment = object_store.environment
    url = f"{s3_url}/run"
    ranks.run(2, rank_work.save_sharded, environment, url, 1)
    outcome = ranks.run(2, rank_work.die_while_saving, environment, url, 2, operation, at, allow_death=True)
    assert all(isinstance(x, Lost) for x in outcome)
    assert outcome[1].exitcode == -9
    backend = open_backend(url)
    assert len(list(backend.pending_uploads())) == 1
    assert [right for right, _ in ranks.run(2, rank_work.load_sharded, environment, url, 1)] == [True] * 2
    ranks.run(2, rank_work.save_sharded, environment, url, 3)
    assert list(backend.pending_uploads()) == []
    assert [right for right, _ in ranks.run(1, rank_work.load_sharded, environment, url, 3)] == [True]


@pytest.mark.slow
def test_a_first_save_that_is_killed_is_no_checkpoint(ranks: Ranks, s3_url: str, object_store: ObjectStore) -> None:
    ranks.run(2, rank_work.die_while_saving, object_store.environment, s3_url, 2, "PutObject", 0, allow_death=True)
    with pytest.raises((NotFoundError, NotCommittedError)):
        ckpt.load(s3_url, {"seed": 0}, strict=False)


def test_a_training_loop_goes_on(ranks: Ranks, s3_url: str, object_store: ObjectStore) -> None:
    environment = object_store.environment
    assert ranks.run(2, rank_work.train, environment, s3_url, 3) == [(None, True)] * 2
    assert ranks.run(3, rank_work.train, environment, s3_url, 5) == [(3, True)] * 3
    assert [s.number for s in ckpt.list_steps(s3_url) if s.committed] == [4, 5]
    assert open_backend(join_url(s3_url, "step-00000003")).list_dir() == []


# ------------------------ ``ckpt watch`` of a save to an object store: what the leader notes there is seen, and gone when the save is over.


class SlowWrites(FaultyProcess):
    """A process whose storage takes a second and a half for each write of a data file, until the save has been watched."""

    watched = threading.Event()

    def operate(self, what: str, effect: Callable[[], Any], half: Callable[[], None] | None = None) -> Any:
        if half is not None:
            self.watched.wait(1.5)
        return super().operate(what, effect, half)


def shown(url: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli, ["watch", "--once", "--json", url])
    return result.exit_code, json.loads(result.stdout.splitlines()[-1]) if result.stdout else {}


def test_a_save_is_watched_through_the_store(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_PROGRESS", "0.5")
    state = {"w": torch.arange(4 << 20, dtype=torch.int32)}

    def save() -> None:
        with wrap_backends(SlowWrites().wrap):
            ckpt.save(f"{s3_url}/step-1", state, job=ckpt.Job(threads=1))

    job = threading.Thread(target=save)
    job.start()
    end = time.monotonic() + 90
    code, seen = 1, dict[str, Any]()
    while not (seen.get("progress") and seen["state"] == "saving") and time.monotonic() < end:
        code, seen = shown(s3_url)  # which says "hangs" while a machine with too much to do leaves the leader no time for a note
    SlowWrites.watched.set()
    assert (code, seen["state"], seen["url"], seen["progress"]["ranks"]) == (0, "saving", f"{s3_url}/step-1", 1)
    job.join(100)
    assert not job.is_alive()
    assert not [e.path for e in open_backend(f"{s3_url}/step-1").list_prefix() if e.path.endswith("progress.json")]
    code, seen = shown(s3_url)
    assert (code, seen["state"]) == (0, "committed")


# ----------------------------- Exports to an object store: all ranks send parts of the same objects, which show when all of them are there.

INDEX = "model.safetensors.index.json"


def objects(store: ObjectStore, url: str) -> dict[str, bytes]:
    """All objects below a URL, by botocore alone."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    found = store.client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/").get("Contents", [])
    return {o["Key"].removeprefix(f"{prefix}/"): store.client.get_object(Bucket=bucket, Key=o["Key"])["Body"].read() for o in found}


def right(found: dict[str, bytes], seed: int, dtype: torch.dtype) -> bool:
    tensors = {n: t for name, data in found.items() if name.endswith(".safetensors") for n, t in safetensors.torch.load(data).items()}
    return tensors.keys() == work.wanted(seed).keys() and all(torch.equal(tensors[n], t.to(dtype)) for n, t in work.wanted(seed).items())


def test_parts_from_all_ranks(ranks: Ranks, object_store: ObjectStore, s3_url: str) -> None:
    reports = ranks.run(3, work.export_model, object_store.environment, f"{s3_url}/a", 1, {"shard_size": "12MB"})
    found = objects(object_store, f"{s3_url}/a")
    assert sorted(found) == ["model-00001-of-00003.safetensors", *(f"model-0000{i}-of-00003.safetensors" for i in (2, 3)), INDEX]
    assert json.load(io.BytesIO(found[INDEX]))["metadata"]["total_size"] == reports[0].tensor_bytes
    assert right(found, 1, torch.float32)
    assert all(r.writes > 0 and r.sent_bytes < r.tensor_bytes / 3 + 1 for r in reports)
    assert list(open_backend(s3_url).pending_uploads()) == []


def test_one_object_cast_and_replaced(ranks: Ranks, object_store: ObjectStore, s3_url: str) -> None:
    url = f"{s3_url}/model.safetensors"
    options: dict[str, Any] = {"dtype": "bfloat16"}
    ranks.run(2, work.export_model, object_store.environment, url, 1, options)
    refused = ranks.run(2, work.export_model, object_store.environment, url, 2, options, allow_death=True)
    assert all("ConflictError" in x.text for x in refused)
    assert right(objects(object_store, s3_url), 1, torch.bfloat16)
    ranks.run(2, work.export_model, object_store.environment, url, 2, {**options, "overwrite": True})
    found = objects(object_store, s3_url)
    assert list(found) == ["model.safetensors"] and right(found, 2, torch.bfloat16)


@pytest.mark.alone  # who is killed must not have been given up before
def test_killed(ranks: Ranks, object_store: ObjectStore, s3_url: str) -> None:
    def check(rank: int, operation: str) -> None:
        url = f"{s3_url}/{rank}/model.safetensors"
        found = ranks.run(2, work.die_at_request, object_store.environment, url, 1, rank, operation, allow_death=True)
        assert isinstance(found[rank], Lost) and found[rank].exitcode == -9
        assert isinstance(found[1 - rank].error, GroupError)
        assert objects(object_store, f"{s3_url}/{rank}") == {}
        assert len(list(open_backend(f"{s3_url}/{rank}").pending_uploads())) == (rank == 0)  # a leader that lives ends its uploads
        ranks.run(2, work.export_model, object_store.environment, url, 2, {})
        assert right(objects(object_store, f"{s3_url}/{rank}"), 2, torch.float32)
        assert list(open_backend(f"{s3_url}/{rank}").pending_uploads()) == []

    at_once(check, [(1, "UploadPart"), (0, "CompleteMultipartUpload")])
