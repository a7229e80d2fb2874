"""Exports to an object store: all ranks send parts of the same objects, which show when all of them are there."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import safetensors.torch
import torch

from ckpt.errors import GroupError
from ckpt.io_backends import open_backend
from tests.distributed.ranks import Lost, Ranks, at_once
from tests.s3 import exporting as work
from tests.s3.stores import ObjectStore

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
