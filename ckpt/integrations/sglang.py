"""SGLang takes weights from any checkpoint, and from a ``ckpt.live.Source``: each worker the parts that it keeps, straight into its
parameters.

SGLang finds this module by its plug-in group ``sglang.srt.plugins``. ``--model-loader-extra-config '{"ckpt": {"url": ...}}'`` loads a
checkpoint at the start. ``--custom-weight-loader ckpt.integrations.sglang.take_weights`` takes versions of a running trainer, when
``update_weights_from_tensor`` is given :func:`update_request`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.model_loader.loader import DefaultModelLoader, post_load_weights
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ckpt.errors import UsageError
from ckpt.integrations.engines.loading import OPTIONS
from ckpt.needs import warn_if_untried
from ckpt.net.group import Job
from ckpt.text import parse_object

from .engines import EngineCheckpoint, EngineSink
from .reading import take_step

TAKE = f"{__name__}.take_weights"
"""The ``load_format`` of an update, and the value of ``--custom-weight-loader``."""
_OPTIONS = ("address", "checkpoint", *OPTIONS)
_UPDATE = ("step", "progress")
_sinks: WeakKeyDictionary[Any, tuple[Mapping[str, Any], EngineSink]] = WeakKeyDictionary()


def update_request(address: str, **options: Any) -> list[tuple[str, torch.Tensor]]:
    """What to give to ``update_weights_from_tensor(..., load_format=TAKE)``: no weights, but where they are.

    Args:
        address: of the source.
        options: a ``step`` to wait for, instead of the newest version; ``progress``: show a bar; and those of ``EngineSink``.

    Raises:
        UsageError: an unknown option.
    """
    if wrong := [name for name in options if name not in (*_OPTIONS, *_UPDATE)]:
        raise UsageError(f"unknown options: {', '.join(map(repr, wrong))}", hint=f"it may have {', '.join((*_UPDATE, *_OPTIONS))}")
    text = json.dumps({"address": address, **options}).encode()
    return [("ckpt", torch.frombuffer(bytearray(text), dtype=torch.uint8))]


def take_weights(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """The custom weight loader: take the version that an :func:`update_request` means. The connection stays for the next one. The secret
    comes from ``CKPT_LIVE_SECRET``: requests do not carry it.

    Raises:
        UsageError: these are weights.
        as ``EngineSink``.
    """
    if [name for name, _ in named_tensors] != ["ckpt"]:
        raise UsageError("these tensors are no request for ckpt", hint="give ckpt.integrations.sglang.update_request(address)")
    given = parse_object(bytes(named_tensors[0][1].cpu().numpy()))
    step, progress = given.pop("step", None), bool(given.pop("progress", False))
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
    a dict with the ``url`` of the checkpoint, by default the model's directory, and what :class:`EngineCheckpoint` takes."""

    def __init__(self, load_config: Any) -> None:
        extra = dict(load_config.model_loader_extra_config or {})
        self._options = dict(extra.pop("ckpt", {}))
        super().__init__(replace(load_config, model_loader_extra_config=extra))

    def download_model(self, model_config: Any) -> None:
        """Nothing is copied: look whether the checkpoint is there."""
        self._get_all_weights(model_config, None)

    def _get_all_weights(self, model_config: Any, model: Any) -> EngineCheckpoint:
        options = dict(self._options)
        return EngineCheckpoint(options.pop("url", model_config.model_path), options)

    def load_weights_and_postprocess(self, model: Any, weights: Any, target_device: Any) -> None:
        """Fill the model that SGLang has built. A quantised one takes whole tensors, since SGLang changes them on their way."""
        if getattr(model, "quant_config", None) is not None:
            self.load_weights_only(model, iter(weights), target_device)
        else:
            weights.fill(model, parallel_state.get_tp_group().cpu_group)
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
