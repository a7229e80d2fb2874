"""A dry run of a load: the phases of the load as far as its plan, and in place of reading a forecast of what would be read. Also for ranks
of a mesh, which need not exist: the stored tensors cut over it by rules, and the plan of each rank in turn.

The rules are those of transformers, for models whose layers have the usual names:

    dp     replicas
    fsdp   dimension 0, as ``fully_shard`` cuts it
    tp     columns of the projections into a block (dimension 0), rows of those out of it (dimension 1), all else replicated
    pp     consecutive layers; embeddings on the first stage, all that has no layer number on the last

An optimizer's tensor lies as its parameter does: it has the parameter's name in its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckpt import settings
from ckpt.catalog import Catalog, TensorEntry, job_tensors
from ckpt.concurrency import gc_paused
from ckpt.engine.load.fill import LoadJob, LoadOptions, LoadReport, Shares
from ckpt.engine.load.load import exchange_of, open_and_match
from ckpt.engine.load.read_exchange import ReadExchange
from ckpt.engine.load.shared_reads import SharedReads, what_is_worth
from ckpt.engine.load.whole_chunks import TensorLoad, address_space
from ckpt.errors import NamesError, UsageError
from ckpt.formats.native.catalog import replacement_noticed
from ckpt.io_backends.registry import is_file_system
from ckpt.net.channel import Row
from ckpt.net.group import Group
from ckpt.net.peers import Peers
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placement_base import Split
from ckpt.plan.layout.placements import Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.match import Selection
from ckpt.plan.ownership import TensorSpec
from ckpt.state import lazy
from ckpt.state.tensors import LocalTensor, parts_of, torch_dtype

from .digest_reader import Verify
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
            known = call.agree({}, known_rate)
        with call.phase("probe"):
            rate = known.get("rate") or forecast.probe(reader)
            seconds: float = call.agree({"seconds": forecast.seconds(rate)}, lambda rows: max(row["seconds"] for row in rows.values()))
    call.drain()
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
        estimated_from=known.get("measured", "a probe of these reads"),
    )


# The same by the ranks of a mesh, which need not exist.

AXES = ("pp", "dp", "fsdp", "tp")
"""Mesh dimensions, the outermost first."""
_COLUMNS = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "wq", "wk", "wv", "w1", "w3"),
        *("embed_tokens", "lm_head", "tok_embeddings", "output"),
    )
)
_ROWS = frozenset(["o_proj", "down_proj", "wo", "w2"])
_FIRST = frozenset(["embed_tokens", "tok_embeddings", "wte", "word_embeddings", "embeddings"])
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankForecast:
    """What one rank of a mesh would read; fields as in ``LoadReport``."""

    rank: int
    tensors: int
    bytes_needed: int
    bytes_read: int
    bytes_received: int
    requests: int
    files: int
    memory: int
    state_bytes: int
    """Memory of the rank's tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshForecast:
    """What a load by the ranks of a mesh would read, of those ranks that were planned; ``seconds`` of the slowest of them.
    ``replicated``: tensors of at least two dimensions that no rule of ``tp`` cuts."""

    url: str
    mesh: Mapping[str, int]
    ranks: tuple[RankForecast, ...]
    replicated: tuple[str, ...]
    seconds: float
    estimated_from: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshRules:
    """How tensors are cut over ``mesh``. ``cuts``: globs with the dimension that ``tp`` cuts, before the rules for usual names; ``near``:
    ranks of one machine."""

    mesh: Mesh
    cuts: tuple[tuple[str, int], ...] = ()
    near: int = 8

    @classmethod
    def of(cls, sizes: Mapping[str, int], cuts: Sequence[tuple[str, int]] = (), near: int = 8) -> MeshRules:
        """Raises:
        UsageError: a dimension has no rule."""
        odd = [name for name in sizes if name not in AXES]
        if odd:
            raise UsageError(f"no rule for a mesh dimension {odd[0]!r}", hint=f"one of {', '.join(AXES)}, such as fsdp=8,tp=4")
        if min(sizes.values(), default=0) < 1:
            raise UsageError(f"a mesh of the sizes {dict(sizes)}", hint="each dimension has at least one rank, such as fsdp=8,tp=4")
        return cls(mesh=Mesh.of({name: sizes[name] for name in AXES if name in sizes}), cuts=tuple(cuts), near=near)

    def layout(self, entry: TensorEntry, layers: int) -> TensorLayout:
        """Where a stored tensor of a model of so many layers would lie."""
        names, ndim = self.mesh.names, len(entry.shape)
        splits: list[Split] = []
        dim = self.cut(entry)
        if dim is not None and "tp" in names:
            splits.append(Shard(dim, "tp"))
        if ndim and "fsdp" in names:
            splits.append(Shard(0, "fsdp"))
        at = (("pp", (self.stage(entry.name, layers),)),) if "pp" in names else ()
        return TensorLayout(self.mesh, tuple(splits), at)

    def cut(self, entry: TensorEntry) -> int | None:
        """The dimension that ``tp`` cuts."""
        ndim, words = len(entry.shape), {*entry.name.split(".")}
        for glob, dim in self.cuts:
            if fnmatchcase(entry.name, glob):
                return dim if dim < ndim else None
        if words & _COLUMNS and ndim:
            return 0
        return 1 if words & _ROWS and ndim > 1 else None

    def check_cuts(self, entries: Sequence[TensorEntry], url: str) -> None:
        """Whether each of ``cuts`` cuts something of what is loaded."""
        if self.cuts and "tp" not in self.mesh.names:
            raise UsageError("cuts are those of tp, which the layout does not have", hint="such as fsdp=8,tp=4")
        for glob, dim in self.cuts:
            ranks = {len(entry.shape) for entry in entries if fnmatchcase(entry.name, glob)}
            if not ranks:
                raise NamesError(f"no tensor matches {glob!r}, which tp is to cut", where=url, hint="`ckpt inspect` lists the names")
            if dim >= max(ranks):
                raise UsageError(f"no tensor that matches {glob!r} has a dimension {dim}", where=url, hint="dimensions count from 0")

    def stage(self, name: str, layers: int) -> int:
        stages, number = self.mesh.size("pp"), _LAYER.search(name)
        if number is not None:
            return int(number.group(1)) * stages // layers
        return 0 if {*name.split(".")} & _FIRST else stages - 1


def forecast_on_mesh(
    catalog: Catalog, rules: MeshRules, *, only: Sequence[str] = (), verify: Verify = "full", most_ranks: int = 64
) -> MeshForecast:
    """What the ranks of a mesh would read to load the stored tensors that ``only`` selects. Of more than ``most_ranks`` ranks, so many are
    planned, spread evenly."""
    selection = Selection(only=tuple(only))
    entries = [entry for name, entry in job_tensors(catalog).items() if entry.alias is None and selection.wants(name)]
    idle = selection.idle([entry.name for entry in entries], ())
    if not entries or idle:
        raise NamesError("\n".join(["nothing is selected", *idle]), where=catalog.url, hint="`ckpt inspect` lists the names")
    rules.check_cuts(entries, catalog.url)
    layers = 1 + max((int(m.group(1)) for e in entries if (m := _LAYER.search(e.name)) is not None), default=0)
    layouts = {entry.name: rules.layout(entry, layers) for entry in entries}
    shares: Shares = "parts" if is_file_system(catalog.url) else "all"
    options = LoadOptions(
        layout=None,
        selection=selection,
        strict=True,
        cast=False,
        verify=verify,
        timeout=settings.timeout(None),
        threads=settings.threads(None),
        exchange=shares,
        dry_run=True,
    )
    job = LoadJob(call=Group(0, (0,)).call("load", catalog.url, options.timeout), options=options)
    ranks, rate, seconds = list[RankForecast](), 0.0, 0.0
    for rank in rules.mesh.ranks[:: max(1, math.ceil(len(rules.mesh.ranks) / most_ranks))]:
        jobs = list(_jobs(entries, layouts, rank))
        reader = job.reader(catalog, verify)
        shared = jobs if shares == "all" or verify == "full" else ()
        sharing = SharedReads.of(shared, rank, parts=shares == "parts", piece=catalog.backend.io_hints.read_size)
        near = frozenset(range(first := rank // rules.near * rules.near, first + rules.near))
        sharing.divide((), near if shares == "parts" else None, what_is_worth(parts=shares == "parts", verify=verify))
        exchange = ReadExchange(sharing, reader.fetch, near, reader.threads, _no_peers, job.call)
        forecast = ReadForecast.of(reader, jobs, exchange)
        rate = rate or forecast.probe(reader)
        seconds = max(seconds, forecast.seconds(rate))
        ranks.append(
            RankForecast(
                rank=rank,
                tensors=len(jobs),
                bytes_needed=forecast.needed,
                bytes_read=forecast.read,
                bytes_received=forecast.received,
                requests=forecast.requests,
                files=len(forecast.paths),
                memory=forecast.memory,
                state_bytes=sum(part.memory.nbytes for load in jobs for part in load.target.parts),
            )
        )
    whole = [entry.name for entry in entries if len(entry.shape) > 1 and rules.cut(entry) is None]
    return MeshForecast(
        url=catalog.url,
        mesh=dict(zip(rules.mesh.names, rules.mesh.sizes, strict=True)),
        ranks=tuple(ranks),
        replicated=tuple(whole) if "tp" in rules.mesh.names and rules.mesh.size("tp") > 1 else (),
        seconds=seconds,
        estimated_from="a probe of these reads, by this process alone",
    )


def _jobs(entries: Sequence[TensorEntry], layouts: Mapping[str, TensorLayout], rank: int) -> Iterator[TensorLoad]:
    """What a rank would load into memory of its own; there is no memory behind it."""
    for entry in entries:
        layout = layouts[entry.name]
        if layout.coordinate(rank) is None:
            continue
        info = TensorSpec(entry.name, entry.dtype, entry.shape, layout, entry.logical)
        memory = address_space(lazy.torch.empty(layout.local_shape(entry.shape, rank), dtype=torch_dtype(entry.dtype), device="meta"))
        yield TensorLoad(LocalTensor(info, parts_of(info, memory, rank), entry.name), entry)


def _no_peers() -> Peers:
    raise AssertionError("a dry run moves nothing")
