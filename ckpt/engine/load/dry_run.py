"""A dry run of a load: the phases of the load as far as its plan, and in place of reading a forecast of what would be read."""

from __future__ import annotations

from collections.abc import Callable

from ckpt.coordination.rows import Row
from ckpt.formats.native.replaced import replacement_noticed
from ckpt.maintenance.transfer_rates import rate_of_loads

from .fitting import renamed
from .forecast import ReadForecast
from .options import LoadReport
from .phases import Matched
from .read_exchange import ReadExchange
from .reader import Reader


def dry_run(matched: Matched, divided: Callable[[Reader], ReadExchange | None]) -> LoadReport:
    """What the load would do on this rank; nothing in the state changes. ``divided`` divides the reads among the ranks, as for the load.

    Objects of the state are not asked whether they take their values: to ask them is to change them.
    """
    job, call = matched.job, matched.job.call
    with call.phase("plan"), replacement_noticed(matched.catalog):
        reader = job.reader(matched.catalog, job.options.verify)
        forecast = ReadForecast.of(reader, matched.jobs, matched.sharing, divided(reader))
        known: Row = job.agree({}, lambda _: _known_rate(call.url))
    with call.phase("probe"):
        rate = known.get("rate") or forecast.probe(reader)
        seconds: float = job.agree({"seconds": forecast.seconds(rate)}, lambda rows: max(row["seconds"] for row in rows.values()))
    call.linger()
    return LoadReport(
        url=call.url,
        tensors=len(matched.binding.targets),
        missing=matched.missing,
        unexpected=matched.unexpected,
        renamed=renamed(matched.binding, job.options.selection.followed_by(matched.binding.renames)),
        cast=tuple(matched.binding.cast),
        bytes_needed=forecast.needed,
        bytes_read=forecast.read,
        bytes_unverified=forecast.read - forecast.verified,
        bytes_received=forecast.received,
        seconds=seconds,
        requests=forecast.requests,
        files=len(forecast.paths),
        memory=forecast.memory,
        dry_run=True,
        estimated_from=known.get("measured", "a probe: a sample of these reads"),
    )


def _known_rate(url: str) -> Row:
    """Leader: how fast an earlier load was."""
    rate = rate_of_loads(url)
    return {} if rate is None else {"rate": rate.bytes_per_second, "measured": rate.measured}
