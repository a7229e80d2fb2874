"""What the nodes have of one checkpoint, as of one look, what of it has no second place yet, and what of it is lost. No torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ckpt.catalog import DataFile
from ckpt.errors import CkptError, ConflictError, NotFoundError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.datafile import box_text
from ckpt.formats.native.paths import COPIES, data_prefix, index_path, parity_prefix
from ckpt.formats.native.spans import read_spans
from ckpt.formats.native.writer import committed_id
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend
from ckpt.plan.copies import NodeCopy, domain_groups, even_groups, is_complete, missing_copies
from ckpt.plan.parity import PlannedParity, plan_parity, protected_files

from .backend import SpreadBackend
from .nodes import NodeSet
from .parity import parity_path, read_records, record_path


@dataclass(frozen=True, slots=True, eq=False)
class SpreadFiles:
    """The data files of a checkpoint, and their sizes by path and node; and those of its parity files."""

    nodes: NodeSet
    backend: SpreadBackend
    id: str
    files: Mapping[str, DataFile]
    sizes: Mapping[str, Mapping[int, int]]
    parity: Mapping[str, Mapping[int, int]]

    @classmethod
    def of(cls, url: str, nodes: NodeSet) -> SpreadFiles:
        backend, catalog = open_backend(url), open_catalog(url)
        assert isinstance(backend, SpreadBackend) and isinstance(catalog, NativeCatalog)
        id = catalog.record.id
        parity = backend.holders(parity_prefix(id)) if nodes.parity is not None else {}
        return cls(nodes, backend, id, {f.path: f for f in catalog.files}, backend.holders(data_prefix(id)), parity)

    def holders(self) -> dict[str, set[int]]:
        """The nodes of the job that have each file whole: no copies are made from or to machines where no rank runs."""
        return {path: self._whole(self.sizes.get(path, {}), f.size) for path, f in self.files.items()}

    def _whole(self, sizes: Mapping[int, int], size: int) -> set[int]:
        return {node for node, there in sizes.items() if there == size and node < len(self.nodes.nodes)}

    @property
    def is_lost(self) -> bool:
        """Whether no node of the job has some file."""
        return not all(self.holders().values())

    @property
    def is_complete(self) -> bool:
        """Whether each file survives the loss of as many domains as it is meant to, and none is lost."""
        nodes = self.nodes
        if nodes.parity is None:
            return is_complete(self.holders(), nodes.domains, nodes.copies)
        return not self.is_lost and not self.missing_parity()

    def missing_copies(self) -> list[NodeCopy]:
        """What has to be copied."""
        if self.nodes.parity is not None:
            return []
        return missing_copies(self.holders(), self.nodes.domains, self.nodes.copies)

    def missing_parity(self) -> list[PlannedParity]:
        """The parity files that have to be made. None of a checkpoint of which something is lost: it cannot be protected any more."""
        holders, sizes, domains = self.holders(), {path: f.size for path, f in self.files.items()}, self.nodes.domains
        if self.nodes.parity is None or self.is_lost:
            return []
        groups = parity_groups(self.nodes, self.nodes.parity)
        planned = plan_parity(holders, sizes, domains, groups)
        missing = [one for one in planned if not self._is_made(one)]
        if missing and self.parity.keys() - {path for one in planned for path in self._paths(one)}:
            # An earlier job had other groups, since it had other nodes: what its parity protects needs no other.
            records = read_records(self.backend.reader, self.id, self.parity)
            stored = [(domains[node], r.layout) for path, r in records.items() for node in self._nodes_with(path, r.layout.size)]
            protected = protected_files(stored, holders, sizes, domains)
            planned = plan_parity(
                {path: nodes_with for path, nodes_with in holders.items() if path not in protected}, sizes, domains, groups
            )
            missing = [one for one in planned if not self._is_made(one)]
        return missing

    def _paths(self, planned: PlannedParity) -> tuple[str, str]:
        path = parity_path(self.id, planned.layout)
        return path, record_path(path)

    def _nodes_with(self, path: str, size: int) -> set[int]:
        """The nodes that have a parity file whole, with its record."""
        return self._whole(self.parity.get(path, {}), size) & self.parity.get(record_path(path), {}).keys()

    def _is_made(self, planned: PlannedParity) -> bool:
        """Whether a node that has none of its terms has a parity file whole, with its record."""
        nodes = self._nodes_with(self._paths(planned)[0], planned.layout.size)
        return not {self.nodes.domains[node] for node in nodes} <= {term.domain for term in planned.layout.terms}


def parity_groups(nodes: NodeSet, size: int) -> Sequence[Sequence[str]]:
    """The domains in groups of ``size``, or of more where some are left over."""
    return even_groups(domain_groups(nodes.domains, size - 1), size)


# That all second copies of a checkpoint were seen: a small file beside its index on every node, for ``ckpt memory status``.
#
# The leader writes it when the copies are complete, and removes it when a later life of the job finds that some are missing. Nothing that
# loads or copies asks it: what nodes have is asked of the nodes themselves.


def note_copies(nodes: NodeSet, url: str, id: str) -> None:
    """Note on every node of the job that the checkpoint ``id`` at ``url`` has all of its copies."""
    backend, path = open_backend(url), index_path(id, COPIES)
    assert isinstance(backend, SpreadBackend)
    data = json.dumps({"nodes": [node.name for node in nodes.nodes]}).encode()

    def put(node: int) -> None:
        with suppress(ConflictError):  # an earlier life of the job has noted it
            backend.node(node).put_if(path, data, expected=None)

    nodes.ask_all(put)
    if committed_id(backend) != id:  # it was removed or replaced meanwhile, and nobody would remove the note
        backend.delete(path)


def forget_copies(nodes: NodeSet, url: str, id: str) -> None:
    """Some copies are missing, though an earlier life of the job may have noted that it has all. Costs no message if it has not."""
    backend, path = open_backend(url), index_path(id, COPIES)
    assert isinstance(backend, SpreadBackend)
    with suppress(NotFoundError):
        backend.node(nodes.own).size(path)
        backend.delete(path)


def copies_seen(url: str) -> bool | None:
    """Whether all copies of the checkpoint at ``url``, in the memory of this machine, were seen. None if no other machine had a part in it:
    all of its files are here, and no copies are noted; or if it cannot be read, or only by those who ask for what it is.
    """
    backend = open_backend(url)
    try:
        id = committed_id(backend)
        if id is None:
            return None
        if COPIES in backend.list_dir(f"index-{id}"):
            return True
        return None if _is_all_here(backend, url, id) else False
    except CkptError:
        return None


def _is_all_here(backend: Backend, url: str, id: str) -> bool:
    here = {entry.path for entry in backend.list_prefix(data_prefix(id))}
    own = (file.path for file in open_catalog(url).files if file.path.startswith(data_prefix(id)))  # others are of checkpoints referred to
    return all(path in here for path in own)


# What of a checkpoint is lost: files that no node has that answers, that parity cannot give, and that are not at the root; by tensor, box
# and who had them.

NAMED = 4
"""Chunks that a message names."""


def lost_files(backend: SpreadBackend, catalog: NativeCatalog) -> list[int]:
    """Rows of the catalog's files that nobody has whole, and that cannot be computed."""
    prefix = data_prefix(catalog.record.id)
    sizes = backend.holders(prefix)
    lost = [n for n, f in enumerate(catalog.files) if f.size not in sizes.get(f.path, {}).values()]
    lost = [n for n in lost if not _is_computable(backend, catalog.files[n])]
    if not lost or (root := backend.root()) is None:
        return lost
    there = {entry.path: entry.size for entry in root.list_prefix(prefix)}
    return [n for n in lost if there.get(catalog.files[n].path) != catalog.files[n].size]


def loss(url: str) -> str | None:
    """Why the checkpoint cannot be loaded from the nodes that answer; None if it can, as far as listings say."""
    backend = open_backend(url)
    try:
        catalog = open_catalog(url)
    except CkptError as err:
        return f"its index cannot be read: {err.message}"
    if not isinstance(catalog, NativeCatalog) or not isinstance(backend, SpreadBackend):
        return None
    lost = lost_files(backend, catalog)
    if not lost:
        return None
    hosts: dict[int, str | None] = {}
    with suppress(CkptError):
        hosts = {rank: table.host for rank, table in read_spans(backend, catalog.record).items()}
    chunks = list(_chunks(catalog, lost))
    ranks = sorted({catalog.files[n].rank for n in lost})
    who = ", ".join(f"rank {rank}{f' on {host}' if (host := hosts.get(rank)) else ''}" for rank in ranks[:NAMED])
    names = ", ".join(chunks[:NAMED]) + (f" and {len(chunks) - NAMED} more" if len(chunks) > NAMED else "")
    parity = next((missing for n in lost if (missing := backend.reader.parity.missing(catalog.files[n].path)) is not None), None)
    places = "on no node that answers and not at the root"
    places += "" if parity is None else f", and parity gives the first of them only with {parity}"
    count = f"{len(lost)} of {len(catalog.files)} files are {places}"
    return f"{count}; {who}{' and others' if len(ranks) > NAMED else ''} wrote them: {names}"


def _is_computable(backend: SpreadBackend, file: DataFile) -> bool:
    try:
        return backend.reader.parity.size(file.path) == file.size
    except NotFoundError:
        return False


def _chunks(catalog: NativeCatalog, files: Collection[int]) -> Iterator[str]:
    """Tensor and box of each chunk that is in one of these files."""
    for name, entry in catalog.tensors.items():
        if entry.alias is None:
            of_chunk = np.broadcast_to(entry.grid.files, (len(entry.grid.all_boxes()[0]),))
            for chunk in np.flatnonzero(np.isin(of_chunk, list(files))).tolist():
                yield name + box_text(entry.grid.box(chunk), entry.shape)
