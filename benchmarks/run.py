"""The command: runs the scenarios, prints tables and checks, writes JSON. It exits with 1 if a check fails."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import click

from .findings import Finding
from .places import Place, machine
from .pool import Pool
from .report import Check, checks_of, rows_of, tables

SCHEMA = 1
SCENARIOS = (
    "sharded",
    "replicated",
    "small",
    "reshard",
    "async",
    "scale",
    "steady",
    "gpu",
)
ONCE = ("scale",)
"""Scenarios that use no storage."""
MB = 1_000_000


def default_directories() -> tuple[str, ...]:
    """Shared memory, and the disk that has temporary files; one of them where both are the same."""
    there = [d for d in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(d)]
    return tuple({os.stat(d).st_dev: d for d in reversed(there)}.values())[::-1]


@click.command(context_settings={"show_default": True})
@click.option("--size", type=click.IntRange(1), default=512, help="MB of state per rank.")
@click.option("--ranks", type=click.IntRange(1), default=2, help="Ranks; twice as many run too where the scenario says so.")
@click.option("--dir", "directories", multiple=True, help="A directory, or s3://bucket/prefix for 'sharded' and 'small'; repeatable.")
@click.option("--repeat", type=click.IntRange(1), default=5, help="Repetitions that count, after one that does not.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True), help="Write the results to this file.")
@click.option("--only", multiple=True, type=click.Choice(SCENARIOS), help="Scenarios to run; may be given more than once.")
@click.option("--small-tensors", type=click.IntRange(1), default=20_000, help="Tensors of the scenario 'small'.")
@click.option("--large-layers", type=click.IntRange(1), default=126, help="Layers of the loads of the scenario 'scale'.")
@click.option("--large-ranks", type=click.IntRange(1), default=16_384, help="Simulated ranks of the loads of the scenario 'scale'.")
@click.option("--scale-ranks", type=click.IntRange(128), default=16_384, help="Most ranks of a job of the scenario 'scale'.")
@click.option("--scale-layers", type=click.IntRange(0), default=0, help="Layers of the models of the scenario 'scale'; 0: all.")
@click.option("--steady-saves", type=click.IntRange(10), default=2000, help="Saves of each kind of the scenario 'steady'.")
@click.option("-q", "--quiet", is_flag=True, help="Do not report each measurement as it is made.")
def main(*, directories: Sequence[str], json_path: str | None, only: Sequence[str], quiet: bool, **given: int) -> None:
    """Compare ckpt with torch's distributed checkpoint (DCP), torch.save, and plain writes and reads of the same bytes."""
    given["size"] *= MB
    document = benchmark(given, directories or default_directories(), [s for s in SCENARIOS if not only or s in only], quiet=quiet)
    for line in text_of(document):
        click.echo(line)
    if json_path is not None:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
    sys.exit(0 if all(check["ok"] for check in document["checks"]) else 1)


def benchmark(given: dict[str, int], directories: Sequence[str], scenarios: Sequence[str], *, quiet: bool = False) -> dict[str, Any]:
    """Run scenarios in directories; what main prints and writes. ``given`` are the fields of ``scenarios.Settings``.

    Raises:
        click.UsageError: a directory has too little space.
        TaskError: a contestant failed.
    """
    most = 2 * given["ranks"]
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with ExitStack() as stack:
        pool = stack.enter_context(Pool(most))
        places = [stack.enter_context(Place(d)) for d in directories]
        for place in places:
            if place.remote and not {"sharded", "small"}.issuperset(scenarios):
                raise click.UsageError(f"{place.parent} is for --only sharded and --only small")
            if place.free() < 4 * given["size"] * given["ranks"]:
                raise click.UsageError(
                    f"{place.label} has {place.free() / 1e9:.1f} GB free: too little for 4 checkpoints; use --size or --dir"
                )
        document = _run(given, pool, places, scenarios, quiet=quiet)
    where = [{"directory": p.parent, "filesystem": p.filesystem} for p in places]
    head = {"schema": SCHEMA, "started": started, "machine": machine(), "settings": given | {"places": where}}
    return head | document


def _run(given: dict[str, int], pool: Pool, places: Sequence[Place], scenarios: Sequence[str], *, quiet: bool) -> dict[str, Any]:
    from . import async_saves, gpu, scale_load, scale_save, steady, tasks  # import torch
    from .scenarios import MOVING, Settings

    more = {"async": (async_saves,), "scale": (scale_save, scale_load), "steady": (steady,), "gpu": (gpu,)}

    def tell(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    settings = Settings(**given)
    measured = [m for place in places for name in scenarios if name in MOVING for m in MOVING[name](settings, pool, place, tell)]
    rows = rows_of(measured)
    findings = [
        finding
        for name in scenarios
        for part in more.get(name, ())
        for place in (places[:1] if name in ONCE else places)
        for finding in part.run(settings, pool, place, tell)
    ]
    checks: list[Check] = [*checks_of(rows), *(check for finding in findings for check in finding.checks)]
    versions = pool.run(tasks.versions, on=1)[0]
    document = {"versions": versions, "results": rows, "findings": [f.to_json() for f in findings]}
    return document | {"checks": [asdict(c) for c in checks]}


def text_of(document: dict[str, Any]) -> list[str]:
    """The document as lines for people."""
    about, settings = document["machine"], document["settings"]
    lines = [
        f"{about['processor']}, {about['cores']} cores, {about['memory'] / 1e9:.0f} GB, {about['system']}, Python {about['python']}",
        ", ".join(f"{name} {version}" for name, version in document["versions"].items()),
        f"medians of {settings['repeat']} repetitions, one before them discarded; files synced; loads from disk without the page cache",
        *tables(document["results"]),
    ]
    for finding in document["findings"]:
        lines += Finding.from_json(finding).lines()
    checks = [f"{'PASS' if c['ok'] else 'FAIL'}  {c['name']}: {c['detail']}" for c in document["checks"]]
    return [*lines, "", *checks]
