"""Virtual checkpoints: what is loaded from them is what lies in the files that they point into, and no file that changed is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt
from ckpt import convert, settings
from ckpt.catalog import Catalog
from ckpt.converters import importer, references
from ckpt.converters.comparison import compare
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import AccessError, ConflictError, CorruptError, CoverageError, NamesError, UsageError
from ckpt.formats.native.paths import EXTENTS
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.posix_backend import PosixBackend
from ckpt.io_backends.protocol import IOHints
from ckpt.plan import views
from ckpt.plan.views import LogicalTensor

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    made = {f"w{i}": (torch.randn(5, 7, 3) * 50).to(d) for i, d in enumerate(DTYPES)}
    return {**made, "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "row": torch.arange(11)}


@pytest.fixture
def source(tmp_path: Path) -> str:
    ckpt.save(str(tmp_path / "source"), {**state(), "step": 7})
    return str(tmp_path / "source")


def data_file(source: str) -> Path:
    (found,) = (Path(source) / "data").iterdir()
    return found


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (found, expected)]
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(*raw)


@pytest.mark.parametrize("digest", [False, True])
@pytest.mark.parametrize("max_chunk", [64 << 20, 40])
def test_a_virtual_checkpoint_loads_and_opens_as_any_other(
    source: str, tmp_path: Path, digest: bool, max_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "CHUNK", max_chunk)
    url = str(tmp_path / "virtual")
    report = import_checkpoint(source, url, digest=digest)
    assert (report.tensors, report.sources, report.format) == (8, 1, "ckpt 1")
    fresh = {name: torch.zeros_like(t) for name, t in state().items()} | {"step": 0}
    ckpt.load(url, fresh)
    assert fresh.pop("step") == 7
    view = ckpt.open(url)
    for name, expected in state().items():
        assert same(fresh[name], expected), name
        assert same(view[name][...], expected), name
    assert same(view["w0"][1:4, 2, ::2], state()["w0"][1:4, 2, ::2])
    found = verify(url)
    assert found.ok
    own = max_chunk == 64 << 20  # whole chunks keep the digests that they have
    assert (found.undigested == 0) == (digest or own)
    size = sum(f.stat().st_size for f in Path(url).rglob("*") if f.is_file())
    assert size < 20_000


def cut_apart(shapes: dict[str, tuple[int, ...]]) -> dict[str, LogicalTensor]:
    """Views of all kinds: a column, a transposed tensor, a stack, an interleaving, a permuted part."""
    whole = {name: views.whole(name, shape) for name, shape in shapes.items() if name.startswith("w")}
    left, middle, right = views.split(whole["w0"], 1, [2, 4, 1])
    return {
        "left": left,
        "middle": views.transpose(middle, [2, 0, 1]),
        "right": right,
        "stacked": views.stack([whole["w1"]] * 2, 1),
        "mixed": views.interleave([whole["w2"], whole["w2"]], 1, 7),
        "turned": views.transpose(whole["w3"], [1, 2, 0]),
        "w4": views.unstack(whole["w4"], 2)[1],
    }


@pytest.mark.parametrize("max_chunk", [64 << 20, 24])
def test_views_are_read_where_they_lie(source: str, tmp_path: Path, max_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "CHUNK", max_chunk)
    url = str(tmp_path / "virtual")
    import_checkpoint(source, url, views=cut_apart, digest=True)  # type: ignore[arg-type]
    w = state()
    expected = {
        "left": w["w0"][:, :2],
        "middle": w["w0"][:, 2:6].permute(2, 0, 1),
        "right": w["w0"][:, 6:],
        "stacked": torch.stack([w["w1"]] * 2, 1),
        "mixed": torch.stack([w["w2"], w["w2"]], 2).reshape(5, 14, 3),
        "turned": w["w3"].permute(1, 2, 0),
        "w4": w["w4"].view(torch.uint8)[..., 1].view(torch.float8_e4m3fn),
    }
    fresh = {name: torch.zeros_like(t.contiguous()) for name, t in expected.items()} | {"step": 0}
    ckpt.load(url, fresh)
    assert fresh.pop("step") == 7
    opened = ckpt.open(url)
    for name, tensor in expected.items():
        assert same(fresh[name], tensor), name
        assert same(opened[name][1:], tensor[1:]), name
    assert verify(url).ok and verify(url).undigested == 0


@pytest.mark.parametrize("max_chunk", [64 << 20, 100])
def test_filling_is_zeros(source: str, tmp_path: Path, max_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the ends of two axes, of every dtype; also as a copy and a conversion have it."""
    monkeypatch.setattr(settings, "CHUNK", max_chunk)
    url, copy = str(tmp_path / "virtual"), str(tmp_path / "copy")

    def filled(shapes: dict[str, tuple[int, ...]]) -> dict[str, LogicalTensor]:
        whole = {f"w{i}": views.whole(f"w{i}", shapes[f"w{i}"]) for i in range(len(DTYPES))}
        return {name: views.padded(views.padded(view, 0, 9), 2, 4) for name, view in whole.items()}

    import_checkpoint(source, url, views=filled, digest=True)  # type: ignore[arg-type]
    convert(url, copy, to="native")
    for place in (url, copy):
        assert verify(place).ok and verify(place).undigested == 0
        fresh = {f"w{i}": torch.ones(9, 7, 4, dtype=torch.float32).to(d) for i, d in enumerate(DTYPES)}
        ckpt.load(place, fresh, only="w*")
        for name, found in fresh.items():
            expected = torch.zeros(9, 7, 4).to(found.dtype)
            expected[:5, :, :3] = state()[name]
            assert same(found, expected), name
            assert same(ckpt.open(place)[name][3:8, 1:], expected[3:5, 1:, :3]), name  # what is filled at the ends is padding
    assert compare(url, copy).same


def test_filling_of_a_file_without_zeros(tmp_path: Path) -> None:
    """Eight bytes of a double: what a safetensors file begins with has only five."""
    url = str(tmp_path / "m.safetensors")
    save_file({"w": torch.ones(3, dtype=torch.float64)}, url)
    with pytest.raises(CoverageError, match=r"w\[3:4\] would be filling"):
        import_checkpoint(url, str(tmp_path / "v"), views=lambda shapes: {"w": views.padded(views.whole("w", shapes["w"]), 0, 4)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [3, 4, 6 << 18])
def test_several_chunks_over_the_same_bytes(tmp_path: Path, rows: int, dtype: torch.dtype) -> None:
    """In another order, in other places of a tensor; so short that they are read together, and longer than one read."""
    source, url = str(tmp_path / "source"), str(tmp_path / "virtual")
    tensor = torch.arange(rows * 3.0).reshape(rows, 3)
    ckpt.save(source, {"w": tensor})

    def made(shapes: Mapping[str, Sequence[int]]) -> dict[str, LogicalTensor]:
        whole = views.whole("w", shapes["w"])
        return {
            "a": whole,
            "turned": views.transpose(whole, [1, 0]),
            "stacked": views.stack([whole] * 2, 1),
            "twice": views.concat([whole] * 2, 0),
        }

    import_checkpoint(source, url, views=made)
    expected = {"a": tensor, "turned": tensor.T, "stacked": torch.stack([tensor] * 2, 1), "twice": torch.cat([tensor] * 2)}
    fresh = {name: torch.zeros(t.shape, dtype=dtype) for name, t in expected.items()}
    ckpt.load(url, fresh, cast=True)
    for name, t in expected.items():
        assert torch.equal(fresh[name], t.to(dtype)), name


def test_tied_tensors_stay_tied_where_both_are_taken(tmp_path: Path) -> None:
    source = str(tmp_path / "source")
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3, bias=False), "b": torch.nn.Linear(2, 3, bias=False)})
    model["b"].weight = model["a"].weight
    ckpt.save(source, {"m": model})
    for number, (only, alias) in enumerate([((), "m.a.weight"), (("m.b.*",), None)]):
        made = import_checkpoint(source, str(tmp_path / f"v{number}"), only=only)
        assert open_catalog(made.url).tensors["m.b.weight"].alias == alias
        assert same(ckpt.open(made.url)["m.b.weight"][...], model["a"].weight.detach())
        assert verify(made.url).ok


@pytest.mark.parametrize("to", ["import", "native"])
def test_a_name_that_means_another_tensor_now_ties_nothing(tmp_path: Path, to: str) -> None:
    source, made = str(tmp_path / "source"), str(tmp_path / "made")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in "abc"})
    model["b"].weight = model["a"].weight
    ckpt.save(source, {"m": model})

    def other(shapes: Mapping[str, Sequence[int]]) -> dict[str, LogicalTensor]:
        return {"m.b.weight": views.whole("m.b.weight", (2, 2)), "m.a.weight": views.whole("m.c.weight", (2, 2))}

    if to == "import":
        import_checkpoint(source, made, views=other)
    else:
        convert(source, made, to="native", views=other)
    assert same(ckpt.open(made)["m.b.weight"][...], model["a"].weight.detach())
    assert same(ckpt.open(made)["m.a.weight"][...], model["c"].weight.detach())


def test_a_source_that_changed_is_not_read(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, file = str(tmp_path / "virtual"), data_file(source)
    monkeypatch.setattr(settings, "CHUNK", 64)  # parts of stored chunks, which have no digest of their own
    import_checkpoint(source, url, only=["w*"])
    data = file.read_bytes()
    os.utime(file, ns=(1, 1))
    with pytest.raises(CorruptError, match="changed after it was imported"):
        ckpt.open(url)["w0"][...]
    file.write_bytes(data[:-1])
    with pytest.raises(CorruptError, match=f"has {len(data) - 1} bytes; when it was imported it had {len(data)}"):
        ckpt.load(url, {"w0": torch.zeros(5, 7, 3)}, only="w0")
    file.unlink()
    with pytest.raises(CorruptError, match="is not there any more"):
        ckpt.open(url)["w0"][...]
    assert not verify(url).ok


def test_a_source_that_was_only_touched_is_read_if_its_chunks_have_digests(source: str, tmp_path: Path) -> None:
    url = str(tmp_path / "virtual")
    import_checkpoint(source, url, digest=True)
    os.utime(data_file(source), ns=(1, 1))
    assert same(ckpt.open(url)["w0"][...], state()["w0"])
    assert verify(url).ok


def test_a_flipped_byte_is_found_by_the_digests_of_the_import(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "CHUNK", 64)
    url, file = str(tmp_path / "virtual"), data_file(source)
    import_checkpoint(source, url, digest=True)
    data, at = bytearray(file.read_bytes()), file.stat()
    row = data.rindex(state()["w0"][3].numpy().tobytes())
    data[row] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))
    (problem,) = verify(url).problems
    assert problem.tensor == "w0" and problem.box is not None and problem.box.offset[0] == 3
    with pytest.raises(CorruptError, match="w0"):
        ckpt.load(url, {"w0": torch.zeros(5, 7, 3)}, only="w0")


def test_damage_that_only_checksums_tell_gets_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive has one checksum for a tensor that is pointed at in parts."""
    monkeypatch.setattr(settings, "CHUNK", 64)
    source = tmp_path / "model.pt"
    torch.save(state(), source)
    import_checkpoint(str(source), str(tmp_path / "whole"), digest=True)
    data = bytearray(source.read_bytes())
    data[data.index(state()["w0"][3].numpy().tobytes())] ^= 1
    source.write_bytes(data)
    with pytest.raises(CorruptError, match="w0"):
        import_checkpoint(str(source), str(tmp_path / "damaged"), digest=True)
    assert not (tmp_path / "damaged").exists()


def test_sources_are_read_as_their_storage_is_best_used(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_checkpoint(source, str(tmp_path / "virtual"))
    assert open_catalog(str(tmp_path / "virtual")).backend.io_hints == IOHints()
    best = IOHints(read_size=8 << 20, split_read_size=64 << 20, coalesce_gap=1 << 20, concurrency=16)
    monkeypatch.setattr(PosixBackend, "io_hints", best)
    assert open_catalog(str(tmp_path / "virtual")).backend.io_hints == best
    assert same(ckpt.open(str(tmp_path / "virtual"))["w0"][...], state()["w0"])


def test_nothing_is_written_through_a_virtual_checkpoint(source: str, tmp_path: Path) -> None:
    url = str(tmp_path / "virtual")
    import_checkpoint(source, url)
    before = data_file(source).read_bytes()
    backend = open_catalog(url).backend
    (path,) = [e.path for e in backend.list_prefix()]
    assert backend.list_dir() == ["sources/"] and backend.list_dir("sources/0") == [path.rpartition("/")[2]]
    for write in (lambda: backend.delete(path), lambda: backend.create("x", 1), backend.prepare):
        with pytest.raises(AccessError, match="only read"):
            write()
    ckpt.save(url, {"w": torch.ones(2)})  # replaces the virtual one, and leaves the sources
    assert data_file(source).read_bytes() == before
    assert verify(source).ok and set(ckpt.open(url)) == {"w"}


def test_a_source_that_changes_while_it_is_imported(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version_token = PosixBackend.version_token

    def touched(backend: object, path: str) -> str | None:
        os.utime(data_file(source), ns=(1, len(seen)))
        seen.append(path)
        return version_token(backend, path)

    seen: list[str] = []
    monkeypatch.setattr(PosixBackend, "version_token", touched)
    with pytest.raises(CorruptError, match="changed while they were imported"):
        import_checkpoint(source, str(tmp_path / "virtual"))
    assert not (tmp_path / "virtual").exists()


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Two safetensors files and one more, all written long ago."""
    root = tmp_path / "foreign"
    root.mkdir()
    for i in range(2):
        save_file({f"w{i}": torch.full((40,), float(i))}, root / f"model-{i + 1:05d}-of-00002.safetensors")
    (root / "config.json").write_text("{}")
    for path in root.iterdir():
        os.utime(path, (1e9, 1e9))
    return root


def opened(patch: pytest.MonkeyPatch, meanwhile: Callable[[], object] = lambda: None) -> list[str]:
    """The sources that are opened from now on; ``meanwhile`` is called before each is."""
    seen: list[str] = []

    def open_noted(url: str) -> Catalog:
        meanwhile()
        seen.append(url)
        return open_catalog(url)

    patch.setattr(importer, "open_catalog", open_noted)
    return seen


def test_files_that_nobody_writes_are_looked_at_once(foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = opened(monkeypatch)
    import_checkpoint(str(foreign), str(tmp_path / "once"))
    assert len(seen) == 1
    os.utime(foreign / "config.json")  # another write right now could have the same time
    import_checkpoint(str(foreign), str(tmp_path / "twice"))
    assert len(seen) == 3
    import_checkpoint(str(foreign / "model-00001-of-00002.safetensors"), str(tmp_path / "one"))
    assert len(seen) == 4


def test_a_file_that_changes_before_it_is_opened_or_after(foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there when the import began is not what was read: it is read again, and if that differs too, refused."""
    file = foreign / "model-00002-of-00002.safetensors"
    writes = iter([{"w1": torch.ones(7)}, {"w1": torch.ones(9)}])
    seen = opened(monkeypatch, lambda: save_file(next(writes), file))
    with pytest.raises(CorruptError, match="changed while they were imported"):
        import_checkpoint(str(foreign), str(tmp_path / "changing"))
    assert len(seen) == 2 and not (tmp_path / "changing").exists()
    writes = iter([{"w1": torch.ones(9)}] * 2)
    os.utime(file, (1e9, 1e9))
    times = iter([2e9, 2e9])
    seen = opened(monkeypatch, lambda: os.utime(file, (1e9, next(times))))
    import_checkpoint(str(foreign), str(tmp_path / "touched"))
    assert len(seen) == 2 and ckpt.open(str(tmp_path / "touched"))["w1"].shape == (9,)


def test_what_cannot_be_imported(source: str, tmp_path: Path) -> None:
    url = str(tmp_path / "virtual")
    with pytest.raises(NamesError, match="'z\\*'"):
        import_checkpoint(source, url, only=["z*"])
    twice = LogicalTensor(shape=(5, 7, 3), pieces=views.whole("w0", (5, 7, 3)).pieces * 2)
    with pytest.raises(CoverageError, match=r"w0\[0:5,0:7,0:3\] would be in 2 stored tensors"):
        import_checkpoint(source, url, views=lambda shapes: {"w0": twice})
    with pytest.raises(UsageError, match=r"'w0' \(float32\) and 'w2' \(int64\)"):
        import_checkpoint(source, url, views=lambda shapes: {"m": views.stack([views.whole(n, shapes[n]) for n in ("w0", "w2")], 0)})
    assert not Path(url).exists()
    import_checkpoint(source, url)
    with pytest.raises(ConflictError, match="already"):
        import_checkpoint(source, url)
    import_checkpoint(source, url, overwrite=True)
    with pytest.raises(UsageError, match="virtual checkpoint already"):
        import_checkpoint(url, str(tmp_path / "more"))


def test_a_checkpoint_does_not_point_into_itself_and_a_replaced_one_leaves_nothing(source: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="into itself"):
        import_checkpoint(source, source + "/", overwrite=True)
    assert verify(source).ok
    url = str(tmp_path / "other")
    ckpt.save(url, {"w": torch.ones(5)})
    import_checkpoint(source, url, overwrite=True)
    assert not (Path(url) / "data").exists()
    assert verify(url).ok


def test_a_transposed_tensor_is_cut_where_it_is_long(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "CHUNK", 84)
    url = str(tmp_path / "virtual")
    import_checkpoint(source, url, views=lambda s: {"t": views.transpose(views.whole("w0", s["w0"]), [2, 1, 0])})
    catalog = open_catalog(url)
    entry = catalog.tensors["t"]
    assert max(e.length for e in catalog.extents(entry, range(len(entry.grid)))) <= 84
    assert same(ckpt.open(url)["t"][...], state()["w0"].permute(2, 1, 0))


def test_coded_chunks_are_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    source, url = str(tmp_path / "source"), str(tmp_path / "virtual")
    tensor = torch.zeros(64, 64)
    ckpt.save(source, {"w": tensor}, codec="zstd")
    with pytest.raises(UsageError, match="is coded"):
        import_checkpoint(source, url, views=lambda shapes: {"w": views.part(views.whole("w", shapes["w"]), views.Box((0, 0), (32, 64)))})


def test_an_index_that_points_beyond_its_sources_is_refused(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "virtual")
    reach = references.reach
    monkeypatch.setattr(references, "_parts", lambda *a: [(b, e._replace(offset=e.offset + 10**9)) for b, e in _true_parts(*a)])
    monkeypatch.setattr(settings, "CHUNK", 16)
    with pytest.raises(ckpt.CkptError, match="cannot be"):
        import_checkpoint(source, url)
    assert reach((2, 3), (12, 4), 4) == 24
    assert not list(Path(tmp_path).rglob(EXTENTS))


_true_parts = references._parts


def test_strides_that_do_not_fit_the_bytes() -> None:
    from ckpt.formats.external_elements import gather, strided, strides_of

    codec = strided((2, 3), (4, 8), 4)
    assert codec is not None and strides_of(codec) == (4, 8)
    assert strided((2, 3), (12, 4), 4) is None and strided((1, 3), (999, 4), 4) is None
    stored, out = np.arange(6, dtype=np.int32), np.zeros(6, dtype=np.int32)
    gather(codec, memoryview(stored).cast("B")[:24], memoryview(out).cast("B"), 4)
    assert out.tolist() == [0, 2, 4, 1, 3, 5]
    with pytest.raises(CorruptError):
        gather(codec, memoryview(stored).cast("B")[:20], memoryview(out).cast("B"), 4)
