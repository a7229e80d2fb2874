"""Distributed checkpoints for PyTorch that load into any layout.

>>> import ckpt
>>> ckpt.save("runs/a/step-100", {"model": model, "optimizer": optimizer, "step": 100})  # doctest: +SKIP
>>> ckpt.load("runs/a/step-100", {"model": model, "optimizer": optimizer, "step": 0})  # doctest: +SKIP

What is public: the functions and classes below, and the names in ``__all__`` of the modules in ``FACES``. Functions are verbs and
belong to ``ckpt`` itself (``ckpt.save``, ``ckpt.convert``, ``ckpt.merge``, ``ckpt.export``, ``ckpt.copy``); modules are nouns
(``ckpt.policies``, ``ckpt.errors``). Everything else is internal. Names are imported when first used, so ``import ckpt`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._version import __version__
from .needs import late_names

if TYPE_CHECKING:
    from . import converters as converters
    from . import data as data
    from . import ema as ema
    from . import errors as errors
    from . import formats as formats
    from . import integrations as integrations
    from . import io_backends as io_backends
    from . import live as live
    from . import monitors as monitors
    from . import policies as policies
    from . import rng as rng
    from .adapters.per_rank import PerRank as PerRank
    from .api import load as load
    from .api import open as open
    from .api import save as save
    from .api import save_async as save_async
    from .converters.arithmetic.merge import MergeReport as MergeReport
    from .converters.arithmetic.merge import merge as merge
    from .converters.convert import ConvertReport as ConvertReport
    from .converters.convert import convert as convert
    from .converters.export.export import export as export
    from .converters.export.job import ExportReport as ExportReport
    from .converters.pipeline.parallel import MegatronParallel as MegatronParallel
    from .converters.virtual.translated import translated as translated
    from .engine.load.options import LoadReport as LoadReport
    from .engine.save.background import SaveHandle as SaveHandle
    from .engine.save.fence import fence as fence
    from .engine.save.job import SaveReport as SaveReport
    from .engine.verify.verify import VerifyReport as VerifyReport
    from .engine.verify.verify import verify as verify
    from .errors import CkptError as CkptError
    from .io_backends.storage_options import configure_storage as configure_storage
    from .layout.layout import Layout as Layout
    from .layout.mesh import Mesh as Mesh
    from .layout.numbering import Numbered as Numbered
    from .layout.numbering import experts as experts
    from .layout.numbering import pipeline as pipeline
    from .layout.placements import Flat as Flat
    from .layout.placements import GlobalShape as GlobalShape
    from .layout.placements import Interleaved as Interleaved
    from .layout.placements import OnMesh as OnMesh
    from .layout.placements import Padded as Padded
    from .layout.placements import Replicate as Replicate
    from .layout.placements import Shard as Shard
    from .layout.placements import Stage as Stage
    from .layout.placements import Uneven as Uneven
    from .maintenance.copy import CopyReport as CopyReport
    from .maintenance.copy import copy_checkpoint
    from .maintenance.step_listing import list_steps as list_steps
    from .spread.tier import Memory as Memory
    from .spread.tier import NodeLocal as NodeLocal
    from .training.begin_from import BeginFrom as BeginFrom
    from .training.checkpointer import Checkpointer as Checkpointer
    from .training.restored_from import RestoredFrom as RestoredFrom
    from .view import View as View

    copy = copy_checkpoint

_WHERE = {
    "save": "api",
    "save_async": "api",
    "fence": "engine.save.fence",
    "Checkpointer": "training.checkpointer",
    "RestoredFrom": "training.restored_from",
    "BeginFrom": "training.begin_from",
    "NodeLocal": "spread.tier",
    "Memory": "spread.tier",
    "load": "api",
    "open": "api",
    "list_steps": "maintenance.step_listing",
    "copy": "maintenance.copy:copy_checkpoint",
    "verify": "engine.verify.verify",
    "convert": "converters.convert",
    "merge": "converters.arithmetic.merge",
    "export": "converters.export.export",
    "translated": "converters.virtual.translated",
    "configure_storage": "io_backends.storage_options",
    "PerRank": "adapters.per_rank",
    "Layout": "layout.layout",
    "Mesh": "layout.mesh",
    "Shard": "layout.placements",
    "Replicate": "layout.placements",
    "Flat": "layout.placements",
    "Interleaved": "layout.placements",
    "Padded": "layout.placements",
    "Uneven": "layout.placements",
    "GlobalShape": "layout.placements",
    "Stage": "layout.placements",
    "OnMesh": "layout.placements",
    "Numbered": "layout.numbering",
    "pipeline": "layout.numbering",
    "experts": "layout.numbering",
    "SaveReport": "engine.save.job",
    "LoadReport": "engine.load.options",
    "SaveHandle": "engine.save.background",
    "CopyReport": "maintenance.copy",
    "VerifyReport": "engine.verify.verify",
    "ConvertReport": "converters.convert",
    "MergeReport": "converters.arithmetic.merge",
    "ExportReport": "converters.export.job",
    "MegatronParallel": "converters.pipeline.parallel",
    "View": "view",
    "CkptError": "errors",
}
"""Public name → the module that has it, and after a colon its name there, if that is another one."""

FACES = ("converters", "data", "ema", "errors", "formats", "integrations", "io_backends", "live", "monitors", "policies", "rng")
"""The public modules. Of ``integrations``, each module has its own names and needs its library."""

__all__ = ["__version__", *FACES, *_WHERE]


__getattr__ = late_names(__name__, {**{name: f".{name}:" for name in FACES}, **{name: f".{where}" for name, where in _WHERE.items()}})


def __dir__() -> list[str]:
    return sorted(__all__)
