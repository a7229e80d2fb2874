"""What the nodes have of one checkpoint, as of one look, and what of it has no second place yet. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.catalog import DataFile
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.paths import data_prefix, parity_prefix
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import open_backend
from ckpt.plan.redundancy.copies import NodeCopy, is_complete, missing_copies
from ckpt.plan.redundancy.domains import domain_groups, even_groups
from ckpt.plan.redundancy.parity import PlannedParity, plan_parity, protected_files

from .backend import SpreadBackend
from .nodes import NodeSet
from .parity_record import parity_path, record_path
from .parity_source import read_records


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
            planned = plan_parity({path: held for path, held in holders.items() if path not in protected}, sizes, domains, groups)
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
