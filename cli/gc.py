"""``ckpt gc``: what of a run would go, why, and away with it."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from ckpt.errors import NotFoundError, UsageError
from ckpt.text import units

from .output import Output, options, style

if TYPE_CHECKING:
    from ckpt.maintenance.orphans import Orphan
    from ckpt.maintenance.step_listing import Step
    from ckpt.policies import Verdicts

_WHAT = {"save": "uncommitted save", "temporary": "temporary file", "upload": "upload", "conversion": "unfinished conversion"}


@click.command("gc", short_help="Remove what a run does not need: old checkpoints, orphaned files.")
@click.argument("root")
@click.option("--keep", "rules", multiple=True, metavar="RULE", help="Keep what RULE says, e.g. latest=3; several keep what any says.")
@click.option("--older-than", default="1d", metavar="TIME", help="Remove orphans that nobody touched for TIME, e.g. 36h. [default: 1d]")
@click.option("--yes", is_flag=True, help="Remove. Without it, only tell what would be removed.")
@click.option("--dry-run", is_flag=True, help="Only tell: the default.")
@options
def command(root: str, rules: tuple[str, ...], *, older_than: str, yes: bool, dry_run: bool, as_json: bool, quiet: bool) -> None:
    """Tell for each checkpoint below ROOT whether the rules keep it, and why, and what killed saves and conversions left; with --yes
    remove the others.

    Rules: latest=3, every=1000, within=7d, best=loss:min, tagged=release*, all. The newest checkpoint, the one that was written last and
    tagged ones are always kept, and without a rule all are.

    Orphans are files that no commit record reaches and that nobody touched for --older-than: younger ones may belong to a save in progress.
    --older-than 0 says that no save is in progress.

    \b
    Example:
      ckpt gc runs/a --keep latest=3 --keep every=1000
      ckpt gc s3://bucket/runs/a --keep latest=3 --older-than 6h --yes
    """
    from ckpt.formats.registry import list_foreign
    from ckpt.io_backends.registry import open_backend
    from ckpt.maintenance.orphans import find_orphans, remove_orphans
    from ckpt.maintenance.step_listing import infos, list_steps, none_here, remove_steps
    from ckpt.policies import All, AnyOf, parse_keep, retention

    if yes and dry_run:
        raise UsageError("--yes and --dry-run contradict each other")
    patience = units.seconds(older_than)
    if patience is None:
        raise UsageError(f"{older_than!r} is no time", where="--older-than", hint="90min, 36h, 1d12h, or 0")
    output = Output(json=as_json, quiet=quiet)
    backend = open_backend(root)
    now = backend.now()
    if now is None:  # a storage that is only read, say: nothing can be removed there
        now = time.time()
    orphans = find_orphans(backend, older_than=patience, now=now)
    steps = list_steps(root)
    if not steps and not orphans:
        foreign = list_foreign(root, ())
        if foreign:
            hint = "they are yours to remove; `ckpt ls` lists them"
            raise NotFoundError("only checkpoints of other formats are here, which gc leaves alone", where=root, hint=hint)
        raise none_here(root)
    facts = infos(steps)
    verdicts = retention(AnyOf(*map(parse_keep, rules)) if rules else All(), facts, datetime.fromtimestamp(now, timezone.utc))
    by_number = {s.number: s for s in steps}
    going = [by_number[n] for n in verdicts.removed]
    _tell(output, root, _step_rows(steps, verdicts, going, orphans), orphans, removed=yes)
    if yes:
        remove_steps(root, going, {info.step: info.referred_by for info in facts})
        remove_orphans(backend, orphans)


Row = tuple["Step", str, tuple[str, ...]]
"""A step, ``kept`` or ``removed``, and why."""


def _step_rows(steps: list[Step], verdicts: Verdicts, going: list[Step], orphans: list[Orphan]) -> list[Row]:
    why = {v.step: v.reasons for v in verdicts}
    gone = {s.url for s in going}
    rows = []
    for step in steps:
        if not step.committed and not step.damaged:
            rows.append(_unfinished_row(step, orphans))
            continue
        reasons = ("it has no step number",) if step.number is None else why[step.number]
        outcome = "removed" if step.url in gone else "kept"
        rows.append((step, outcome, (*reasons, *_links(step, removed=step.url in gone))))
    return rows


def _links(step: Step, *, removed: bool) -> list[str]:
    """What links have to do with it."""
    found = []
    if step.link is not None:
        found.append(f"it is a link: only the link goes, {step.link} stays" if removed else f"it is a link to {step.link}")
    if step.also:
        names = ", ".join(step.also)
        found.append(f"links that will lead nowhere: {names}" if removed else f"links to it: {names}")
    return found


def _unfinished_row(step: Step, orphans: list[Orphan]) -> Row:
    name = step.url.rstrip("/").rpartition("/")[2]
    saves = [d for d in orphans if d.what in ("save", "conversion") and d.directory in ("", name)]
    goes = bool(saves) and all(d.removable for d in saves)
    reasons = [*dict.fromkeys(d.reason for d in saves), *_links(step, removed=False)]
    return step, "removed" if goes else "kept", tuple(reasons) or ("not committed",)


def _tell(output: Output, root: str, rows: list[Row], orphans: list[Orphan], *, removed: bool) -> None:
    if output.json:
        found = [
            {"url": s.url, "step": s.number, "outcome": outcome, "reasons": list(reasons), "link": s.link, "also": s.also}
            for s, outcome, reasons in rows
        ]
        output.document({"root": root, "acted": removed, "steps": found, "debris": [_fields(root, d) for d in orphans]})
        return
    committed = [row for row in rows if row[0].committed or row[0].damaged]
    going = [step.url for step, outcome, _ in committed if outcome == "removed"] + [_url(root, d) for d in orphans if d.removable]
    if output.quiet:
        for url in dict.fromkeys(going):
            output.line(url)
        return
    words = {"kept": style("keep", "green"), "removed": style("remove", "red")}
    lines = [(s.url, words[outcome], "; ".join(reasons)) for s, outcome, reasons in committed]
    lines += [(_url(root, d), words["removed" if d.removable else "kept"], f"{_WHAT[d.what]}: {d.reason}") for d in orphans]
    output.table(("CHECKPOINT", "WHAT", "WHY"), lines)
    if going and not removed:
        output.talk(f"{len(going)} would be removed; --yes removes them")


def _url(root: str, orphan: Orphan) -> str:
    return f"{root.rstrip('/')}/{orphan.path}".rstrip("/")


def _fields(root: str, orphan: Orphan) -> dict[str, Any]:
    return {
        "url": _url(root, orphan),
        "what": orphan.what,
        "id": orphan.id,
        "files": len(orphan.entries),
        "bytes": orphan.bytes,
        "outcome": "removed" if orphan.removable else "kept",
        "reasons": [orphan.reason],
    }
