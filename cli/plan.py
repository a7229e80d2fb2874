"""``ckpt plan``: what a load into another layout would read, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ckpt import units
from ckpt.cli.console.output import URL, OneOf, Output, options, require_torch

if TYPE_CHECKING:
    from ckpt.engine.dry_run.load import MeshForecast

_VERIFY = ("full", "partial", "off")


def _parse_mesh(context: click.Context, parameter: click.Parameter, text: str) -> Mapping[str, int]:
    """``fsdp=8,tp=4``, or a number of ranks."""
    if text.isdecimal():
        return {"fsdp": int(text)}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name or not size.isdecimal() or name in sizes:
            raise click.BadParameter(f"{text!r} is no layout such as fsdp=8,tp=4 or 32")
        sizes[name] = int(size)
    return sizes


def _parse_cuts(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    cuts = []
    for text in texts:
        glob, _, dim = text.rpartition("=")
        if not glob or not dim.isdecimal():
            raise click.BadParameter(f"{text!r} is no GLOB=DIM such as '*.router.weight=0'")
        cuts.append((glob, int(dim)))
    return tuple(cuts)


@click.command("plan", short_help="Show what a load into a layout would read.")
@click.argument("url", type=URL)
@click.option("--layout", required=True, callback=_parse_mesh, metavar="SIZES", help="pp=2,dp=2,fsdp=4,tp=8, or N for fsdp=N.")
@click.option("--cut", callback=_parse_cuts, multiple=True, metavar="GLOB=DIM", help="Dimension that tp cuts of GLOB. Repeatable.")
@click.option("--only", multiple=True, metavar="GLOB", help="Load only tensors whose name matches GLOB. Repeatable.")
@click.option(
    "--verify", type=OneOf(_VERIFY), default="full", show_default=True, metavar="HOW", help="As for ckpt.load: full, partial, off."
)
@click.option(
    "--ranks-per-host",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="N",
    help="Consecutive ranks that share a host, and reads of it.",
)
@click.option(
    "--ranks", "most", type=click.IntRange(min=1), default=64, show_default=True, metavar="N", help="Plan N ranks, spread evenly."
)
@options
def command(
    url: str,
    layout: Mapping[str, int],
    cut: tuple[tuple[str, int], ...],
    only: tuple[str, ...],
    verify: str,
    *,
    ranks_per_host: int,
    most: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show what each rank would read to load the checkpoint at URL, of any format, into a layout. Nothing is loaded.

    Mesh dimensions: dp replicates, fsdp cuts dimension 0, tp cuts projections and embeddings by their usual names, pp deals out layers.
    The plan is that of ckpt.load; in a job, ckpt.load(..., dry_run=True) plans the state that is really there. Seconds are estimated
    from a sample of the reads.

    \b
    Example:
      ckpt plan runs/a/step-00001000 --layout 64
      ckpt plan runs/a/step-00001000 --layout pp=2,fsdp=4,tp=4 --only 'model.*'
      ckpt plan --json hf/Llama-3-8B --layout tp=8 | jq .ranks[0].bytes_read
    """
    require_torch("`ckpt plan`")
    from ckpt.engine.dry_run.load import MeshRules, forecast_on_mesh
    from ckpt.formats.registry import open_catalog

    output, rules = Output(json=as_json, quiet=quiet), MeshRules.of(layout, cut, ranks_per_host)
    forecast = forecast_on_mesh(open_catalog(url), rules, only=only, verify=verify, most_ranks=most)  # type: ignore[arg-type]
    if output.json:
        output.document(asdict(forecast))
    elif not output.quiet:
        _print(forecast, output, len(rules.mesh.ranks))


def _print(forecast: MeshForecast, output: Output, world: int) -> None:
    rows = [
        (
            str(one.rank),
            units.size(one.state_bytes),
            units.size(one.bytes_read),
            units.size(one.bytes_received) if one.bytes_received else "",
            f"{one.requests:,}",
            f"{one.files:,}",
            units.size(one.memory),
        )
        for one in forecast.ranks
    ]
    output.table(("RANK", ">STATE", ">READ", ">RECEIVED", ">REQUESTS", ">FILES", ">MEMORY"), rows)
    ranks = forecast.ranks
    read = units.size(sum(one.bytes_read for one in ranks))
    output.line(f"{len(ranks)} of {units.plural(world, 'rank')}: {read} in {units.plural(sum(one.requests for one in ranks), 'request')}")
    output.line(f"about {units.duration(forecast.seconds)} on the slowest ({forecast.estimated_from})")
    if forecast.replicated:
        names = ", ".join(forecast.replicated[:3]) + (", …" if len(forecast.replicated) > 3 else "")
        output.talk(f"note: no rule of tp cuts {units.plural(len(forecast.replicated), 'tensor')}, such as {names}: --cut GLOB=DIM does")
