"""Which format a URL is in: by content alone."""

from __future__ import annotations

from importlib import metadata

import pytest

from ckpt.catalog import Format
from ckpt.errors import CorruptError, FormatError, NotCommittedError, NotFoundError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.registry import formats, open_catalog
from ckpt.io_backends.registry import open_backend
from tests.formats.native_sample import read, save, two_ranks


def test_native(tmp_path):
    backend = open_backend(str(tmp_path))
    save(backend, two_ranks())
    catalog = open_catalog(str(tmp_path))
    assert catalog.format == "ckpt 1"
    assert read(backend, catalog, "w").tobytes() == two_ranks()[0].data.tobytes()


def test_nothing(tmp_path):
    for url in (str(tmp_path), str(tmp_path / "absent")):
        with pytest.raises(NotFoundError) as caught:
            open_catalog(url)
        assert caught.value.where == url


def test_not_committed(tmp_path):
    save(open_backend(str(tmp_path)), two_ranks())
    (tmp_path / "checkpoint.json").unlink()
    with pytest.raises(NotCommittedError):
        open_catalog(str(tmp_path))


def test_damaged(tmp_path):
    save(open_backend(str(tmp_path)), two_ranks())
    (tmp_path / "checkpoint.json").write_bytes(b"")
    with pytest.raises(CorruptError):
        open_catalog(str(tmp_path))


def test_unknown_names_what_was_found(tmp_path):
    for n in range(12):
        (tmp_path / f"file{n:02d}").write_text("x")
    with pytest.raises(FormatError, match=r"\(ckpt, .*\).*file00, file01, .*file07 and 4 more"):
        open_catalog(str(tmp_path))


def test_several_torch_files(tmp_path):
    for name in ("model.pt", "optimizer.pt"):
        (tmp_path / name).write_bytes(b"PK\x03\x04")
    with pytest.raises(FormatError, match="several torch.save files: name one of them, such as model.pt"):
        open_catalog(str(tmp_path))


def test_a_run_is_not_a_checkpoint(tmp_path):
    save(open_backend(str(tmp_path / "step-00001000")), two_ranks())
    with pytest.raises(FormatError, match="step-00001000"):
        open_catalog(str(tmp_path))


def test_formats_of_other_distributions(tmp_path, monkeypatch):
    """Found by entry point, asked after our own, and given the backend."""
    opened = []

    def open_foreign(backend):
        opened.append(backend.url)
        save(open_backend("inprocess://foreign"), two_ranks())
        return NativeCatalog(open_backend("inprocess://foreign"))

    ours = [f.name for f in formats()]
    foreign = Format(
        name="foreign", recognises=lambda backend, names: backend.read("magic") == b"F" and "magic" in names, open=open_foreign
    )
    point = metadata.EntryPoint("foreign", "somewhere:FORMAT", "ckpt.formats")
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda self: {"somewhere:FORMAT": foreign}[self.value])
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [point] if group == "ckpt.formats" else [])
    (tmp_path / "magic").write_text("F")
    assert [f.name for f in formats()] == [*ours, "foreign"]
    assert open_catalog(str(tmp_path)).format == "ckpt 1"
    assert opened == [open_backend(str(tmp_path)).url]
    (tmp_path / "magic").write_text("G")
    with pytest.raises(FormatError, match=r"\(ckpt, .*, foreign\)"):
        open_catalog(str(tmp_path))
