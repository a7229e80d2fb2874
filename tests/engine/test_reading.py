"""Whatever is stored arrives bit by bit, by every way that a chunk can take into memory; and a changed byte is found on each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.catalog import Catalog, Extent, Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.engine.verify import verify
from ckpt.errors import CorruptError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.inprocess import InProcessBackend
from ckpt.io_backends.registry import open_backend
from ckpt.plan.layout.geometry import Box
from tests.api.checked import empty_directory
from tests.box_strategies import boxes_in
from tests.engine.reading import SIZES, WAYS, Target, limits, load, targets_of
from tests.formats import native_sample
from tests.formats.native_sample import Sample, coded_samples, sample, samples, save, two_ranks
from tests.pairwise import pairwise

MODES = ("full", "partial", "off")


@pytest.fixture
def place() -> Iterator[str]:
    with empty_directory() as path:
        yield path


@pytest.fixture(params=SIZES)
def sizes(request: pytest.FixtureRequest) -> Iterator[None]:
    with limits(request.param):
        yield


# ------------------------------------------------------------------------------------------------------------ bit by bit


@settings(max_examples=60)
@given(st.data(), samples(), st.sampled_from(MODES), st.sampled_from(list(SIZES)), st.integers(1, 2))
def test_any_boxes_of_anything(data: st.DataObject, stored: list[Sample], mode: Any, kind: str, spread: int) -> None:
    backend = InProcessBackend("inprocess://" + "reading")
    for path in [e.path for e in backend.list_prefix("")]:
        backend.delete(path)
    save(backend, stored)
    targets = [Target(s, [box], spread) for s in stored for box in data.draw(st.lists(boxes_in(s.shape), min_size=1, max_size=3))]
    with limits(kind):
        done = load(NativeCatalog(backend), targets, mode)
    for target in targets:
        target.check()
    assert done.bytes_needed == sum(h.memory.nbytes for t in targets for h in t.local.parts)
    if mode == "off":
        assert done.fetch.verified == 0
    if mode == "full":
        assert done.fetch.verified == done.fetch.read


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(
    ("sizes", "codec", "way", "mode"), pairwise(list(SIZES), [None, "zstd", "planes-zstd"], list(WAYS), MODES), indirect=["sizes"]
)
def test_every_way(place: str, way: str, mode: Any, codec: str | None) -> None:
    stored = two_ranks() if codec is None else coded_samples()
    save(open_backend(place), stored, codec=codec)
    catalog = open_catalog(place)
    targets = targets_of(stored, way)
    done = load(catalog, targets, mode)
    for target in targets:
        target.check()
    assert done.bytes_needed == sum(s.data.nbytes for s in stored)
    if codec is not None:
        assert any(e.codec == codec for t in catalog.tensors.values() for e in catalog.extents(t, range(len(t.grid))))


@pytest.mark.parametrize("codec", ["zstd", "planes-zstd"])
def test_coded_tensors_can_be_looked_into(place: str, codec: str) -> None:
    import ckpt

    stored = coded_samples()[0]
    save(open_backend(place), [stored], codec=codec)
    found = ckpt.open(place)[stored.name][20:70, 3:9]
    assert found.contiguous().view(torch.uint8).numpy().tobytes() == stored.data[20:70, 3:9].tobytes()


def test_a_chunk_that_several_targets_want_is_read_once(place: str) -> None:
    stored = [sample("a", "float32", (40,)), sample("b", "int8", (100,))]
    save(open_backend(place), stored)
    targets = [*targets_of(stored, "whole"), *targets_of(stored, "whole")]
    done = load(open_catalog(place), targets)
    for target in targets:
        target.check()
    assert (done.fetch.read, done.bytes_needed) == (260, 520)


def test_many_small_tensors(place: str) -> None:
    stored = [sample(f"t{i:04d}", ("float32", "int8", "float64")[i % 3], (1 + i % 7,)) for i in range(700)]
    save(open_backend(place), stored)
    for kind in SIZES:
        targets = targets_of(stored, "whole")
        with limits(kind):
            done = load(open_catalog(place), targets)
        for target in targets:
            target.check()
        assert done.fetch.read == done.bytes_needed == sum(s.data.nbytes for s in stored)


class Foreign:
    """A catalog of a format that keeps no digests."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)

    def extents(self, entry: TensorEntry, chunks: Any) -> list[Extent]:
        return [e._replace(digest=None) for e in self._catalog.extents(entry, chunks)]

    def extents_of(self, wanted: Any) -> list[Extent]:
        return [e._replace(digest=None) for e in self._catalog.extents_of(wanted)]


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("way", WAYS)
def test_without_digests_only_what_is_needed_is_read(place: str, way: str) -> None:
    stored = [sample("w", "bfloat16", (20, 64)), sample("x", "float32", (300,))]
    save(open_backend(place), stored)
    targets = targets_of(stored, way)
    done = load(Foreign(open_catalog(place)), targets)  # type: ignore[arg-type]
    for target in targets:
        target.check()
    assert done.fetch.verified == 0
    top = Target(stored[0], [Box((0, 0), (3, 64))], 1)
    done = load(Foreign(open_catalog(place)), [top])  # type: ignore[arg-type]
    top.check()
    assert done.fetch.read == 3 * 64 * 2


def test_partial_reads_little_more_than_it_needs(place: str) -> None:
    """Half of each row, where what lies between is worth skipping."""
    stored = [sample("w", "uint8", (6, 400_000))]
    save(open_backend(place), stored)
    half = Target(stored[0], [Box((0, 200_000), (6, 200_000))], 1)
    done = load(open_catalog(place), [half], "partial")
    half.check()
    assert done.fetch.read == done.bytes_needed == 1_200_000


def test_chunks_that_are_not_aligned(place: str) -> None:
    """A file whose chunks begin anywhere: writers should align them, but need not."""
    stored = [sample("a", "int8", (3,)), sample("b", "float64", (5, 4)), sample("c", "complex128", (3,))]
    save(open_backend(place), stored)
    catalog = open_catalog(place)
    data = {s.name: s.data.tobytes() for s in stored}
    path = "odd"
    with catalog.backend.create(path, 300) as writer:
        at, extents = 1, {}
        for name, chunk in data.items():
            writer.write(at, [chunk])
            extents[name] = Extent(path, at, len(chunk), None)
            at += len(chunk)
        writer.write(0, [b"?"])
        writer.write(at, [bytes(300 - at)])
        writer.commit()

    class Odd(Foreign):
        def extents(self, entry: TensorEntry, chunks: Any) -> list[Extent]:
            return [extents[entry.name] for _ in chunks]

        def extents_of(self, wanted: Any) -> list[Extent]:
            return [extents[entry.name] for entry, _ in wanted]

    for way in WAYS:
        targets = targets_of(stored, way)
        load(Odd(catalog), targets)  # type: ignore[arg-type]
        for target in targets:
            target.check()


# ---------------------------------------------------------------------------------------------------------------- damage


@contextmanager
def flipped(backend: Any, path: str, at: int) -> Iterator[None]:
    file = f"{backend.url}/{path}"
    with open(file, "r+b") as f:
        f.seek(at)
        old = f.read(1)
        f.seek(at)
        f.write(bytes([old[0] ^ 0x10]))
    try:
        yield
    finally:
        with open(file, "r+b") as f:
            f.seek(at)
            f.write(old)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(("sizes", "codec", "way"), pairwise(list(SIZES), [None, "zstd", "planes-zstd"], list(WAYS)), indirect=["sizes"])
def test_a_changed_byte_is_found_on_every_way(place: str, way: str, codec: str | None) -> None:
    stored = (
        coded_samples()[:6] if codec is not None else [sample("w", "float32", (16, 12), [[0, 5, 16], [0, 12]]), sample("s", "int8", (9,))]
    )
    save(open_backend(place), stored, codec=codec)
    catalog = open_catalog(place)
    for entry in catalog.tensors.values():
        for number, extent in enumerate(catalog.extents(entry, range(len(entry.grid)))):
            for at in {extent.offset, extent.offset + extent.length // 2, extent.offset + extent.length - 1}:
                with flipped(catalog.backend, extent.path, at):
                    with pytest.raises(CorruptError) as caught:
                        load(open_catalog(place), targets_of(stored, way))
                    assert f"tensor {entry.name} is damaged" in str(caught.value)
                    assert str(entry.grid.box(number)) in str(caught.value)
                    found = verify(place).problems
                    assert [(p.kind, p.tensor, p.box) for p in found] == [("digest", entry.name, entry.grid.box(number))]
    load(open_catalog(place), targets_of(stored, way))
    assert verify(place).ok


@pytest.mark.parametrize("way", WAYS)
def test_a_coded_chunk_that_cannot_be_decoded(place: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest is right: somebody's encoder was wrong."""
    stored = coded_samples()[1:2]
    monkeypatch.setattr(native_sample, "encode", lambda codec, data, itemsize: memoryview(b"nonsense" * 9))
    save(open_backend(place), stored, codec="zstd")
    with pytest.raises(CorruptError, match="whole is damaged"):
        load(open_catalog(place), targets_of(stored, way))
    (problem,) = verify(place).problems
    assert (problem.kind, problem.tensor) == ("codec", "whole")


def test_a_coded_chunk_of_absurd_size_is_refused_before_memory_is_asked_for(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index may claim a tensor of any size; its only chunk has a few bytes."""
    stored = coded_samples()[1:2]
    save(open_backend(place), stored, codec="zstd")
    catalog = open_catalog(place)
    entry = catalog.tensors["whole"]
    claimed = TensorEntry(
        name="whole", dtype=DTYPES["float32"], shape=(1 << 40, 50), grid=Grid(cuts=((0, 1 << 40), (0, 50)), files=entry.grid.files)
    )
    with pytest.raises(CorruptError, match="is listed as coded"):
        catalog.extents(claimed, [0])


def test_what_is_remembered_of_one_checkpoint_is_not_believed_of_another() -> None:
    """Two steps with equal tables: the second one's bytes and digests are its own."""
    with empty_directory() as root:
        first = [sample("w", "float32", (30, 7)), sample("v", "int8", (5,))]
        second = [Sample(name=s.name, dtype=s.dtype, data=s.data[::-1].copy(), cuts=s.cuts, ranks=s.ranks) for s in first]
        for step, stored in (("a", first), ("b", second), ("a", first)):
            save_once(f"{root}/{step}", stored)
            targets = targets_of(stored, "whole")
            load(open_catalog(f"{root}/{step}"), targets)
            for target in targets:
                target.check()
        extent = open_catalog(f"{root}/b").extents(open_catalog(f"{root}/b").tensors["w"], [0])[0]
        with flipped(open_backend(f"{root}/b"), extent.path, extent.offset + 7), pytest.raises(CorruptError, match="tensor w"):
            load(open_catalog(f"{root}/b"), targets_of(second, "whole"))


def save_once(url: str, stored: Sequence[Sample]) -> None:
    backend = open_backend(url)
    if not list(backend.list_prefix("")):
        save(backend, stored)
