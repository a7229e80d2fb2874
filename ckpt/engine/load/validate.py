"""Whether a checkpoint fits the states of all ranks: the row that each rank gives the leader, and the leader's verdict. All problems of all
ranks go into one error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

from ckpt.catalog import Catalog, job_tensors
from ckpt.errors import CorruptError, MismatchError, NamesError, ShapeError
from ckpt.formats.native.commit import LABELS
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.plan import tree
from ckpt.plan.match import Selection, report_names, ways_out
from ckpt.plan.tables import ranks_text
from ckpt.plan.values import LABEL, part_in, renamed_path
from ckpt.state.targets import Binding
from ckpt.text import parse_json

log = logging.getLogger("ckpt")

_OF_TENSORS = frozenset({"$tensor", "$tensors", "$inline"})
"""Kinds of nodes that stand for tensors: these count by their names."""


def row_of_match(call: Call, catalog: Catalog, binding: Binding) -> Row:
    """For the leader."""
    everything = binding.used >= job_tensors(catalog).keys()
    row: Row = {
        "problems": {"missing": binding.missing, "shapes": binding.shapes, "misfits": binding.misfits},
        "used": {"used": None if everything else sorted(binding.used), "values": sorted(binding.values)},
    }
    if call.group.size > 1:  # what is equal on most ranks goes as a digest: the leader asks one of them for it
        row = {key: call.share(json.dumps(value).encode()) for key, value in row.items()}
    if binding.renames:
        row["renames"] = binding.renames
    return row


def verdict_of(call: Call, catalog: Catalog, rows: Mapping[int, Row], select: Selection, *, strict: bool) -> Row:
    """Leader: names that are missing and unexpected, as every rank reads them; raises what does not fit, of all ranks."""
    if call.group.size > 1:
        call.fetch_all(row[key] for row in rows.values() for key in ("problems", "used"))
    missing: dict[str, list[int]] = {}
    shapes: dict[str, list[int]] = {}
    misfits: dict[str, list[int]] = {}
    used: set[str] = set()
    values: set[str] = set()
    names = job_tensors(catalog).keys()
    for problems, ranks in _lists(call, rows, "problems"):
        for key, lines in (("missing", missing), ("shapes", shapes), ("misfits", misfits)):
            for line in problems[key]:
                lines.setdefault(line, []).extend(ranks)
    for usage, _ in _lists(call, rows, "used"):
        used.update(names if usage["used"] is None else usage["used"])
        values.update(usage["values"])
    for row in rows.values():  # of ranks that have the optimizer: not all need to
        if "renames" in row:
            select = select.followed_by((old, new) for old, new in row["renames"])
    unexpected = _unexpected(catalog, select, names - used, values)
    idle = select.idle(_paths(catalog), missing) if strict and (select.only or select.moves) else []
    lost = ", ".join(part for part in (catalog.record.lost if catalog.record is not None else ()) if part != LABELS)
    if shapes or misfits or idle or (strict and (missing or unexpected)):
        err = _mismatch(catalog, select, len(rows), missing, unexpected, shapes, misfits, idle)
        err.where = call.url
        if lost and not idle:
            message = f"{err.message}\n  a rebuild of its index could not recover the checkpoint's {lost}"
            hint = (
                "load an older step; or strict=False takes what is left, and leaves in the state what is missing; only=[...] loads a part"
            )
            raise CorruptError(message, where=call.url, hint=hint) from err
        raise err
    if lost and missing:
        named = "\n".join(report_names("missing, and left in the state as they are", missing))
        log.warning("%s: a rebuild of its index could not recover the checkpoint's %s\n%s", call.url, lost, named)
    return {"missing": sorted(missing), "unexpected": unexpected}


def _lists(call: Call, rows: Mapping[int, Row], key: str) -> Iterator[tuple[Row, list[int]]]:
    """What rows have under a key, each with the ranks that have it."""
    # Nearly all ranks have the same problems, mostly none, so the leader fetches a handful of lists however many
    # ranks there are.
    by_digest: dict[str, list[int]] = {}
    for rank, row in rows.items():
        if call.group.size == 1:
            yield row[key], [rank]
        else:
            by_digest.setdefault(row[key], []).append(rank)
    for digest, ranks in by_digest.items():
        yield parse_json(call.fetch(digest)), ranks


def _unexpected(catalog: Catalog, select: Selection, unused: Set[str], values: set[str]) -> list[str]:
    """Names of the checkpoint that no rank took."""
    names = [n for n in unused if select.wants(select.renamed(n))]
    taken = values if not select.only and not select.moves else frozenset[str]()
    for path, node in tree.leaves(catalog.state, but=_OF_TENSORS, outside=taken):
        if path.partition(".")[0] == LABEL:
            continue
        counted = not tree.refers(node) or tree.tag_of(node) in ("$per_rank", "$param_groups")
        if counted and path and select.wants(renamed_path(select, path)) and not _covered(select, path, values):
            names.append(path)
    return sorted(names)


def _paths(catalog: Catalog) -> list[str]:
    """Everything that ``only`` and ``rename`` may mean: names of tensors, paths of values, and all that contains them."""
    names = [*job_tensors(catalog)]
    names += [path for path, _ in tree.leaves(catalog.state)]
    names += [n.replace(".state.", ".", 1) for n in names]  # an optimizer's state goes by its parameters too
    return list(dict.fromkeys([*names, *(n[:i] for n in names for i, c in enumerate(n) if c == ".")]))


def _other_kinds(catalog: Catalog, select: Selection, missing: Collection[str]) -> dict[str, str]:
    """For names of the state that are missing because the checkpoint has something of another kind there: what it has."""
    there = {select.renamed(name): "one tensor of all ranks in the checkpoint, a PerRank" for name in job_tensors(catalog)}
    for path, node in tree.leaves(catalog.state, but=_OF_TENSORS):
        if tree.tag_of(node) != "$per_rank":
            there[renamed_path(select, path)] = "one value of all ranks in the checkpoint, a tensor or a PerRank"
        elif sum(path in nodes for nodes in catalog.ranks.values()) == catalog.world_size:  # else a rank may lack its own
            there[renamed_path(select, path)] = "a PerRank in the checkpoint, a tensor"
    return {name: f": {there[name]} in the state" for name in missing if name in there}


def _mismatch(
    catalog: Catalog,
    select: Selection,
    everywhere: int,
    missing: Mapping[str, list[int]],
    unexpected: Iterable[str],
    shapes: Mapping[str, list[int]],
    misfits: Mapping[str, list[int]],
    idle: Sequence[str],
) -> MismatchError:
    notes = _other_kinds(catalog, select, missing) if missing else {}
    lines = report_names("missing in the checkpoint", (_on(n + notes.get(n, ""), r, everywhere) for n, r in missing.items()))
    lines += report_names("unexpected in the checkpoint", (_moved(n, select) for n in unexpected))
    lines += report_names("do not fit", (_on(n, r, everywhere) for n, r in [*shapes.items(), *misfits.items()]))
    lines += report_names("match no name", idle)
    kinds = [kind for kind, given in ((NamesError, missing or unexpected or idle), (ShapeError, shapes), (MismatchError, misfits)) if given]
    kind = kinds[0] if len(kinds) == 1 else MismatchError
    texts = [*shapes, *misfits, *notes.values()]
    hint = ways_out(missing=bool(missing or idle), unexpected=bool(unexpected), texts=texts, ranks=everywhere)
    part = part_in(catalog.state) if missing else None
    if part is not None:
        given = part.text()
        lines.insert(0, f"  the checkpoint is a part of a state: it was saved with {given}")
        hint = f"load the base first, then this part over it with {given}"
    return kind("the checkpoint does not fit the state; nothing in the state was changed\n" + "\n".join(lines), hint=hint)


def _moved(path: str, select: Selection) -> str:
    """A stored name, and the one that the renames made of it: stored → mapped."""
    renamed = renamed_path(select, path) if select.moves else path
    return path if renamed == path else f"{path} → {renamed}"


def _covered(selection: Selection, path: str, taken: set[str]) -> bool:
    """Whether a value of the checkpoint, or something that contains it, was taken, by whatever path the state has it."""
    around = [path, *(path[:i] for i, c in enumerate(path) if c == "."), ""]  # the key "" has the path of the state itself
    return any((renamed_path(selection, p) if selection.moves else p) in taken for p in around)


def _on(name: str, ranks: list[int], size: int) -> str:
    return name if len(ranks) == size else f"{name} ({ranks_text(sorted(ranks))})"
