"""DeepSpeed checkpoints as catalogs: one training checkpoint, whatever the numbers of ranks and stages and the kind of ZeRO.

``model.<parameter>`` are the weights, ``optimizer.state.model.<parameter>.<key>`` the states: ``master`` and whatever the optimizer keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.catalog import Format
from ckpt.errors import CorruptError, FormatError
from ckpt.formats.external import ExternalCatalog, ExternalContents, ExternalFile, sizes_of
from ckpt.formats.fsdp import RankValues
from ckpt.formats.pickle_nodes import step_node
from ckpt.formats.stand_ins import StoredView
from ckpt.formats.torchzip import TensorTable
from ckpt.plan import tree
from ckpt.plan.tree import Node

from .files import (
    MASTER,
    Directory,
    PickledFile,
    RankStates,
    in_one_order,
    is_checkpoint,
    open_files,
    others_of,
    read_directory,
    read_states,
    resolve,
)
from .partitions import Partitioned, StateTable, find_parameters
from .weights import MODEL, OPTIMIZER, STATE, Universal, Weights, node_maker, parameter_files

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


# The optimizer as a node of the state: parameter groups by name, and states that are no tensors.


def group_nodes(
    options: Sequence[Mapping[Any, Any]], names: Sequence[Sequence[str]], node: Callable[[Mapping[Any, Any]], Node]
) -> list[dict[str, Any]]:
    """Parameter groups: names and options of each."""
    return [{"params": list(members), "options": node(of)} for of, members in zip(options, names, strict=False)]


def optimizer_node(groups: Sequence[Mapping[str, Any]], values: Mapping[str, Mapping[str, Node]]) -> Node:
    """The node of an optimizer. Groups with the same options, as the stages of a pipeline have, are one; a parameter is named once."""
    merged: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for group in groups:
        into = merged.setdefault(tree.text(group["options"]), {"params": [], "options": group["options"]})
        into["params"] += [name for name in group["params"] if name not in seen]
        seen |= set(group["params"])
    tensors: Node = {"$tensors": "optimizer.state"}
    kept = {
        name: {key: step_node(value) if key == "step" and type(value) in (int, float) else value for key, value in of.items()}
        for name, of in values.items()
    }
    return {"state": {"": tensors, **kept} if kept else tensors, "param_groups": {"$param_groups": list(merged.values())}}


FORMAT_NAME = "DeepSpeed"
_TAKEN = frozenset(
    {"module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "optimizer"}
)
"""Entries of a model's file that become tensors; all others are values."""
_OTHERS = "zero_optimizer"
"""Where the state has what of ZeRO's optimizer belongs to no parameter."""
_AUTO_EXPERTS = ("ds_autoep_layers", "autoep_layers")


def open_deepspeed(backend: Backend) -> ExternalCatalog:
    """Open what ``is_checkpoint`` found; the catalog's ``url`` says which tag that is."""
    backend = resolve(backend)
    return _Opened(backend, read_directory(backend.list_dir(), backend.url)).catalog()


class _Opened:
    """The open files of one checkpoint, and what was found in them."""

    def __init__(self, backend: Backend, directory: Directory) -> None:
        self.backend = backend
        self.directory = directory
        self.universal = parameter_files(backend) if directory.universal else {}
        stages = directory.stages
        states = [] if directory.universal else [path for stage in stages for path in directory.ranks(stage)]
        further = [OPTIMIZER] if directory.universal else []
        models = [directory.models[key] for key in sorted(directory.models)]
        whole_states = [path for states_of in self.universal.values() for path in states_of.values()]
        paths = [*models, *directory.layers.values(), *directory.experts, *states, *whole_states, *further]
        files = open_files(backend, paths)
        self.by_path = {file.path: file for file in files}
        rank_of = {path: rank for (_, rank), path in directory.states.items()}
        self.files = [ExternalFile(p, size, rank_of.get(p)) for p, size in zip(paths, sizes_of(backend, paths), strict=True)]
        self.table = TensorTable([file.archive for file in files], self.files)
        self.weights = Weights(self.table)
        self.opaque: dict[str, str] = {}
        self.per_stage = max((rank + 1 for _, rank in (*directory.models, *directory.states)), default=1)
        self.zero: int | None = None
        self.groups: list[Any] = []
        self.values: dict[str, dict[str, Any]] = {}
        self.others: tree.Node = None
        self.sliced = False
        self.notes: list[str] = []

    def models(self, stage: int) -> list[PickledFile]:
        """The models' files of a stage, by rank."""
        return [self.by_path[path] for (at, _), path in sorted(self.directory.models.items()) if at == stage]

    def catalog(self) -> ExternalCatalog:
        for stage in self.directory.stages:
            file = self.models(stage)[0]
            if any(file.root.get(key) for key in _AUTO_EXPERTS):
                hint = "make a universal checkpoint of it (deepspeed.checkpoint.ds_to_universal) and open that"
                raise FormatError("layers with automatic expert parallelism (AutoEP) are not known here", where=file.where, hint=hint)
            degrees = file.meaning(file.root.get("checkpoint_parallel_dimensions"))
            several = len(self.directory.stages) > 1 and file.root.get("module") is not None
            self.sliced = self.sliced or several or (isinstance(degrees, dict) and degrees.get("tp_degree") not in (None, 1))
            if self.sliced and not self.directory.universal:
                hint = "make a universal checkpoint of it (deepspeed.checkpoint.ds_to_universal) and open that"
                raise FormatError("weights are cut for tensor parallelism, and DeepSpeed does not say how", where=file.where, hint=hint)
        for stage in self.directory.stages:
            self._module(stage)
        for number, path in self.directory.layers.items():
            self.weights.layer(self.by_path[path], f"{number}.")
        for path in self.directory.experts:
            self.weights.layer(self.by_path[path], "")
        if self.directory.universal:
            self._universal()
        else:
            for stage in self.directory.stages:
                self._states(stage)
        self.weights.tied()
        state, ranks = self._state()
        kind = "" if self.zero is None else f" ZeRO-{self.zero}"
        contents = ExternalContents(
            tensors=self.table.entries.values(),
            files=self.files,
            world_size=len(self.directory.stages) * self.per_stage,
            state=state,
            ranks=ranks,
            opaque=self.opaque,
            notes=self.notes,
        )
        return ExternalCatalog(
            contents,
            backend=self.backend,
            format=f"{FORMAT_NAME}{kind}{' universal' if self.directory.universal else ''}",
            locate=self.table.locate,
            replicas=self.table.replicas,
            storages=self.table.storages,
        )

    # ---- weights

    def _module(self, stage: int) -> None:
        """The weights of a stage."""
        # Slices of them are left alone: a universal directory has the whole parameters.
        files = self.models(stage)
        if self.sliced:
            lacking = [n for n in files[0].optional(files[0].root.get("module"), "'module'") if n not in self.universal]
            if lacking:
                files[0].unknown(f"{lacking[0]} is cut for tensor parallelism, or not, and is in no file of its own")
            return
        partitioned = files[0].path.startswith("zero_pp_rank_")
        self.weights.module(files[0], self._node, partitioned=partitioned)
        if partitioned:
            self.weights.frozen(files)

    def _shapes(self, stage: int) -> list[dict[str, tuple[int, ...]]]:
        file = self.models(stage)[0]
        return [file.shapes(group, "'param_shapes'") for group in file.sequence(file.root.get("param_shapes") or [], "'param_shapes'")]

    # ---- optimizer states

    def _states(self, stage: int) -> None:
        ranks = [read_states(self.by_path[path]) for path in self.directory.ranks(stage)]
        if not ranks:
            if self._shapes(stage):  # without ZeRO there are none, and the optimizer's state is in the model's file, by number
                raise CorruptError("there are no optimizer states", where=self.backend.url, hint="copy the files …_optim_states.pt too")
            return
        ranks = in_one_order(ranks)
        self.zero = ranks[0].zero
        expected = len(ranks) if self.zero == 3 else 1
        if len(self.models(stage)) != expected:
            raise CorruptError(
                f"{len(ranks)} files of optimizer states and {len(self.models(stage))} of models are there",
                where=self.backend.url,
                hint="a process did not save, or files were not copied: get them",
            )
        parameters = find_parameters(self._shapes(stage), ranks)
        shapes = {p.name: p.shape for p in parameters}
        self.weights.tied_layers(shapes)
        table = StateTable(self.table, ranks)
        for partitioned in parameters:
            if f"{STATE}.{partitioned.name}.{MASTER}" not in self.table.entries:  # tied stages have the same
                table.add(partitioned, f"{STATE}.{partitioned.name}", *self.weights.place_master(partitioned.name))
        self.weights.check(shapes, self.backend.url)
        self._values(table.values)
        self._options(ranks[0], parameters)
        self.notes += sorted({f"{key!r} of {r.file.path} is not known here, and left out" for r in ranks for key in r.unknown})
        if self.others is None:
            self.others = self._node(ranks[0].file, dict(ranks[0].others), _OTHERS)

    def _options(self, states: RankStates, parameters: Sequence[Partitioned]) -> None:
        members: dict[int, list[str]] = {}
        for partitioned in parameters:
            for group in sorted({f.group for f in partitioned.fragments})[:1]:
                members.setdefault(group, []).append(f"{MODEL}.{partitioned.name}")
        names = [[name for group in groups for name in members.get(group, [])] for groups in states.members]
        self.groups += group_nodes(states.options, names, lambda options: self._node(states.file, options, "optimizer.param_groups"))

    def _values(self, values: Mapping[str, Mapping[str, tuple[PickledFile, Any]]]) -> None:
        for name, stored_key in values.items():
            for key, (file, value) in stored_key.items():
                by_key = self.values.setdefault(f"{MODEL}.{name}", {})
                by_key[key] = self._node(file, value, f"{STATE}.{name}.{key}")

    def _universal(self) -> None:
        shapes = {n: s for stage in self.directory.stages for group in self._shapes(stage) for n, s in group.items()}
        self.weights.tied_layers(shapes)
        universal = Universal(self.weights, shapes)
        for name, states in self.universal.items():
            universal.add(name, {key: self.by_path[path] for key, path in states.items()})
        self.weights.check(shapes, self.backend.url)
        self._values(universal.values)
        self._universal_optimizer(self.by_path[OPTIMIZER])

    def _universal_optimizer(self, file: PickledFile) -> None:
        """What the optimizer has besides the states."""
        # That of a pipeline is of the first stage alone, and left out.
        zero = file.root.get("zero_stage")
        self.zero = None if zero is None else file.number(zero, "'zero_stage'")
        self.others = self._node(file, others_of(file.root), _OTHERS)
        if len(self.directory.stages) > 1:
            return
        groups = [file.mapping(g, "a parameter group") for g in file.sequence(file.root.get("param_groups") or [], "'param_groups'")]
        members = [[file.number(n, "'params'") for n in file.sequence(g.get("params"), "'params'")] for g in groups]
        flat = dict(enumerate(self._shapes(self.directory.stages[0])))
        names = [[f"{MODEL}.{name}" for n in member for name in flat.get(n, {})] for member in members]
        options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        self.groups += group_nodes(options, names, lambda value: self._node(file, value, "optimizer.param_groups"))
        states = file.optional(file.optional(file.root.get("optimizer_state_dict"), "'optimizer_state_dict'").get("state"), "'state'")
        for n, named in flat.items():  # made of ZeRO-3, these are of the first rank; no other file has the steps
            step = file.meaning(file.optional(states.get(n), f"state {n}").get("step"))
            for name in named if type(step) is StoredView and step.shape == () else ():
                if f"{STATE}.{name}.step" not in self.table.entries:
                    self.table.add(f"{STATE}.{name}.step", file.file, step)

    # ---- values

    def _node(self, file: PickledFile, value: Any, path: str, suffix: str = "", rank: int | None = None) -> tree.Node:
        maker = node_maker(self.table, file, suffix, rank)
        node = maker.root(value, path)
        self.opaque |= maker.opaque
        return node

    def _state(self) -> tuple[tree.Node, Mapping[int, Mapping[str, Any]]]:
        """The state, and what of it differs between ranks."""
        nodes = {}
        for (stage, rank), path in sorted(self.directory.models.items()):
            number, alone = stage * self.per_stage + rank, len(self.directory.models) == 1
            nodes[number] = self._values_of(self.by_path[path], None if alone else number)
        steps = sorted({tree.text(node["global_steps"]) for node in nodes.values() if "global_steps" in node})
        if len(steps) > 1:
            hint = "a process did not save, or files were not copied: get those of one step"
            raise CorruptError(f"the files of ranks are of different steps: {', '.join(steps)}", where=self.backend.url, hint=hint)
        own = {name for name, entry in self.table.entries.items() if entry.rank is not None}
        values = RankValues(own)
        state = dict(values.merge(nodes, ""))
        module: tree.Node = {"$tensors": MODEL}
        state[MODEL] = {"": module, **self.weights.extras} if self.weights.extras else module
        if self.groups or self.values or any(name.startswith(f"{STATE}.") for name in self.table.entries):
            state["optimizer"] = optimizer_node(self.groups, self.values)
        if self.others is not None:
            state[_OTHERS] = self.others
        return state, values.ranks

    def _values_of(self, file: PickledFile, rank: int | None) -> dict[str, tree.Node]:
        """Everything in a model's file that is neither weights nor about them."""
        suffix = "" if rank is None else f"@rank{rank}"
        values = {}
        for key, value in file.root.items():
            if key in _TAKEN and (key != "optimizer" or value is None):
                continue
            if type(key) is not str or key in (MODEL, _OTHERS) or key.startswith("$"):
                file.damaged(f"{key!r} is among the values that were saved")
            values[key] = self._node(file, value, key, suffix, rank)
        return values


FORMAT = Format(name=FORMAT_NAME, recognises=is_checkpoint, open=open_deepspeed)
"""This format, for ckpt.formats.registry."""
