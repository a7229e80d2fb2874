"""Jobs that checkpoint to an object store: killed at random moments on random numbers of ranks, with and without a local tier before it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.verify import verify
from ckpt.errors import StorageError
from ckpt.policies import EverySteps, Latest
from tests.faults.proxy import FaultProxy, Schedule
from tests.s3.stores import ObjectStore

ROOT = Path(__file__).parents[2]


def killed(bucket: str, local: Path | None, kills: int, seed: int) -> str:
    """Run the example; what it said."""
    command = [sys.executable, "examples/s3_restart.py", f"{bucket}/run", "--kills", str(kills), "--seed", str(seed), "--longest", "1.5"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    given = ["--local", str(local)] if local is not None else []
    done = subprocess.run([*command, *given], cwd=ROOT, env=env, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_what_is_left(store: ObjectStore, bucket: str) -> None:
    """Every object belongs to a committed checkpoint, every upload has ended: by a client that knows nothing of our format but the id."""
    steps = [s for s in ckpt.list_steps(f"{bucket}/run") if s.committed]
    name = bucket.removeprefix("s3://")
    keys = [o["Key"] for o in store.client.list_objects_v2(Bucket=name).get("Contents", ())]
    ours = {f"run/step-{s.number:08d}/checkpoint.json": str(s.id) for s in steps}
    strange = [k for k in keys if k not in ours and not any(id in k for id in ours.values())]
    assert strange == [] and 1 <= len(steps) <= 2
    assert "Uploads" not in store.client.list_multipart_uploads(Bucket=name)


@pytest.mark.slow
def test_killed_again_and_again(object_store: ObjectStore, bucket: str) -> None:
    said = killed(bucket, None, kills=2, seed=1)
    assert "2 kills" in said and "the same bit for bit" in said
    check_what_is_left(object_store, bucket)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tier", ["straight to the store", "with a local tier"])
def test_killed_twenty_times(object_store: ObjectStore, bucket: str, tmp_path: Path, tier: str) -> None:
    said = killed(bucket, tmp_path / "local" if tier == "with a local tier" else None, kills=20, seed=2)
    print(said)
    assert "20 kills" in said and "the same bit for bit" in said
    check_what_is_left(object_store, bucket)


# ------------------------------------------------------------------------------------------------------------ a store that is away


def state_of(n: int) -> dict[str, Any]:
    return {"w": torch.full((700, 300), float(n)), "n": n}


def test_a_store_that_is_away_for_a_while(
    object_store: ObjectStore, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on; what is newest is published when the store is back, and what was lost locally comes from there."""
    monkeypatch.setenv("CKPT_TIMEOUT", "2")  # a second of failing is a failure
    local = tmp_path / "local"
    with FaultProxy(object_store.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with ckpt.Checkpointer(s3_url, local=str(local), save=EverySteps(1), keep=Latest(3), publish_timeout=0.1) as c:
            c.step(1, state_of(1))
            c.wait()
            assert [s.number for s in ckpt.list_steps(s3_url)] == [1]
            proxy.schedule = Schedule(rates={"refuse": 1.0})
            for n in range(2, 6):
                c.step(n, state_of(n))
                assert c.handle is not None
                c.handle.result()
            with pytest.raises(StorageError, match="step 5 is committed in .* could not be published"):
                c.wait()
            assert c.unpublished[-1] == 5 and "is not published" in caplog.text
            proxy.schedule = None
            c.step(6, state_of(6))
        assert proxy.injected["refuse"] > 0
        assert [s.number for s in ckpt.list_steps(str(local)) if s.committed] == [6]
        assert {1, 6} <= {s.number for s in ckpt.list_steps(s3_url) if s.committed}
        assert verify(f"{s3_url}/step-00000006").ok
        (path,) = (local / "step-00000006").glob("data/*")
        path.unlink()
        with ckpt.Checkpointer(s3_url, local=str(local)) as c:
            state = state_of(0)
            assert c.restore(state) == 6 and torch.equal(state["w"], state_of(6)["w"])
            assert c.restored_from is not None and c.restored_from.url == f"{s3_url}/step-00000006"


def test_waiting_until_the_store_is_back(object_store: ObjectStore, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TIMEOUT", "2")
    with FaultProxy(object_store.endpoint, Schedule(rates={"fail": 1.0})) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with ckpt.Checkpointer(s3_url, local=str(tmp_path), save=EverySteps(1), publish_timeout=30) as c:
            c.step(1, state_of(1))
            back = threading.Thread(target=_let_through_later, args=(proxy,))
            back.start()
            c.wait()
            back.join()
        assert (tmp_path / "step-00000001" / "checkpoint.json").read_bytes() == _object(
            object_store, f"{s3_url}/step-00000001/checkpoint.json"
        )


def _let_through_later(proxy: FaultProxy) -> None:
    """Two seconds after the first request that failed."""
    while not proxy.injected["fail"]:
        time.sleep(0.01)
    time.sleep(2)
    proxy.schedule = None


def _object(store: ObjectStore, url: str) -> bytes:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    data: bytes = store.client.get_object(Bucket=bucket, Key=key)["Body"].read()
    return data
