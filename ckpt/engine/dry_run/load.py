"""A dry run of a load: the phases of the load as far as its plan, and in place of reading a forecast of what would be read."""

from __future__ import annotations

from ckpt.concurrency import gc_paused
from ckpt.engine.load.fill import LoadJob, LoadOptions, LoadReport
from ckpt.engine.load.load import exchange_of, open_and_match
from ckpt.engine.load.whole_chunks import TensorLoad
from ckpt.formats.native.writer import replacement_noticed
from ckpt.net.channel import Row
from ckpt.net.group import Group

from .forecast import ReadForecast, rate_of_loads


def dry_run(url: str, state: object, group: Group, options: LoadOptions) -> LoadReport:
    """What a load into ``state`` would do on this rank; collective over ``group``. Nothing in the state changes.

    Objects of the state are not asked whether they take their values: to ask them is to change them.
    """
    job = LoadJob(call=group.call("load", url, options.timeout), options=options)
    call = job.call

    def known_rate(rows: dict[int, Row]) -> Row:
        """Leader: how fast an earlier load was."""
        rate = rate_of_loads(url)
        return {} if rate is None else {"rate": rate.bytes_per_second, "measured": rate.measured}

    with gc_paused():
        matched, sharing = open_and_match(job, state)
        with call.phase("plan"), replacement_noticed(matched.catalog):
            reader = job.reader(matched.catalog)
            exchange = None if sharing is None else exchange_of(matched, sharing, reader)
            forecast = ReadForecast.of(reader, list(map(TensorLoad._make, matched.binding.targets.values())), exchange)
            known = job.agree({}, known_rate)
        with call.phase("probe"):
            rate = known.get("rate") or forecast.probe(reader)
            seconds: float = job.agree({"seconds": forecast.seconds(rate)}, lambda rows: max(row["seconds"] for row in rows.values()))
    call.linger()
    return matched.report(
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
