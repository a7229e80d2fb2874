"""Whether a checkpoint fits the states of all ranks: the row that each rank gives the leader, and the leader's verdict. All problems of all
ranks go into one error. And how a state takes the values that are no tensors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from ckpt.catalog import Catalog, identity, job_tensors
from ckpt.errors import CkptError, CorruptError, MismatchError, NamesError, ShapeError
from ckpt.formats.native.commit import LABELS
from ckpt.net.channel import Row
from ckpt.net.shm_pool import machine
from ckpt.plan import machines, tree
from ckpt.plan import machines as near_files
from ckpt.plan.layout.partition import runs_of
from ckpt.plan.match import Selection, report_names, ways_out
from ckpt.plan.tables import ranks_text
from ckpt.plan.values import LABEL, part_in, renamed_path
from ckpt.state.targets import Binding
from ckpt.state.walk import take_all
from ckpt.text import parse_json

from .job import LoadJob, StateWrites
from .shared_reads import SharedReads, refused

log = logging.getLogger("ckpt")

INLINE = 512
"""Bytes of what the verdict contains itself; of what is longer it has the digest, and ranks hand it on to each other."""
_OF_TENSORS = frozenset({"$tensor", "$tensors", "$inline"})
"""Kinds of nodes that stand for tensors: these count by their names."""


def row_of_match(job: LoadJob, catalog: Catalog, binding: Binding, sharing: SharedReads) -> Row:
    """For the leader. What is equal on most ranks goes as a digest: it asks one of them for it."""

    def shared(value: object) -> str:
        return job.call.share(json.dumps(value).encode())

    everything = binding.used >= names_of(catalog)
    row: Row = {
        "id": identity(catalog),
        "problems": shared({"missing": binding.missing, "misfits": binding.misfits}),
        "used": shared({"used": None if everything else sorted(binding.used), "values": sorted(binding.values)}),
    }
    if binding.renames:
        row["renames"] = binding.renames
    if not sharing.wanted:
        return row
    near = catalog.backend.nearby([file.path for file in catalog.files])
    if near is not None:
        row["near"] = runs_of(number for number, file in enumerate(catalog.files) if file.path in near)
    return row | {"shares": shared(sharing.digests()), "machine": machine()}


def verdict_of(job: LoadJob, catalog: Catalog, rows: dict[int, Row]) -> Row:
    """Leader: whether it fits everywhere, and who shares. Small: every rank reads it."""
    if len({row["id"] for row in rows.values()}) > 1:
        return {"replaced": True}
    call, options = job.call, job.options
    call.fetch_all(row[key] for row in rows.values() for key in ("problems", "used", "shares") if key in row)

    def once(digest: str) -> Row:
        value: Row = parse_json(call.fetch(digest))
        return value

    selection = options.selection
    for row in rows.values():  # of ranks that have the optimizer: not all need to
        selection = selection.followed_by((old, new) for old, new in row.get("renames", ()))
    verdict: Row = check_match(rows, once, catalog, selection, strict=options.strict, url=call.url)
    if any("shares" not in row for row in rows.values()):
        return verdict | {"refused": None}
    digests = {digest: once(digest) for digest in {row["shares"] for row in rows.values()}}
    ordered = [rows[rank] for rank in call.group.ranks]
    if all("near" in row for row in ordered):
        spelled = near_files.spelled([tuple(map(tuple, row["near"])) for row in ordered])
        text = json.dumps(spelled).encode()
        # Where machines changed places there is a row for each of them, which is too much for a verdict that every rank
        # reads from the store.
        verdict["near_files"] = spelled if len(text) <= INLINE else call.leave(text)
    return verdict | {
        "refused": refused(digests[row["shares"]] for row in rows.values()),
        "machines": machines.spell([row["machine"] for row in ordered]),
    }


def check_match(
    rows: Mapping[int, Row], fetch: Callable[[str], Row], catalog: Catalog, select: Selection, *, strict: bool, url: str
) -> dict[str, list[str]]:
    """Names that are missing and unexpected. ``rows`` have digests of what the ``problems`` of each rank, and ``used``; ``fetch`` gives
    what has a digest; ``url`` is what the caller calls the checkpoint."""
    missing: dict[str, list[int]] = {}
    misfits: dict[str, list[int]] = {}
    used: set[str] = set()
    values: set[str] = set()
    names = names_of(catalog)
    of_digest: dict[str, list[int]] = {}
    # Rows carry digests of lists. Nearly all ranks have the same problems, mostly none, so the leader fetches a
    # handful of lists however many ranks there are.
    for rank, row in rows.items():
        of_digest.setdefault(row["problems"], []).append(rank)
    for digest, ranks in of_digest.items():  # nearly all ranks say the same
        misfit = fetch(digest)
        for name in misfit["missing"]:
            missing.setdefault(name, []).extend(ranks)
        for text in misfit["misfits"]:
            misfits.setdefault(text, []).extend(ranks)
    for digest in {row["used"] for row in rows.values()}:
        usage = fetch(digest)
        used.update(names if usage["used"] is None else usage["used"])
        values.update(usage["values"])
    unexpected = _unexpected(catalog, select, names - used, values)
    idle = select.idle(_paths(catalog, select), missing) if strict else []
    lost = ", ".join(part for part in (catalog.record.lost if catalog.record is not None else ()) if part != LABELS)
    if misfits or idle or (strict and (missing or unexpected)):
        err = _mismatch(catalog, select, len(rows), missing, unexpected, misfits, idle)
        err.where = url
        if lost and not idle:
            message = f"{err.message}\n  a rebuild of its index could not recover the checkpoint's {lost}"
            hint = (
                "load an older step; or strict=False takes what is left, and leaves in the state what is missing; only=[...] loads a part"
            )
            raise CorruptError(message, where=url, hint=hint) from err
        raise err
    if lost and missing:
        named = "\n".join(report_names("missing, and left in the state as they are", missing))
        log.warning("%s: a rebuild of its index could not recover the checkpoint's %s\n%s", url, lost, named)
    return {"missing": sorted(missing), "unexpected": unexpected}


def names_of(catalog: Catalog) -> Set[str]:
    """Names of the stored tensors that do not belong to one rank."""
    return job_tensors(catalog).keys()


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


def _paths(catalog: Catalog, select: Selection) -> list[str]:
    """Everything that ``only`` and ``rename`` may mean: names of tensors, paths of values, and all that contains them."""
    if not select.only and not select.moves:
        return []
    names = [*job_tensors(catalog)]
    names += [path for path, _ in tree.leaves(catalog.state)]
    names += [n.replace(".state.", ".", 1) for n in names]  # an optimizer's state goes by its parameters too
    return list(dict.fromkeys([*names, *(n[:i] for n in names for i, c in enumerate(n) if c == ".")]))


def _other_kinds(catalog: Catalog, select: Selection, missing: Collection[str]) -> dict[str, str]:
    """For names of the state that are missing because the checkpoint has something of another kind there: what it has."""
    there = {select.renamed(name): "one tensor of all ranks in the checkpoint, a PerRank" for name in names_of(catalog)}
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
    misfits: Mapping[str, list[int]],
    idle: Sequence[str],
) -> MismatchError:
    notes = _other_kinds(catalog, select, missing) if missing else {}
    lines = report_names("missing in the checkpoint", (_on(n + notes.get(n, ""), r, everywhere) for n, r in missing.items()))
    lines += report_names("unexpected in the checkpoint", (_moved(n, select) for n in unexpected))
    lines += report_names("do not fit", (_on(n, r, everywhere) for n, r in misfits.items()))
    lines += report_names("match no name", idle)
    kind = ShapeError if not missing and not unexpected and not idle else NamesError if not misfits else MismatchError
    hint = ways_out(missing=bool(missing or idle), unexpected=bool(unexpected), texts=[*misfits, *notes.values()], ranks=everywhere)
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


def renamed(binding: Binding, selection: Selection) -> dict[str, str]:
    """Stored names of loaded tensors that have another name in the state."""
    if not selection.moves:
        return {}
    entries = {n: e for n, (_, e) in binding.targets.items() if e.rank is None}
    return {e.name: n for n, e in entries.items() if selection.renamed(e.name) != e.name}


# The values of a state that are no tensors: objects take theirs before any tensor changes, all else is set when every byte is there.


def accept(binding: Binding, writes: StateWrites, url: str) -> list[Callable[[], None]]:
    """Let the objects of the state take theirs. Returns what is left to set when all bytes are there."""
    if not binding.objects:
        return [*(each.take for each in binding.options), *binding.apply]
    refusal = take_all([*binding.options, *binding.objects])
    if refusal is not None:
        writes.begun = not refusal.undone
        if isinstance(refusal.error, CkptError):
            raise refusal.error
        raise _refused(refusal.error, f"{refusal.path} in {url}") from refusal.error
    return binding.apply


def set_all(setters: Iterable[Callable[[], None]], url: str) -> None:
    """Set the values, now that all bytes are there."""
    try:
        run_each(setters)
    except CkptError:
        raise
    except Exception as err:  # whatever an object of the user's raises: it has to say that the state was touched
        raise _refused(err, url) from err


def run_each(actions: Iterable[Callable[[], None]]) -> None:
    for action in actions:
        action()


def _refused(err: Exception, where: str) -> CkptError:
    return CkptError(
        f"an object of the state did not take its loaded value: {type(err).__name__}: {err}",
        where=where,
        hint="`ckpt inspect URL --state` shows what is stored; only=[...] leaves the object out",
    )
