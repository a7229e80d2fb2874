"""Files of ``torch.save`` as catalogs: a single file, or a Hugging Face directory of ``.bin`` files with an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpt.errors import FormatError
from ckpt.formats.external.base import ExternalCatalog, ExternalContents, ExternalFile
from ckpt.formats.external.hf_index import check_all_there, check_index, find_index, read_index, sizes_of
from ckpt.formats.external.virtual_backends import candidates
from ckpt.formats.pickles.nodes import NodeMaker
from ckpt.formats.pickles.stored import StoredPart, StoredView
from ckpt.formats.protocol import Format

from .archive import MAGIC, Archive, is_legacy, open_archive
from .table import TensorTable

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""How files of ``torch.save`` are usually called: in a directory only such files are looked at."""
INDEX_SUFFIX = ".bin.index.json"
FORMAT_NAME = "torch.save archive"


def recognises(backend: Backend, names: Sequence[str]) -> bool:
    """Whether there is an index of ``.bin`` files, or exactly one file of ``torch.save``."""
    if any(name.endswith(INDEX_SUFFIX) for name in names):
        return True
    files = candidates(backend, names, SUFFIXES)
    return len(files) == 1 and is_torch_file(backend, files[0])


def is_torch_file(backend: Backend, path: str) -> bool:
    """Whether a file begins like one of ``torch.save``, old ones included."""
    head = backend.read(path, 0, min(backend.size(path), 512))
    return head.startswith(MAGIC) or is_legacy(head)


def open_torch(backend: Backend) -> ExternalCatalog:
    """Open what ``recognises`` found."""
    names = backend.list_dir()
    index = find_index(names, INDEX_SUFFIX, backend.url)
    if index is not None:
        return _open_shards(backend, index)
    (path,) = candidates(backend, names, SUFFIXES)
    check_all_there(backend, [path])
    return _open_file(backend, path)


def _open_file(backend: Backend, path: str) -> ExternalCatalog:
    archive = open_archive(backend, path)
    files = [ExternalFile(path, backend.size(path))]
    table = TensorTable([archive], files)
    maker = node_maker(table, 0)
    state = maker.root(archive.load())
    contents = ExternalContents(tensors=table.entries.values(), files=files, state=state, opaque=maker.opaque)
    return ExternalCatalog(contents, backend=backend, format=FORMAT_NAME, locate=table.locate, storages=table.storages)


def node_maker(table: TensorTable, file: int) -> NodeMaker:
    """Makes the nodes of an archive's object graph; puts its tensors into the table."""
    archive = table.archives[file]

    def place(value: StoredView | StoredPart, path: str) -> Any:
        if isinstance(value, StoredPart):
            _refuse_part(archive, path)
        else:
            table.add(path, file, value)
        return {"$tensor": path}

    return NodeMaker(archive.values, place, pickle_bytes=archive.pickle_bytes)


def _refuse_part(archive: Archive, path: str) -> None:
    raise FormatError(
        f"tensor {path} is sharded, and this file has the part of one rank",
        where=archive.where,
        hint="open the directory that has the files of all ranks",
    )


def _open_shards(backend: Backend, index: str) -> ExternalCatalog:
    weights = read_index(backend, index)
    paths = sorted(set(weights.values()))
    files = [ExternalFile(path, size) for path, size in zip(paths, sizes_of(backend, paths), strict=True)]
    table = TensorTable([open_archive(backend, path) for path in paths], files)
    owners: dict[str, str] = {}
    for number, path in enumerate(paths):
        node_maker(table, number).root(table.archives[number].load())
        owners |= {name: path for name in table.entries if name not in owners}
    check_index(weights, owners, f"{backend.url.rstrip('/')}/{index}")
    contents = ExternalContents(tensors=table.entries.values(), files=files)
    return ExternalCatalog(contents, backend=backend, format=FORMAT_NAME, locate=table.locate, storages=table.storages)


FORMAT = Format(name=FORMAT_NAME, recognises=recognises, open=open_torch)
"""This format, for ckpt.formats.registry."""
