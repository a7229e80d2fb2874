"""One bit flips on the way down, and what is stored is right: nothing is given up, nothing wrong is given, and the log says so."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import convert
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.copy import copy_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import CorruptError
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import wrap_backends
from tests.failures.damage import flip, header
from tests.failures.flips import Flip
from tests.failures.states import blank, number_of, state, stored

RIGHT = "read again, and right"


def files_of(directory: Path) -> dict[str, Path]:
    """The files of a checkpoint that a load reads, by kind."""
    (data,) = (directory / "data").iterdir()
    index = {p.name: p for d in directory.glob("index-*") for p in d.iterdir() if p.name != "spans.json"}
    return {"record": directory / "checkpoint.json", **index, "header": data, "chunks": data}


def place(chance: random.Random, kind: str, file: Path) -> int:
    """A byte of a file of this kind that is read."""
    data = file.read_bytes()
    if kind not in ("header", "chunks"):
        return chance.randrange(len(data))
    entries, start = header(data)
    if kind == "header":
        return chance.randrange(start)
    spans = [e["data_offsets"] for name, e in entries.items() if name != "__metadata__" and e["data_offsets"][0] < e["data_offsets"][1]]
    return start + chance.randrange(*chance.choice(spans))


@pytest.mark.parametrize("rounds", [28, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_no_restore_goes_back_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture, rounds: int) -> None:
    run = str(tmp_path / "run")
    for step in (1, 2):
        ckpt.save(f"{run}/step-{step}", state(step))
    files = files_of(tmp_path / "run" / "step-2")
    assert len(files) == 7
    chance = random.Random(rounds)
    restored: Counter[int | None] = Counter()
    for number in range(rounds):
        kind, file = list(files.items())[number % 7]
        at = place(chance, kind, file)
        flipping = Flip(str(file), at, chance.randrange(8))
        target = blank()
        with wrap_backends(flipping.wrap), ckpt.Checkpointer(run) as checkpointer:
            restored[checkpointer.restore(target, job=ckpt.Job(threads=1 + number % 3))] += 1
        assert flipping.happened == 1, f"byte {at} of {file} was not read"
        assert number_of(target) == 2
    assert restored == {2: rounds}
    assert sum(RIGHT in r.message for r in caplog.records) == rounds and not any("passed over" in r.message for r in caplog.records)


def test_what_is_damaged_in_the_storage_is_passed_over_as_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        ckpt.save(str(tmp_path / f"step-{step}"), state(step))
    file = files_of(tmp_path / "step-2")["chunks"]
    flip(file, place(random.Random(1), "chunks", file))
    target = blank()
    with ckpt.Checkpointer(str(tmp_path)) as checkpointer:
        assert checkpointer.restore(target) == 1
    assert number_of(target) == 1
    (warning,) = (r.message for r in caplog.records if "passed over" in r.message)
    assert "is damaged: its XXH3-64 digest is" in warning and RIGHT not in caplog.text


def test_bytes_that_differ_each_time_are_not_read_for_ever(tmp_path: Path) -> None:
    ckpt.save(str(tmp_path / "c"), {"w": torch.arange(100_000)})
    file = files_of(tmp_path / "c")["chunks"]
    always = Flip(str(file), file.stat().st_size - 1, times=1000)
    with wrap_backends(always.wrap), pytest.raises(CorruptError, match="is damaged: its XXH3-64 digest is"):
        ckpt.load(str(tmp_path / "c"), {"w": torch.zeros(100_000, dtype=torch.int64)})
    assert always.happened == 2 and always.evicted.count(str(file)) == 1  # the same twice: that is what is stored


# --------------------------------------------------------------------------------------------------- whoever reads chunks

LARGE = 3_000_000


def tensors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    large, small = torch.randn(LARGE, generator=made), [torch.randn(60, 7, generator=made) for _ in range(3)]
    return {"large": large, **{f"small{i}": t for i, t in enumerate(small)}, "zeros": torch.zeros(50_000)}


def same(found: dict[str, Any]) -> bool:
    return all(torch.equal(torch.as_tensor(found[name]).to(t.dtype), t) for name, t in tensors().items())


def _load(url: str, target: Path) -> bool:
    found = {name: torch.full_like(t, 9) for name, t in tensors().items()}
    report = ckpt.load(url, found)
    return same(found) and report.bytes_unverified == 0


def _load_cast(url: str, target: Path) -> bool:
    """Through memory of its own, piece by piece."""
    found = {name: torch.full_like(t, 9, dtype=torch.float64) for name, t in tensors().items()}
    ckpt.load(url, found, cast=True)
    return same(found)


def _load_strided(url: str, target: Path) -> bool:
    found = {name: torch.full((*t.shape, 2), 9.0)[..., 1] for name, t in tensors().items()}
    ckpt.load(url, found)
    return same(found)


def _open(url: str, target: Path) -> bool:
    view = ckpt.open(url)
    return same({name: view[name].read() for name in view})


def _verify(url: str, target: Path) -> bool:
    return verify(url).ok


def _copy(url: str, target: Path) -> bool:
    copy_checkpoint(url, str(target))
    return _open(str(target), target) and verify(str(target)).ok


def _native(url: str, target: Path) -> bool:
    convert(url, str(target), to="native", verify=True)
    return _open(str(target), target) and verify(str(target)).ok


def _torch(url: str, target: Path) -> bool:
    convert(url, f"{target}.pt", to="torch", verify=True)
    return same(torch.load(f"{target}.pt", weights_only=True))


def _import(url: str, target: Path) -> bool:
    import_checkpoint(url, str(target), digest=True)
    return _open(str(target), target) and verify(str(target)).ok


READERS: list[Callable[[str, Path], bool]] = [_load, _load_cast, _load_strided, _open, _verify, _copy, _native, _torch, _import]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    root = tmp_path_factory.mktemp("saved")
    for codec in (None, "zstd"):
        ckpt.save(str(root / str(codec)), tensors(), codec=codec)
    return {codec: root / str(codec) for codec in (None, "zstd")}


@pytest.mark.parametrize(
    ("codec", "reader"), [(codec, reader) for codec in (None, "zstd") for reader in READERS if codec is None or reader is not _import]
)
def test_chunks(saved: dict[str | None, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, codec: str | None, reader: Any) -> None:
    directory = saved[codec]
    file = files_of(directory)["chunks"]
    entries, start = header(file.read_bytes())
    for name in entries.keys() - {"__metadata__"}:
        begin, end = entries[name]["data_offsets"]
        flipping = Flip(str(file), start + (begin + end) // 2)
        with wrap_backends(flipping.wrap):
            assert reader(str(directory), tmp_path / f"{begin}"), name
        assert flipping.happened == 1 and flipping.evicted.count(str(file)) == 1
        assert caplog.text.count(RIGHT) == 1 and f"{file.name}, bytes" in caplog.text
        caplog.clear()


KINDS = ("record", "tensors.arrow", "grids.arrow", "files.arrow", "state.json", "header")
OTHERS = [(reader, kind) for reader in (_verify, _copy, _native, _open) for kind in KINDS]


@pytest.mark.parametrize(("reader", "kind"), [*OTHERS, (ckpt.list_steps, "record")])
def test_all_else(saved: dict[str | None, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, reader: Any) -> None:
    directory = saved[None]
    file = files_of(directory)[kind]
    flipping = Flip(str(file), 60)
    with wrap_backends(flipping.wrap):
        if reader is not ckpt.list_steps:
            assert reader(str(directory), tmp_path / "made")
        else:
            assert [s.committed for s in ckpt.list_steps(str(directory))] == [True]
    assert flipping.happened == 1 and caplog.text.count(RIGHT) == 1


def test_a_save_over_a_record_that_is_read_wrong(tmp_path: Path) -> None:
    """What a save replaces is compared byte for byte."""
    url = str(tmp_path / "c")
    ckpt.save(url, state(1))
    flipping = Flip(f"{url}/checkpoint.json", 60)
    with wrap_backends(flipping.wrap):
        ckpt.save(url, state(2))
    assert flipping.happened == 1 and stored(url) == 2


# ------------------------------------------------------------------------------------------------------- other formats


def test_foreign_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a checksum or the structure shows it: the pickle and the directory of an archive, the header of a safetensors file."""
    from safetensors.torch import save_file

    torch.save({"a": torch.arange(30_000), "n": 5}, tmp_path / "m.pt")
    save_file({"a": torch.arange(30_000)}, tmp_path / "m.safetensors")
    pt, st = (tmp_path / "m.pt").read_bytes(), (tmp_path / "m.safetensors").read_bytes()
    places = [("m.pt", 0), ("m.pt", pt.index(b"collections") + 3), ("m.pt", pt.index(b"PK\1\2"))]
    places += [("m.safetensors", 0), ("m.safetensors", 8), ("m.safetensors", st.index(b"I64"))]
    for name, at in places:
        caplog.clear()
        for skip in range(9):  # formats that do not recognise a file read its beginning too
            flipping = Flip(f"{tmp_path}/{name}", at, skip=skip)
            with wrap_backends(flipping.wrap):
                found = ckpt.open(f"{tmp_path}/{name}")["a"].read()
            assert torch.equal(found, torch.arange(30_000)), (name, at)
            if not flipping.happened:
                break
        assert RIGHT in caplog.text and skip, (name, at)


def test_verify_of_archives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"a": torch.arange(30_000)}, tmp_path / "m.pt")
    (extent,) = (lambda c: c.extents(c.tensors["a"], [0]))(open_catalog(f"{tmp_path}/m.pt"))
    flipping = Flip(f"{tmp_path}/m.pt", extent.offset + 100)
    with wrap_backends(flipping.wrap):
        assert verify(f"{tmp_path}/m.pt").ok
    assert flipping.happened == 1 and RIGHT in caplog.text
