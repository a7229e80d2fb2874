"""SGLang takes weights from any checkpoint, and from a ``ckpt.live.Source``: each worker the parts that it keeps, straight into its
parameters.

SGLang finds this module by its plug-in group ``sglang.srt.plugins``. ``--model-loader-extra-config '{"ckpt": {"url": ...}}'`` loads a
checkpoint at the start. ``--custom-weight-loader ckpt.integrations.sglang.take_weights`` takes versions of a running trainer, when
``update_weights_from_tensor`` is given :func:`update_request`.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.model_loader.loader import DefaultModelLoader, post_load_weights
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ckpt.errors import UsageError
from ckpt.integrations.engines import OPTIONS
from ckpt.live.sink import take_step
from ckpt.needs import warn_if_untried
from ckpt.net.group import Job
from ckpt.text import parse_object

from .engines import EngineCheckpoint, EngineSink

log = logging.getLogger("ckpt")

TAKE = f"{__name__}.take_weights"
"""The ``load_format`` of an update, and the value of ``--custom-weight-loader``."""
_OPTIONS = ("address", "checkpoint", *OPTIONS)
_UPDATE = ("step", "progress", "models")
_sinks: WeakKeyDictionary[Any, tuple[Mapping[str, Any], EngineSink]] = WeakKeyDictionary()


def update_request(address: str, **options: Any) -> list[tuple[str, torch.Tensor]]:
    """What to give to ``update_weights_from_tensor(..., load_format=TAKE)``: no weights, but where they are.

    Args:
        address: of the source.
        options: a ``step`` to wait for, instead of the newest version; ``progress``: show a bar; and those of ``EngineSink``. SGLang
            hands one request to the model and to its draft models: ``models`` has globs of class names, each with options of these
            models alone, or None: they are left as they are. ``{"*Eagle*": None, "*NextN": {"optional": ["model.embed*"]}}``.

    Raises:
        UsageError: an unknown option.
    """
    if wrong := [name for name in options if name not in (*_OPTIONS, *_UPDATE)]:
        raise UsageError(f"unknown options: {', '.join(map(repr, wrong))}", hint=f"it may have {', '.join((*_UPDATE, *_OPTIONS))}")
    text = json.dumps({"address": address, **options}).encode()
    return [("ckpt", torch.frombuffer(bytearray(text), dtype=torch.uint8))]


def take_weights(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The custom weight loader: take the version that an :func:`update_request` means. The connection stays for the next one, one for each
    model. The secret comes from ``CKPT_LIVE_SECRET``: requests do not carry it.

    Raises:
        UsageError: these are weights.
        as ``EngineSink``.
    """
    tensors = list(itertools.islice(named_tensors, 2))  # it may be a generator; of weights the rest is not made
    if [name for name, _ in tensors] != ["ckpt"]:
        raise UsageError("these tensors are not a request for ckpt", hint="give ckpt.integrations.sglang.update_request(address)")
    given = parse_object(bytes(tensors[0][1].cpu().numpy()))
    step, progress, kind = given.pop("step", None), bool(given.pop("progress", False)), type(model).__name__
    own: dict[str, Any] | None = next((options for glob, options in given.pop("models", {}).items() if fnmatchcase(kind, glob)), {})
    if own is None:
        log.info("%s keeps its weights: the request leaves it out", kind)
        return
    given |= own
    options, sink = _sinks.get(model, ({}, None))
    if sink is None or options != given:
        if sink is not None:
            del _sinks[model]  # also if the request is wrong
            sink.close()
        further = {name: value for name, value in given.items() if name not in ("address", "timeout")}
        sink = EngineSink(given["address"], model.load_weights, model, **further, job=Job(timeout=given.get("timeout")))
        _sinks[model] = given, sink
    take_step(sink, step, given.get("timeout"), progress=progress)
    post_load_weights(model)


class CkptLoader(DefaultModelLoader):
    """A loader for SGLang: ``load_format=CkptLoader`` of its offline engine, or by the key ``ckpt`` of ``model_loader_extra_config``,
    a dict with the ``url`` of the checkpoint, by default the model's directory, and what :class:`EngineCheckpoint` takes. ``draft`` is such
    a dict for draft models.

    Raises:
        UsageError: a draft model, and no ``draft``.
    """

    def __init__(self, load_config: Any) -> None:
        extra = dict(load_config.model_loader_extra_config or {})
        self._options = dict(extra.pop("ckpt", {}))
        super().__init__(replace(load_config, model_loader_extra_config=extra))

    def download_model(self, model_config: Any) -> None:
        """Nothing is copied: look whether the checkpoint is there."""
        self._get_all_weights(model_config, None)

    def _get_all_weights(self, model_config: Any, model: Any) -> EngineCheckpoint:
        options = dict(self._options)
        draft = options.pop("draft", None)
        if model_config.is_draft_model:
            if draft is None and options:
                hint = 'give the key ckpt a "draft": {} for its own directory, or {"url": ...}, "only" and "rename" as for the model'
                raise UsageError("the draft model has other weights than the model", where=model_config.model_path, hint=hint)
            options = dict(draft or {})
        return EngineCheckpoint(options.pop("url", model_config.model_path), options)

    def _get_weights_iterator(self, source: Any, **_: Any) -> EngineCheckpoint:
        """For an update from a disk: the checkpoint that it names."""
        options = {name: value for name, value in self._options.items() if name not in ("url", "draft")}
        return EngineCheckpoint(source.model_or_path, options)

    def load_weights_and_postprocess(self, model: Any, weights: Any, target_device: Any) -> None:
        """Fill the model that SGLang has built. A quantised one takes whole tensors, since SGLang changes them on their way; so does one
        for which SGLang gives an iterator of its own."""
        layer = self.load_config.draft_model_idx
        if getattr(model, "quant_config", None) is not None or not isinstance(weights, EngineCheckpoint):
            chosen = iter(weights) if layer is None else self._filter_mtp_weights(iter(weights), "", layer)
            self.load_weights_only(model, chosen, target_device)
        else:
            # one of several draft models takes one layer of multi-token prediction, by the name of the first
            load = None if layer is None else lambda all_: model.load_weights(self._filter_mtp_weights(all_, "", layer))
            weights.fill(model, parallel_state.get_tp_group().cpu_group, load)
            post_load_weights(model)
        self.postprocess_weights(model, target_device)


def _chosen(original: Any, load_config: Any, model_config: Any = None) -> Any:
    ours = "ckpt" in (load_config.model_loader_extra_config or {})
    return CkptLoader(load_config) if ours else original(load_config, model_config)


@cache
def register() -> None:
    """The plug-in of SGLang, which calls it in each of its processes."""
    warn_if_untried("sglang", "0.5.23")
    HookRegistry.register("sglang.srt.model_loader.loader.get_model_loader", _chosen, HookType.AROUND)
