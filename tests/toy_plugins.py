"""A small distribution that has a plug-in of each kind, and its installation: a folder on ``sys.path`` with what pip would write there."""

from __future__ import annotations

import importlib
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ckpt.catalog import Catalog
from ckpt.converters.targets import torch_file
from ckpt.errors import CorruptError
from ckpt.formats import Format
from ckpt.formats.native.codecs import CODECS, Bytes, Codec
from ckpt.formats.registry import open_catalog
from ckpt.io_backends import Backend, InProcessBackend
from ckpt.plan.layout import placements
from ckpt.plan.layout.placements import SPLITS


class ToyStorage(InProcessBackend):
    """Serves ``toy://``."""

    def __init__(self, url: str) -> None:
        super().__init__(url.replace("toy://", "inprocess://toy/"))


def _open_pointer(backend: Backend) -> Catalog:
    return open_catalog(backend.read("pointer.txt").decode())


FORMAT = Format(name="pointer", recognises=lambda backend, names: "pointer.txt" in names, open=_open_pointer)
"""A file with the URL of a checkpoint."""

TARGET = replace(torch_file.TARGET, name="toy")


def encode(data: Bytes, itemsize: int, out: Bytes) -> int | None:
    blob = zlib.compress(data, 1)
    if len(blob) > len(out):
        return None
    out[: len(blob)] = np.frombuffer(blob, dtype=np.uint8)
    return len(blob)


def decode(blob: memoryview, out: Bytes, itemsize: int) -> None:
    try:
        data = zlib.decompressobj().decompress(blob, len(out) + 1)
    except zlib.error as err:
        raise CorruptError(f"a coded chunk is damaged: {err}") from err
    if len(data) != len(out):
        raise CorruptError(f"a coded chunk has {len(data)} bytes, not {len(out)}")
    out[:] = np.frombuffer(data, dtype=np.uint8)


DEFLATE = Codec(name="deflate", doc="a test's own", encode=encode, decode=decode, itemsizes=(4,))


def use(trainer: str) -> str:
    """What an integration is called for."""
    return f"{trainer} saves with ckpt"


Points = Mapping[str, Mapping[str, str]]
TOY: Points = {
    "ckpt.storage": {"toy": f"{__name__}:ToyStorage"},
    "ckpt.formats": {"pointer": f"{__name__}:FORMAT"},
    "ckpt.targets": {"toy": f"{__name__}:TARGET"},
    "ckpt.codecs": {"deflate": f"{__name__}:DEFLATE"},
    "ckpt.placements": {"BlockCyclic": "tests.plan.block_cyclic:BlockCyclic"},
    "ckpt.integrations": {"toy": __name__},
}
"""Its entry points: group → name → object."""


@contextmanager
def installed(points: Points = TOY, *, name: str = "ckpt-toy", requires: Sequence[str] = (), modules: Sequence[str] = ()) -> Iterator[None]:
    """A distribution, in this process and for the time of the block."""
    with TemporaryDirectory() as folder:
        info = Path(folder, f"{name.replace('-', '_')}-1.0.dist-info")
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {requirement}" for requirement in requires)]
        (info / "METADATA").write_text("\n".join(lines))
        (info / "top_level.txt").write_text("\n".join(modules))
        sections = [f"[{group}]\n" + "\n".join(f"{key} = {value}" for key, value in entries.items()) for group, entries in points.items()]
        (info / "entry_points.txt").write_text("\n".join(sections))
        before: list[tuple[dict[str, Any], set[str]]] = [(registry, {*registry}) for registry in (CODECS, SPLITS)]
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(folder)
            for registry, known in before:  # only what was entered meanwhile: a plug-in may claim a name of our own
                for key in registry.keys() - known:
                    del registry[key]
            placements._enter_plugins.cache_clear()
