"""Removing one checkpoint that somebody names, by the rules of a run's retention: what is tagged, or used by others, stays. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.errors import ConflictError, FormatError, NotCommittedError, UsageError
from ckpt.formats.native.clearing import referred_files
from ckpt.formats.native.paths import split_url
from ckpt.formats.registry import find_format
from ckpt.io_backends.registry import open_backend

from .members import joint_uses
from .removal import remove_at, remove_steps, uses
from .step_listing import Step, directory_name, list_steps, look, none_here


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRemoval:
    """A checkpoint that may go. ``run``: the URL of the directory that it lies in; None if it lies in none, or is a symbolic link, of which
    only the link goes."""

    step: Step
    run: str | None

    def remove(self) -> None:
        """Remove it, and its directory if nothing else is in it."""
        if self.run is None:
            remove_at(self.step.url)
        elif not remove_steps(self.run, [self.step], {}):
            message = "it was replaced, removed, tagged or referred to meanwhile; what is there stays"
            raise ConflictError(message, where=self.step.url, hint="look at it with `ckpt ls`, and decide anew")


def named_removal(url: str) -> NamedRemoval:
    """The checkpoint at ``url``. Only looks."""
    backend = open_backend(url)
    step, names = look(backend, url)
    if step is None:
        raise _no_checkpoint(url, has_directories=bool(names))
    try:
        run, _ = split_url(backend)
    except UsageError:
        run = None
    if not step.committed and not step.damaged:
        hint = f"if it was killed: `ckpt gc {run or 'ROOT'} --yes` removes its files after a day, with --older-than 0 at once"
        raise NotCommittedError("no checkpoint is committed here: a save did not finish, or still goes on", where=url, hint=hint)
    if step.link is not None:
        return NamedRemoval(step=step, run=None)
    if step.tags:
        hint = f"take the tags away first: ckpt tag -d {url} {' '.join(step.tags)}"
        raise ConflictError(f"it is tagged: {', '.join(step.tags)}", where=url, hint=hint)
    steps = list_steps(run) if run is not None else []
    here = next((s for s in steps if directory_name(s) == directory_name(step)), None)
    if here is None:  # the directory above is a checkpoint itself, or nothing
        used = [text] if (text := referred_files(backend).text()) else []
    else:
        used = uses(here, steps)
        if run is not None and here.id is not None and (user := joint_uses(run, steps).get(here.id)) is not None:
            used.append(f"it is a part of {user}")
    if used:
        hint = "remove these first, or make copies of them that need no other: `ckpt cp`"
        raise ConflictError(f"it has to stay: {'; '.join(used)}", where=url, hint=hint)
    return NamedRemoval(step=here or step, run=run if here is not None else None)


def _no_checkpoint(url: str, *, has_directories: bool) -> Exception:
    format = find_format(url)
    if format is not None:
        hint = "remove its files yourself"
        return FormatError(f"only checkpoints of ckpt's own format are removed; this is {format}", where=url, hint=hint)
    if has_directories and any(s.committed or s.damaged for s in list_steps(url)):
        return UsageError("this is a run, not a checkpoint", where=url, hint=f"name one of its checkpoints, or use `ckpt gc {url}`")
    return none_here(url)
