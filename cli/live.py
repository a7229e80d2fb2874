"""``ckpt live``: what a source of live state says of itself."""

from __future__ import annotations

from dataclasses import asdict

import click

from ckpt.cli.console.output import OneOf, Output, options
from ckpt.errors import UsageError


@click.command("live", short_help="Show the versions of a live state and who takes them.")
@click.argument("what", type=OneOf(("status",)), metavar="status")
@click.argument("address", metavar="ADDRESS")
@click.option("--timeout", default="10s", metavar="TIME", show_default=True, help="Give up if nothing answers for TIME.")
@options
def command(what: str, address: str, *, timeout: str, as_json: bool, quiet: bool) -> None:
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
    status = ask_status(address, SinkSecret(None, address)(), patience)
    if as_json:
        output.document(asdict(status))
        return
    if quiet:
        for version in status.versions[-1:]:
            output.line(str(version.step))
        return
    versions, sinks = len(status.versions), len(status.sinks)
    output.line(f"run {status.run}, {versions} version{'s' * (versions != 1)}, {sinks} sink{'s' * (sinks != 1)}")
    if status.lost_ranks:
        output.line(f"{ranks_text(status.lost_ranks)} of the source died: it publishes nothing any more")
    output.table(
        (">STEP", ">SIZE", ">RANKS", ">AGE", ">TAKEN BY"),
        [(str(v.step), units.size(v.bytes), str(v.ranks), units.duration(v.age), str(len(v.taken_by))) for v in reversed(status.versions)],
    )
    if not status.sinks:
        return
    output.line()
    newest = {v.digest: v.step for v in status.versions}
    rows = []
    for sink in status.sinks:
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
