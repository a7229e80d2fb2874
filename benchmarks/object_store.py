"""The scenario ``s3``: the same bytes to an object store and back, by ckpt, by the client alone, by s3fs and by DCP over s3fs.

The store is Ceph's gateway as the tests start it, on the same cores: throughput is more the store's than the client's; CPU time is the
client's alone. Without the gateway the scenario says so and measures nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

import ckpt
from ckpt.io_backends import open_backend

from .findings import Finding, at_least, at_most, medians
from .measure import cost_of
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell

PART, RANGE, LANES = 16 << 20, 8 << 20, 16
"""What ckpt's own backend uses: the raw client does the same."""
TENSOR = 64_000_000
BUCKET = "bench"
RAW, PORT, SAVE = "client alone", "ckpt backend", "ckpt"


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """All contestants in turns, one process; ``place`` is not used."""
    del place
    with _store() as (environment, told):
        if environment is None:
            return [Finding(scenario="s3", title="left out", columns=(), rows=(), figures={}, notes=(told,))]
        found: dict[str, list[dict[str, float]]] = pool.run(
            measure, on=1, size=settings.size, repeat=settings.repeat, environment=environment
        )[0]
    tell(f"s3: {', '.join(found)}")
    mine = {name: medians(samples) for name, samples in found.items()}
    rows = [(name, *_cells(m, settings.size)) for name, m in mine.items()]
    raw, saved = mine[RAW], mine[SAVE]
    checks = []
    for op in OPERATIONS:
        checks.append(at_least(f"{op} to the store, throughput over the client alone", raw[f"{op} wall"] / saved[f"{op} wall"], 0.9))
        checks.append(at_most(f"{op} to the store, CPU over the client alone", saved[f"{op} cpu"] / raw[f"{op} cpu"], 1.3))
    return [
        Finding(
            scenario="s3",
            title=f"{settings.size / 1e6:,.0f} MB to {told} on the same cores, and back",
            columns=("", *OPERATIONS, *(f"{op} CPU s/GB" for op in OPERATIONS)),
            rows=rows,
            figures={"medians": mine, "samples": found},
            checks=checks,
        )
    ]


OPERATIONS = ("upload", "download")


def _cells(found: dict[str, float], size: int) -> list[str]:
    speeds = [f"{size / found[f'{op} wall'] / 1e6:,.0f} MB/s" for op in OPERATIONS]
    return speeds + [f"{found[f'{op} cpu'] / size * 1e9:.2f}" for op in OPERATIONS]


@contextlib.contextmanager
def _store() -> Iterator[tuple[dict[str, str] | None, str]]:
    """The environment that leads to a running store, and its name; or None, and why there is none."""
    from tests.s3 import rgw
    from tests.s3.stores import ObjectStore

    with contextlib.ExitStack() as stack:
        try:
            gateway = stack.enter_context(rgw.serve())
        except rgw.NotStartedError as err:
            yield None, f"Ceph's gateway does not run here: {err}"
            return
        store = ObjectStore(kind="rgw", name=f"Ceph RGW {gateway.version}", endpoint=gateway.endpoint, pids={})
        store.client.create_bucket(Bucket=BUCKET)
        yield store.environment, store.name


# ---- in the rank


@dataclass(frozen=True, kw_only=True)
class _Contestant:
    upload: Callable[[str], None]
    download: Callable[[str], None]


def measure(rank: Rank, *, size: int, repeat: int, environment: dict[str, str]) -> dict[str, list[dict[str, float]]]:
    """Wall and CPU seconds of each operation, by contestant and repetition. What comes back is compared each time."""
    os.environ.update(environment)
    warnings.filterwarnings("ignore")  # DCP's advice is not about what is measured here
    torch.manual_seed(0)
    sizes = [min(TENSOR, size - at) for at in range(0, size, TENSOR)]
    state = {f"t{i}": torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
    found = {name: torch.zeros_like(t) for name, t in state.items()}
    samples: dict[str, list[dict[str, float]]] = {}
    for repetition in range(repeat + 1):
        for name, contestant in _contestants(state, found, rank.groups[1]).items():
            url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
            sample = {}
            for op in OPERATIONS:
                gc.collect()
                cost = cost_of(partial(_act, getattr(contestant, op), url))
                sample |= {f"{op} wall": cost.ended - cost.began, f"{op} cpu": cost.cpu}
            for tensor in state:
                if not torch.equal(found[tensor], state[tensor]):
                    raise ValueError(f"{name} did not bring back what it took")
                found[tensor].zero_()
            _remove(url)
            if repetition > 0:
                samples.setdefault(name, []).append(sample)
    return samples


def _act(act: Callable[[str], None], url: str) -> dict[str, Any]:
    act(url)
    return {}


def _remove(url: str) -> None:
    backend = open_backend(url)
    for entry in list(backend.list()):
        backend.delete(entry.path)


def _contestants(state: dict[str, torch.Tensor], found: dict[str, torch.Tensor], alone: Any) -> dict[str, _Contestant]:
    def upload(url: str) -> None:
        backend = open_backend(url)
        for name, tensor in state.items():
            with backend.create(name, tensor.numel()) as writer:
                writer.write(0, [tensor.numpy().data])
                writer.commit()

    def download(url: str) -> None:
        backend = open_backend(url)
        for name, tensor in found.items():
            backend.read_into(name, 0, tensor.numpy().data)

    contestants = {
        RAW: _Contestant(upload=lambda url: _raw_upload(url, state), download=lambda url: _raw_download(url, found)),
        PORT: _Contestant(upload=upload, download=download),
        SAVE: _Contestant(
            upload=lambda url: _drop(ckpt.save(url, state, process_group=alone)),
            download=lambda url: _drop(ckpt.load(url, found, process_group=alone)),
        ),
    }
    with contextlib.suppress(ImportError):
        contestants["s3fs"] = _s3fs(state, found)
        contestants["DCP over s3fs"] = _dcp(state, found)
    return contestants


def _drop(report: object) -> None:
    del report


# ---- the client alone: a multipart upload per tensor, ranges of it back, all tensors at once


@cache
def _client() -> Any:
    import botocore.session
    from botocore.config import Config

    when = "when_required"
    config = Config(
        request_checksum_calculation=when,
        response_checksum_validation=when,
        max_pool_connections=LANES,
        s3={"payload_signing_enabled": False, "addressing_style": "path"},
    )
    return botocore.session.get_session().create_client("s3", region_name="us-east-1", config=config)


def _raw_upload(url: str, state: dict[str, torch.Tensor]) -> None:
    client, names = _client(), {name: {"Bucket": BUCKET, "Key": f"{url.rpartition('/')[2]}/{name}"} for name in state}
    with ThreadPoolExecutor(LANES) as threads:
        for name, tensor in state.items():
            upload, data = client.create_multipart_upload(**names[name])["UploadId"], tensor.numpy().data

            def send(number: int, name: str = name, upload: str = upload, data: memoryview = data) -> dict[str, Any]:
                body = bytes(data[number * PART : (number + 1) * PART])
                answer = client.upload_part(**names[name], UploadId=upload, PartNumber=number + 1, Body=body)
                return {"PartNumber": number + 1, "ETag": answer["ETag"]}

            parts = list(threads.map(send, range(-(-len(data) // PART))))
            client.complete_multipart_upload(**names[name], UploadId=upload, MultipartUpload={"Parts": parts})


def _raw_download(url: str, found: dict[str, torch.Tensor]) -> None:
    client, prefix = _client(), url.rpartition("/")[2]
    ranges = [(name, at, tensor.numpy().data[at : at + RANGE]) for name, tensor in found.items() for at in range(0, tensor.numel(), RANGE)]

    def fetch(wanted: tuple[str, int, memoryview]) -> None:
        name, at, view = wanted
        answer = client.get_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Range=f"bytes={at}-{at + len(view) - 1}")
        view[:] = answer["Body"].read()

    with ThreadPoolExecutor(LANES) as threads:
        list(threads.map(fetch, ranges))


# ---- others


def _s3fs(state: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> _Contestant:
    import s3fs

    fs = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)

    def upload(url: str) -> None:
        for name, tensor in state.items():
            fs.pipe_file(f"{url}/{name}", tensor.numpy().tobytes())

    def download(url: str) -> None:
        for name, tensor in found.items():
            tensor.numpy().data[:] = fs.cat_file(f"{url}/{name}")

    return _Contestant(upload=upload, download=download)


def _dcp(state: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> _Contestant:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    return _Contestant(
        upload=lambda url: _drop(dcp.save(state, storage_writer=FsspecWriter(url, sync_files=False), no_dist=True)),
        download=lambda url: dcp.load(found, storage_reader=FsspecReader(url), no_dist=True),
    )
