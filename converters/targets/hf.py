"""Conversion into what ``transformers.from_pretrained`` loads: safetensors shards and their index, or one file. Weights only. No torch.

(Source of names and index: ``transformers/modeling_utils.py``; of the file: github.com/huggingface/safetensors.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from ckpt.catalog import Catalog
from ckpt.converters.pipeline.target import OutputFile, OutputOptions, OutputPlan, Target, publish_once
from ckpt.converters.pipeline.windows import FileItem
from ckpt.converters.select.selection import OutputSet, OutputTensor, choose_weights
from ckpt.dtypes import FROM_SAFETENSORS
from ckpt.errors import CorruptError, UsageError
from ckpt.formats.external.base import ExternalCatalog
from ckpt.formats.megatron.catalog import METADATA_JSON, TRACKER
from ckpt.formats.native.commit import COMMIT_PATH
from ckpt.formats.native.virtual import VirtualCatalog
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import is_file_system, open_backend, real_url
from ckpt.layout.geometry import Box
from ckpt.plan.reads import group_sizes
from ckpt.settings import limits

from .derived_config import derived_config

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
        _check_configured(chosen, layout.url)
    groups = [range(len(members))] if alone else group_sizes([w.nbytes for w in members], layout.shard_size or SHARD)
    names = [layout.name or SINGLE] if len(groups) == 1 else [f"model-{i + 1:05d}-of-{len(groups):05d}{SUFFIX}" for i in range(len(groups))]
    shards = [[members[i] for i in group] for group in groups]
    files = tuple(_file(name, shard) for name, shard in zip(names, shards, strict=True))

    def finish(backend: Backend) -> None:
        if alone:
            return
        beside = layout.beside or dict(_beside(chosen.catalog))
        derived = derived_config(chosen).content if CONFIG not in beside else None
        for name, data in {**beside, **({CONFIG: derived} if derived is not None else {})}.items():
            publish_once(backend, name, data)
        if len(files) > 1:
            publish_once(backend, INDEX, _index(names, shards))

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
    if not os.path.isfile(path):  # a memory:// URL counts as a file system, too
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
        backends = [catalog.backend] if isinstance(catalog, ExternalCatalog) else []
    files: dict[str, bytes] = {}
    for backend in backends:
        files = {**small_files(backend), **files}
    return list(files.items())


def small_files(backend: Backend) -> dict[str, bytes]:
    """Configuration and tokenizer that lie at a root; nothing if there is no configuration."""
    names = backend.list_dir()
    if CONFIG not in names:
        return {}
    return {name: backend.read(name) for name in names if _belongs(name) and backend.size(name) <= limits.SIDE_FILE}


def _belongs(name: str) -> bool:
    if name in OF_FORMATS or name.endswith((".index.json", "/")) or name.startswith(("training_args", "trainer_state", ".")):
        return False
    return name.endswith((".json", ".txt", ".model", ".jinja", ".tiktoken"))


def _check_configured(chosen: OutputSet, url: str) -> None:
    derived = derived_config(chosen)
    if derived.content is None and CONFIG not in dict(_beside(chosen.catalog)):
        why = "the source has none" if derived.reason is None else f"the source has none, and none can be made: {derived.reason}"
        hint = "name a config.json, or the directory of a model that has one: --config PATH; or write the weights without one: --no-config"
        raise UsageError(f"from_pretrained needs a {CONFIG}, and {why}; nothing was written", where=url, hint=hint)


def _notes(chosen: OutputSet) -> tuple[str, ...]:
    """Where ``config.json`` comes from, if it does not lie beside the source."""
    if CONFIG in dict(_beside(chosen.catalog)):
        return ()
    content, reason = derived_config(chosen)
    return () if reason is None else (f"{CONFIG}: {reason}" if content is not None else f"{CONFIG} is not written: {reason}",)


TARGET = Target(name="hf", computes=True, choose=choose_weights, plan=plan, one_file=lambda url: url.endswith(SUFFIX), notes=_notes)
"""For ``ckpt.converters.pipeline.target``."""
