"""Exports: the model of a running job as files that ``transformers.from_pretrained`` loads, written by all ranks at once.

Two phases, as in a save. *begin*: the leader checks that the ranks' states make one model, lays out the files as ``ckpt convert --to hf``
would, and begins them. *write*: every rank puts its blocks at their final place; the leader counts and publishes.

Invariants: no rank holds more of other ranks' tensors than windows of bounded size. Nothing shows before every byte is durable.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ckpt import settings, tree
from ckpt.adapters.collect import Collected, collect
from ckpt.converters.mapping.convention import model_views
from ckpt.converters.mapping.model_numbers import changed
from ckpt.converters.pipeline.target import OutputOptions, OutputPlan, split_url
from ckpt.converters.select.selection import OutputSet, SelectOptions
from ckpt.converters.targets.hf import INDEX, TARGET
from ckpt.converters.targets.hf_config import Configuration, ModelConfig, read_configuration
from ckpt.coordination.call import Call
from ckpt.coordination.group import current_group
from ckpt.coordination.rows import Row
from ckpt.engine.save.background import wait_for_pending_save
from ckpt.engine.save.leader import grouped
from ckpt.errors import ConsistencyError, StorageError, UsageError
from ckpt.formats.deltas.catalog import Base, open_base
from ckpt.io_backends.registry import check_url, open_backend
from ckpt.layout.layout import Layout
from ckpt.plan.match import several
from ckpt.plan.tables import Joined, Table, join_tables
from ckpt.plan.values import join_values
from ckpt.plan.views import filled
from ckpt.settings import limits
from ckpt.text import units
from ckpt.text.urls import url_text
from ckpt.transport.peers import peers_of

from .delivery import Delivery
from .delta import DeltaRecorder, DeltaTransaction, check_follows, delta_paths
from .plan import Way, WritePlan, WritePlanner
from .state_catalog import StateCatalog
from .transaction import Destination, ExportTransaction, RankFiles

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.nn import Module

ANCHOR_EVERY = 16
"""A delta is read from the anchor on, and each link of 1 % adds about a third of the time that the anchor alone takes: with so many, a load
takes some seven times as long, and all deltas together are a quarter of the size of the anchor."""
SHARES = 3
"""Of the memory, what one round may keep and send: as much again is room for what comes, or was put together the round before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What an export did. ``tensor_bytes`` and ``file_bytes`` are all ranks'; ``rank_bytes`` are those of tensors that this rank wrote, in
    ``writes`` calls, and ``sent_bytes`` those that it sent to other ranks. ``left_out`` are tensors of which nothing was exported.
    ``seconds`` of wall time."""

    url: str
    files: tuple[str, ...]
    tensors: int
    tensor_bytes: int
    file_bytes: int
    rank_bytes: int
    sent_bytes: int
    writes: int
    left_out: tuple[str, ...]
    seconds: float
    since: str | None = None
    """The export that this delta follows; None for a full one."""
    changed: int = 0
    """Elements that a delta has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What all ranks have to give alike; see ``export``."""

    names: str | None
    convention: str
    numbers: Mapping[str, int]
    only: Sequence[str]
    exclude: Sequence[str]
    root: str | None
    dtype: str | None
    shard_size: int | str | None
    overwrite: bool
    memory: int
    since: str | None
    anchor_every: int

    def selection(self, numbers: Mapping[str, int]) -> SelectOptions:
        """What of the state is taken; ``numbers`` of the model are these options' and those of its configuration."""
        return SelectOptions(
            views=None if self.names is None else model_views(self.names, self.convention, numbers),
            only=self.only,
            exclude=self.exclude,
            dtype=self.dtype,
            root=self.root,
        )


def export(
    url: str | os.PathLike[str],
    state: Module | Mapping[str, Any],
    *,
    names: str | None = None,
    convention: str = "huggingface",
    numbers: Mapping[str, int] | None = None,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    root: str | None = None,
    dtype: str | torch.dtype | None = None,
    shard_size: int | str | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig | None = None,
    layout: Layout | None = None,
    overwrite: bool = False,
    since: str | os.PathLike[str] | None = None,
    anchor_every: int = ANCHOR_EVERY,
    memory: int = limits.EXPORT_MEMORY,
    timeout: float | None = None,
    threads: int | None = None,
    process_group: ProcessGroup | None = None,
) -> ExportReport:
    """Write the model of a running job as safetensors files, as ``ckpt convert --to hf`` would write them of a save of ``state``.

    Collective: every rank of the job calls it; without torch.distributed, one process does. Each rank writes its own blocks at their
    final place, and no rank ever has the whole model. The state must not change before it returns. If it raises, nothing shows at ``url``,
    and what stood there is untouched; but see ``overwrite``.

    Args:
        url: a directory, or one file if it ends in ``.safetensors``. All ranks must see the same storage.
        state: a model, or a state as ``ckpt.save`` takes it.
        names: a translation, such as ``"llama"``, into ``convention``. ``numbers`` of the model that ``config`` lacks: ``{"heads": 32}``.
        only, exclude: globs of new names.
        root: the key of the state that has the model; by default the only one with tensors.
        dtype: of floating-point tensors: ``"bfloat16"`` or ``torch.bfloat16`` and the like. By default as they are.
        shard_size: bytes of a file, about: ``"5GB"``. A single file is never cut.
        config: what becomes ``config.json``: ``model.config`` of transformers, its content, or the path of such a file, or of a directory
            with it, whose tokenizer comes too. Only the leading rank reads it. Beside one file nothing is written.
        layout: places for plain tensors that are parts of larger ones (Megatron-style models).
        overwrite: replace an earlier export. A single file is replaced at once; a directory cannot be opened for a moment, and if the job
            dies in it, not until it is exported again.
        since: an export of the same tensors, full or a delta: only the elements that changed since are written, in a directory that
            ``ckpt.load`` and ``ckpt.convert`` take as the whole model. It refers to ``since``, which must stay where it is. ``config`` is
            written with full exports alone.
        anchor_every: with ``since``, write a full export instead where this would be delta number ``anchor_every`` after a full one.
        memory: bytes of tensors that a rank has in windows at once.
        timeout, threads, process_group: as for ``ckpt.save``.

    Raises:
        ConflictError: something is at ``url``.
        MismatchError: ``since`` has other tensors.
        NotFoundError, FormatError, CorruptError: ``since`` is no export, or damaged.
        NamesError, UsageError: a glob fits nothing, or the options do not fit each other, the state or the translation.
        StateError, LayoutError, ConsistencyError, StorageError, RankFailedError, DeadlineError: as for ``ckpt.save``.
    """
    url = url_text(url)
    options = ExportOptions(
        names=names,
        convention=convention,
        numbers=dict(numbers or {}),
        only=several(only),
        exclude=several(exclude),
        root=root,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        shard_size=shard_size,
        overwrite=overwrite,
        memory=memory,
        since=None if since is None else url_text(since),
        anchor_every=anchor_every,
    )
    group = current_group(process_group)
    wait_for_pending_save(group)
    return _Export(group.call("export", url, settings.timeout(timeout)), options, config, settings.threads(threads)).run(state, layout)


class _Export:
    """One rank's side of one export."""

    def __init__(
        self, call: Call, options: ExportOptions, config: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig | None, threads: int
    ) -> None:
        self.began = time.perf_counter()
        self.call = call
        self.options = options
        self.config = config
        self.threads = threads
        self.sinks: RankFiles | DeltaRecorder | None = None
        self.begun: ExportTransaction | DeltaTransaction | None = None
        self.base: Base | None = None
        """The export that this one follows; None if it is a full one."""
        self._configuration = Configuration()

    def run(self, state: Module | Mapping[str, Any], layout: Layout | None) -> ExportReport:
        """Agree, write, publish."""
        try:
            agreed = self.call.map_reduce("begin", lambda: self.begin(state, layout), self.leader_begin)
            written = self.call.map_reduce("write", lambda: self.write(agreed), self.leader_publish)
        except BaseException:
            if self.sinks is not None:
                self.sinks.close()
                if not self.call.undecided:  # a leader that is slow, not dead, may publish later
                    self.sinks.discard()
            if self.begun is not None:
                self.begun.discard()
            raise
        if self.sinks is not None:
            self.sinks.close()
        if self.call.is_leader:
            self.call.linger()
        return self.report(written)

    # ---- begin

    def begin(self, state: Module | Mapping[str, Any], layout: Layout | None) -> Row:
        """Tell the leader what this rank has."""
        group = self.call.group
        if self.options.memory < limits.LEAST_MEMORY:
            raise UsageError(f"{self.options.memory} bytes of memory are too few", hint=f"at least {limits.LEAST_MEMORY} (memory=)")
        if layout is not None:
            layout.check_ranks(group.ranks)
        if self.options.anchor_every < 1:
            raise UsageError(f"anchor_every={self.options.anchor_every}", hint="1 or more: 1 writes full exports alone")
        check_url(self.call.url)
        root, name = split_url(self.call.url, file=TARGET.one_file(self.call.url))
        self.destination = Destination(url=self.call.url, backend=open_backend(root), name=name, replace=self.options.overwrite)
        named = state if isinstance(state, dict) else {"model": state}
        self.collected: Collected = collect(named, rank=group.rank, ranks=group.ranks, layout=layout)
        shard_table = self.collected.shard_table
        shared = [t.info for n, t in shard_table.tensors.items() if n not in shard_table.own]
        table = Table(tensors=tuple(shared), aliases={n: to for n, to in shard_table.aliases.items() if n not in shard_table.own})
        return {
            "table": self.call.share(table.to_bytes()),
            "state": self.call.share(tree.text(self.collected.state).encode()),
            "options": json.dumps(asdict(self.options), sort_keys=True),
        }

    def leader_begin(self, rows: dict[int, Row]) -> Row:
        """Check that it makes one model, lay out the files and begin them; what the others need to do the same."""
        if len({row["options"] for row in rows.values()}) > 1:
            raise ConsistencyError("the ranks export with different options", where=self.call.url, hint="give the same ones on every rank")
        self._configuration = read_configuration(self.config)
        self.call.fetch_all(row[key] for row in rows.values() for key in ("table", "state"))
        tables = [[self.call.leave(self.call.fetch(digest)), ranks] for digest, ranks in grouped(rows, "table")]
        state = join_values([(ranks, json.loads(self.call.fetch(d))) for d, ranks in grouped(rows, "state")])
        agreed: Row = {
            "tables": tables,
            "state": self.call.leave(json.dumps(state).encode()),
            "numbers": changed(self._configuration.numbers, self.options.numbers),
        }
        if self.options.since is not None:
            self.base = open_base(self.options.since)
            if self.base.number + 1 >= self.options.anchor_every:
                self.base = None
        agreed["base"] = None if self.base is None else self.base.this.id
        self.lay_out(agreed)
        self.destination.backend.prepare()
        self.destination.clear()
        if self.base is not None:
            self.begun = DeltaTransaction(self.destination, self.base, self.call.group.size)
            return {**agreed, "tokens": None, "parts": None}
        beside = (
            [] if self.destination.name is not None else [*self._configuration.files, *([INDEX] if len(self.planned.files) > 1 else [])]
        )
        self.begun = ExportTransaction.begin(self.destination, self.planned.files, beside)
        return {**agreed, "tokens": self.begun.tokens, "parts": self.begun.parts}

    # ---- both

    def lay_out(self, agreed: Row) -> None:
        """The catalog of all ranks' tensors, what is taken of it, and the files."""
        tables = [(ranks, Table.from_bytes(self.call.fetch(digest))) for digest, ranks in agreed["tables"]]
        joined: Joined = join_tables(tables)
        destination = self.destination
        self.catalog = StateCatalog.of(
            joined,
            json.loads(self.call.fetch(agreed["state"])),
            url=self.call.url,
            backend=destination.backend,
            world_size=self.call.group.size,
        )
        self.chosen: OutputSet = TARGET.choose(self.catalog, self.options.selection(agreed["numbers"]))
        size = self.options.shard_size
        size = units.parse_size(size) if isinstance(size, str) else size
        layout = OutputOptions(id="", url=self.call.url, shard_size=size, name=destination.name, previous=None)
        self.planned: OutputPlan = TARGET.plan(self.chosen, layout)
        self.tensors = {name: wanted.without_padding() for name, wanted in self.chosen.tensors.items()}
        if agreed["base"] is not None:
            self.base = self.base or open_base(self.options.since or "")
            if self.base.this.id != agreed["base"]:
                message = f"the ranks see different exports at {self.options.since}"
                raise ConsistencyError(message, where=self.call.url, hint="since= must be on storage that all ranks share")
            check_follows(self.base, self.tensors, self.call.url)

    # ---- write

    def write(self, agreed: Row) -> Row:
        """Bring this rank's blocks to their places; what the leader needs to count and publish."""
        if self.begun is None:
            self.lay_out(agreed)
        group, files = self.call.group, self.planned.files
        planner = WritePlanner(self.catalog, self.tensors, files, group.ranks)
        way = _way(agreed["parts"]) if self.base is None else "parts"  # a delta goes through windows: their ranges are its sections
        gathering = planner.plan(way, agreed["parts"] or [0] * len(files), self.options.memory // SHARES)
        if self.base is None:
            mine = self.begun.shared if self.begun is not None else None
            self.sinks = RankFiles(self.destination, files, agreed["tokens"], mine)
        else:
            self.sinks = DeltaRecorder(self.destination, self.base, files, delta_paths(group.size)[group.ranks.index(group.rank)])
        shard_table = self.collected.shard_table
        local = {**shard_table.tensors, **{name: shard_table.tensors[to] for name, to in shard_table.aliases.items()}}
        self.delivery = Delivery(planner, gathering, local, group.rank, self.sinks.write)
        for number in _opened(planner, gathering, group.rank):
            self.sinks.open(number)
        peers = peers_of(group, timeout=self.call.timeout) if group.size > 1 and gathering.rounds else None
        self.delivery.run(peers, max(self.threads, self.destination.backend.io_hints.concurrency), self.call.check_failures)
        receipts = self.call.alive_while(self.sinks.flush, self.call.timeout)
        return {
            "receipts": {str(f): receipt for f, receipt in receipts.items()},
            "counted": {str(f): {str(i): n for i, n in of.items()} for f, of in self.delivery.counted.items()},
        }

    def leader_publish(self, rows: dict[int, Row]) -> Row:
        """Every byte of every tensor was written once: make the files exist."""
        self.check_counts([row["counted"] for row in rows.values()])
        receipts: dict[int, list[Any]] = {}
        for row in rows.values():
            for f, receipt in row["receipts"].items():
                receipts.setdefault(int(f), []).append(receipt)
        assert self.begun is not None
        self.begun.commit(receipts, {} if self.destination.name is not None else self._configuration.files, self.planned.finish)
        if self.base is None:
            return {"file_bytes": sum(f.size for f in self.planned.files), "changed": 0}
        return {"file_bytes": sum(r["size"] for r in receipts[0]), "changed": sum(r["changed"] for r in receipts[0])}

    def check_counts(self, counted: Sequence[Mapping[str, Mapping[str, int]]]) -> None:
        """Raise StorageError unless the ranks have written each tensor's bytes, no more and no fewer."""
        for f, file in enumerate(self.planned.files):
            for i, item in enumerate(file.items):
                written = sum(of.get(str(f), {}).get(str(i), 0) for of in counted)
                planned = filled(self.tensors[item.name].view) * item.itemsize
                if written != planned:
                    message = f"tensor {item.name}: {planned} bytes were planned, but all ranks together wrote {written}"
                    raise StorageError(message, where=self.call.url, hint="please report this")

    def report(self, written: Row) -> ExportReport:
        files = self.planned.files
        taken = self.chosen.taken
        return ExportReport(
            url=self.call.url,
            files=tuple(f.path for f in files) if self.base is None else delta_paths(self.call.group.size),
            tensors=len(self.tensors),
            tensor_bytes=sum(i.length for f in files for i in f.items),
            file_bytes=written["file_bytes"],
            rank_bytes=sum(n for of in self.delivery.counted.values() for n in of.values()),
            sent_bytes=self.delivery.sent,
            writes=self.delivery.writes,
            left_out=tuple(sorted(n for n in self.catalog.tensors if n not in taken)),
            seconds=time.perf_counter() - self.began,
            since=None if self.base is None else self.base.this.url,
            changed=written["changed"],
        )


def _way(parts: Sequence[int] | None) -> Way:
    if parts is None:
        return "files"
    return "parts" if any(parts) else "ranges"


def _opened(planner: WritePlanner, gathering: WritePlan, rank: int) -> list[int]:
    """The files that a rank writes to."""
    numbers = {w.file for w in gathering.windows if w.aggregator == rank}
    numbers |= {f for f, head in enumerate(gathering.heads) if head == rank}
    numbers |= {f for f, _, _ in planner.direct_pieces(gathering, rank)}
    return sorted(numbers)
