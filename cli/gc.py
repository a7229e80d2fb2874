"""``ckpt gc``: what of a run would go, why, and away with it."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

import click

from ckpt.errors import NotFoundError, UsageError

from .output import Output, options

if TYPE_CHECKING:
    from ckpt.policies import Verdicts
    from ckpt.runs import Step


@click.command("gc", short_help="Remove the checkpoints of a run that no rule keeps.")
@click.argument("root")
@click.option("--keep", "rules", multiple=True, metavar="RULE", help="Keep what RULE says, e.g. latest=3; several keep what any says.")
@click.option("--debris", is_flag=True, help="Also what is left of saves that did not finish, below the newest checkpoint.")
@click.option("--yes", is_flag=True, help="Remove. Without it, only tell what would be removed.")
@click.option("--dry-run", is_flag=True, help="Only tell: the default.")
@options
def command(root: str, rules: tuple[str, ...], *, debris: bool, yes: bool, dry_run: bool, as_json: bool, quiet: bool) -> None:
    """Tell for each checkpoint below ROOT whether the rules keep it, and why; with --yes remove the others.

    Rules: latest=3, every=1000, within=7d, best=loss:min, tagged=release*, all. The newest checkpoint, the one that was written last and
    tagged ones are always kept. Run it while no job saves to ROOT.

    \b
    Example:
      ckpt gc runs/a --keep latest=3 --keep every=1000
      ckpt gc runs/a --keep latest=3 --debris --yes
    """
    from ckpt.policies import All, AnyOf, parse_keep, retention
    from ckpt.runs import infos, list_steps, remove_step

    if yes and dry_run:
        raise UsageError("--yes and --dry-run contradict each other")
    output = Output(json=as_json, quiet=quiet)
    steps = list_steps(root)
    if not steps:
        raise NotFoundError("no checkpoint here, and none in a directory below", where=root, hint="name the directory that holds the steps")
    verdicts = retention(AnyOf(*map(parse_keep, rules)) if rules else All(), infos(steps), datetime.now(timezone.utc))
    by_number = {s.number: s for s in steps}
    going = [by_number[n] for n in verdicts.removed] + (_debris(steps) if debris else [])
    _tell(output, root, steps, verdicts, going, removed=yes)
    for step in going if yes else ():
        remove_step(root, step)


def _debris(steps: list[Step]) -> list[Step]:
    """What is left of saves that did not finish, older than the newest checkpoint: what is newer may be a save that goes on."""
    newest = max((s.number for s in steps if s.committed and s.number is not None), default=-1)
    return [s for s in steps if not s.committed and not s.damaged and s.number is not None and s.number < newest]


def _tell(output: Output, root: str, steps: list[Step], verdicts: Verdicts, going: list[Step], *, removed: bool) -> None:
    why = {v.step: v.reasons for v in verdicts}
    gone = {s.url for s in going}
    rows = [
        (step, "removed" if step.url in gone else "kept", _reasons(step, why, debris=step.url in gone and not step.committed))
        for step in steps
    ]
    if output.json:
        found = [{"url": s.url, "step": s.number, "outcome": outcome, "reasons": list(reasons)} for s, outcome, reasons in rows]
        output.document({"root": root, "acted": removed, "steps": found})
    elif output.quiet:
        for step in going:
            output.line(step.url)
    else:
        words = {"kept": click.style("keep", fg="green"), "removed": click.style("remove", fg="red")}
        output.table(("CHECKPOINT", "WHAT", "WHY"), [(s.url, words[outcome], "; ".join(reasons)) for s, outcome, reasons in rows])
        if going and not removed:
            output.talk(f"{len(going)} would be removed; --yes removes them")


def _reasons(step: Step, why: dict[int, tuple[str, ...]], *, debris: bool) -> tuple[str, ...]:
    if debris:
        return ("debris of a save that did not finish",)
    return ("it has no step number",) if step.number is None else why.get(step.number, ())
