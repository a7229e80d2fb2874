"""``ckpt memory serve | status | drop | stop``: the daemon that holds checkpoints in this machine's memory."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import click

from ckpt import units
from ckpt.errors import ConflictError, FormatError, UsageError
from ckpt.text import address_text

from .options import CommandGroup, parse_size, time_option
from .output import URL, Output, options

if TYPE_CHECKING:
    from ckpt.nodes.memory_connection import MemoryObject


_NAMED = 4
_KINDS = {"lent": "saves in progress", "dropped": "dropped, still read", "spare": "spare, to be filled again", "freeing": "being freed"}


@click.group("memory", cls=CommandGroup, short_help="Run, show or end the daemon that holds checkpoints in memory.")
def memory() -> None:
    """Run, show or end the daemon that holds the checkpoints of memory:// on this machine, for this account.

    It starts by itself with the first save to memory://. CKPT_MEMORY_DIR chooses the daemon.

    \b
    Example:
      ckpt memory status
      ckpt memory drop memory://runs/a/step-00000100
      ckpt memory serve --budget 64GiB
    """


@memory.command("serve")
@click.option("--budget", callback=parse_size, metavar="SIZE", help="Hold at most SIZE, e.g. 64GiB. [default: half of what is available]")
@options
def serve_(*, budget: int | None, output: Output) -> None:
    """Run the daemon in the foreground, as a sidecar or a service.

    \b
    Example:
      ckpt memory serve --budget 64GiB
    """
    from ckpt.nodes import memory_connection
    from ckpt.nodes.memory_daemon import serve

    folder = memory_connection.folder()
    output.talk(f"holding checkpoints in memory for {folder}; Ctrl-C ends it")
    serve(folder, budget)


@memory.command("status", short_help="Show what the daemon holds.")
@click.option("--listen", is_flag=True, help="Listen for other machines, if it does not yet, and show the address.")
@time_option("--timeout", default="10s", help="Give up if it does not answer for TIME.")
@options
def status_(*, listen: bool, timeout: float, output: Output) -> None:
    """Show what the daemon holds: the size of each checkpoint, and whether its copies on other machines are complete.

    \b
    Example:
      ckpt memory status
    """
    from ckpt.concurrency import patience
    from ckpt.nodes import memory_client
    from ckpt.nodes.copies import copies_seen

    if not timeout:
        raise UsageError("nothing answers within no time", where="--timeout", hint="10s, 2min")
    click.get_current_context().call_on_close(partial(patience.reset, patience.set(timeout)))
    daemon = memory_client.connect(start=False)
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


@memory.command("drop")
@click.argument("url", type=URL, required=False)
@click.option("--all", "everything", is_flag=True, help="Delete everything.")
@options
def drop(url: str | None, *, everything: bool, output: Output) -> None:
    """Delete the checkpoints below URL.

    \b
    Example:
      ckpt memory drop memory://runs/a/step-00000100
    """
    from ckpt.nodes import memory_client
    from ckpt.nodes.memory_backend import MemoryBackend
    from ckpt.nodes.memory_remote import is_remote

    if (url is None) != everything:
        raise UsageError("give either a URL or --all", hint="ckpt memory drop memory://runs/a")
    if url is not None and is_remote(url):
        raise UsageError("this is the memory of another machine", where=url, hint="run `ckpt memory drop` there")
    prefix = "" if url is None else MemoryBackend(url).url.removeprefix("memory://")
    if url is not None and not prefix:
        raise UsageError("this URL is everything", where=url, hint="give --all if that is meant")
    daemon = memory_client.connect(start=False)
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


@memory.command("stop")
@click.option("--all", "everything", is_flag=True, help="End it even if it holds runs, which are lost.")
@options
def stop(*, everything: bool, output: Output) -> None:
    """End the daemon. It does not end while it holds runs, perhaps of other jobs: the error names them, and --all ends it anyway.

    \b
    Example:
      ckpt memory stop
    """
    from ckpt.nodes import memory_client, memory_connection

    try:
        daemon = memory_client.connect(start=False)
    except FormatError:
        if not everything:
            raise
        memory_client.end_daemon(memory_connection.folder())
        output.document({"pid": None}) if output.json else output.line("a daemon of another release has ended")
        return
    runs = _runs(daemon.list())
    if runs and not everything:
        named = [f"memory://{run} ({units.size(size)}, last saved {units.duration(age)} ago)" for run, size, age in runs[:_NAMED]]
        more = [f"{len(runs) - _NAMED} more"] if len(runs) > _NAMED else []
        raise UsageError(
            f"it holds {', '.join([*named, *more])}: this is lost when it ends",
            where=str(daemon.folder),
            hint=f"end one run with `ckpt memory drop memory://{runs[0][0]}`; or give --all, if none of them is needed",
        )
    pid = daemon.status()["pid"]
    daemon.stop()
    output.document({"pid": pid}) if output.json else output.line(f"process {pid} has ended")


def _runs(objects: Iterable[MemoryObject]) -> list[tuple[str, int, float]]:
    """The directories above checkpoints, with their bytes and the seconds since something was saved there; the latest first."""
    from ckpt.nodes.memory_store import checkpoint_of

    sizes: Counter[str] = Counter()
    ages: dict[str, float] = {}
    now = time.time()
    for each in objects:
        checkpoint = checkpoint_of(each.path)
        run = checkpoint.rpartition("/")[0] or checkpoint
        sizes[run] += each.size
        ages[run] = min(ages.get(run, math.inf), max(0.0, now - each.modified))
    return [(run, sizes[run], age) for run, age in sorted(ages.items(), key=lambda item: item[1])]
