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

from .needs import late_names, warn_of_other_owners
from .settings import __version__

if TYPE_CHECKING:
    from . import converters as converters
    from . import errors as errors
    from . import formats as formats
    from . import integrations as integrations
    from . import io_backends as io_backends
    from . import live as live
    from . import monitors as monitors
    from . import policies as policies
    from . import testing as testing
    from . import training as training
    from .api import load as load
    from .api import open as open
    from .api import save as save
    from .api import save_async as save_async
    from .converters.convert import ConvertReport as ConvertReport
    from .converters.convert import convert as convert
    from .converters.export_plan import ExportReport as ExportReport
    from .converters.importer import translated as translated
    from .converters.live_export import export as export
    from .converters.mapping.convention import Translation as Translation
    from .converters.merge import MergeReport as MergeReport
    from .converters.merge import merge as merge
    from .converters.target import MegatronParallel as MegatronParallel
    from .engine.copy import CopyReport as CopyReport
    from .engine.copy import copy_checkpoint
    from .engine.load.fill import LoadReport as LoadReport
    from .engine.load.fill import ReadOptions as ReadOptions
    from .engine.save.background import SaveHandle as SaveHandle
    from .engine.save.options import SaveReport as SaveReport
    from .engine.save.staging import fence as fence
    from .engine.verify import VerifyReport as VerifyReport
    from .engine.verify import verify as verify
    from .engine.view import View as View
    from .errors import CkptError as CkptError
    from .io_backends.registry import configure_storage as configure_storage
    from .net.group import Job as Job
    from .plan.layout.layout import Layout as Layout
    from .plan.layout.mesh import Mesh as Mesh
    from .plan.layout.mesh import Numbered as Numbered
    from .plan.layout.mesh import experts as experts
    from .plan.layout.mesh import pipeline as pipeline
    from .plan.layout.placements import Flat as Flat
    from .plan.layout.placements import GlobalShape as GlobalShape
    from .plan.layout.placements import Interleaved as Interleaved
    from .plan.layout.placements import OnMesh as OnMesh
    from .plan.layout.placements import Padded as Padded
    from .plan.layout.placements import Replicate as Replicate
    from .plan.layout.placements import Shard as Shard
    from .plan.layout.placements import Stage as Stage
    from .plan.layout.placements import Uneven as Uneven
    from .runs.checkpointer import Checkpointer as Checkpointer
    from .runs.members import Member as Member
    from .runs.members import MemberChanges as MemberChanges
    from .runs.node_tier import Memory as Memory
    from .runs.node_tier import NodeLocal as NodeLocal
    from .runs.node_tier import SharedLocal as SharedLocal
    from .runs.step_listing import latest as latest
    from .runs.step_listing import list_steps as list_steps
    from .runs.tier_chain import BeginFrom as BeginFrom
    from .runs.tier_chain import RestoredFrom as RestoredFrom
    from .state.walk import PerRank as PerRank

    copy = copy_checkpoint

_WHERE = {
    "save": "api",
    "save_async": "api",
    "fence": "engine.save.staging",
    "Checkpointer": "runs.checkpointer",
    "RestoredFrom": "runs.tier_chain",
    "BeginFrom": "runs.tier_chain",
    "SharedLocal": "runs.node_tier",
    "NodeLocal": "runs.node_tier",
    "Memory": "runs.node_tier",
    "Member": "runs.members",
    "MemberChanges": "runs.members",
    "Job": "net.group",
    "load": "api",
    "ReadOptions": "engine.load.fill",
    "open": "api",
    "latest": "runs.step_listing",
    "list_steps": "runs.step_listing",
    "copy": "engine.copy:copy_checkpoint",
    "verify": "engine.verify",
    "convert": "converters.convert",
    "merge": "converters.merge",
    "export": "converters.live_export",
    "translated": "converters.importer",
    "Translation": "converters.mapping.convention",
    "configure_storage": "io_backends.registry",
    "PerRank": "state.walk",
    "Layout": "plan.layout.layout",
    "Mesh": "plan.layout.mesh",
    "Shard": "plan.layout.placements",
    "Replicate": "plan.layout.placements",
    "Flat": "plan.layout.placements",
    "Interleaved": "plan.layout.placements",
    "Padded": "plan.layout.placements",
    "Uneven": "plan.layout.placements",
    "GlobalShape": "plan.layout.placements",
    "Stage": "plan.layout.placements",
    "OnMesh": "plan.layout.placements",
    "Numbered": "plan.layout.mesh",
    "pipeline": "plan.layout.mesh",
    "experts": "plan.layout.mesh",
    "SaveReport": "engine.save.options",
    "LoadReport": "engine.load.fill",
    "SaveHandle": "engine.save.background",
    "CopyReport": "engine.copy",
    "VerifyReport": "engine.verify",
    "ConvertReport": "converters.convert",
    "MergeReport": "converters.merge",
    "ExportReport": "converters.export_plan",
    "MegatronParallel": "converters.target",
    "View": "engine.view",
    "CkptError": "errors",
}
"""Public name → the module that has it, and after a colon its name there, if that is another one."""

FACES = ("converters", "errors", "formats", "integrations", "io_backends", "live", "monitors", "policies", "testing", "training")
"""The public modules. Of ``integrations``, each module has its own names and needs its library."""

__all__ = ["__version__", *FACES, *_WHERE]


if not TYPE_CHECKING:  # a checker would take every name for Any
    __getattr__ = late_names(__name__, {**{name: f".{name}:" for name in FACES}, **{name: f".{where}" for name, where in _WHERE.items()}})


warn_of_other_owners(__file__)


def __dir__() -> list[str]:
    return sorted(__all__)
