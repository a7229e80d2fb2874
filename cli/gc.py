"""``ckpt gc``: removes the checkpoints of a run that no rule keeps, and what killed saves left behind."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from ckpt import units
from ckpt.errors import NotFoundError, UsageError

from .options import time_option
from .output import URL, Output, options, style

if TYPE_CHECKING:
    from ckpt.policies import KeepPolicy, StepInfo
    from ckpt.runs.orphans import Orphan
    from ckpt.runs.step_listing import KnownSteps, Step

_KINDS = {
    "save": "uncommitted save",
    "temporary": "temporary file",
    "upload": "upload",
    "conversion": "unfinished conversion",
    "export": "unfinished export",
}
_OF_A_STEP = ("save", "conversion", "export")
_KEPT = style("keep", "green")
_REMOVED = {False: style("would remove", "red"), True: style("remove", "red")}
"""By whether it is removed right after the table is shown."""


@click.command("gc", short_help="Remove old checkpoints and orphaned files of a run.")
@click.argument("root", type=URL)
@click.option("--keep", "rules", multiple=True, metavar="RULE", help="Keep the checkpoints that RULE selects. Repeatable.")
@click.option("--abandoned", is_flag=True, help="Remove abandoned checkpoints, whatever the rules keep.")
@time_option("--older-than", default="1d", help="Age at which orphaned files are removed, e.g. 36h.")
@click.option("--yes", is_flag=True, help="Remove. Without it, only list what would be removed.")
@click.option("--dry-run", is_flag=True, help="Only list; the default.")
@options
def gc(root: str, rules: tuple[str, ...], *, abandoned: bool, older_than: float, yes: bool, dry_run: bool, output: Output) -> None:
    """List which checkpoints of the run at ROOT the rules keep or remove, and why; with --yes, remove them.

    Rules: latest=3, every=1000, within=7d, best=loss:min, tagged=release*, all. A checkpoint stays if any rule selects it. The newest
    checkpoint, the one written last and tagged ones always stay. Without a rule, all stay.

    When a run has gone back to an earlier step, the later ones are abandoned: restore ignores them. The rules apply to all
    checkpoints, and again to those that are not abandoned; what either keeps, stays. --abandoned removes abandoned ones, except those that
    are tagged or needed by others.

    Killed saves, copies, conversions and exports leave orphaned files. They are removed once they have not been written to for
    --older-than, because a save in progress looks the same. --older-than 0 removes them at once: make sure that no save is running.

    \b
    Example:
      ckpt gc runs/a --keep latest=3 --keep every=1000
      ckpt gc s3://bucket/runs/a --keep latest=3 --older-than 6h --yes
    """
    if yes and dry_run:
        raise UsageError("--yes and --dry-run contradict each other")
    collection = _collect(root, rules, older_than, abandoned=abandoned)
    if not output.json:
        collection.show(output, acts=yes)
    removed, freed = collection.remove() if yes else (0, 0)
    if output.json:
        output.document(collection.document(acted=yes) | {"removed": removed, "removed_bytes": freed})
    else:
        output.talk(collection.result(removed, freed) if yes else collection.forecast())


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A checkpoint or an unfinished save: ``outcome`` is ``kept`` or ``removed``; ``bytes`` is None if it was removed meanwhile."""

    step: Step
    outcome: str
    reasons: tuple[str, ...]
    bytes: int | None

    @property
    def freed(self) -> int:
        """What its removal frees: of a symbolic link only the link goes."""
        return 0 if self.step.link is not None else self.bytes or 0


@dataclass(frozen=True, kw_only=True)
class _Collection:
    """What is to be done with everything below a root."""

    root: str
    rows: tuple[_Row, ...]
    removable: tuple[_Row, ...]
    """The checkpoints that go, each after those that use its bytes: removing may stop anywhere."""
    orphans: tuple[Orphan, ...]
    referrers: Mapping[int, tuple[int, ...]]
    known: KnownSteps

    @property
    def checkpoints(self) -> list[_Row]:
        """The rows that are checkpoints; unfinished saves are among the orphans."""
        return [row for row in self.rows if row.step.committed or row.step.damaged]

    def remove(self) -> tuple[int, int]:
        """Remove what is to go. How many checkpoints and orphans went, and their bytes."""
        from ckpt.io_backends.registry import open_backend
        from ckpt.runs.orphans import remove_orphans
        from ckpt.runs.removal import remove_steps

        sizes = {row.step.url: row.freed for row in self.removable}
        gone = remove_steps(self.root, [row.step for row in self.removable], self.referrers, relist=self.known.list)
        orphans = [orphan for orphan in self.orphans if orphan.removable]
        remove_orphans(open_backend(self.root), list(self.orphans))
        return len(gone) + len(orphans), sum(sizes[step.url] for step in gone) + sum(orphan.bytes for orphan in orphans)

    def document(self, *, acted: bool) -> dict[str, Any]:
        steps = [
            {
                "url": row.step.url,
                "step": row.step.number,
                "outcome": row.outcome,
                "reasons": list(row.reasons),
                "link": row.step.link,
                "also": row.step.also,
                "bytes": row.bytes,
            }
            for row in self.rows
        ]
        orphans = [
            {
                "url": self._url(orphan),
                "what": orphan.what,
                "id": orphan.id,
                "files": len(orphan.entries),
                "bytes": orphan.bytes,
                "outcome": "removed" if orphan.removable else "kept",
                "reasons": [orphan.reason],
            }
            for orphan in self.orphans
        ]
        return {"root": self.root, "acted": acted, "steps": steps, "orphans": orphans}

    def show(self, output: Output, *, acts: bool) -> None:
        """The table, or if quiet the URLs of what goes."""
        if output.quiet:
            for url in dict.fromkeys([row.step.url for row in self.removable] + [self._url(o) for o in self.orphans if o.removable]):
                output.line(url)
            return
        outcomes = {"kept": _KEPT, "removed": _REMOVED[acts]}
        lines = [
            (row.step.url.rstrip("/").rpartition("/")[2], outcomes[row.outcome], _size(row.bytes), "; ".join(row.reasons))
            for row in self.checkpoints
        ]
        lines += [
            (o.path or ".", outcomes["removed" if o.removable else "kept"], _size(o.bytes), f"{_KINDS[o.what]}: {o.reason}")
            for o in self.orphans
        ]
        output.table(("CHECKPOINT", "ACTION", ">ON DISK", "~REASON"), lines)

    def forecast(self) -> str:
        sizes = [row.freed for row in self.removable]
        sizes += [orphan.bytes for orphan in self.orphans if orphan.removable]
        if not sizes:
            return "nothing to remove"
        return f"{len(sizes)} would be removed, {units.size(sum(sizes))}; --yes removes {'it' if len(sizes) == 1 else 'them'}"

    def result(self, removed: int, freed: int) -> str:
        kept = [row for row in self.checkpoints if row.outcome == "kept"]
        stays = f"{units.plural(len(kept), 'checkpoint')} kept, {units.size(sum(row.bytes or 0 for row in kept))}"
        return f"{f'{removed} removed, {units.size(freed)}' if removed else 'nothing removed'}; {stays}"

    def _url(self, orphan: Orphan) -> str:
        return f"{self.root.rstrip('/')}/{orphan.path}".rstrip("/")


def _size(count: int | None) -> str:
    return "" if count is None else units.size(count)


def _collect(root: str, rules: tuple[str, ...], least_age: float, *, abandoned: bool) -> _Collection:
    """Decide what goes. Only lists; nothing is removed here."""
    from ckpt.formats.registry import list_foreign
    from ckpt.io_backends.registry import open_backend
    from ckpt.policies import All, AnyOf, parse_keep, retention
    from ckpt.runs.members import joint_uses
    from ckpt.runs.orphans import find_orphans
    from ckpt.runs.removal import infos
    from ckpt.runs.step_listing import KnownSteps, directory_name, none_here, stored_sizes, vanished_bases

    backend = open_backend(root)
    now = backend.now()
    if now is None:  # a storage that is only read, say: nothing can be removed there
        now = time.time()
    orphans = find_orphans(backend, older_than=least_age, now=now)
    known = KnownSteps(root)
    steps = known.list()
    if any(step.url == root and (step.committed or step.damaged) for step in steps):
        parent = root.rstrip("/").rpartition("/")[0]
        hint = f"ckpt gc {parent or 'ROOT'}; or `ckpt rm {root}` for this checkpoint alone"
        raise UsageError("this is a single checkpoint; gc works on the run that contains it", where=root, hint=hint)
    if not steps and not orphans:
        if list_foreign(root, ()):
            hint = "remove them yourself; `ckpt ls` lists them"
            raise NotFoundError("only checkpoints of other formats are here, which gc leaves alone", where=root, hint=hint)
        raise none_here(root)
    facts = infos(steps, joint=joint_uses(root, steps))
    keep = AnyOf(*map(parse_keep, rules)) if rules else All()
    _check_metrics(root, keep, facts)
    verdicts = retention(keep, facts, datetime.fromtimestamp(now, timezone.utc), abandoned=not abandoned)
    sizes = stored_sizes(steps)
    reasons = {v.step: v.reasons for v in verdicts}
    by_number = {step.number: step for step in steps}
    going = [by_number[number].url for number in verdicts.removed]
    gone, rows, vanished = set(going), {}, vanished_bases(root, steps)
    for step in steps:
        removed, why = step.url in gone, () if step.number is None else reasons.get(step.number, ())
        why = why if rules else tuple("no --keep was given" if reason == repr(keep) else reason for reason in why)
        if not step.committed and not step.damaged:
            saves = [o for o in orphans if o.what in _OF_A_STEP and o.place.directory in ("", directory_name(step))]
            removed, why = (
                bool(saves) and all(o.removable for o in saves),
                tuple(dict.fromkeys(o.reason for o in saves)) or ("not committed",),
            )
        elif step.number is None:
            why = ("it has no step number",)
        why = (*why, *(f"{name} has vanished, and data files that this needs with it" for name in vanished.get(step.url, ())))
        why = (*why, *_link_reasons(step, removed=removed and step.url in gone))
        rows[step.url] = _Row(step=step, outcome="removed" if removed else "kept", reasons=why, bytes=sizes.get(step.url))
    return _Collection(
        root=root,
        rows=tuple(rows.values()),
        removable=tuple(rows[url] for url in going),
        orphans=tuple(orphans),
        referrers={info.step: info.users for info in facts},
        known=known,
    )


def _check_metrics(root: str, keep: KeepPolicy, steps: Sequence[StepInfo]) -> None:
    """That a rule for the best steps names a metric that some step has: a typing error would have all of them removed."""
    from ckpt.policies.keep import without_metric

    metrics = sorted({metric for step in steps for metric in step.metrics})
    for rule in without_metric(keep, steps):
        there = f"they have {', '.join(metrics)}" if metrics else "they have none"
        hint = f"--keep best={metrics[0]}:{rule.mode}" if metrics else "save with metrics=, or leave the rule out"
        raise UsageError(f"no checkpoint has the metric {rule.metric!r}; {there}", where=root, hint=hint)


def _link_reasons(step: Step, *, removed: bool) -> list[str]:
    """What symbolic links have to do with the outcome."""
    reasons = []
    if step.link is not None:
        reasons.append(f"it is a link: only the link goes, {step.link} stays" if removed else f"it is a link to {step.link}")
    if step.also:
        names = ", ".join(step.also)
        reasons.append(f"links that will lead nowhere: {names}" if removed else f"links to it: {names}")
    return reasons
