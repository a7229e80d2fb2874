"""Conversion into Megatron-LM's format ``torch``: a file for each tensor-, pipeline- and expert-parallel rank, as the job loads it.

(Source: ``get_checkpoint_name``, ``generate_state_dict`` and ``load_checkpoint`` of Megatron-LM training/checkpointing.py.)
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt.catalog import Catalog
from ckpt.converters.pipeline.target import FileItem, MegatronParallel, OutputFile, OutputOptions, OutputPlan, Target, publish_once
from ckpt.converters.select.selection import OutputSet, OutputTensor, SelectOptions
from ckpt.converters.select.selection import choose as choose_all
from ckpt.converters.select.state_values import pruned
from ckpt.converters.targets.torch_file import ArchivePlan, StorageStub, nested_state
from ckpt.errors import UsageError
from ckpt.formats.megatron.catalog import TRACKER
from ckpt.formats.megatron.legacy_ranks import FILE, OPTIMIZER_FILE
from ckpt.formats.megatron.names import EMBEDDING, EXTRA_STATE, LAYER, OUTPUT, expert_name, expert_of, extra_states, fused_norms
from ckpt.formats.megatron.training import MODEL, STATE
from ckpt.plan.layout.geometry import Box

from .arguments import arguments_of, configuration_of
from .optimizer import RELEASE, STATES, VERSION, Optimizer, buffers_file, groups_of, is_identified, optimizer_of
from .rank_parts import ModelRank, RankParam, Ranks, check_names

_KEPT = ("num_floating_point_operations_so_far", "opt_param_scheduler")


def choose(catalog: Catalog, choice: SelectOptions) -> OutputSet:
    """The tensors of one model under the names that they have in the whole of Megatron's model, and the values of the state.

    ``choice.root`` is the key of the state that has the model; by default ``model``, if anything lies there.
    """
    chosen = choose_all(catalog, replace(choice, root=None))
    root = choice.root
    if root is None:
        root = "model" if any(name.startswith(MODEL) for name in chosen.tensors) else ""
    head = f"{root}." if root else ""
    model_tensors = {n: w for n, w in chosen.tensors.items() if n.startswith(head) and w.rank is None and not n.endswith(EXTRA_STATE)}
    if not root:
        model_tensors = {n: w for n, w in model_tensors.items() if not n.startswith("optimizer.")}
    if not model_tensors:
        raise UsageError(f"no tensor of a model lies below {root!r}", where=catalog.url, hint="`ckpt inspect` lists the names")
    named = {n.removeprefix(head): chosen.tensors[w.alias] if w.alias in model_tensors else w for n, w in model_tensors.items()}
    if OUTPUT in named and named[OUTPUT] is named.get(EMBEDDING):
        del named[OUTPUT]  # tied
    check_names(named, head, catalog.url)
    model = _in_one_convention(named)
    optimizer = _optimizer(chosen, model) if head == MODEL and choice.optimizer else None
    states = {} if optimizer is None else {f"{STATE}{n}.{STATES[key]}": w for key, own in optimizer.states.items() for n, w in own.items()}
    state = pruned(chosen.state, [], optimizers=False)
    return replace(chosen, tensors={**model, **states}, state=state, ranks={}, beside=configuration_of(catalog))


def _optimizer(chosen: OutputSet, model: Mapping[str, OutputTensor]) -> Optimizer | None:
    return optimizer_of(chosen.tensors, model, chosen.catalog.state, root="model", fits=is_identified)


def _in_one_convention(named: Mapping[str, OutputTensor]) -> dict[str, OutputTensor]:
    """The tensors by the names that ``ckpt.formats.megatron.names`` has for them."""
    apart = {}
    for name, wanted in named.items():
        match = LAYER.fullmatch(name)
        expert = None if match is None else expert_of(match[3])
        apart[name if match is None or expert is None else f"{match[1]}{match[2]}.{expert_name(*expert)}"] = wanted
    called = fused_norms(apart)
    return {called[name]: wanted for name, wanted in apart.items()}


def plan(chosen: OutputSet, layout: OutputOptions) -> OutputPlan:
    """One file for each rank, and what says where they are."""
    if layout.shard_size is not None:
        raise UsageError("the format megatron has a file for each rank", hint="leave out --shard-size: more ranks make smaller files")
    parallel = layout.parallel or MegatronParallel()
    model = {name: w for name, w in chosen.tensors.items() if not name.startswith(STATE)}
    optimizer = _optimizer(chosen, model) if len(model) < len(chosen.tensors) else None
    arguments = arguments_of(chosen.catalog, chosen.beside, model, parallel)
    if optimizer is not None:
        arguments["use_distributed_optimizer"] = True
    ranks = Ranks(model, parallel, arguments, chosen.catalog.url)
    values = _values(chosen, trained=optimizer is not None)
    head = {"args": Namespace(**arguments), "checkpoint_version": VERSION, "iteration": 0, **values}
    if optimizer is not None:
        head["optimizer"] = groups_of(optimizer, ranks)
    tensors: dict[str, OutputTensor] = {}
    files = []
    for at in ranks.all():
        iteration = f"iter_{values['iteration']:07d}" if "iteration" in values else RELEASE
        folder = f"{iteration}/{directory(at, parallel)}"
        files.append(_file(f"{folder}/{FILE}", head, ranks.chunks(at), tensors))
        if optimizer is not None:
            beside = buffers_file(f"{folder}/{OPTIMIZER_FILE}", at, ranks, optimizer, tensors)
            files += [] if beside is None else [beside]
    latest = str(values.get("iteration", RELEASE)).encode()
    return OutputPlan(
        files=tuple(files), digest="crc32", finish=lambda backend: publish_once(backend, TRACKER, latest), tensors=tensors, last=(TRACKER,)
    )


def directory(at: ModelRank, parallel: MegatronParallel) -> str:
    """Where the files of a rank are."""
    stage = f"_{at.pipeline:03d}" if parallel.pipeline > 1 else ""
    return f"mp_rank_{at.tensor:02d}{stage}" + (f"_{at.expert:03d}" if parallel.expert > 1 else "")


def _values(chosen: OutputSet, *, trained: bool) -> dict[str, Any]:
    """The values of the state that Megatron keeps too."""
    # Without an optimizer, iteration 0 is none.
    nested = nested_state(replace(chosen, tensors={}), lambda wanted: None)
    kept = {k: nested[k] for k in ("iteration", *_KEPT) if k in nested} if isinstance(nested, dict) else {}
    iteration = kept.pop("iteration", None)
    return {"iteration": iteration, **kept} if isinstance(iteration, int) and (iteration > 0 or trained) else kept


def _file(path: str, head: Mapping[str, Any], chunks: Sequence[Sequence[RankParam]], tensors: dict[str, OutputTensor]) -> OutputFile:
    """The file of a rank; what it is made of is added to ``tensors``."""
    stands: list[StorageStub] = []
    made: list[OutputTensor] = []
    state = dict(head)
    for number, chunk in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{number}"
        state[key] = {}
        for one in chunk:
            state[key][one.name] = StorageStub(len(stands), one.dtype, one.shape)
            stands.append(state[key][one.name])
            made.append(OutputTensor(name=f"{path}:{key}.{one.name}", view=one.view, dtype=one.dtype))
        state[key] |= dict.fromkeys(extra_states(state[key]))
    archive = ArchivePlan(state, stands)
    tensors.update({w.name: w for w in made})
    items = [FileItem(w.name, Box.whole(w.shape), at, w.dtype.itemsize) for w, at in zip(made, archive.starts, strict=True)]
    return OutputFile(path=path, size=archive.size, items=tuple(items), ends=archive.ends)


TARGET = Target(name="megatron", choose=choose, plan=plan, parallel=True)
"""For ``ckpt.converters.pipeline.target``."""
