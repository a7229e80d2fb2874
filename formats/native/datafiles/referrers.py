"""Who refers to the data files of a checkpoint: they have to stay, whether or not their own checkpoint needs them. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.formats.native.catalog import read_index, read_record
from ckpt.formats.native.commit import COMMIT_PATH, REFERENCED, CommitRecord
from ckpt.formats.native.index import decode_files
from ckpt.formats.native.paths import FILES
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import join_url, open_backend

from .references import UP, is_reference, owner_of, split_url

Referrers = Mapping[str, Mapping[str, Collection[str]]]
"""Directory of a run → path of a data file below it → names of the checkpoints that refer to it."""


def referrers_in(run: Backend) -> Referrers:
    """All references among the checkpoints right below a run. What cannot be loaded, since its record is damaged, refers to nothing.

    Raises:
        CorruptError: an index with references cannot be read, so nobody knows what they need.
        StorageError: the storage cannot be read.
    """
    referrers: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in (entry.rstrip("/") for entry in run.list_dir("") if entry.endswith("/")):
        data = read_record(run, f"{name}/")
        if data is None:
            continue
        try:
            record = CommitRecord.from_bytes(data, f"{run.url}/{name}/{COMMIT_PATH}")
        except (CorruptError, FormatError):
            continue
        if REFERENCED in record.features:
            rows = decode_files(read_index(open_backend(join_url(run.url, name)), record, FILES), f"{run.url}/{name}")
            for path in (file.path for file in rows if is_reference(file.path)):
                owner = owner_of(path)
                referrers[owner][path[len(UP) + len(owner) + 1 :]].append(name)
    return referrers


def referred_files(checkpoint: Backend) -> Mapping[str, Collection[str]]:
    """Paths of a checkpoint's data files that others of its run refer to, and their names. Raises what :func:`referrers_in` does."""
    try:
        run, name = split_url(checkpoint)
    except UsageError:
        return {}
    return referrers_in(open_backend(run)).get(name, {})
