"""``ckpt inspect``: what a checkpoint holds, from its index alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from ckpt import units
from ckpt.errors import CkptError, NamesError, NotFoundError, UsageError
from ckpt.text import did_you_mean

from .output import URL, Output, options, style

if TYPE_CHECKING:
    from ckpt.catalog import Catalog, TensorEntry


# What a checkpoint is, in a few lines: when it was saved and by whom, what its bytes are, and its tensors as a tree.

_LINES = 40
"""Lines of a tree whose depth nobody gave."""
_INDENT = "  "
_DTYPES = 4


def summary(catalog: Catalog, entries: Sequence[TensorEntry]) -> dict[str, Any]:
    """The head of ``ckpt inspect`` as JSON fields; null where the format does not say."""
    from ckpt.formats.native.commit import CODED
    from ckpt.formats.native.paths import is_reference, owner_of, step_number
    from ckpt.plan.values import part_in
    from ckpt.runs.report.summary import kinds_of

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
    kinds = Counter[str]()
    for kind in fields["kinds"]:  # all states of an optimizer together
        kinds[kind["kind"].partition(":")[0]] += kind["bytes"]
    if kinds:
        yield "contents", ", ".join(f"{kind} {units.size(nbytes)}" for kind, nbytes in kinds.most_common())
    dtypes = [f"{name} in {units.plural(count, 'tensor')}" for name, count in fields["dtypes"].items()]
    if dtypes:
        yield "dtypes", ", ".join([*dtypes[:_DTYPES], *([f"{len(dtypes) - _DTYPES} more"] if len(dtypes) > _DTYPES else [])])
    if fields["stored_bytes"] is not None:
        from ckpt.formats.native.paths import is_reference

        shared = sum(is_reference(file.path) for file in catalog.files)
        yield "files", f"{units.plural(len(catalog.files) - shared, 'data file')}, {units.size(fields['stored_bytes'])}"
        if shared:
            owners = ", ".join(fields["shared_with"])
            yield "shared", f"{units.plural(shared, 'data file')} of {owners}, {units.size(fields['shared_bytes'])}"
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
    root = _NameTree()
    for entry in entries:
        branch = root
        for part in entry.name.split("."):
            branch = branch.below.setdefault(part, _NameTree())
            if entry.alias is None:  # the bytes of an alias are those of another tensor
                branch.tensors += 1
                branch.bytes += entry.nbytes
        branch.entry = entry
    if depth is not None:
        return list(_rows(root, depth, ""))
    rows, deeper = list(_rows(root, 1, "")), 2
    while len(more := list(_rows(root, deeper, ""))) > len(rows) and len(more) <= _LINES:
        rows, deeper = more, deeper + 1
    return rows


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


@click.command("inspect", short_help="Show what a checkpoint contains.")
@click.argument("url", type=URL)
@click.argument("glob", required=False)
@click.option("--state", is_flag=True, help="Show the values that are not tensors, by path.")
@click.option("--files", is_flag=True, help="Show the data files.")
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="Levels of the tree. [default: as many as fit 40 lines]")
@options
def inspect(url: str, glob: str | None, *, state: bool, files: bool, depth: int | None, output: Output) -> None:
    """Describe the checkpoint at URL, and show its tensors as a tree with sizes. Only the index is read.

    With GLOB, show each tensor whose name matches; * matches dots too. With --state, GLOB selects paths of values; with --files, the
    data files that contain the tensors. -q prints bare names.

    \b
    Example:
      ckpt inspect runs/a/step-00001000
      ckpt inspect runs/a/step-00001000 --depth 4
      ckpt inspect runs/a/step-00001000 'model.layers.0.*'
      ckpt inspect runs/a/step-00001000 --state 'scheduler.*'
      ckpt inspect --json runs/a/step-00001000 | jq .totals
    """
    from ckpt.formats.registry import open_catalog
    from ckpt.runs.members import member_urls

    if state and files:
        raise UsageError("--state shows values, and --files data files", hint="give one of them")
    show = "state" if state else "files" if files else None
    if depth is not None and (glob is not None or show is not None):
        raise UsageError("--depth is for the tree, which GLOB, --state and --files replace", hint="leave one of them out")
    if parts := member_urls(url):
        if output.json:
            output.document({"url": url, "members": parts})
        else:
            output.table(("MEMBER", "CHECKPOINT"), list(parts.items()))
        return
    catalog = open_catalog(url)
    if output.json:
        output.document(_document(catalog, glob, show))
    elif show == "state":
        _print_state(_matching(_values(catalog), glob, "path"), output)
    else:
        entries = list(_matching(catalog.tensors, glob, "tensor").values())
        if output.quiet:
            for name in [file["path"] for file in _files(catalog, entries)] if show == "files" else [entry.name for entry in entries]:
                output.line(name)
        elif show == "files":
            _print_files(catalog, entries, output)
        elif glob is not None:
            output.table(("NAME", "DTYPE", "SHAPE", ">BYTES", ">CHUNKS", "~NOTE"), [_row(entry) for entry in entries])
            _print_totals(catalog, entries, output)
        else:
            output.table(("", "~"), [(style(label, "bold"), text) for label, text in head_rows(catalog, summary(catalog, entries))])
            output.line()
            output.table(("NAME", ">TENSORS", ">BYTES", "DTYPE", "SHAPE"), tree_rows(entries, depth))
            _print_totals(catalog, entries, output)


def _matching(things: Mapping[str, Any], glob: str | None, what: str) -> dict[str, Any]:
    """Those whose name matches; no match is an error, because it is more often a typing mistake than an answer."""
    matching = {name: thing for name, thing in things.items() if glob is None or fnmatchcase(name, glob)}
    if glob is not None and not matching:
        first = ", ".join(list(things)[:3]) or "none"
        close = did_you_mean(glob, things)
        hint = close or f"quote the pattern for the shell; the first of {len(things):,} are: {first}"
        raise NamesError(f"no {what} matches {glob!r}", hint=hint)
    return matching


# ---------------------------------------------------------------------------------------------------------------- people


def _print_totals(catalog: Catalog, entries: Sequence[TensorEntry], output: Output) -> None:
    totals = _totals(entries)
    bytes_and_chunks = f"{units.size(totals['bytes'])} in {units.plural(totals['chunks'], 'chunk')}"
    output.line(f"{units.plural(totals['tensors'], 'tensor')}, {totals['elements']:,} elements, {bytes_and_chunks} ({catalog.format})")
    if not catalog.tensors and (values := _values(catalog)):
        output.line(f"{units.plural(len(values), 'value')}: --state shows them")
    for note in _notes(catalog):
        output.line(f"note: {note}")


def _notes(catalog: Catalog) -> list[str]:
    """What a reader of another format says about the whole: what it left out, what may be wrong; and which checkpoints have vanished that
    this one refers to."""
    from ckpt.formats.native.paths import is_reference, owner_of

    notes = [*catalog.notes, *([] if catalog.suspect is None else [catalog.suspect])]
    for owner, path in {owner_of(file.path): file.path for file in catalog.files if is_reference(file.path)}.items():
        try:
            catalog.backend.size(path)
        except NotFoundError:
            notes.append(f"{owner} has vanished, and data files that this needs with it: restore it beside this checkpoint")
    return notes


def _row(entry: TensorEntry) -> tuple[str, ...]:
    notes = [f"= {entry.alias}"] if entry.alias is not None else []
    notes += [f"without padding {units.shape(entry.logical)}"] if entry.logical is not None else []
    notes += [f"rank {entry.rank}"] if entry.rank is not None else []
    stored = ("", "") if entry.alias is not None else (units.size(entry.nbytes), f"{len(entry.grid):,}")
    return (entry.name, entry.dtype.name, units.shape(entry.shape), *stored, ", ".join(notes))


def _print_files(catalog: Catalog, entries: Sequence[TensorEntry], output: Output) -> None:
    rows = [
        (
            file["path"],
            "" if file["rank"] is None else str(file["rank"]),
            "" if file["size"] is None else units.size(file["size"]),
            f"{file['chunks']:,}",
            units.size(file["bytes"]),
        )
        for file in _files(catalog, entries)
    ]
    output.table(("FILE", ">RANK", ">SIZE", ">CHUNKS", ">BYTES"), rows)


def _print_state(values: dict[str, Any], output: Output) -> None:
    from ckpt.plan.tree import shorten

    if output.quiet:
        for path in values:
            output.line(path)
        return

    def shown(node: Any) -> str:
        match node:
            case {"$array": [str(dtype), list(sizes), _]}:  # its bytes would say nothing
                return f"array {dtype} {units.shape(sizes)}"
        return shorten(node)

    output.table(("PATH", "~VALUE"), [(path, shown(node)) for path, node in values.items()])


# -------------------------------------------------------------------------------------------------------------- machines


def _document(catalog: Catalog, glob: str | None, show: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"url": catalog.url, "format": catalog.format}
    if show == "state":
        return {**fields, "state": catalog.state, "ranks": {str(rank): dict(values) for rank, values in catalog.ranks.items()}}
    entries = list(_matching(catalog.tensors, glob, "tensor").values())
    fields |= {"notes": notes} if (notes := _notes(catalog)) else {}
    fields |= {"totals": _totals(entries), "tensors": [_fields(entry) for entry in entries]}
    fields |= {"files": _files(catalog, entries)} if show == "files" else {}
    return {**fields, "summary": summary(catalog, entries)}


def _fields(entry: TensorEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "dtype": entry.dtype.name,
        "shape": entry.shape,
        "logical": entry.logical,
        "bytes": entry.nbytes,
        "chunks": len(entry.grid),
        "alias": entry.alias,
        "rank": entry.rank,
    }


def _totals(entries: Sequence[TensorEntry]) -> dict[str, int]:
    """Sums over stored tensors: an alias stands for bytes that its target already counts."""
    stored = [entry for entry in entries if entry.alias is None]
    return {
        "tensors": len(stored),
        "aliases": len(entries) - len(stored),
        "elements": sum(entry.numel for entry in stored),
        "bytes": sum(entry.nbytes for entry in stored),
        "chunks": sum(len(entry.grid) for entry in stored),
    }


def _files(catalog: Catalog, entries: Sequence[TensorEntry]) -> list[dict[str, Any]]:
    """A row per file that holds a chunk of ``entries``: what the index says of the file, and how many chunks and bytes of them it holds."""
    chunks, sizes = Counter[str](), Counter[str]()
    for entry in entries:
        if entry.alias is None:
            for extent in catalog.extents(entry, range(len(entry.grid))):
                chunks[extent.path] += 1
                sizes[extent.path] += extent.length
    known = {file.path: file for file in catalog.files}
    return [
        {
            "path": path,
            "rank": known[path].rank if path in known else None,
            "size": known[path].size if path in known else None,
            "chunks": chunks[path],
            "bytes": sizes[path],
        }
        for path in sorted(chunks)
    ]


def _values(catalog: Catalog) -> dict[str, Any]:
    """Every value by path, tensors left out; those of one rank start with ``rank <r>:``."""
    from ckpt.plan.tree import leaves

    values = dict(leaves(catalog.state)) if catalog.state is not None else {}
    for rank, by_path in catalog.ranks.items():
        for path, node in by_path.items():
            values |= {f"rank {rank}: {path}{'.' if below else ''}{below}": value for below, value in leaves(node)}
    return {path: node for path, node in values.items() if not (isinstance(node, dict) and node.keys() & {"$tensor", "$tensors"})}
