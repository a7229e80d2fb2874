"""``ckpt live``: what a source of live state says of itself."""

from __future__ import annotations

from dataclasses import asdict

import click

from ckpt.cli.console.groups import CommandGroup
from ckpt.cli.console.output import Output, options
from ckpt.errors import UsageError


@click.group("live", cls=CommandGroup, short_help="Show the versions of a live state and who takes them.")
def command() -> None:
    """Look at a live state.

    \b
    Example:
      ckpt live status tcp://trainer0:7010/actor
    """


@command.command("status", short_help="Show the versions of a source, and which sink has which.")
@click.argument("address", metavar="ADDRESS")
@click.option("--timeout", default="10s", metavar="TIME", show_default=True, help="Give up if nothing answers for TIME.")
@options
def status(address: str, *, timeout: str, as_json: bool, quiet: bool) -> None:
    """Show which versions the source at ADDRESS keeps, which sink has which, from whom it took it, and who is late.

    The source's secret is CKPT_LIVE_SECRET, or is found by itself on the machine of its leader, in its account. With -q, print the step of
    the newest version.

    \b
    Example:
      ckpt live status tcp://trainer0:7010/actor
      ckpt live --json status tcp://trainer0:7010/actor
    """
    from ckpt import units
    from ckpt.live.control import SinkSecret, ask_status
    from ckpt.plan.tables import ranks_text

    output = Output(json=as_json, quiet=quiet)
    patience = units.seconds(timeout)
    if not patience:
        raise UsageError(f"{timeout!r} is not a time with a unit", where="--timeout", hint="10s, 2min")
    answer = ask_status(address, SinkSecret(None, address)(), patience)
    if as_json:
        output.document(asdict(answer))
        return
    if quiet:
        for version in answer.versions[-1:]:
            output.line(str(version.step))
        return
    versions, sinks = len(answer.versions), len(answer.sinks)
    output.line(f"run {answer.run}, {versions} version{'s' * (versions != 1)}, {sinks} sink{'s' * (sinks != 1)}")
    if answer.lost_ranks:
        output.line(f"{ranks_text(answer.lost_ranks)} of the source died: it publishes nothing any more")
    output.table(
        (">STEP", ">SIZE", ">RANKS", ">AGE", ">TAKEN BY"),
        [(str(v.step), units.size(v.bytes), str(v.ranks), units.duration(v.age), str(len(v.taken_by))) for v in reversed(answer.versions)],
    )
    if not answer.sinks:
        return
    output.line()
    newest = {v.digest: v.step for v in answer.versions}
    rows = []
    for sink in answer.sinks:
        doing = f"taking for {units.duration(sink.seconds)}" if sink.state == "taking" and sink.seconds is not None else sink.state
        if sink.lost_ranks:
            doing += f" ({ranks_text(sink.lost_ranks)})"
        last = sink.took[-1] if sink.took else None
        rows.append(
            (
                sink.sink,
                str(sink.ranks),
                "-" if sink.step is None else str(sink.step),
                f"{doing}, late" if sink.late else doing,
                "" if last is None else f"{newest[last[0]]}: {units.size(last[1])} in {units.duration(last[2])}",
                ", ".join(f"{who} {units.size(count)}" for who, count in sink.took_from.items()),
                ", ".join(f"{why} {units.size(count)}" for why, count in sink.dense.items()),
                (sink.error or "").partition("\n")[0],  # --json has all of it
            )
        )
    output.table(("SINK", ">RANKS", ">STEP", "STATE", "LAST TAKE", "FROM", "WHOLE", "~ERROR"), rows)
