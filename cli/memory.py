"""``ckpt memory serve | status | drop | stop``: the daemon that holds checkpoints in this machine's memory."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from ckpt import units
from ckpt.cli.console.output import URL, OneOf, Output, options
from ckpt.errors import ConflictError, FormatError, UsageError
from ckpt.text import address_text

if TYPE_CHECKING:
    from ckpt.nodes.memory.connection import MemoryObject


_NAMED = 4
_KINDS = {
    "lent": "saves in progress",
    "dropped": "dropped, still read",
    "spare": "spare, to be filled again",
    "freeing": "being freed",
}
_OPTIONS = {"--budget": ("serve",), "--listen": ("status",), "--all": ("drop", "stop")}
"""Options, and what each is for."""


@click.command("memory", short_help="Run, show or end the daemon that holds checkpoints in memory.")
@click.argument("what", type=OneOf(("serve", "status", "drop", "stop")), metavar="serve|status|drop|stop")
@click.argument("url", type=URL, required=False)
@click.option("--budget", metavar="SIZE", help="serve: hold at most so much, e.g. 64GiB. [default: half of what is available]")
@click.option("--listen", is_flag=True, help="status: listen for other machines, if it does not yet, and show the address.")
@click.option("--all", "everything", is_flag=True, help="drop: everything; stop: even if it holds runs, which are lost.")
@options
def command(
    what: str,
    url: str | None,
    *,
    budget: str | None,
    listen: bool,
    everything: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run, show or end the daemon that holds the checkpoints of memory:// on this machine, for this account.

    It starts by itself with the first save to memory://. serve runs it in the foreground, as a sidecar or a service. status shows what it
    holds: the size of each checkpoint, and whether its copies on other machines are complete. drop deletes what lies below URL. stop ends
    the daemon; if it holds runs, it names them and needs --all, since they may be those of other jobs. CKPT_MEMORY_DIR chooses the daemon.

    \b
    Example:
      ckpt memory status
      ckpt memory drop memory://runs/a/step-00000100
      ckpt memory serve --budget 64GiB
    """
    output = Output(json=as_json, quiet=quiet)
    if (url is not None) != (what == "drop" and not everything):
        raise UsageError("drop takes a URL or --all, the others no URL", hint="ckpt memory drop memory://runs/a")
    given = {"--budget": budget is not None, "--listen": listen, "--all": everything}
    for option, of in _OPTIONS.items():
        if given[option] and what not in of:
            raise UsageError(f"{option} is an option of ckpt memory {' and '.join(of)}, not of {what}", hint="ckpt memory --help")
    if what == "serve":
        _serve(output, None if budget is None else units.parse_size(budget))
    elif what == "status":
        _status(output, listen=listen)
    elif what == "drop":
        _drop(output, url)
    else:
        _stop(output, everything=everything)


def _serve(output: Output, budget: int | None) -> None:
    from ckpt.nodes.memory import connection
    from ckpt.nodes.memory.daemon import serve

    folder = connection.folder()
    output.talk(f"holding checkpoints in memory for {folder}; Ctrl-C ends it")
    serve(folder, budget)


def _status(output: Output, *, listen: bool) -> None:
    from ckpt.nodes.copies import copies_seen
    from ckpt.nodes.memory import client

    daemon = client.connect(start=False)
    if listen:
        daemon.address()
    status = daemon.status()
    copies = {path: copies_seen(f"memory://{path}") for path in status["by_checkpoint"]}
    if output.json:
        output.document({**status, "copies": copies})
        return
    used = sum(status.get(kind, 0) for kind in ("objects", *_KINDS))
    output.line(
        f"process {status['pid']}, release {status['release']}, {units.duration(status['seconds'])}, in {status['folder']}; "
        f"{units.size(used)} of {units.size(status['budget'])} in use, {status['clients']} clients"
    )
    if status["addresses"]:
        listens = ", ".join(address_text(host, port) for host, port in status["addresses"])
        output.line(f"listens at {listens}; {status['peers']} peers")
    words = {True: "complete", False: "incomplete", None: ""}
    rows = [(units.size(size), words[copies[path]], f"memory://{path}") for path, size in sorted(status["by_checkpoint"].items())]
    for kind, meaning in _KINDS.items():
        if status.get(kind):  # a daemon of an earlier release has fewer
            rows.append((units.size(status[kind]), "", meaning))
    if rows:
        output.table((">SIZE", "COPIES", "WHAT"), rows)


def _drop(output: Output, url: str | None) -> None:
    from ckpt.nodes.memory import client
    from ckpt.nodes.memory.backend import MemoryBackend
    from ckpt.nodes.memory.remote import is_remote

    if url is not None and is_remote(url):
        raise UsageError("this is the memory of another machine", where=url, hint="run `ckpt memory drop` there")
    prefix = "" if url is None else MemoryBackend(url).url.removeprefix("memory://")
    if url is not None and not prefix:
        raise UsageError("this URL is everything", where=url, hint="give --all if that is meant")
    daemon = client.connect(start=False)
    if users := _users_outside(prefix, daemon.status()["by_checkpoint"]):
        raise ConflictError(
            f"other checkpoints refer to what would be dropped: {', '.join(users[:_NAMED])}{' and others' if len(users) > _NAMED else ''}",
            where=f"memory://{prefix}",
            hint="drop these first, or the run with all its steps; `ckpt cp` makes copies of them that need no other",
        )
    freed = daemon.drop(prefix)
    if output.json:
        output.document({"dropped": f"memory://{prefix}", "bytes": freed})
    else:
        output.line(f"dropped {units.size(freed)}" if freed else f"nothing lies below memory://{prefix}: dropped 0 B")


def _users_outside(prefix: str, checkpoints: Iterable[str]) -> list[str]:
    """URLs of the checkpoints that need bytes from below ``prefix`` and do not lie there themselves. They are neighbours in a run."""
    from ckpt.runs.step_listing import list_steps

    if not prefix:
        return []
    dropped = f"memory://{prefix}/"
    runs = {path.rpartition("/")[0] for path in checkpoints if not f"memory://{path}/".startswith(dropped)}
    return sorted(
        step.url
        for run in runs
        for step in list_steps(f"memory://{run}")
        if not f"{step.url}/".startswith(dropped) and any(f"{used}/".startswith(dropped) for used in step.sources)
    )


def _stop(output: Output, *, everything: bool) -> None:
    from ckpt.nodes.memory import client, connection

    try:
        daemon = client.connect(start=False)
    except FormatError:
        if not everything:
            raise
        client.end_daemon(connection.folder())
        output.document({"pid": None}) if output.json else output.line("a daemon of another release has ended")
        return
    runs = _runs(daemon.list())
    if runs and not everything:
        named = [f"memory://{run} ({units.size(size)}, last saved {units.duration(age)} ago)" for run, size, age in runs[:_NAMED]]
        more = [f"{len(runs) - _NAMED} more"] if len(runs) > _NAMED else []
        raise UsageError(
            f"it holds {', '.join([*named, *more])}: this is lost when it ends",
            where=str(daemon.folder),
            hint=f"end one run with `ckpt memory drop memory://{runs[0][0]}`; or give --all, if nobody needs any of them",
        )
    pid = daemon.status()["pid"]
    daemon.stop()
    output.document({"pid": pid}) if output.json else output.line(f"process {pid} has ended")


def _runs(objects: Iterable[MemoryObject]) -> list[tuple[str, int, float]]:
    """The directories above checkpoints, with their bytes and the seconds since something was saved there; the latest first."""
    from ckpt.nodes.memory.store import checkpoint_of

    sizes: Counter[str] = Counter()
    ages: dict[str, float] = {}
    now = time.time()
    for each in objects:
        checkpoint = checkpoint_of(each.path)
        run = checkpoint.rpartition("/")[0] or checkpoint
        sizes[run] += each.size
        ages[run] = min(ages.get(run, math.inf), max(0.0, now - each.modified))
    return [(run, sizes[run], age) for run, age in sorted(ages.items(), key=lambda item: item[1])]


__all__ = ["command"]
