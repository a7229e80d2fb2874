"""Conversion into Megatron-LM's format ``torch``: a file for each tensor-, pipeline- and expert-parallel rank, as the job loads it.

(Source: ``get_checkpoint_name``, ``generate_state_dict`` and ``load_checkpoint`` of Megatron-LM training/checkpointing.py.)
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt.catalog import Catalog
from ckpt.converters.mapping.convention import CONFIG
from ckpt.converters.mapping.translation import of_config, padded_vocabulary
from ckpt.converters.selected_state import pruned
from ckpt.converters.selection import OutputSet, OutputTensor, SelectOptions
from ckpt.converters.selection import choose as choose_all
from ckpt.converters.target import FileItem, MegatronParallel, OutputFile, OutputOptions, OutputPlan, Target
from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.formats.megatron.catalog import FILE, OPTIMIZER_FILE, TRACKER
from ckpt.formats.megatron.names import (
    EMBEDDING,
    EXTRA_STATE,
    LAYER,
    OUTPUT,
    expert_name,
    expert_of,
    extra_states,
    fused_norms,
    gated_layers,
    is_expert,
)
from ckpt.formats.megatron.training import MODEL, STATE
from ckpt.formats.native.commit import RECORD_LIMIT
from ckpt.formats.native.virtual import VirtualCatalog
from ckpt.formats.native.writer import publish
from ckpt.io_backends.registry import open_backend
from ckpt.plan import tree
from ckpt.plan.layout.geometry import Box
from ckpt.text import parse_json

from .megatron_optimizer import RELEASE, STATES, VERSION, Optimizer, buffers_file, groups_of, is_identified, optimizer_of
from .megatron_parts import ModelRank, RankParam, Ranks, check_names
from .torch_file import ArchivePlan, StorageStub, nested_state

# The arguments that a Megatron checkpoint keeps as ``args``: of the source, of its configuration, and what its tensors say. No torch.
#
# Megatron-LM compares some with those of the job that loads (``check_checkpoint_args`` of training/checkpointing.py), and takes others from
# the checkpoint when told ``--use-checkpoint-args`` (``load_args_from_checkpoint``). What nobody says is left out: the job's own holds.

Arguments = dict[str, Any]
DIVISOR = 128
"""Of ``make_vocab_size_divisible_by``, unless somebody says."""

_OF_ONE_JOB = ("rank", "world_size", "local_rank", "data_parallel_size", "transformer_pipeline_model_parallel_size")
"""What is true of the ranks that wrote the source alone."""
_OF_ONE_PIPELINE = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_virtual_stages_per_pipeline_rank",
)
"""What does not fit a pipeline of another length."""


def arguments_of(catalog: Catalog, config: Mapping[str, Any], model: Mapping[str, OutputTensor], parallel: MegatronParallel) -> Arguments:
    """The arguments of a job of these ranks, for a model with these parameters by name. ``config`` is that of :func:`configuration_of`."""
    given_arguments = {**_of_config(config), **_stored_arguments(catalog, parallel), **parallel.arguments}
    if given_arguments.get("untie_embeddings_and_output_weights") and OUTPUT not in model:
        hint = f"convert {OUTPUT} too, or say that it is tied: --arg untie_embeddings_and_output_weights=false"
        raise UsageError("the output layer is missing, and is not tied to the embedding", where=catalog.url, hint=hint)
    arguments = {**_soft(model), **given_arguments, **_facts(model)}
    arguments |= {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual if parallel.virtual > 1 else None,
        "expert_model_parallel_size": parallel.expert,
        "ckpt_format": "torch",
        "use_dist_ckpt": False,
    }
    if "num_attention_heads" in arguments:
        _check_heads(arguments, parallel.tensor, catalog.url)
    elif not _divided_before(given_arguments.get("tensor_model_parallel_size"), parallel.tensor):
        hint = "--arg num_attention_heads=…; also num_query_groups and kv_channels"
        what = f"nothing says how many attention heads the model has, which {parallel.tensor} tensor-parallel ranks divide"
        raise UsageError(what, where=catalog.url, hint=hint)
    per_chunk, rest = divmod(arguments["num_layers"], parallel.pipeline * parallel.virtual)
    if parallel.virtual > 1 and not rest and not any(arguments.get(name) for name in _OF_ONE_PIPELINE):
        arguments["num_layers_per_virtual_pipeline_stage"] = per_chunk
    arguments.setdefault("expert_tensor_parallel_size", parallel.tensor)
    return arguments | _vocabulary(arguments, model, catalog.url, given=parallel.arguments)


def _divided_before(source: Any, ranks: int) -> bool:
    """Whether heads can be divided among these ranks because one has them all, or because the ``source`` had a multiple of them."""
    return ranks == 1 or (isinstance(source, int) and source > 0 and source % ranks == 0)


def _check_heads(arguments: Arguments, ranks: int, where: str) -> None:
    """Raise UsageError if Megatron would not divide heads and groups so.

    (Source: ``TransformerConfig`` of Megatron-LM; since version 0.16 a rank may have a part of a group.)
    """
    heads = arguments["num_attention_heads"]
    groups = (arguments.get("num_query_groups") if arguments.get("group_query_attention", True) else None) or heads
    parts = {f"{heads} attention heads": heads % ranks == 0, f"{groups} query groups": 0 in (groups % ranks, ranks % groups)}
    for what, fits in parts.items():
        if not fits:
            raise UsageError(f"{what} cannot be divided among {ranks} tensor-parallel ranks", where=where, hint="--tp")


def _vocabulary(arguments: Arguments, model: Mapping[str, OutputTensor], where: str, *, given: Mapping[str, Any]) -> Arguments:
    """Rows of the embedding: real ones, if it is known which these are, and with padding."""
    embedding = model.get(EMBEDDING)
    if embedding is None:
        hint = "convert all of the model, under Megatron's names: --names llama --convention megatron"
        raise UsageError(f"there is no tensor {EMBEDDING}", where=where, hint=hint)
    stored = embedding.shape[0]
    real = given.get("vocab_size") or (embedding.logical or (None,))[0] or arguments.get("vocab_size") or stored
    divisor = arguments.get("make_vocab_size_divisible_by") or DIVISOR
    ranks = arguments["tensor_model_parallel_size"]
    rows = given.get("padded_vocab_size") or padded_vocabulary(real, divisor=divisor, tensor_parallel=ranks)
    if not 0 < real <= min(stored, rows) or rows % ranks:
        message = f"a vocabulary of {real}, padded to {rows} rows on {ranks} tensor-parallel ranks, of an embedding with {stored}"
        raise UsageError(message, where=where, hint="--arg vocab_size=… --arg padded_vocab_size=…")
    known = {"vocab_size": real} if real != rows or "vocab_size" in arguments else {}
    return {**known, "padded_vocab_size": rows, "make_vocab_size_divisible_by": divisor}


def _stored_arguments(catalog: Catalog, parallel: MegatronParallel) -> Arguments:
    """Those of the source, if it is Megatron's or was made of one, but for what is true of its ranks alone."""
    node = catalog.state.get("args") if isinstance(catalog.state, dict) else None
    pairs = [] if node is None or tree.tag_of(node) is not None else tree.pairs_of(node) or []
    stored = {str(k): v for k, v in pairs if v is None or isinstance(v, (bool, int, float, str, list))}
    pipeline = (stored.get("pipeline_model_parallel_size", 1), stored.get("virtual_pipeline_model_parallel_size") or 1)
    dropped = {*_OF_ONE_JOB, "expert_tensor_parallel_size", "num_layers_per_virtual_pipeline_stage"}
    if pipeline != (parallel.pipeline, parallel.virtual):
        dropped |= set(_OF_ONE_PIPELINE)
    return {k: v for k, v in stored.items() if k not in dropped}


# ------------------------------------------------------------------------------------------------- what tensors say


def _inner(model: Mapping[str, OutputTensor], ending: str) -> OutputTensor | None:
    return next((w for n, w in model.items() if n.endswith(ending) and not is_expert(n)), None)


def _facts(model: Mapping[str, OutputTensor]) -> Arguments:
    """What nobody can say otherwise."""
    layers = {int(m[2]) for n in model if (m := LAYER.fullmatch(n)) is not None}
    routers = [w for n, w in model.items() if n.endswith(".mlp.router.weight")]
    embedding = model.get(EMBEDDING)
    return {
        "num_layers": len(layers),
        "num_experts": routers[0].shape[0] if routers else None,
        "untie_embeddings_and_output_weights": OUTPUT in model,
        **({} if embedding is None else {"hidden_size": embedding.shape[1]}),
    }


def _soft(model: Mapping[str, OutputTensor]) -> Arguments:
    """What the tensors let one think, as Megatron's own defaults do not."""
    dense, shared = _inner(model, ".mlp.linear_fc2.weight"), _inner(model, ".mlp.shared_experts.linear_fc2.weight")
    routed = next((w for n, w in model.items() if is_expert(n) and n.endswith(".linear_fc2.weight")), None)
    biased = _inner(model, ".linear_proj.bias") is not None
    latent = _inner(model, ".linear_kv_up_proj.layer_norm_weight") is not None
    learned = "embedding.position_embeddings.weight" in model
    guessed: Arguments = {
        "normalization": "LayerNorm" if "decoder.final_layernorm.bias" in model else "RMSNorm",
        "swiglu": bool(gated_layers({n: w.shape for n, w in model.items()})),
        "add_bias_linear": biased,
        "add_qkv_bias": not biased and _inner(model, ".linear_qkv.bias") is not None,
        "qk_layernorm": latent or _inner(model, ".self_attention.q_layernorm.weight") is not None,
        "multi_latent_attention": _inner(model, ".linear_kv_down_proj.weight") is not None,
        "add_position_embedding": True,
        "position_embedding_type": "learned_absolute" if learned else "rope",
        "transformer_impl": "transformer_engine",
    }
    hidden = dense or routed
    if hidden is not None:
        guessed["ffn_hidden_size"] = hidden.shape[1]
    if routed is not None:
        guessed["moe_ffn_hidden_size"] = routed.shape[1]
        guessed["moe_layer_freq"] = _frequency(model)
        guessed["moe_router_enable_expert_bias"] = _inner(model, ".router.expert_bias") is not None
        if guessed["moe_router_enable_expert_bias"]:
            guessed["moe_router_score_function"] = "sigmoid"  # the only one that Megatron has a bias with
    if shared is not None:
        guessed["moe_shared_expert_intermediate_size"] = shared.shape[1]
        guessed["moe_shared_expert_gate"] = _inner(model, ".shared_experts.gate_weight") is not None
    return guessed


def _frequency(model: Mapping[str, OutputTensor]) -> int | list[int]:
    """Which layers have experts: 1 if all have."""
    matches = [m for n in model if (m := LAYER.fullmatch(n)) is not None]
    routed = {int(m[2]) for m in matches if m[3] == "mlp.router.weight"}
    layers = sorted({int(m[2]) for m in matches})
    return 1 if len(routed) == len(layers) else [int(layer in routed) for layer in layers]


# ---------------------------------------------------------------------------------------- what a configuration says

_SAME = {
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "num_experts_per_tok": "moe_router_topk",
    "rope_theta": "rotary_base",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "scoring_func": "moe_router_score_function",
}
"""What transformers calls them, and Megatron."""


def configuration_of(catalog: Catalog) -> Mapping[str, Any]:
    """The ``config.json`` of transformers beside the source; empty if there is none."""
    roots = dict.fromkeys(s.root for s in catalog.sources) if isinstance(catalog, VirtualCatalog) else ()
    for backend in (catalog.backend, *map(open_backend, roots)):
        try:
            config = parse_json(backend.read_whole(CONFIG, RECORD_LIMIT))
        except NotFoundError:
            continue
        except ValueError as err:
            raise CorruptError(f"{CONFIG} cannot be read: {err}", where=backend.url, hint="restore it") from err
        if isinstance(config, dict):
            return config
    return {}


def _of_config(config: Mapping[str, Any]) -> Arguments:
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or {}
    known = of_config(config)
    arguments = {ours: value for theirs, ours in _SAME.items() if (value := text.get(theirs, rope.get(theirs))) is not None}
    if "heads" in known:
        arguments |= {"num_attention_heads": known["heads"], "num_query_groups": known["query_groups"]}
        arguments["group_query_attention"] = known["query_groups"] != known["heads"]
    if "head_size" in known:
        arguments["kv_channels"] = known["head_size"]
    if "vocabulary" in known:
        arguments["vocab_size"] = known["vocabulary"]
    if "max_position_embeddings" in arguments:
        arguments["seq_length"] = arguments["max_position_embeddings"]
    if "tie_word_embeddings" in config:
        arguments["untie_embeddings_and_output_weights"] = not config["tie_word_embeddings"]
    if "norm_topk_prob" in text:
        arguments["moe_router_pre_softmax"] = not text["norm_topk_prob"]
    return arguments


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
        files=tuple(files), digest="crc32", finish=lambda backend: publish(backend, TRACKER, latest), tensors=tensors, last=(TRACKER,)
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
"""For ``ckpt.converters.target``."""
