"""``ckpt inspect``: what a checkpoint holds, from its index alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from ckpt.errors import NamesError, NotFoundError, UsageError
from ckpt.text import units
from ckpt.text.suggest import did_you_mean

from .console.outline import head_rows, summary, tree_rows
from .console.output import Output, options, style
from .console.parameters import URL

if TYPE_CHECKING:
    from ckpt.catalog import Catalog, TensorEntry


@click.command("inspect", short_help="Show what a checkpoint contains.")
@click.argument("url", type=URL)
@click.argument("glob", required=False)
@click.option("--state", "show", flag_value="state", help="Show the values that are not tensors, by path.")
@click.option("--files", "show", flag_value="files", help="Show the data files.")
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="Levels of the tree. [default: as many as fit 40 lines]")
@options
def command(url: str, glob: str | None, show: str | None, *, depth: int | None, as_json: bool, quiet: bool) -> None:
    """Show what the checkpoint at URL is and its tensors, as a tree with sizes. Reads the index only, no tensor data.

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

    if depth is not None and (glob is not None or show is not None):
        raise UsageError("--depth is for the tree, which GLOB, --state and --files replace", hint="leave one of them out")
    output = Output(json=as_json, quiet=quiet)
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
            _print_tensors(catalog, entries, output)
        else:
            _print_outline(catalog, entries, depth, output)


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


def _print_outline(catalog: Catalog, entries: Sequence[TensorEntry], depth: int | None, output: Output) -> None:
    output.table(("", "~"), [(style(label, "bold"), text) for label, text in head_rows(catalog, summary(catalog, entries))])
    output.line()
    output.table(("NAME", ">TENSORS", ">BYTES", "DTYPE", "SHAPE"), tree_rows(entries, depth))
    _print_totals(catalog, entries, output)


def _print_tensors(catalog: Catalog, entries: Sequence[TensorEntry], output: Output) -> None:
    output.table(("NAME", "DTYPE", "SHAPE", ">BYTES", ">CHUNKS", "~NOTE"), [_row(entry) for entry in entries])
    _print_totals(catalog, entries, output)


def _print_totals(catalog: Catalog, entries: Sequence[TensorEntry], output: Output) -> None:
    totals = _totals(entries)
    bytes_and_chunks = f"{units.size(totals['bytes'])} in {units.plural(totals['chunks'], 'chunk')}"
    output.line(f"{units.plural(totals['tensors'], 'tensor')}, {totals['elements']:,} elements, {bytes_and_chunks} ({catalog.format})")
    for note in _notes(catalog):
        output.line(f"note: {note}")


def _notes(catalog: Catalog) -> list[str]:
    """What a reader of another format says about the whole: what it left out, what may be wrong; and which checkpoints have vanished that
    this one refers to."""
    from ckpt.formats.native.datafiles.references import is_reference, owner_of

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
    from ckpt.tree import shorten

    if output.quiet:
        for path in values:
            output.line(path)
        return
    output.table(("PATH", "~VALUE"), [(path, shorten(node)) for path, node in values.items()])


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
    from ckpt.tree import leaves

    values = dict(leaves(catalog.state)) if catalog.state is not None else {}
    for rank, by_path in catalog.ranks.items():
        for path, node in by_path.items():
            values |= {f"rank {rank}: {path}{'.' if below else ''}{below}": value for below, value in leaves(node)}
    return {path: node for path, node in values.items() if not (isinstance(node, dict) and node.keys() & {"$tensor", "$tensors"})}
