"""Making a parity file: this node reads ranges of files of other nodes, and stores their XOR with a record of what it is. No torch."""

from __future__ import annotations

import logging
import time

import numpy as np

from ckpt.byte_source.digest_reader import DigestReader
from ckpt.byte_source.storage import StorageSource
from ckpt.catalog import DataFile
from ckpt.errors import ConflictError, CorruptError
from ckpt.formats.native.writer import committed_id
from ckpt.io_backends.protocol import Backend
from ckpt.maintenance.copy_files import FileCheck
from ckpt.plan.redundancy.parity import ParityLayout

from .backend import SpreadBackend
from .nodes import NodeSet
from .parity_record import BLOCK, ParityRecord, block_digest
from .spread_files import SpreadFiles
from .xor_reads import add_xor

log = logging.getLogger("ckpt")


class ParityWriter:
    """Makes the parity files of one node. ``pace``: bytes a second that it reads from others at most, or None."""

    def __init__(self, nodes: NodeSet, pace: float | None) -> None:
        self.received = 0
        """Bytes that were read from other nodes."""
        self._nodes = nodes
        self._pace = pace

    def make_missing(self, there: SpreadFiles) -> None:
        """Make those that this node lacks of a checkpoint."""
        missing, own = there.missing_parity(), there.backend.node(self._nodes.own)
        # Others compute parity of this node's files. Only this node can compare them with their digests without reading
        # them over the network; that it makes its own parity says that it has.
        wanted = {term.path for one in missing for term in one.layout.terms}
        for path, having in there.holders().items():
            if self._nodes.own in having and path in wanted:
                _compare(own, there.files[path])
        for one in missing:
            if one.target == self._nodes.own:
                self._make(there.backend, own, there.id, one.layout)

    def _make(self, backend: SpreadBackend, own: Backend, id: str, layout: ParityLayout) -> None:
        record = ParityRecord(id, layout, ())
        own.delete(record.record_path)  # of a process that died between the two, or of a disk that has cut one off
        own.delete(record.path)
        digests = []
        try:
            with own.create(record.path, layout.size) as writer:
                for at in range(0, layout.size, BLOCK):
                    block = self._block(backend, layout, at, min(BLOCK, layout.size - at))
                    digests.append(block_digest(block))
                    writer.write(at, [block])
                writer.commit()
            own.put_if(record.record_path, ParityRecord(id, layout, digests).encode(), expected=None)
        except ConflictError:
            return  # another process was first
        if committed_id(own) != id:  # removed meanwhile, by somebody who did not see these files
            own.delete(record.record_path)
            own.delete(record.path)

    def _block(self, backend: SpreadBackend, layout: ParityLayout, at: int, length: int) -> memoryview:
        began = time.monotonic()
        block = np.zeros(length, dtype=np.uint8).data
        received = add_xor(block, [*layout.overlapping(at, at + length)], backend.reader.read_from_any)
        self.received += received
        if self._pace is not None:
            time.sleep(max(0.0, received / self._pace - (time.monotonic() - began)))
        return block


def _compare(own: Backend, file: DataFile) -> None:
    check = FileCheck(DigestReader(StorageSource(own)), file)
    for task in check.jobs():
        task()
    if check.damaged:
        where = f"{own.url.rstrip('/')}/{file.path}"
        raise CorruptError("a file that parity is made of is damaged", where=where, hint="look at the disk or the memory of this machine")
