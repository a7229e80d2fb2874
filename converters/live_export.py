"""Exports: the model of a running job as files that ``transformers.from_pretrained`` loads, written by all ranks at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt import settings, units
from ckpt.converters.mapping.convention import Translation
from ckpt.converters.targets.hf import INDEX, TARGET, ConfigSource, ModelConfig, in_dtype, read_configuration
from ckpt.engine.save.job import wait_for_pending_save
from ckpt.engine.save.replicas import Replicas, compare_replicas
from ckpt.errors import ConsistencyError, StorageError, UsageError
from ckpt.formats.delta_manifest import MANIFEST
from ckpt.formats.deltas import Base, open_base
from ckpt.io_backends.registry import open_backend, scheme_of
from ckpt.net.call import Call, grouped
from ckpt.net.channel import Row
from ckpt.net.group import Job, group_of
from ckpt.net.peers import peers_of
from ckpt.plan import tree
from ckpt.plan.layout.layout import Layout, check_layout
from ckpt.plan.ownership import ChunkAssignment, replicated_chunks
from ckpt.plan.tables import Table, join_tables, split_tables, whole_where_present
from ckpt.plan.values import join_values
from ckpt.plan.views import filled
from ckpt.settings import check_flags
from ckpt.state.collect import collect
from ckpt.state.dtensor import is_wrapper
from ckpt.state.subclasses import dequantized
from ckpt.state.torch_objects import tensors_of
from ckpt.text import parse_json, url_text

from .delivery import Delivery
from .delta import DeltaRecorder, begin_delta, check_follows, delta_paths, manifest_of
from .export_plan import ExportOptions, ExportReport, StateCatalog, Way, WritePlanner
from .selection import OutputSet, OutputTensor
from .target import OutputOptions, OutputPlan, parent_and_name
from .transaction import Destination, ExportTransaction, RankFiles

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


# An export, from top to bottom:
#
#     every rank   Export     names, shapes and values of the state; the leader gets a digest of each
#                    │
#     leader       begin      do they make one model? lays out the files as ``ckpt convert --to hf`` would, begins them
#                    │
#     every rank   lay_out    the same files, from the same tables                                                         → BegunExport
#                    │
#                  write      every rank puts its blocks at their final place
#                    │
#     leader       commit     was every byte written once, and are replicas equal? the files exist
#
# Invariants: no rank holds more of other ranks' tensors than windows of bounded size. Nothing shows before every byte is durable. What an
# error takes back is noted when it is made, and taken back in the reverse order.

SHARES = 3
"""Of the memory, what one round may keep and send: as much again is room for what comes, or was put together the round before."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BegunExport:
    """The catalog of all ranks' tensors, what is taken of it, and the files; the same on every rank. The ``transaction`` and the ``small``
    files beside are the leader's, which makes all of them exist."""

    agreed: Row
    """What the leader says, for the others to lay out the same files."""
    catalog: StateCatalog
    assignments: Mapping[str, ChunkAssignment]
    chosen: OutputSet
    planned: OutputPlan
    tensors: Mapping[str, OutputTensor]
    base: Base | None
    """The export that this one follows; None if it is a full one."""
    transaction: ExportTransaction | None = None
    small: Mapping[str, bytes] = field(default_factory=dict)


class Export:
    """One rank's side of an export. To make it is to look at this rank's state, which talks to no other rank."""

    def __init__(self, call: Call, options: ExportOptions, state: Module | Mapping[str, Any], layout: Layout | None) -> None:
        options.check()
        if not isinstance(state, Mapping) and not hasattr(state, "state_dict"):
            raise UsageError(f"an export takes a module, or a state that contains it, not {type(state).__name__}", where=call.url)
        scheme_of(call.url)
        root, name = parent_and_name(call.url) if TARGET.one_file(call.url) else (call.url, None)
        named = state if isinstance(state, dict) else {"model": state}
        # Raise UsageError for a model of PEFT: nobody loads its weights by the names that they have in it
        parts = named.values()
        modules = (module for part in parts if hasattr(part, "named_parameters") and hasattr(part, "modules") for module in part.modules())
        if any(type(module).__module__.startswith("peft.") for module in modules):
            raise UsageError(
                "the model has adapters of PEFT, and neither from_pretrained nor PEFT knows its weights by the names that they have in it",
                where=call.url,
                hint="write the adapter with model.save_pretrained(DIRECTORY), and the merged model with "
                "`ckpt lora merge BASE DIRECTORY OUT`; "
                'or export the tensors under these names: {"model": model.state_dict()}',
            )
        if options.dequantize:
            named = {key: _dequantized(value, key) for key, value in named.items()}
        self.call = call
        self.options = options
        self.destination = Destination(url=call.url, backend=open_backend(root), name=name, replace=options.overwrite)
        self.collected = collect(named, rank=call.group.rank, ranks=call.group.ranks, layout=layout)

    def row(self) -> Row:
        """For the leader, which asks for what it does not know yet."""
        shard_table = self.collected.shard_table
        table, _ = split_tables((t.info for t in shard_table.tensors.values()), shard_table.aliases, shard_table.own)
        return {
            "table": self.call.share(table.to_bytes()),
            "state": self.call.share(tree.text(self.collected.state, sort_keys=False).encode()),
            "options": json.dumps(asdict(self.options), sort_keys=True),
        }

    def begin(self, rows: Mapping[int, Row], config: ConfigSource, undo: ExitStack) -> BegunExport:
        """Leader: check that it makes one model, lay out the files and begin them."""
        call, options, destination = self.call, self.options, self.destination
        if len({row["options"] for row in rows.values()}) > 1:
            raise ConsistencyError("the ranks export with different options", where=call.url, hint="give the same ones on every rank")
        configuration = read_configuration(config)
        call.fetch_all(row[key] for row in rows.values() for key in ("table", "state"))
        state = join_values([(ranks, parse_json(call.fetch(d))) for d, ranks in grouped(rows, "state")])
        base = None if options.since is None else open_base(options.since)
        if base is not None and base.number + 1 >= options.anchor_every:
            base = None
        agreed: Row = {
            "tables": [[call.leave(call.fetch(digest)), ranks] for digest, ranks in grouped(rows, "table")],
            "state": call.leave(json.dumps(state).encode()),
            "numbers": dict(configuration.numbers),
            "base": None if base is None else base.this.id,
            "tokens": None,
            "parts": None,
        }
        begun = self.lay_out(agreed, base)
        destination.backend.prepare()
        destination.clear()
        small: Mapping[str, bytes] = {}
        if base is not None:
            transaction = begin_delta(destination, call.group.size)  # small files are the anchor's
        else:
            files = begun.planned.files
            small = {} if destination.name is not None else in_dtype(configuration.files, begun.tensors.values())
            index = [INDEX] if destination.name is None and len(files) > 1 else []
            transaction = ExportTransaction.begin(destination, files, [*small, *index])
            agreed |= {"tokens": transaction.tokens, "parts": transaction.parts}
        undo.callback(transaction.discard)
        return replace(begun, transaction=transaction, small=small)

    def lay_out(self, agreed: Row, base: Base | None = None) -> BegunExport:
        """What every rank computes alike from what was agreed. ``base``: on the leader, which has opened it."""
        call, options, destination = self.call, self.options, self.destination
        joined = join_tables(whole_where_present([(ranks, Table.from_bytes(call.fetch(digest))) for digest, ranks in agreed["tables"]]))
        catalog = StateCatalog.of(
            joined, parse_json(call.fetch(agreed["state"])), url=call.url, backend=destination.backend, world_size=call.group.size
        )
        chosen = TARGET.choose(catalog, options.selection(agreed["numbers"]))
        size = units.parse_size(options.shard_size) if isinstance(options.shard_size, str) else options.shard_size
        planned = TARGET.plan(chosen, OutputOptions(id="", url=call.url, shard_size=size, name=destination.name, previous=None))
        tensors = {name: wanted.without_padding() for name, wanted in chosen.tensors.items()}
        if agreed["base"] is not None:
            base = base or open_base(options.since or "")
            if base.this.id != agreed["base"]:
                message = f"the ranks see different exports at {options.since}"
                raise ConsistencyError(message, where=call.url, hint="since= must be on storage that all ranks share")
            check_follows(base, tensors, call.url)
        return BegunExport(
            agreed=agreed, catalog=catalog, assignments=joined.assignments, chosen=chosen, planned=planned, tensors=tensors, base=base
        )

    def replicas(self, begun: BegunExport, threads: int) -> dict[str, str]:
        """Digests of what other ranks have too, of which one rank's is written: what is called alike may be the expert of each rank."""
        call, shard_table = self.call, self.collected.shard_table
        taken = {shard_table.aliases.get(name, name) for name in begun.chosen.taken()}
        compared = [each for each in replicated_chunks(begun.assignments, call.group.rank) if each[0] in taken]
        replicas = Replicas(begun.assignments, compared, shard_table.tensors.__getitem__, call.group.rank)
        replicas.hash(threads, call.check_failures)
        return replicas.row(call)

    def write(self, begun: BegunExport, threads: int, undo: ExitStack) -> tuple[Delivery, RankFiles | DeltaRecorder]:
        """Bring this rank's blocks to their places."""
        call, group, planned, parts = self.call, self.call.group, begun.planned, begun.agreed["parts"]
        planner = WritePlanner(begun.catalog, begun.tensors, planned.files, group.ranks)
        # A delta goes through windows: their ranges are its sections.
        way: Way = "parts" if begun.base is not None else "files" if parts is None else "parts" if any(parts) else "ranges"
        gathering = planner.plan(way, parts or [0] * len(planned.files), self.options.memory // SHARES)
        files: RankFiles | DeltaRecorder
        if begun.base is not None:
            path = delta_paths(group.size)[group.position]
            files = DeltaRecorder(self.destination, begun.base, planned.files, path)
        else:
            mine = begun.transaction.shared if begun.transaction is not None else None
            files = RankFiles(self.destination, planned.files, begun.agreed["tokens"], mine)
        undo.callback(_discard, files, call)
        shard_table = self.collected.shard_table
        local = {**shard_table.tensors, **{name: shard_table.tensors[to] for name, to in shard_table.aliases.items()}}
        delivery = Delivery(planner, gathering, local, group.rank, files.write)
        opened = {w.file for w in gathering.windows if w.aggregator == group.rank}
        opened |= {f for f, head in enumerate(gathering.heads) if head == group.rank}
        opened |= {f for f, _, _ in planner.direct_pieces(gathering, group.rank)}
        for number in sorted(opened):
            files.open(number)
        peers = peers_of(group, timeout=call.timeout) if group.size > 1 and gathering.rounds else None
        delivery.run(peers, max(threads, self.destination.backend.io_hints.concurrency), call.check_failures)
        return delivery, files

    def commit(self, begun: BegunExport, transaction: ExportTransaction, rows: Mapping[int, Row]) -> Row:
        """Leader: make the files exist if every byte of every tensor was written once, and replicas are equal. What it says of the
        whole."""
        if self.options.check_replicas:
            compare_replicas(self.call, rows)
        for f, file in enumerate(begun.planned.files):
            for i, item in enumerate(file.items):
                count = sum(row["counted"].get(str(f), {}).get(str(i), 0) for row in rows.values())
                planned = filled(begun.tensors[item.name].view) * item.itemsize
                if count != planned:
                    message = f"tensor {item.name}: {planned} bytes were planned, but all ranks together wrote {count}"
                    raise StorageError(message, where=self.call.url, hint="please report this")
        receipts: dict[int, list[Any]] = {}
        for row in rows.values():
            for f, receipt in row["receipts"].items():
                receipts.setdefault(int(f), []).append(receipt)
        destination, base = self.destination, begun.base
        if base is None:
            transaction.commit(receipts, begun.small, begun.planned.finish)
            return {"file_bytes": sum(f.size for f in begun.planned.files), "changed": 0}
        written = receipts[0]
        transaction.sizes = {r["path"]: r["size"] for r in written}
        transaction.commit({}, {}, lambda backend: destination.put(MANIFEST, manifest_of(destination, base, written)))
        return {"file_bytes": sum(r["size"] for r in written), "changed": sum(r["changed"] for r in written)}


def _dequantized(value: Any, path: str) -> Any:
    """A part of a state, with plain tensors for those that are made of others. A module that has some becomes its tensors by name."""
    made: dict[int, torch.Tensor] = {}  # tied ones stay one
    if is_module := hasattr(value, "state_dict") and hasattr(value, "named_parameters"):
        tensors: Mapping[Any, Any] = tensors_of(value).tensors
    elif not is_module and isinstance(value, Mapping):
        tensors = value
    else:
        return value
    for name, tensor in tensors.items():
        if is_wrapper(tensor):
            made[id(tensor)] = made.get(id(tensor), dequantized(tensor, f"{path}.{name}"))
    return {name: made.get(id(tensor), tensor) for name, tensor in tensors.items()} if made else value


def _discard(files: RankFiles | DeltaRecorder, call: Call) -> None:
    files.close()
    if not call.undecided:  # a leader that is slow, not dead, may publish later
        files.discard()


ANCHOR_EVERY = 16
"""A delta is read from the anchor on, and each link of 1 % adds about a third of the time that the anchor alone takes: with so many, a load
takes some seven times as long, and all deltas together are a quarter of the size of the anchor."""


def export(
    url: str | os.PathLike[str],
    state: Module | Mapping[str, Any],
    *,
    translation: Translation | None = None,
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
    dequantize: bool = False,
    check_replicas: bool = True,
    memory: int = settings.EXPORT_MEMORY,
    job: Job | None = None,
) -> ExportReport:
    """Write the model of a running job as safetensors files, as ``ckpt convert --to hf`` would write them of a save of ``state``.

    Collective: every rank of the job calls it; without torch.distributed, one process does. Each rank writes its own blocks at their
    final place, and no rank ever has the whole model. The state must not change before it returns. If it raises, nothing shows at ``url``,
    and what stood there is untouched; but see ``overwrite``.

    Args:
        url: a directory, or one file if it ends in ``.safetensors``. All ranks must see the same storage.
        state: a model, or a state as ``ckpt.save`` takes it. A plain tensor that only some ranks have is whole there.
        translation: other names for the tensors; its ``numbers`` go before those in ``config``.
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
        dequantize: write what quantised tensors stand for, in the dtype that they show. Each rank makes its values at once. Without
            it they are an error.
        check_replicas: compare what several ranks have of a tensor, as ``ckpt.save`` does. Without it, one rank's is written.
        memory: bytes of tensors that a rank has in windows at once.
        job: as for ``ckpt.save``.

    Raises:
        ConflictError: something is at ``url``.
        MismatchError: ``since`` has other tensors.
        NotFoundError, FormatError, CorruptError: ``since`` is not an export, or is damaged.
        NamesError, UsageError: a glob fits nothing, or the options do not fit each other, the state or the translation; or the model has
            adapters of PEFT.
        StateError, LayoutError, ConsistencyError, ReplicaError, StorageError, RankFailedError, DeadlineError: as for ``ckpt.save``.
    """
    url = url_text(url)
    options = ExportOptions(
        translation=translation,
        only=only,
        exclude=exclude,
        root=root,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        shard_size=shard_size,
        overwrite=overwrite,
        memory=memory,
        since=None if since is None else url_text(since),
        anchor_every=anchor_every,
        dequantize=dequantize,
        check_replicas=check_replicas,
    )
    group = group_of(job)
    with group.fails_together("export", url):
        job = Job.of(job)
        wait_for_pending_save(group)
        check_flags(overwrite=overwrite, dequantize=dequantize, check_replicas=check_replicas)
        if layout is not None:
            check_layout(layout, group.ranks)
        seconds, workers = settings.timeout(job.timeout), settings.threads(job.threads)
    return _run(group.call("export", url, seconds), options, config, state, layout, workers)


def _run(
    call: Call, options: ExportOptions, config: ConfigSource, state: Module | Mapping[str, Any], layout: Layout | None, threads: int
) -> ExportReport:
    began = time.perf_counter()
    with ExitStack() as undo:
        with call.phase("begin"):
            job = Export(call, options, state, layout)
            if call.is_leader:
                begun = call.lead(job.row(), lambda rows: job.begin(rows, config, undo), lambda begun: begun.agreed)
            else:
                begun = job.lay_out(call.follow(job.row()))
        with call.phase("write"):
            delivery, written = job.write(begun, threads, undo)
            row: Row = {
                "receipts": {str(f): receipt for f, receipt in call.alive_while(written.flush, call.timeout).items()},
                "counted": {str(f): {str(i): n for i, n in of.items()} for f, of in delivery.counted.items()},
            }
            if options.check_replicas:
                row["replicas"] = job.replicas(begun, threads)
            transaction = begun.transaction
            totals: Row = call.follow(row) if transaction is None else call.lead(row, lambda rows: job.commit(begun, transaction, rows))
        undo.pop_all()
    written.close()
    if call.is_leader:
        call.drain()
    files, base, taken = begun.planned.files, begun.base, begun.chosen.taken()
    return ExportReport(
        url=call.url,
        files=tuple(f.path for f in files) if base is None else delta_paths(call.group.size),
        tensors=len(begun.tensors),
        tensor_bytes=sum(i.length for f in files for i in f.items),
        file_bytes=totals["file_bytes"],
        rank_bytes=sum(n for of in delivery.counted.values() for n in of.values()),
        sent_bytes=delivery.sent,
        writes=delivery.writes,
        left_out=tuple(sorted(n for n in begun.catalog.tensors if n not in taken)),
        seconds=time.perf_counter() - began,
        since=None if base is None else base.this.url,
        changed=totals["changed"],
    )
