"""Conversion into what ``transformers.from_pretrained`` loads: safetensors shards and their index, or one file. Weights only. No torch.

(Source of names and index: ``transformers/modeling_utils.py``; of the file: github.com/huggingface/safetensors.)
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ckpt import settings
from ckpt.catalog import Catalog
from ckpt.converters.mapping.translation import of_config
from ckpt.converters.selection import FLOATING, OutputSet, OutputTensor, choose_weights
from ckpt.converters.target import FileItem, OutputFile, OutputOptions, OutputPlan, Target, parent_and_name
from ckpt.dtypes import FROM_SAFETENSORS
from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.formats.megatron.catalog import METADATA_JSON, TRACKER
from ckpt.formats.native.commit import COMMIT_PATH
from ckpt.formats.native.virtual import VirtualCatalog
from ckpt.formats.native.writer import publish
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import is_file_system, open_backend, real_url
from ckpt.plan import tree
from ckpt.plan.layout.geometry import Box
from ckpt.plan.reads import group_sizes
from ckpt.text import parse_json, url_text

# A ``config.json`` for exported weights, from what a Megatron job left of its arguments: every number known, or no file.

# transformers computes with what config.json says, and a wrong number changes what a model computes without any error. So nothing is
# assumed. Three things have to come together:
#
#     names       those of LlamaForCausalLM and no others: embedding, layers with gate, up and down projections, RMS norms
#     arguments   each number that Llama's configuration needs stands in the source's ``args``, and all that it cannot express is off
#     shapes      what the arguments say of sizes is what the tensors have
#
# A token's number (BOS, EOS) is in no argument: those stay null, where transformers would put its own.


_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PROJECTIONS = {**dict.fromkeys("qkvo", "self_attn"), **dict.fromkeys(("gate", "up", "down"), "mlp")}
_WEIGHTS = frozenset(f"{module}.{name}_proj.weight" for name, module in _PROJECTIONS.items())
_NORMS = frozenset({"input_layernorm.weight", "post_attention_layernorm.weight"})
_ATTENTION_BIASES = frozenset(f"self_attn.{name}_proj.bias" for name in "qkvo")
_MLP_BIASES = frozenset(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down"))

_NEEDED: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_position_embeddings"), (int,)),
    **dict.fromkeys(("norm_epsilon", "rotary_base", "rotary_percent"), (int, float)),
}
_MUST_BE: Mapping[str, object] = {"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "rotary_percent": 1.0}
_MUST_BE_OFF = (
    *("use_rope_scaling", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "window_size", "no_rope_freq"),
    *("apply_layernorm_1p", "qk_layernorm", "qk_l2_norm", "multi_latent_attention", "attention_output_gate", "softmax_scale"),
    *("num_experts", "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "activation_func_clamp_value"),
)
"""What Llama's configuration cannot express. A version of Megatron-LM without such an argument has no such feature."""


class DerivedConfig(NamedTuple):
    """The content of ``config.json``, and why; None if it cannot be made. ``reason`` is None where there are no arguments at all."""

    content: bytes | None
    reason: str | None


def derived_config(chosen: OutputSet) -> DerivedConfig:
    """The configuration that the source's arguments and the tensors that are exported make."""
    node = chosen.catalog.state.get("args") if isinstance(chosen.catalog.state, dict) else None
    pairs = None if node is None or tree.tag_of(node) is not None else tree.pairs_of(node)
    if not pairs:
        return DerivedConfig(None, None)
    arguments = {key: value for key, value in pairs if isinstance(key, str)}
    shapes = {name: wanted.without_padding().shape for name, wanted in chosen.tensors.items()}
    inner = [{m[2] for n in shapes if (m := _LAYER.fullmatch(n)) is not None and m[1] == str(i)} for i in range(_layers(shapes))]
    biases = inner[0] - _WEIGHTS - _NORMS if inner else frozenset[str]()
    known = {_EMBEDDING, "model.norm.weight", _HEAD} | {n for n in shapes if _LAYER.fullmatch(n)}
    if not inner or _EMBEDDING not in shapes or shapes.keys() - known or any(own != {*_WEIGHTS, *_NORMS, *biases} for own in inner):
        return DerivedConfig(None, "the tensors are not those of LlamaForCausalLM")
    if biases not in (set(), _ATTENTION_BIASES, _MLP_BIASES, _ATTENTION_BIASES | _MLP_BIASES):
        return DerivedConfig(None, f"LlamaForCausalLM has no {min(biases)} alone")
    problem = _problem(arguments)
    if problem is not None:
        return DerivedConfig(None, problem)
    config = _config(arguments, shapes, biases)
    if not _fit(config, shapes):
        return DerivedConfig(None, "the source's arguments do not fit the shapes of the tensors")
    dtypes = {wanted.dtype.name for wanted in chosen.tensors.values()}
    if len(dtypes) == 1:
        config["torch_dtype"] = min(dtypes)
    return DerivedConfig(json.dumps(config, indent=2, sort_keys=True).encode() + b"\n", "made of the source's arguments")


def _layers(shapes: Mapping[str, object]) -> int:
    return len({m[1] for name in shapes if (m := _LAYER.fullmatch(name)) is not None})


def _problem(arguments: Mapping[str, Any]) -> str | None:
    """What the arguments do not say, or say that Llama's configuration has no word for."""
    lacking = [name for name, kinds in _NEEDED.items() if not isinstance(arguments.get(name), kinds) or isinstance(arguments[name], bool)]
    lacking += [name for name in _MUST_BE if arguments.get(name) is None and name not in lacking]
    if lacking:
        return f"the source's arguments do not say {', '.join(lacking)}"
    odd = [name for name, value in _MUST_BE.items() if arguments[name] != value] + [name for name in _MUST_BE_OFF if arguments.get(name)]
    return f"LlamaForCausalLM cannot express {odd[0]}={arguments[odd[0]]!r}" if odd else None


def _config(arguments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], biases: frozenset[str] | set[str]) -> dict[str, Any]:
    heads = arguments["num_attention_heads"]
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention", True) else None
    theta = float(arguments["rotary_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": bool(biases & _ATTENTION_BIASES),
        "mlp_bias": bool(biases & _MLP_BIASES),
        "hidden_act": "silu",
        "hidden_size": arguments["hidden_size"],
        "intermediate_size": arguments["ffn_hidden_size"],
        "max_position_embeddings": arguments["max_position_embeddings"],
        "num_attention_heads": heads,
        "num_hidden_layers": arguments["num_layers"],
        "num_key_value_heads": groups or heads,
        "head_dim": arguments.get("kv_channels") or arguments["hidden_size"] // heads,
        "rms_norm_eps": arguments["norm_epsilon"],
        "rope_theta": theta,  # before transformers 5
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": _HEAD not in shapes,
        "vocab_size": shapes[_EMBEDDING][0],
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _fit(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows, key_rows = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    expected = {
        "self_attn.q_proj.weight": (rows, hidden),
        "self_attn.k_proj.weight": (key_rows, hidden),
        "self_attn.v_proj.weight": (key_rows, hidden),
        "self_attn.o_proj.weight": (hidden, rows),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    layers = range(config["num_hidden_layers"])
    fits = all(shapes.get(f"model.layers.{i}.{name}") == shape for i in layers for name, shape in expected.items())
    vocabulary = (config["vocab_size"], hidden)
    return fits and len(layers) == _layers(shapes) and shapes[_EMBEDDING] == shapes.get(_HEAD, vocabulary) == vocabulary


SHARD = 5_000_000_000
"""Bytes of a shard, at most, unless the caller says: what transformers does."""
SUFFIX = ".safetensors"
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
METADATA = "__metadata__"
OF_FORMATS = (METADATA_JSON, TRACKER, COMMIT_PATH)
"""Files by which a checkpoint of another format is known: beside safetensors files they would say that these are one."""
_INTEGERS = {"U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "BOOL"}
_ALL_READERS = _INTEGERS | {"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"}
"""Dtypes that every supported version of the safetensors library knows."""
ALIGNED = 4096
"""The data begins at a multiple of this many bytes."""


def plan(chosen: OutputSet, layout: OutputOptions) -> OutputPlan:
    """Shards in the order of names."""
    members = [chosen.tensors[name].without_padding() for name in sorted(chosen.tensors)]
    odd = [w.name for w in members if FROM_SAFETENSORS.get(w.dtype.safetensors) != w.dtype]
    if odd:
        message = f"safetensors files have no {chosen.tensors[odd[0]].dtype.name}: {odd[0]!r}"
        raise UsageError(message, where=chosen.catalog.url, hint="leave it out: --exclude")
    reserved = [w.name for w in members if w.name in ("", METADATA)]
    if reserved:
        message = f"safetensors files have no tensor called {reserved[0]!r}"
        raise UsageError(message, where=chosen.catalog.url, hint="leave it out: --exclude")
    alone = layout.name is not None
    if layout.require_config and not alone and CONFIG not in layout.beside:
        derived = derived_config(chosen)
        if derived.content is None and CONFIG not in dict(_beside(chosen.catalog)):
            why = "the source has none" if derived.reason is None else f"the source has none, and none can be made: {derived.reason}"
            hint = "name a config.json, or a model's directory that has one: --config PATH; or write the weights without one: --no-config"
            raise UsageError(f"from_pretrained needs a {CONFIG}, and {why}; nothing was written", where=layout.url, hint=hint)
    groups = [range(len(members))] if alone else group_sizes([w.nbytes for w in members], layout.shard_size or SHARD)
    names = [layout.name or SINGLE] if len(groups) == 1 else [f"model-{i + 1:05d}-of-{len(groups):05d}{SUFFIX}" for i in range(len(groups))]
    shards = [[members[i] for i in group] for group in groups]
    files = tuple(_file(name, shard) for name, shard in zip(names, shards, strict=True))

    def finish(backend: Backend) -> None:
        if alone:
            return
        beside = in_dtype(layout.beside or dict(_beside(chosen.catalog)), members)
        derived = derived_config(chosen).content if CONFIG not in beside else None
        for name, data in {**beside, **({CONFIG: derived} if derived is not None else {})}.items():
            publish(backend, name, data)
        if len(files) > 1:
            publish(backend, INDEX, _index(names, shards))

    return OutputPlan(files=files, digest=None, finish=finish, last=() if alone else (INDEX,))


def _file(path: str, members: Sequence[OutputTensor]) -> OutputFile:
    """Tensors by item size, largest first, so that each begins at a multiple of its own; a header as transformers writes it."""
    ordered = sorted(members, key=lambda w: (-w.dtype.itemsize, w.name))
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    at = 0
    starts = []
    for w in ordered:
        header[w.name] = {"dtype": w.dtype.safetensors, "shape": w.dtype.stored_shape(w.shape), "data_offsets": [at, at + w.nbytes]}
        starts.append(at)
        at += w.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // ALIGNED) * ALIGNED - 8
    head = length.to_bytes(8, "little") + text.ljust(length)
    items = tuple(
        FileItem(w.name, Box.whole(w.shape), len(head) + start, w.dtype.itemsize) for w, start in zip(ordered, starts, strict=True)
    )
    check = check_readable if {w.dtype.safetensors for w in ordered} <= _ALL_READERS else None
    return OutputFile(path=path, size=len(head) + at, items=items, ends=lambda digests: [(0, head)], check=check)


def check_readable(backend: Backend, file: OutputFile) -> None:
    """Open a written file by the safetensors library, the reference for all that will read it. It opens files of file systems only."""
    if not is_file_system(backend.url):
        return
    from safetensors import SafetensorError, safe_open

    path = f"{real_url(backend.url)}/{file.path}"
    if not os.path.isfile(path):  # a inprocess:// URL counts as a file system, too
        return
    try:
        with safe_open(path, framework="np") as opened:
            names = set(opened.keys())
    except SafetensorError as err:
        backend.delete(file.path)
        raise CorruptError(f"the safetensors library refuses the file: {err}", where=path, hint="please report this") from err
    missing = {item.name for item in file.items} ^ names
    if missing:
        backend.delete(file.path)
        raise CorruptError(f"the safetensors library shows other tensors: {min(missing)!r}", where=path, hint="please report this")


def _index(names: Sequence[str], shards: Sequence[Sequence[OutputTensor]]) -> bytes:
    where = {w.name: name for name, tensors in zip(names, shards, strict=True) for w in tensors}
    tensors = [w for shard in shards for w in shard]
    metadata = {"total_parameters": sum(Box.whole(w.shape).numel for w in tensors), "total_size": sum(w.nbytes for w in tensors)}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(where.items()))}, indent=2).encode() + b"\n"


def _beside(catalog: Catalog) -> list[tuple[str, bytes]]:
    """Configuration and tokenizer of the source: small files that are no weights, and what describes these."""
    if isinstance(catalog, VirtualCatalog):
        backends = [open_backend(root) for root in dict.fromkeys(s.root for s in catalog.sources)]
    else:
        backends = [catalog.backend]
    files: dict[str, bytes] = {}
    for backend in backends:
        files = {**small_files(backend), **files}
    return list(files.items())


def small_files(backend: Backend) -> dict[str, bytes]:
    """Configuration and tokenizer that lie at a root, or in its ``huggingface/``, where verl has them; nothing without a configuration."""
    for within in ("", "huggingface/"):
        names = backend.list_dir(within.rstrip("/"))
        if CONFIG in names:
            wanted = [name for name in names if _belongs(name) and backend.size(f"{within}{name}") <= settings.SIDE_FILE]
            return {name: backend.read(f"{within}{name}") for name in wanted}
    return {}


def _belongs(name: str) -> bool:
    if name in OF_FORMATS or name.endswith((".index.json", "/")) or name.startswith(("training_args", "trainer_state", ".")):
        return False
    return name.endswith((".json", ".txt", ".model", ".jinja", ".tiktoken"))


def _notes(chosen: OutputSet) -> tuple[str, ...]:
    """Where ``config.json`` comes from, if it does not lie beside the source."""
    if CONFIG in dict(_beside(chosen.catalog)):
        return ()
    content, reason = derived_config(chosen)
    return () if reason is None else (f"{CONFIG}: {reason}" if content is not None else f"{CONFIG} is not written: {reason}",)


TARGET = Target(name="hf", computes=True, choose=choose_weights, plan=plan, one_file=lambda url: url.endswith(SUFFIX), notes=_notes)
"""For ``ckpt.converters.target``."""


# What lies beside exported weights: ``config.json``, and tokenizer and other small files.


class ModelConfig(Protocol):
    """What ``model.config`` of transformers is."""

    def to_dict(self) -> dict[str, Any]: ...


ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | ModelConfig | None
"""A configuration of transformers, the content of ``config.json``, its path or URL, or that of a directory that has it."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """``files`` by name; ``numbers`` of the model that they tell, for translations."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)


def read_configuration(given: ConfigSource) -> Configuration:
    if given is None:
        return Configuration()
    if isinstance(given, os.PathLike):
        given = url_text(given)
    if not isinstance(given, str):
        try:
            files = {CONFIG: json.dumps(_content(given), indent=2, sort_keys=True).encode() + b"\n"}
        except (ValueError, TypeError) as err:
            raise UsageError(f"this configuration cannot be written as JSON: {err}", hint="config=model.config, or plain values") from err
    elif given.endswith(".json"):
        root, name = parent_and_name(given)
        files = {CONFIG: open_backend(root).read_whole(name, settings.SIDE_FILE)}
    else:
        files = small_files(open_backend(given))
        if CONFIG not in files:
            raise NotFoundError(f"there is no {CONFIG}", where=given, hint="give the directory of a model, or the file")
    try:
        return Configuration(files=files, numbers=dict(of_config(parse_json(files[CONFIG]))))
    except (ValueError, AttributeError, TypeError) as err:
        raise UsageError(f"this is not the configuration of a model: {err}", where=given if isinstance(given, str) else None) from err


def in_dtype(files: Mapping[str, bytes], tensors: Iterable[OutputTensor]) -> dict[str, bytes]:
    """``files`` with the dtype of the weights in ``config.json``, if they have one and it names another: transformers loads into what is
    named there. That of quantised weights stays."""
    kinds = {wanted.dtype.name for wanted in tensors if wanted.dtype.name in FLOATING}
    try:
        content = parse_json(files.get(CONFIG, b"{}"))
    except ValueError:  # the source's own, which is copied as it is
        return dict(files)
    if len(kinds) != 1 or not isinstance(content, dict) or "quantization_config" in content:
        return dict(files)
    (kind,) = kinds
    parts = [part for part in (content, *content.values()) if isinstance(part, dict)]  # a model of several has a configuration for each
    named = [(part, key) for part in parts for key in ("dtype", "torch_dtype") if part.get(key, kind) != kind and part[key] in FLOATING]
    for part, key in named:
        part[key] = kind
    return {**files, CONFIG: json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"} if named else dict(files)


def _content(given: Mapping[str, Any] | ModelConfig) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    if not hasattr(given, "to_dict"):
        raise UsageError(f"a configuration is a mapping, a path or model.config, not {type(given).__name__}", hint="config=model.config")
    return dict(given.to_dict())
