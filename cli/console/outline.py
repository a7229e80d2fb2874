"""What a checkpoint is, in a few lines: when it was saved and by whom, what its bytes are, and its tensors as a tree."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.errors import CkptError
from ckpt.text import units

if TYPE_CHECKING:
    from ckpt.catalog import Catalog, TensorEntry

_LINES = 40
"""Lines of a tree whose depth nobody gave."""
_INDENT = "  "
_DTYPES = 4


def summary(catalog: Catalog, entries: Sequence[TensorEntry]) -> dict[str, Any]:
    """The head of ``ckpt inspect`` as JSON fields; null where the format does not say."""
    from ckpt.formats.native.commit import CODED
    from ckpt.formats.native.datafiles.references import is_reference, owner_of
    from ckpt.formats.native.paths import step_number
    from ckpt.observe.sizes import kinds_of
    from ckpt.plan.part import part_in

    record = catalog.record
    own = [file for file in catalog.files if not is_reference(file.path)]
    dtypes = Counter(entry.dtype.name for entry in entries if entry.alias is None)
    return {
        "step": step_number(catalog.url.rstrip("/").rpartition("/")[2]),
        "created": record.created if record else None,
        "writer": record.writer if record else None,
        "world_size": catalog.world_size,
        "stored_bytes": sum(file.size for file in own) if catalog.files else None,
        "shared_bytes": sum(file.size for file in catalog.files) - sum(file.size for file in own),
        "shared_with": sorted({owner_of(file.path) for file in catalog.files if is_reference(file.path)}),
        "part": None if (part := part_in(catalog.state)) is None else part.text(),
        "codec": _codec(catalog, entries) if record and CODED in record.features else None,
        "kinds": [{"kind": k.kind, "bytes": k.bytes, "tensors": k.tensors} for k in kinds_of(entries, 0)[0]],
        "dtypes": dict(dtypes.most_common()),
    }


def _codec(catalog: Catalog, entries: Sequence[TensorEntry]) -> str:
    """The codec of the largest tensor."""
    # Each chunk has its own, and asking all of them would read the header of every file.
    largest = max((entry for entry in entries if entry.alias is None), key=lambda entry: entry.nbytes, default=None)
    with suppress(CkptError):  # a damaged file is no reason to show nothing: `ckpt verify` names it
        if largest is not None and (codec := catalog.extents(largest, [0])[0].codec) is not None:
            return codec
    return "some chunks"


def head_rows(catalog: Catalog, fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The head for people: a label and what it says, a pair for each line."""
    record = catalog.record
    if fields["step"] is not None:
        yield "step", str(fields["step"])
    if record is not None:
        yield "saved", f"{record.created[:19].replace('T', ' ')} UTC, {units.age(record.created)}"
    writer = f", written by {fields['writer']}" if fields["writer"] else ""
    yield "format", f"{catalog.format}{writer}, {units.plural(catalog.world_size, 'rank')}"
    if fields["part"] is not None:
        yield "part", f"of a state, saved with {fields['part']}: load its base first"
    kinds = [f"{kind['kind']} {units.size(kind['bytes'])}" for kind in fields["kinds"]]
    if kinds:
        yield "contents", ", ".join(kinds)
    dtypes = [f"{name} in {units.plural(count, 'tensor')}" for name, count in fields["dtypes"].items()]
    if dtypes:
        yield "dtypes", ", ".join([*dtypes[:_DTYPES], *([f"{len(dtypes) - _DTYPES} more"] if len(dtypes) > _DTYPES else [])])
    if fields["stored_bytes"] is not None:
        from ckpt.formats.native.datafiles.references import is_reference

        shared = sum(is_reference(file.path) for file in catalog.files)
        yield "on disk", f"{units.size(fields['stored_bytes'])} in {units.plural(len(catalog.files) - shared, 'data file')}"
        if shared:
            owners = ", ".join(fields["shared_with"])
            yield "shared", f"{units.size(fields['shared_bytes'])} in {units.plural(shared, 'data file')} of {owners}"
    if fields["codec"] is not None:
        yield "codec", fields["codec"]
    if record is not None and record.metrics:
        yield "metrics", ", ".join(f"{name}={value:.6g}" for name, value in record.metrics.items())
    if record is not None and record.tags:
        yield "tags", ", ".join(record.tags)
    if record is not None and record.lost:
        yield "lost", f"{', '.join(record.lost)}: `ckpt rebuild` could not recover them"


@dataclass(kw_only=True, slots=True)
class _NameTree:
    """Tensors with a common name prefix, such as those of one module."""

    tensors: int = 0
    bytes: int = 0
    entry: TensorEntry | None = None
    """The tensor of exactly this name."""
    below: dict[str, _NameTree] = field(default_factory=dict)


def tree_rows(entries: Sequence[TensorEntry], depth: int | None) -> list[tuple[str, ...]]:
    """NAME, TENSORS, BYTES, DTYPE and SHAPE of each line of the tree, ``depth`` levels deep; by default as deep as 40 lines allow.

    A branch with a single branch below it is one line with both names, ``model.layers``: it counts as one level.
    """
    root = _tree_of(entries)
    if depth is not None:
        return list(_rows(root, depth, ""))
    rows, deeper = list(_rows(root, 1, "")), 2
    while len(more := list(_rows(root, deeper, ""))) > len(rows) and len(more) <= _LINES:
        rows, deeper = more, deeper + 1
    return rows


def _tree_of(entries: Sequence[TensorEntry]) -> _NameTree:
    root = _NameTree()
    for entry in entries:
        branch = root
        for part in entry.name.split("."):
            branch = branch.below.setdefault(part, _NameTree())
            if entry.alias is None:  # the bytes of an alias are those of another tensor
                branch.tensors += 1
                branch.bytes += entry.nbytes
        branch.entry = entry
    return root


def _rows(branch: _NameTree, depth: int, indent: str) -> Iterator[tuple[str, ...]]:
    for name, child in sorted(branch.below.items(), key=lambda item: _natural(item[0])):
        while len(child.below) == 1 and child.entry is None:
            ((part, child),) = child.below.items()
            name = f"{name}.{part}"
        entry = child.entry
        if entry is None or child.below:
            yield (f"{indent}{name}", f"{child.tensors:,}", units.size(child.bytes), "", "")
        else:
            note = ("", f"= {entry.alias}") if entry.alias is not None else (entry.dtype.name, units.shape(entry.shape))
            yield (f"{indent}{name}", "", "" if entry.alias is not None else units.size(entry.nbytes), *note)
        if depth > 1:
            yield from _rows(child, depth - 1, indent + _INDENT)


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts ``layers.9`` before ``layers.10``."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name))
