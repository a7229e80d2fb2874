"""Checkpoints of Megatron-LM and Megatron-Core as catalogs: the format ``torch`` of files per model-parallel rank, and ``torch_dist``.

Whatever the layout that wrote them, they are one training checkpoint: ``model.<parameter>`` and, for an optimizer,
``optimizer.state.model.<parameter>.<key>``, with names as in ``names``. Nothing is rearranged: bytes are read where they lie.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ckpt.catalog import Format
from ckpt.concurrency import map_tasks
from ckpt.errors import CkptError, CorruptError, FormatError, NotCommittedError, NotFoundError
from ckpt.formats.external import ExternalFile, SingleFile, sizes_of
from ckpt.formats.pickle_nodes import NodeMaker
from ckpt.formats.stand_ins import StoredView
from ckpt.formats.torch_archive import Archive, open_archive
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.text import parse_object

from .legacy_names import ChunkNames, Local, PlainStates, Value, local_params
from .names import EXTRA_STATE, LAYER, LocalParam
from .pieces import InArchive, PieceTable, SourcePiece
from .stored_buffers import HINT, FlatStates, coalesced, coalesced_layout, members_of
from .torch_dist import optimizer_extras
from .training import (
    COMMON,
    LEFT_OUT,
    MODEL,
    RANK_DIRECTORY,
    STATE,
    MegatronCatalog,
    arguments_of,
    groups_in,
    logical_shape,
    no_tensor,
    optimizer_node,
    state_node,
)

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


TRACKER = "latest_checkpointed_iteration.txt"
METADATA_JSON = "metadata.json"
TORCH_DIST = "torch_dist"
_MAX_JSON = 1 << 16


def recognises(backend: Backend, names: Sequence[str]) -> bool:
    """Whether it is a directory of one iteration in one of the two formats, or one above it that says which is the latest."""
    if _is_iteration(backend, names, ""):
        return True
    if TRACKER not in names:
        return False
    try:
        below = _latest(backend)
    except CkptError:
        return False
    return _is_iteration(backend, backend.list_dir(below), below + "/")


def _is_iteration(backend: Backend, names: Sequence[str], below: str) -> bool:
    return any(RANK_DIRECTORY.fullmatch(name) for name in names) or _is_torch_dist(backend, names, below)


def _is_torch_dist(backend: Backend, names: Sequence[str], below: str) -> bool:
    """Others call files ``metadata.json`` too; beside ``common.pt`` it is Megatron's, whatever it says."""
    if METADATA_JSON not in names:
        return False
    try:
        return COMMON in names or _sharded_backend(backend, below + METADATA_JSON) == TORCH_DIST
    except (CkptError, ValueError):
        return False


def _sharded_backend(backend: Backend, path: str) -> object:
    return parse_object(backend.read_whole(path, _MAX_JSON)).get("sharded_backend")


def _latest(backend: Backend) -> str:
    """The directory of the latest iteration."""
    text = backend.read(TRACKER, 0, min(backend.size(TRACKER), 64)).decode("utf-8", "replace").strip()
    if text == "release":
        return text
    if not text.isascii() or not text.isdigit():
        raise CorruptError(
            f"{text!r} is not an iteration", where=f"{backend.url.rstrip('/')}/{TRACKER}", hint="open the directory of one iteration"
        )
    return f"iter_{int(text):07d}"


def open_megatron(backend: Backend) -> MegatronCatalog:
    """Open what ``recognises`` found."""
    from .torch_dist import open_torch_dist

    names = backend.list_dir()
    if not _is_iteration(backend, names, ""):
        below = _latest(backend)
        names = backend.list_dir(below)
        if not names:
            raise NotFoundError("the latest iteration is missing", where=join_url(backend.url, below), hint="open another one")
        backend = open_backend(join_url(backend.url, below))
    try:
        if not _is_torch_dist(backend, names, ""):
            return open_legacy(backend, names)
        kind = _sharded_backend(backend, METADATA_JSON)
        if kind == "ckpt":
            raise NotCommittedError("its commit record is gone: it was removed", where=backend.url, hint="take another step")
        if kind != TORCH_DIST:
            message = f"a checkpoint of Megatron in the form {kind!r}, of which {TORCH_DIST} alone is read"
            raise FormatError(message, where=backend.url, hint=f"save it again with --ckpt-format {TORCH_DIST}")
        return open_torch_dist(backend)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as err:
        if isinstance(err, CkptError):
            raise
        what = f"the files do not say what Megatron writes ({type(err).__name__}: {err})"
        raise CorruptError(what, where=backend.url, hint="the files are damaged, or of different saves: copy the checkpoint again") from err


FORMAT = Format(name="Megatron", recognises=recognises, open=open_megatron)
"""This format, for ckpt.formats.registry."""


def _is_unfinished(backend: Backend, names: Sequence[str]) -> bool:
    """Megatron writes ``common.pt`` first, then the tensors, and ``metadata.json`` last."""
    return COMMON in names and METADATA_JSON not in names and not isinstance(backend, SingleFile)


def _open_unfinished(backend: Backend) -> NoReturn:
    raise NotCommittedError(
        f"this is a Megatron save that was not finished: {COMMON} is there, and no {METADATA_JSON}",
        where=backend.url,
        hint=f"open another iteration; or, if it is your own torch.save file, {join_url(backend.url, COMMON)}",
    )


UNFINISHED = Format(name="unfinished Megatron save", recognises=_is_unfinished, open=_open_unfinished)
"""Recognised so that no other format takes what is there for a checkpoint."""


# Megatron-LM's format ``torch``: a file for each tensor-, pipeline- and expert-parallel rank, with numbers of layers and experts that
# count from 0 on each, and the distributed optimizer's buffers beside it.
#
# (Sources: ``get_checkpoint_name`` and ``generate_state_dict`` of Megatron-LM training/checkpointing.py, ``ChainedOptimizer`` of
# core/optimizer/optimizer.py, ``Float16OptimizerWithFloat16Params`` of the same.)

# Distributed optimizers of Megatron-LM's format ``torch``: the flat buffers of ``distrib_optim.pt``.


def add_distributed(states: FlatStates, number: int, chunks: Sequence[Sequence[LocalParam]], arguments: Mapping[str, Any]) -> None:
    """Add what the ``distrib_optim.pt`` with this archive number has, of the trained parameters of each chunk.

    With experts the file has a list: the buffers of all other parameters, then those of experts, or None for those that another file has.
    """
    archive = states.table.archives[number]
    meaning, where = archive.values.meaning, archive.where
    root = meaning(archive.load())
    parts = list(root) if isinstance(root, (list, tuple)) else [root]
    if len(parts) > 2:
        raise FormatError(f"{len(parts)} optimizers in a chain", where=where, hint=HINT)
    for place, part in enumerate(parts):
        if meaning(part) is None:
            continue
        buffers = coalesced(meaning, number, part, where)
        wanted = [[p for p in chunk if len(parts) == 1 or p.expert == bool(place)] for chunk in chunks]
        expected = [(dtype, [p for p in chunk if p.dtype == dtype]) for chunk in wanted for dtype in dict.fromkeys(p.dtype for p in chunk)]
        if sorted(buffers) != list(range(len(expected))):
            raise FormatError(f"{len(buffers)} buffers of {len(expected)}", where=where, hint=HINT)
        for index, (dtype, params) in enumerate(expected):
            buffer = buffers[index]
            layout = coalesced_layout(members_of(params), buffer.used, arguments) if buffer.dtype == dtype else None
            if layout is None:
                what = f"buffer {index}, {buffer.dtype}, has {buffer.used:,} elements, which are not those of its {len(params)} parameters"
                raise FormatError(what, where=where, hint="frozen parameters, or buckets of an unknown size: save it as torch_dist")
            for param, slot in zip(params, layout.slots, strict=True):
                states.add(param, layout.compact(slot), buffer.segments)


FORMAT_NAME = "Megatron torch"
FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
_THREADS = 16
_CHUNK = re.compile(r"model_?(\d*)")


class FileRank(NamedTuple):
    """The ranks that a file is of: tensor-, pipeline- and expert-parallel."""

    tensor: int
    pipeline: int
    expert: int


@dataclass(eq=False)
class RankFile:
    """One rank's files: ``number`` and ``optimizer`` are those of the archives, ``chunks`` are the model's: tensors by name."""

    directory: str
    number: int
    archive: Archive
    root: Mapping[Any, Any]
    optimizer: int | None
    chunks: list[dict[str, StoredView]] = field(default_factory=list)
    at: FileRank = field(default_factory=lambda: FileRank(0, 0, 0))

    @cached_property
    def arguments(self) -> dict[str, Any]:
        return arguments_of(self.root.get("args"))


def open_legacy(backend: Backend, names: Sequence[str]) -> MegatronCatalog:
    """Open a directory of the format."""
    return _Legacy(backend, [n for n in names if RANK_DIRECTORY.fullmatch(n)]).catalog()


class _Legacy:
    def __init__(self, backend: Backend, directories: Sequence[str]) -> None:
        self.backend = backend
        beside = dict(zip(directories, map_tasks(backend.list_dir, directories, _THREADS, "ckpt-open"), strict=True))
        paths = [d + FILE for d in directories]
        extra = [d + OPTIMIZER_FILE for d in directories if OPTIMIZER_FILE in beside[d]]
        files = [ExternalFile(p, size) for p, size in zip(paths + extra, sizes_of(backend, paths + extra), strict=True)]
        archives = map_tasks(lambda file: open_archive(backend, file.path), files, _THREADS, "ckpt-open")
        optimizers = {p.removesuffix(OPTIMIZER_FILE): len(paths) + i for i, p in enumerate(extra)}
        self.unread = sorted({n for names in beside.values() for n in names} - {FILE, OPTIMIZER_FILE})
        self.table = PieceTable(backend, files, archives, range(len(files)))
        self.ranks = [self._rank(n, d, optimizers.get(d)) for n, d in enumerate(directories)]
        self.arguments = self.ranks[0].arguments
        # A single number after that of tensor parallelism is a stage, or a group of experts.
        for rank in self.ranks:
            first, *others = (int(number) for number in rank.directory.rstrip("/").removeprefix("mp_rank_").split("_"))
            if len(others) == 1 and self._second_is_expert():
                others = [0, *others]
            rank.at = FileRank(first, *others, *[0] * (2 - len(others)))
        self.sizes = FileRank(*(1 + max(r.at[i] for r in self.ranks) for i in range(3)))
        self._check_sizes()

    def _rank(self, number: int, directory: str, optimizer: int | None) -> RankFile:
        archive = self.table.archives[number]
        root = archive.values.meaning(archive.load())
        if not isinstance(root, dict):
            raise FormatError("no dictionary, so no checkpoint of Megatron-LM", where=archive.where)
        version = root.get("checkpoint_version", 0)
        if not isinstance(version, (int, float)) or version < 2:
            raise FormatError(f"checkpoint version {version}, whose queries, keys and values lie in another order", where=archive.where)
        rank = RankFile(directory, number, archive, root, optimizer)
        chunks = {int(m[1] or 0): v for k, v in root.items() if isinstance(k, str) and (m := _CHUNK.fullmatch(k)) is not None}
        if sorted(chunks) != list(range(len(chunks))) or not chunks:
            raise CorruptError(f"the model's chunks are {sorted(chunks)}", where=archive.where, hint="get the file again")
        rank.chunks = [self._chunk(archive, chunks[i]) for i in range(len(chunks))]
        return rank

    def _chunk(self, archive: Archive, value: Any) -> dict[str, StoredView]:
        views = {}
        for name, stored in (archive.values.meaning(value) or {}).items():
            if not isinstance(name, str) or name.endswith(EXTRA_STATE):
                continue
            view = archive.values.meaning(stored)
            if not isinstance(view, StoredView):
                hint = "convert it with Megatron-LM's tools/checkpoint first"
                raise FormatError(
                    f"{name!r} of the model is not a tensor: a model from before Megatron-Core?", where=archive.where, hint=hint
                )
            views[name] = view
        return views

    # ---- who wrote which file

    def _second_is_expert(self) -> bool:
        stages, groups = (self.arguments.get(f"{kind}_model_parallel_size") for kind in ("pipeline", "expert"))
        if isinstance(stages, int) and stages > 1:
            return False
        if isinstance(groups, int) and groups > 1:
            return True
        return all(any(n.startswith("embedding.") for n in rank.chunks[0]) for rank in self.ranks)

    def _check_sizes(self) -> None:
        sizes = {
            "tensor": self.arguments.get("tensor_model_parallel_size"),
            "pipeline": self.arguments.get("pipeline_model_parallel_size"),
            "expert": self.arguments.get("expert_model_parallel_size"),
        }
        wrong = [k for k, n in sizes.items() if isinstance(n, int) and n != getattr(self.sizes, k)]
        there = {(r.at.tensor, r.at.pipeline) for r in self.ranks}
        owners = {(r.at.pipeline, r.at.expert) for r in self.ranks}
        complete = len(there) == self.sizes.tensor * self.sizes.pipeline and len(owners) == self.sizes.pipeline * self.sizes.expert
        if wrong or not complete:
            what = ", ".join(f"{k} parallelism of {sizes[k]}" for k in wrong) or "all of them"
            raise CorruptError(
                f"there are files of {len(self.ranks)} ranks, which is not {what}",
                where=self.backend.url,
                hint="files of ranks are missing: copy the checkpoint again",
            )
        split = self.arguments.get("expert_tensor_parallel_size")
        has_experts = any(".mlp.experts." in name for rank in self.ranks for chunk in rank.chunks for name in chunk)
        if has_experts and isinstance(split, int) and split not in (1, self.sizes.tensor):
            raise FormatError(
                f"experts with another tensor parallelism than the rest ({split} of {self.sizes.tensor})",
                where=self.backend.url,
                hint="save it as torch_dist: --ckpt-format torch_dist",
            )

    # ---- tensors

    @cached_property
    def first_layers(self) -> dict[tuple[int, int], int]:
        """The number of the first layer of each chunk, by stage and chunk: chunks follow one another stage by stage."""
        counts: dict[tuple[int, int], int] = {}
        for rank in self.ranks:
            for number, chunk in enumerate(rank.chunks):
                layers = 1 + max((int(m[2]) for n in chunk if (m := LAYER.fullmatch(n)) is not None), default=-1)
                counts[number, rank.at.pipeline] = max(layers, counts.get((number, rank.at.pipeline), 0))
        first, at = {}, 0
        for (number, stage), layers in sorted(counts.items()):
            first[stage, number], at = at, at + layers
        return first

    def catalog(self) -> MegatronCatalog:
        local = [(rank, self._local(rank)) for rank in self.ranks]
        pieces: dict[str, list[SourcePiece]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for rank, chunks in local:
            for one in (one for chunk in chunks for one in chunk):
                source = InArchive(rank.number, one.view)
                for block in one.param.blocks:
                    shape = one.shapes[block.name]
                    if shapes.setdefault(block.name, shape) != shape:
                        what = f"{block.name} would be {list(shape)} and {list(shapes[block.name])}"
                        raise CorruptError(what, where=rank.archive.where, hint="the files are of different saves")
                    pieces.setdefault(block.name, []).append(SourcePiece(block.offset, block.shape, source, block.start, block.strides))
        for name, own in pieces.items():
            logical = logical_shape(name, shapes[name], self.arguments)
            self.table.add(f"{MODEL}{name}", own[0].source.dtype, shapes[name], own, logical)
        plain = self._add_optimizer(local)
        first = self.ranks[0]
        more = optimizer_extras(first.archive.values.meaning, first.root.get("optimizer"), by_number=True)
        models = [key for key in first.root if isinstance(key, str) and _CHUNK.fullmatch(key)]
        state, opaque, more_notes = state_node(self.table, 0, first.root, [(0, scaler) for scaler in more.scalers], models)
        state["model"] = {"$tensors": "model"}
        notes = [LEFT_OUT, *(f"files {name} of ranks are not read" for name in self.unread), *more_notes]
        notes += [f"{key} is not known here, and left out" for key in more.unknown]
        if plain.values or any(n.startswith(STATE) for n in self.table.entries):
            groups = groups_in(self.table, 0, first.root.get("optimizer"))
            values = {name: self._nodes(name, own) for name, own in plain.values.items()}
            state["optimizer"], more_notes = optimizer_node(first.archive, groups, self.table.entries, values)
            notes += more_notes
        return MegatronCatalog(
            table=self.table,
            format=FORMAT_NAME,
            state=state,
            world_size=len(self.ranks),
            arguments=self.arguments,
            notes=notes,
            opaque=opaque,
        )

    def _local(self, rank: RankFile) -> list[list[Local]]:
        """The parameters in a file, by chunk."""
        alone = self.arguments.get("expert_tensor_parallel_size") == 1
        tied = self.sizes.pipeline > 1 and self.arguments.get("untie_embeddings_and_output_weights") is False
        chunks = []
        for number, chunk in enumerate(rank.chunks):
            names = ChunkNames(
                first_layer=self.first_layers[rank.at.pipeline, number],
                tensor=(rank.at.tensor, self.sizes.tensor),
                expert=(rank.at.expert, self.sizes.expert),
                expert_tensor=(0, 1) if alone else (rank.at.tensor, self.sizes.tensor),
                tied=tied and rank.at.pipeline == self.sizes.pipeline - 1,
                shared=tied,
                arguments=self.arguments,
            )
            chunks.append(local_params(chunk, names, rank.archive.where))
        return chunks

    def _add_optimizer(self, local: Sequence[tuple[RankFile, list[list[Local]]]]) -> PlainStates:
        states = FlatStates(self.table)
        plain = PlainStates(states)
        for rank, chunks in local:
            params = [[one.param for one in chunk if one.trained] for chunk in chunks]
            if rank.optimizer is not None:
                add_distributed(states, rank.optimizer, params, self.arguments)
            elif "optimizer" in rank.root:
                plain.add(rank.number, [p for chunk in params for p in chunk], rank.root["optimizer"])
        states.finish()
        plain.finish()
        return plain

    def _nodes(self, name: str, values: Mapping[str, Value]) -> dict[str, Any]:
        """The nodes of the states of a parameter that are no tensors; a step stays the number that it is."""
        nodes: dict[str, Any] = {}
        for key, (number, value) in values.items():
            owner = self.table.archives[number]
            nodes[key] = NodeMaker(owner.values, no_tensor, pickle_bytes=owner.pickle_bytes).root(value, f"{STATE}{name}.{key}")
        return nodes
