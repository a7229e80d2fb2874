"""Distributed checkpoints for PyTorch that load into any layout.

>>> import ckpt
>>> ckpt.save("runs/a/step-100", {"model": model, "optimizer": optimizer, "step": 100})  # doctest: +SKIP
>>> ckpt.load("runs/a/step-100", {"model": model, "optimizer": optimizer, "step": 0})  # doctest: +SKIP

The names below are the public face; they are imported when first used, so ``import ckpt`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import errors as errors
    from . import policies as policies
    from .adapters.per_rank import PerRank as PerRank
    from .api import load as load
    from .api import open as open
    from .api import save as save
    from .api import save_async as save_async
    from .checkpointer import Checkpointer as Checkpointer
    from .converters.convert import ConvertReport as ConvertReport
    from .converters.convert import convert as convert
    from .converters.export.export import ExportReport as ExportReport
    from .converters.export.export import export as export
    from .converters.pipeline.parallel import MegatronParallel as MegatronParallel
    from .converters.virtual.translated import translated as translated
    from .engine.background import SaveHandle as SaveHandle
    from .engine.background import fence as fence
    from .engine.load import LoadReport as LoadReport
    from .engine.save import SaveReport as SaveReport
    from .errors import CkptError as CkptError
    from .io_backends.storage_options import configure_storage as configure_storage
    from .mesh import Mesh as Mesh
    from .numbered import Numbered as Numbered
    from .numbered import experts as experts
    from .numbered import pipeline as pipeline
    from .placements import GlobalShape as GlobalShape
    from .placements import OnMesh as OnMesh
    from .placements import Padded as Padded
    from .placements import Stage as Stage
    from .placements import Uneven as Uneven
    from .rules import Layout as Layout
    from .runs import list_steps as list_steps
    from .splits import Flat as Flat
    from .splits import Interleaved as Interleaved
    from .splits import Replicate as Replicate
    from .splits import Shard as Shard
    from .view import View as View

_WHERE = {
    "save": "api",
    "save_async": "api",
    "fence": "engine.background",
    "Checkpointer": "checkpointer",
    "load": "api",
    "open": "api",
    "list_steps": "runs",
    "convert": "converters.convert",
    "export": "converters.export.export",
    "translated": "converters.virtual.translated",
    "configure_storage": "io_backends.storage_options",
    "PerRank": "adapters.per_rank",
    "Layout": "rules",
    "Mesh": "mesh",
    "Shard": "splits",
    "Replicate": "splits",
    "Flat": "splits",
    "Interleaved": "splits",
    "Padded": "placements",
    "Uneven": "placements",
    "GlobalShape": "placements",
    "Stage": "placements",
    "OnMesh": "placements",
    "Numbered": "numbered",
    "pipeline": "numbered",
    "experts": "numbered",
    "SaveReport": "engine.save",
    "LoadReport": "engine.load",
    "SaveHandle": "engine.background",
    "ConvertReport": "converters.convert",
    "ExportReport": "converters.export.export",
    "MegatronParallel": "converters.pipeline.parallel",
    "View": "view",
    "CkptError": "errors",
}

__all__ = ["__version__", "errors", "policies", *_WHERE]


def __getattr__(name: str) -> Any:
    if name in ("errors", "policies"):
        return import_module(f".{name}", __name__)
    if name in _WHERE:
        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module 'ckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
