"""Directories with one ``torch.save`` file per rank: sharded and local state dicts of FSDP, dictionaries of DTensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from ckpt.catalog import Format
from ckpt.errors import CorruptError
from ckpt.plan import tree
from ckpt.plan.layout.geometry import row_major_strides

from .external import ExternalCatalog, ExternalContents, ExternalFile, SingleFile, shown
from .pickle_nodes import NodeMaker
from .stand_ins import StoredPart, StoredView
from .torch_archive import open_archive
from .torchzip import SUFFIXES, TensorTable, is_torch_file

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


# One ``torch.save`` file per rank, as users of FSDP write them: ``model_world_size_2_rank_0.pt``, ``local_rank1.pt``.
#
# ShardedTensors and DTensors say which box of which tensor each rank has: they become one tensor. A plain tensor says nothing of the
# kind, so it belongs to its rank, and so does a value that differs between ranks. Beside sharded tensors, a plain one that is the same on
# all ranks, by the checksums of the archives, is one tensor too: a buffer, or the step of an optimizer.
#
# verl writes model, optimizer and the rest in such sets, and numbers the parameters of the optimizer in the order of the model.

FORMAT_NAME = "torch.save files of ranks"
_OF_VERL = "fsdp_config.json"
_NUMBERED = re.compile(r"optim\.state\.(\d+)(\..+)")
_FILE = re.compile(r"(.*?)(?:_?world_size_(\d{1,6}))?[-_.]?rank[-_]?(\d{1,6})(?:\.pt|\.pth|\.bin|\.ckpt)")


def rank_sets(names: Sequence[str]) -> dict[str, dict[int, str]]:
    """The files by what they are called besides the rank (``model``, ``optim``), then by rank. Empty unless all ``torch.save`` files of
    the directory are of such sets, each from rank 0 up without a gap. Sets whose names say how many ranks there were may lack files, and
    have others beside them, such as the position in the data."""
    sets: dict[str, dict[int, str]] = {}
    world_sizes: dict[str, int] = {}
    others = False
    for name in names:
        if not name.endswith(SUFFIXES):
            continue
        match = _FILE.fullmatch(name)
        if match is None:
            others = True
            continue
        if int(match[3]) in sets.setdefault(match[1], {}):
            return {}
        sets[match[1]][int(match[3])] = name
        world = int(match[2] or 0)
        if world_sizes.setdefault(match[1], world) != world:
            return {}
    worlds = {world_sizes[name] or len(files) for name, files in sets.items()}
    complete = all(
        max(files) < world_sizes[name] if world_sizes[name] else sorted(files) == list(range(len(files))) for name, files in sets.items()
    )
    named = sets and all(world_sizes.values())
    return sets if complete and len(worlds) == 1 and (named or (not others and worlds.pop() > 1)) else {}


def _check_all_there(sets: Mapping[str, Mapping[int, str]], url: str) -> int:
    """How many ranks wrote the files."""
    missing = []
    for files in sets.values():
        match = _FILE.fullmatch(next(iter(files.values())))  # any file of the set has what all have in common
        if match is not None:
            ranks = int(match[2] or len(files))
            missing += [f"{match.string[: match.start(3)]}{r}{match.string[match.end(3) :]}" for r in range(ranks) if r not in files]
    if missing:
        hint = "copy the directory again; to read what one rank saved, give its file's own URL"
        raise CorruptError(f"files of ranks are missing: {shown(missing)}", where=url, hint=hint)
    return ranks


def recognises(backend: Backend, names: Sequence[str]) -> bool:
    """Whether the directory has such sets of files."""
    sets = {} if isinstance(backend, SingleFile) else rank_sets(names)
    return bool(sets) and all(is_torch_file(backend, min(files.values())) for files in sets.values())


def open_ranks(backend: Backend) -> ExternalCatalog:
    """Open what ``recognises`` found. With several sets, names begin with that of the set."""
    names = backend.list_dir()
    sets = rank_sets(names)
    ranks = _check_all_there(sets, backend.url)
    paths = [(name, rank, files[rank]) for name, files in sorted(sets.items()) for rank in range(ranks)]
    files = [ExternalFile(path, backend.size(path), rank) for _, rank, path in paths]
    joined = _Joined(TensorTable([open_archive(backend, path) for _, _, path in paths], files))
    nodes: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for number, (name, rank, _) in enumerate(paths):
        if (name, rank) == ("optim", 0) and "model" in sets and _OF_VERL in names:
            joined.name_parameters(number)
        nodes[rank][name] = joined.node(number, rank, name if len(sets) > 1 else "")
    roots = [node if len(sets) > 1 else next(iter(node.values())) for node in nodes]
    joined.finish(ranks)
    values = RankValues({name for name, entry in joined.table.entries.items() if entry.rank is not None})
    state = values.merge(dict(enumerate(roots)), "")
    table = joined.table
    contents = ExternalContents(
        tensors=table.entries.values(), files=files, world_size=ranks, state=state, ranks=values.ranks, opaque=joined.opaque
    )
    return ExternalCatalog(
        contents, backend=backend, format=FORMAT_NAME, locate=table.locate, replicas=table.replicas, storages=table.storages
    )


class _Joined:
    """Collects the tensors of all files."""

    def __init__(self, table: TensorTable) -> None:
        self.table = table
        self.opaque: dict[str, str] = {}
        self._parts: dict[str, list[tuple[int, StoredPart]]] = {}
        self._plain: dict[str, list[tuple[int, int, StoredView, dict[str, Any]]]] = {}
        self._parameters: list[str] = []
        """Those of the optimizer, if it numbers them."""
        self._groups: list[dict[str, Any]] = []

    def node(self, file: int, rank: int, path: str) -> tree.Node:
        archive = self.table.archives[file]

        def place(node: StoredView | StoredPart, at: str) -> tree.Node:
            if self._parameters and (numbered := _NUMBERED.fullmatch(at)):
                at = f"optim.state.{self._parameters[int(numbered[1])]}{numbered[2]}"
            if isinstance(node, StoredPart):
                self._parts.setdefault(at, []).append((file, node))
                return {"$tensor": at}
            plain = {"$tensor": f"{at}@rank{rank}"}
            self._plain.setdefault(at, []).append((file, rank, node, plain))
            return plain

        maker = NodeMaker(archive.values, place, pickle_bytes=archive.pickle_bytes)
        node = maker.root(archive.load(), path)
        self.opaque |= maker.opaque
        if self._parameters and path == "optim":
            return {"state": {"$tensors": "optim.state"}, "param_groups": {"$param_groups": self._groups}}
        return node

    def name_parameters(self, file: int) -> None:
        """Have the parameters of the optimizer in ``file`` named after those of the model, if it has as many, of the same shapes in the
        same order, and options that are the same for all. Else they keep their numbers."""
        model: dict[object, tuple[str, tuple[int, ...]]] = {}
        for name, ((_, part), *_) in self._parts.items():
            if name.startswith("model."):  # tied ones by their first name
                model.setdefault(views_of(part) or name, (name, part.shape))
        names, shapes = zip(*model.values(), strict=True) if model else ((), ())
        seen: dict[str, tuple[int, ...]] = {}

        def look(tensor: StoredView | StoredPart, at: str) -> tree.Node:
            seen[at] = tensor.shape
            return {"$tensor": at}

        archive = self.table.archives[file]
        root = NodeMaker(archive.values, look, pickle_bytes=archive.pickle_bytes).root(archive.load(), "optim")
        groups = tree.find(root, ["param_groups"])
        if not isinstance(groups, list) or len(groups) != 1 or groups[0].get("params") != list(range(len(names))):
            return
        known = {f"optim.state.{number}": shape for number, shape in enumerate(shapes)}
        fits = all(at.rpartition(".")[0] in known and shape in ((), known[at.rpartition(".")[0]]) for at, shape in seen.items())
        if fits and len(seen) == len(list(tree.leaves(tree.find(root, ["state"])))):  # no state is a plain value
            self._parameters = list(names)
            self._groups = [{"params": self._parameters, "options": {k: v for k, v in groups[0].items() if k != "params"}}]

    def finish(self, ranks: int) -> None:
        for name, copies in self._plain.items():
            if (
                (self._parts or ranks == 1)
                and len(copies) == ranks
                and len({self._content(file, view) for file, _, view, _ in copies}) == 1
            ):
                _, _, view, _ = copies[0]
                self.table.add_parts(name, view.dtype, view.shape, [(file, (0,) * len(view.shape), each) for file, _, each, _ in copies])
                for *_, node in copies:
                    node["$tensor"] = name
            else:
                for file, rank, view, node in copies:
                    self.table.add(node["$tensor"], file, view, rank)
        for name, parts in self._parts.items():
            first = parts[0][1]
            for file, part in parts:
                if (part.dtype, part.shape) != (first.dtype, first.shape):
                    raise CorruptError(
                        f"tensor {name} is {first.dtype} {list(first.shape)} on one rank and {part.dtype} {list(part.shape)} on another",
                        where=self.table.archives[file].where,
                        hint="the files are of different saves",
                    )
            self.table.add_parts(name, first.dtype, first.shape, [(file, o, view) for file, part in parts for o, view in part.boxes])

    def _content(self, file: int, view: StoredView) -> object:
        """Equal for tensors of one content; that of no other tensor where the archive has no checksum of it."""
        archive, length = self.table.archives[file], math.prod(view.shape) * view.itemsize
        whole = view.strides == row_major_strides(view.shape) and not view.lazy
        crc = (archive.crc32(view.storage, view.offset * view.itemsize, length) if length else 0) if whole else None
        return file if crc is None else (view.dtype, view.shape, crc)


def views_of(part: StoredPart) -> object:
    """Equal for tensors that share their memory, as tied weights do; nothing for a part without elements."""
    return tuple((view.storage.key, view.offset, view.shape) for _, view in part.boxes)


class RankValues:
    """One state out of those of all ranks; what differs is kept in ``ranks``, by rank and path."""

    def __init__(self, own: Set[str]) -> None:
        self.ranks: dict[int, dict[str, Any]] = {}
        self._own = own  # names of the tensors that belong to one rank

    def merge(self, nodes: Mapping[int, tree.Node], path: str) -> tree.Node:
        first = next(iter(nodes.values()))
        if len({tree.text(node) for node in nodes.values()}) == 1 and not any(
            leaf["$tensor"] in self._own for _, leaf in tree.leaves(first) if tree.tag_of(leaf) == "$tensor"
        ):
            return first
        pairs = {rank: tree.pairs_of(node) for rank, node in nodes.items()}
        if all(pairs.values()):
            keys = {tree.text(key): key for own in pairs.values() for key, _ in own or ()}
            by_key = {rank: {tree.text(k): v for k, v in own or ()} for rank, own in pairs.items()}
            merged = [(key, {r: of[text] for r, of in by_key.items() if text in of}) for text, key in keys.items()]
            return tree.mapping_node([(key, self.merge(values, tree.child_path(path, key))) for key, values in merged])
        for rank, node in nodes.items():
            self.ranks.setdefault(rank, {})[path] = node
        return {"$per_rank": True}


FORMAT = Format(name=FORMAT_NAME, recognises=recognises, open=open_ranks)
"""This format, for ckpt.formats.registry."""
