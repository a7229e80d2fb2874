"""Weights for generation engines: where the tensors of a checkpoint go in an engine's memory, recorded from its own ``load_weights``.
``EngineCheckpoint`` is a checkpoint of any format for a model that an engine has just built, as vLLM and SGLang load it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from ckpt.api import load
from ckpt.api import open as open_checkpoint
from ckpt.converters.importer import translated
from ckpt.engine.view import StoredTensor
from ckpt.errors import CoverageError, UsageError
from ckpt.net.group import Job
from ckpt.plan.match import Selection, rules_of_rename, several

from .recorded import EngineSink, Recorded, record, translation_in
from .recording import LoadWeights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["EngineCheckpoint", "EngineSink", "Recorded", "record"]

log = logging.getLogger("ckpt")

OPTIONS = ("only", "rename", "names", "convention", "numbers", "stage", "optional", "timeout")
UNSTORED = ("*.q_scale", "*.k_scale", "*.v_scale", "*.prob_scale")
"""Scales of an engine's cache: most checkpoints have none, and the engine's own value stays."""


class EngineCheckpoint:
    """A checkpoint, by the names that ``load_weights`` of an engine takes. Iterates over names and whole tensors.

    Args:
        url: of any checkpoint that ``ckpt.open`` reads.
        options: ``only``, ``rename`` and ``timeout`` as for ``ckpt.load``; ``names``, ``convention`` and ``numbers`` as for
            ``ckpt.Translation``, which comes first; ``stage`` and ``optional`` as for :func:`record`.

    Raises:
        UsageError: an unknown option.
        as ``ckpt.open`` and ``ckpt.translated``.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        if unknown := [name for name in options if name not in OPTIONS]:
            raise UsageError(f"unknown options: {', '.join(map(repr, unknown))}", hint=f"it may have url, {', '.join(OPTIONS)}")
        translation = translation_in(options.get("names"), options.get("convention"), options.get("numbers"))
        if translation is not None:
            url = translated(url, translation)
        self.url, self._options = url, options
        selection = Selection(only=several(options.get("only", ())), rename=rules_of_rename(options.get("rename")))
        named = [(selection.renamed(tensor.name), tensor) for tensor in open_checkpoint(url).tensors()]
        self.tensors: dict[str, StoredTensor] = {name: tensor for name, tensor in named if selection.wants(name)}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, one at a time; their digests are checked."""
        for name, tensor in self.tensors.items():
            yield name, tensor.read()

    def fill(self, model: Any, process_group: ProcessGroup | None = None, load_weights: LoadWeights | None = None) -> None:
        """Load into the model's parameters; collective over ``process_group``. Each rank reads what ``load_weights``, by default the
        model's, keeps, straight into its memory. A model whose parameters have no memory (quantised while they are loaded) takes whole
        tensors instead.

        Raises:
            as :func:`record` and ``ckpt.load``.
        """
        optional = (*UNSTORED, *several(self._options.get("optional", ())))
        load_weights = load_weights or model.load_weights
        if any(parameter.is_meta for parameter in model.parameters()):
            self._pass_on(model, load_weights, optional)
            return
        recorded = record(load_weights, self.tensors, model, stage=self._options.get("stage", ()), optional=optional)
        report = load(
            self.url,
            recorded.state,
            only=self._options.get("only"),
            rename=self._options.get("rename"),
            cast=True,
            job=Job(process_group=process_group, timeout=self._options.get("timeout")),
        )
        recorded.finish()
        unverified = f", {report.bytes_unverified:,} of them without digests" if report.bytes_unverified else ""
        log.info("%s: read %d bytes for this rank%s; %s", self.url, report.bytes_read, unverified, recorded)

    def _pass_on(self, model: Any, load_weights: LoadWeights, optional: Iterable[str]) -> None:
        wanted = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
        filled = load_weights(iter(self))
        missing = sorted(wanted - filled) if isinstance(filled, set) else []
        if missing := [name for name in missing if not any(fnmatchcase(name, glob) for glob in optional)]:
            message = f"load_weights does not fill {', '.join(missing[:5])}"
            raise CoverageError(message, where=self.url, hint="look whether the checkpoint has them; optional=[globs] if it need not")
