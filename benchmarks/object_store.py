"""The scenario ``s3``: the same bytes to an object store and back, by ckpt, by the client alone, and by s3fs, DCP over s3fs, boto3, obstore
and s3torchconnector where they are installed and run.

The store is Ceph's gateway as the tests start it, on the same cores: throughput is more the store's than the client's; CPU time is the
client's alone, and requests are those that the gateway counted. Without the gateway the scenario says so and measures nothing.
"""

from __future__ import annotations

import contextlib
import gc
import io
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

PART, RANGE, LANES = 16 << 20, 32 << 20, 16
"""What the clients of others are given. ckpt's own ranges are as long, and its objects of up to 64 MiB are one request."""
TENSOR = 64_000_000
BUCKET = "bench"
RAW, SIGNED, PORT, SAVE = "client alone", "client alone, bodies signed", "ckpt backend", "ckpt"
"""``SIGNED`` is the client as it comes, on a way without TLS: it protects what it sends as ckpt does on this store, with SHA-256."""


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """All contestants in turns, one process; ``place`` is not used."""
    del place
    with _store() as (environment, control, told):
        if environment is None:
            return [Finding(scenario="s3", title="left out", columns=(), rows=(), figures={}, notes=(told,))]
        found: dict[str, list[dict[str, Any]]] = pool.run(
            measure, on=1, size=settings.size, repeat=settings.repeat, environment=environment, control=control
        )[0]
        failed = {name: str(samples[0]["failed"]) for name, samples in found.items() if "failed" in samples[0]}
        found = {name: samples for name, samples in found.items() if name not in failed}
    tell(f"s3: {', '.join(found)}")
    mine = {name: medians(samples) for name, samples in found.items()}
    rows = [(name, *_cells(m, settings.size)) for name, m in mine.items()]
    raw, signed, saved = mine[RAW], mine[SIGNED], mine[SAVE]
    checks = [
        at_least(f"{op} to the store, throughput over the client alone", raw[f"{op} wall"] / saved[f"{op} wall"], 0.9) for op in OPERATIONS
    ]
    checks.append(at_most("upload, CPU over the client alone, bodies signed", saved["upload cpu"] / signed["upload cpu"], 1.3))
    checks.append(at_most("download, CPU over the client alone", saved["download cpu"] / raw["download cpu"], 0.6))
    return [
        Finding(
            scenario="s3",
            title=f"{settings.size / 1e6:,.0f} MB to {told} on the same cores, and back",
            columns=("", *OPERATIONS, *(f"{op} {what}" for what in ("CPU s/GB", "requests") for op in OPERATIONS)),
            notes=[f"{name} did not run: {why}" for name, why in failed.items()],
            rows=rows,
            figures={"medians": mine, "samples": found},
            checks=checks,
        )
    ]


OPERATIONS = ("upload", "download")


def _cells(found: dict[str, float], size: int) -> list[str]:
    speeds = [f"{size / found[f'{op} wall'] / 1e6:,.0f} MB/s" for op in OPERATIONS]
    return (
        speeds + [f"{found[f'{op} cpu'] / size * 1e9:.2f}" for op in OPERATIONS] + [f"{found[f'{op} requests']:.0f}" for op in OPERATIONS]
    )


@contextlib.contextmanager
def _store() -> Iterator[tuple[dict[str, str] | None, str, str]]:
    """The environment that leads to a running store, the socket that tells about it, and its name; or None, and why there is none."""
    from tests.s3 import rgw
    from tests.s3.stores import ObjectStore

    with contextlib.ExitStack() as stack:
        try:
            gateway = stack.enter_context(rgw.serve())
        except rgw.NotStartedError as err:
            yield None, "", f"Ceph's gateway does not run here: {err}"
            return
        store = ObjectStore(kind="rgw", name=f"Ceph RGW {gateway.version}", endpoint=gateway.endpoint, pids={})
        store.client.create_bucket(Bucket=BUCKET)
        yield store.environment, gateway.control, store.name


# ---- in the rank


@dataclass(frozen=True, kw_only=True)
class _Contestant:
    upload: Callable[[str], None]
    download: Callable[[str], None]


def measure(rank: Rank, *, size: int, repeat: int, environment: dict[str, str], control: str) -> dict[str, list[dict[str, Any]]]:
    """Wall and CPU seconds and requests of each operation, by contestant and repetition. What comes back is compared each time. Of one that
    fails in the first repetition, why."""
    from tests.s3.rgw import requests

    os.environ.update(environment)
    warnings.filterwarnings("ignore")  # DCP's advice is not about what is measured here
    torch.manual_seed(0)
    sizes = [min(TENSOR, size - at) for at in range(0, size, TENSOR)]
    state = {f"t{i}": torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
    found = {name: torch.zeros_like(t) for name, t in state.items()}
    samples: dict[str, list[dict[str, Any]]] = {}
    for repetition in range(repeat + 1):
        for name, contestant in _contestants(state, found, rank.groups[1]).items():
            if "failed" in samples.get(name, [{}])[0]:
                continue
            url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
            sample = {}
            try:
                for op in OPERATIONS:
                    gc.collect()
                    before = requests(control)
                    cost = cost_of(partial(_act, getattr(contestant, op), url))
                    sample |= {f"{op} wall": cost.ended - cost.began, f"{op} cpu": cost.cpu, f"{op} requests": requests(control) - before}
            except Exception as err:  # another's, whatever it raises; ours has to run
                if repetition > 0 or name in (RAW, SIGNED, PORT, SAVE):
                    raise
                samples[name] = [{"failed": f"{type(err).__name__}: {err}".splitlines()[0]}]
                continue
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
    for entry in list(backend.list_prefix()):
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
        SIGNED: _Contestant(
            upload=lambda url: _raw_upload(url, state, signed=True), download=lambda url: _raw_download(url, found, signed=True)
        ),
        PORT: _Contestant(upload=upload, download=download),
        SAVE: _Contestant(
            upload=lambda url: _drop(ckpt.save(url, state, process_group=alone)),
            download=lambda url: _drop(ckpt.load(url, found, process_group=alone)),
        ),
    }
    others = {"s3fs": _s3fs, "DCP over s3fs": _dcp, "boto3": _boto3, "obstore": _obstore, "s3torchconnector": _s3torchconnector}
    for name, make in others.items():
        with contextlib.suppress(ImportError):
            contestants[name] = make(state, found)
    return contestants


def _drop(report: object) -> None:
    del report


# ---- the client alone: a multipart upload per tensor, ranges of it back, all tensors at once


@cache
def _client(*, signed: bool = False) -> Any:
    import botocore.session
    from botocore.config import Config

    when = "when_required"
    config = Config(
        request_checksum_calculation=when,
        response_checksum_validation=when,
        max_pool_connections=LANES,
        s3={"payload_signing_enabled": signed, "addressing_style": "path"},
    )
    return botocore.session.get_session().create_client("s3", region_name="us-east-1", config=config)


def _raw_upload(url: str, state: dict[str, torch.Tensor], *, signed: bool = False) -> None:
    client, names = _client(signed=signed), {name: {"Bucket": BUCKET, "Key": f"{url.rpartition('/')[2]}/{name}"} for name in state}
    with ThreadPoolExecutor(LANES) as threads:
        for name, tensor in state.items():
            upload, data = client.create_multipart_upload(**names[name])["UploadId"], tensor.numpy().data

            def send(number: int, name: str = name, upload: str = upload, data: memoryview = data) -> dict[str, Any]:
                body = bytes(data[number * PART : (number + 1) * PART])
                answer = client.upload_part(**names[name], UploadId=upload, PartNumber=number + 1, Body=body)
                return {"PartNumber": number + 1, "ETag": answer["ETag"]}

            parts = list(threads.map(send, range(-(-len(data) // PART))))
            client.complete_multipart_upload(**names[name], UploadId=upload, MultipartUpload={"Parts": parts})


def _raw_download(url: str, found: dict[str, torch.Tensor], *, signed: bool = False) -> None:
    client, prefix = _client(signed=signed), url.rpartition("/")[2]
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
    import s3fs  # noqa: F401  what fsspec opens these URLs with
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    return _Contestant(
        upload=lambda url: _drop(dcp.save(state, storage_writer=FsspecWriter(url, sync_files=False), no_dist=True)),
        download=lambda url: dcp.load(found, storage_reader=FsspecReader(url), no_dist=True),
    )


def _boto3(state: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> _Contestant:
    """Its transfer manager, with parts as ours and without checksums of its own."""
    import boto3  # noqa: F401  s3transfer comes with it
    from s3transfer.manager import TransferConfig, TransferManager

    config = TransferConfig(multipart_chunksize=PART, multipart_threshold=PART, max_request_concurrency=LANES)

    def upload(url: str) -> None:
        with TransferManager(_client(), config) as manager:
            for name, tensor in state.items():
                manager.upload(io.BytesIO(tensor.numpy().data), BUCKET, f"{url.rpartition('/')[2]}/{name}")

    def download(url: str) -> None:
        files = {name: io.BytesIO() for name in found}
        with TransferManager(_client(), config) as manager:
            for name, file in files.items():
                manager.download(BUCKET, f"{url.rpartition('/')[2]}/{name}", file)
        for name, tensor in found.items():
            tensor.numpy().data[:] = files[name].getbuffer()

    return _Contestant(upload=upload, download=download)


def _obstore(state: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> _Contestant:
    """Bodies unsigned; ranges as ours; it gives each answer in memory of its own."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        region="us-east-1",
        unsigned_payload=True,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def upload(url: str) -> None:
        for name, tensor in state.items():
            obstore.put(store, f"{url.rpartition('/')[2]}/{name}", tensor.numpy().data, chunk_size=PART, max_concurrency=LANES)

    def download(url: str) -> None:
        ranges = [(name, at, min(at + RANGE, t.numel())) for name, t in found.items() for at in range(0, t.numel(), RANGE)]

        def fetch(wanted: tuple[str, int, int]) -> None:
            name, start, end = wanted
            found[name].numpy().data[start:end] = memoryview(
                obstore.get_range(store, f"{url.rpartition('/')[2]}/{name}", start=start, end=end)
            )

        with ThreadPoolExecutor(LANES) as threads:
            list(threads.map(fetch, ranges))

    return _Contestant(upload=upload, download=download)


def _s3torchconnector(state: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> _Contestant:
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    config = S3ClientConfig(force_path_style=True)
    checkpoint = S3Checkpoint(region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)

    def upload(url: str) -> None:
        with checkpoint.writer(f"{url}/state") as writer:
            torch.save(state, writer)

    def download(url: str) -> None:
        with checkpoint.reader(f"{url}/state") as reader:
            for name, tensor in torch.load(reader).items():
                found[name].copy_(tensor)

    return _Contestant(upload=upload, download=download)
