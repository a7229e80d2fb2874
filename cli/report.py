"""``ckpt report``: draws saves as one HTML file."""

from __future__ import annotations

import math
import os
import secrets
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from ckpt import units
from ckpt.cli.console.output import URL, Output, options
from ckpt.errors import StorageError, UsageError

if TYPE_CHECKING:
    from ckpt.plan.layout.mesh import Mesh


@click.command("report", short_help="Draw saves as one HTML file.")
@click.argument("urls", metavar="URL...", nargs=-1, required=True, type=URL)
@click.option("-o", "--out", metavar="FILE", default="report.html", show_default=True, help="File to write; - is stdout.")
@click.option("--price", metavar="NUMBER", help="Price of one rank for an hour, e.g. 2.50 or €2.50.")
@click.option("--ranks-per-host", type=click.IntRange(1), metavar="N", help="Consecutive ranks that share a host.")
@click.option("--mesh", metavar="NAME=SIZE,...", help="Parallel dimensions, the fastest-varying last, e.g. pp=4,dp=8,tp=8.")
@options
def command(
    urls: tuple[str, ...], *, out: str, price: str | None, ranks_per_host: int | None, mesh: str | None, as_json: bool, quiet: bool
) -> None:
    """Draw where the time of saves went. URL is a run, or one or more checkpoints to compare.

    The report is one HTML file that needs no network and no scripts: figures, advice, a heat map of ranks and phases, threads over time,
    and what is stored. The newest save is shown in detail.

    \b
    Example:
      ckpt report runs/a
      ckpt report runs/a/step-1000 -o step.html --price 2.50
      ckpt report runs/a/step-1000 runs/b/step-1000 -o both.html
    """
    from ckpt.runs.report.content import Setting, build_report
    from ckpt.runs.report.html import render

    output = Output(json=as_json, quiet=quiet)
    if out == "-" and as_json:
        raise UsageError("the report and the JSON document cannot both go to stdout", hint="name a file with -o")
    currency, number = _price(price)
    setting = Setting(price=number, currency=currency, ranks_per_host=ranks_per_host, mesh=_mesh(mesh))
    report = build_report(urls, setting)
    page = render(report).encode()
    if out == "-":
        sys.stdout.buffer.write(page)
        return
    _write(out, page)
    saves = len([s for s in report.saves if s.summary is not None])
    if output.json:
        notes = list(report.notes)
        output.document(
            {"path": out, "bytes": len(page), "saves": saves, "detail": report.detail and report.detail.saved.url, "notes": notes}
        )
        return
    for note in report.notes:
        output.talk(note)
    output.talk(f"{out}: {units.plural(saves, 'save')}, {units.size(len(page))}; open it in a browser")


def _price(text: str | None) -> tuple[str, float | None]:
    """Currency and number of ``€2.50``."""
    if text is None:
        return "", None
    number = text.lstrip("$€£¥ ")
    with suppress(ValueError):
        price = float(number)
        if math.isfinite(price) and 0 <= price < 1e9:
            return text[: len(text) - len(number)], price
    raise UsageError(f"{text!r} is not a price such as 2.50 or €2.50", where="--price")


def _mesh(text: str | None) -> Mesh | None:
    from ckpt.plan.layout.mesh import Mesh

    if text is None:
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name or name in sizes or not (size.isascii() and size.isdecimal() and 0 < int(size) < 1 << 24):
            raise UsageError(f"{text!r} is not a mesh such as pp=4,dp=8,tp=8", where="--mesh")
        sizes[name] = int(size)
    if math.prod(sizes.values()) >= 1 << 24:
        raise UsageError("a mesh has fewer than 16,777,216 ranks", where="--mesh")
    return Mesh.of(sizes)


def _write(path: str, page: bytes) -> None:
    """Write the whole file or nothing."""
    # An earlier file stays if the disk is full.
    part = f"{path}.{secrets.token_hex(4)}.part"
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # /dev/stdout, a pipe
            with open(path, "wb") as file:
                file.write(page)
            return
        with open(part, "wb") as file:
            file.write(page)
        os.replace(part, path)
    except OSError as err:
        with suppress(OSError):
            os.unlink(part)
        if isinstance(err, BrokenPipeError):
            raise
        raise StorageError(
            f"the report cannot be written: {err.strerror or err}", where=path, hint="name a file in an existing directory"
        ) from err
