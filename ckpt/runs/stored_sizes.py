"""How many bytes checkpoints take on their storage, without opening their data files. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ckpt.concurrency import map_tasks
from ckpt.errors import CorruptError, FormatError, NotFoundError
from ckpt.formats.native.catalog import read_index, read_record
from ckpt.formats.native.commit import VIRTUAL, CommitRecord
from ckpt.formats.native.index import decode_files
from ckpt.formats.native.paths import FILES, SPANS, index_path
from ckpt.formats.native.references import is_reference
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import join_url, open_backend

from .step_listing import Step

_THREADS = 8


def stored_sizes(steps: Sequence[Step]) -> dict[str, int]:
    """URL → bytes of a step's files. A step that was removed meanwhile is left out.

    Of a committed checkpoint the index knows the sizes of all files, so a step costs two or three requests however many files it has; on an
    object store, listing them would cost a request per thousand. What did not finish or is damaged has no index to believe: its files are
    listed. The files that a virtual checkpoint points into, and data files of other checkpoints that
    one refers to, are not its own and do not count.
    """
    sizes = map_tasks(_size_of, steps, _THREADS, "ckpt-sizes")
    return {step.url: size for step, size in zip(steps, sizes, strict=True) if size is not None}


def _size_of(step: Step) -> int | None:
    backend = open_backend(step.url)
    if step.members:  # whose checkpoints lie beside this one
        run = step.url.rstrip("/").rpartition("/")[0]
        return sum(_committed_size(open_backend(join_url(run, c.path))) or 0 for c in step.members.values())
    try:
        return _committed_size(backend) if step.committed else sum(entry.size for entry in backend.list_prefix())
    except NotFoundError:
        return None
    except (CorruptError, FormatError):  # the index, not the record: the listing of the run takes only records into account
        return sum(entry.size for entry in backend.list_prefix())


def _committed_size(backend: Backend) -> int | None:
    data = read_record(backend)
    if data is None:
        return None
    record = CommitRecord.from_bytes(data, backend.url)
    index = len(data) + sum(file.size for file in record.index.values())
    with suppress(NotFoundError):  # spans lie beside the index, and nothing else says how large they are
        index += backend.size(index_path(record.id, SPANS))
    if VIRTUAL in record.features:
        return index
    rows = decode_files(read_index(backend, record, FILES), record.index[FILES].path)
    return index + sum(file.size for file in rows if not is_reference(file.path))
