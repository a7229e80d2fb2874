"""Which files of a directory make a DeepSpeed checkpoint, by what they are called.

(Source of the names: ``deepspeed/runtime/engine.py`` and ``runtime/pipe/module.py`` of DeepSpeed 0.5 to 0.19.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt.concurrency import map_tasks
from ckpt.errors import CorruptError, FormatError, NotFoundError
from ckpt.formats.external.base import SingleFile
from ckpt.formats.native.paths import path_problem
from ckpt.formats.pickles.stand_ins import Made, Size, StoredView, counts
from ckpt.formats.torchzip.archive import Archive, open_archive
from ckpt.io_backends.registry import join_url, open_backend

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


LATEST = "latest"
UNIVERSAL = "zero/"
"""Directory of a universal checkpoint with a directory per parameter."""

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{2,6})_model_states\.pt")
_STATES = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{2,6})(-model_\d+)?-model_states\.pt")
_EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_(\d{2,6})_model_states\.pt")
_NOT_READ = {
    re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt"): "optimizer states of experts without ZeRO",
    re.compile(r"expert_\d+_mp_rank_\d+_model_states\.pt"): "experts as DeepSpeed before 0.5.9 wrote them",
    re.compile(r"offloaded_tensors/"): "optimizer states that were swapped out to other files",
}
_MAX_TAG = 4096


@dataclass(frozen=True, kw_only=True)
class Directory:
    """The files of one checkpoint. A pipeline stage is what DeepSpeed calls ``mp_rank``; ``dp`` counts data-parallel ranks."""

    models: Mapping[tuple[int, int], str]
    """By stage and rank. Only ZeRO-3 has files of other ranks than 0."""
    states: Mapping[tuple[int, int], str]
    """Optimizer states, by stage and rank."""
    layers: Mapping[int, str]
    experts: tuple[str, ...]
    universal: bool

    @property
    def stages(self) -> list[int]:
        return sorted({stage for stage, _ in self.models})

    def ranks(self, stage: int) -> list[str]:
        """The optimizer states of a stage, by rank."""
        paths = {rank: path for (at, rank), path in self.states.items() if at == stage}
        gap = next((rank for rank in range(len(paths)) if rank not in paths), None)
        if gap is not None:
            raise CorruptError(
                f"optimizer states of rank {gap} are missing, those of rank {max(paths)} are there",
                where=next(iter(paths.values())),
                hint="a process did not save, or files were not copied: get them",
            )
        return [paths[rank] for rank in range(len(paths))]


def is_checkpoint(backend: Backend, names: Sequence[str]) -> bool:
    """Whether the names below a URL are those of a checkpoint, or of a directory whose ``latest`` names one."""
    if isinstance(backend, SingleFile):
        return False
    if any(_MODEL.fullmatch(name) for name in names):
        return True
    tag = _latest(backend) if LATEST in names else None
    return tag is not None and any(_MODEL.fullmatch(name) for name in backend.list_dir(tag))


def resolve(backend: Backend) -> Backend:
    """The directory of the checkpoint: that of the tag that ``latest`` names, if the one given is only its parent."""
    names = backend.list_dir()
    if any(_MODEL.fullmatch(name) for name in names):
        return backend
    tag = _latest(backend)
    if tag is None:
        raise NotFoundError("`latest` names no checkpoint", where=backend.url, hint="open the directory of a tag")
    return open_backend(join_url(backend.url, tag))


def _latest(backend: Backend) -> str | None:
    try:
        if backend.size(LATEST) > _MAX_TAG:
            return None
        tag = backend.read(LATEST).decode("utf-8").strip()
    except (NotFoundError, UnicodeDecodeError):
        return None
    return None if path_problem(tag) else tag


def read_directory(names: Iterable[str], where: str) -> Directory:
    """Sort the files of a checkpoint."""
    models: dict[tuple[int, int], str] = {}
    states: dict[tuple[int, int], str] = {}
    layers: dict[int, str] = {}
    experts = []
    names = list(names)
    for name in names:
        _refuse_others(name, where)
        if match := _MODEL.fullmatch(name):
            key = (int(match[2]), int(match[1] or 0))
            if key in models:
                _two_saves(models[key], name, where)
            models[key] = name
        elif match := _STATES.fullmatch(name):
            key = (int(match[3]), int(match[2]))
            if key in states:
                _two_saves(states[key], name, where)
            states[key] = name
        elif match := _LAYER.fullmatch(name):
            if match[2] or int(match[1]) in layers:
                _tensor_parallel(name, where)
            layers[int(match[1])] = name
        elif match := _EXPERT.fullmatch(name):
            experts.append(name)
    return Directory(models=models, states=states, layers=layers, experts=tuple(sorted(experts)), universal=UNIVERSAL in names)


def _refuse_others(name: str, where: str) -> None:
    for pattern, what in _NOT_READ.items():
        if pattern.fullmatch(name):
            raise FormatError(f"{what} are not read ({name})", where=where, hint="load it with DeepSpeed and save it with ckpt")


def _two_saves(one: str, other: str, where: str) -> NoReturn:
    raise CorruptError(f"{one} and {other} are of different saves", where=where, hint="remove the files of one of them")


def _tensor_parallel(name: str, where: str) -> NoReturn:
    raise FormatError(
        f"{name} is a layer that was cut for tensor parallelism, and DeepSpeed does not say how",
        where=where,
        hint="make a universal checkpoint of it (deepspeed.checkpoint.ds_to_universal) and open that",
    )


# The object in one file of DeepSpeed, with checks on what is taken out of it.

_THREADS = 16


class PickledFile:
    """``whole`` is what was saved, with stand-ins; ``file`` the number of the file."""

    def __init__(self, archive: Archive, path: str, file: int) -> None:
        self.archive = archive
        self.path = path
        self.file = file
        self.where = archive.where
        self.whole = archive.values.meaning(archive.load())

    @property
    def root(self) -> dict[Any, Any]:
        """What was saved, which has to be a mapping."""
        return self.mapping(self.whole, "its contents")

    def damaged(self, what: str) -> NoReturn:
        raise CorruptError(what, where=self.where, hint="the file is damaged, or of a version of DeepSpeed that is not known here")

    def unknown(self, what: str) -> NoReturn:
        raise FormatError(f"{what}, which is not known here", where=self.where, hint="load it with DeepSpeed and save it with ckpt")

    def mapping(self, value: Any, what: str) -> dict[Any, Any]:
        """A dict, or what was one."""
        meant = self.archive.values.meaning(value)
        return meant if isinstance(meant, dict) else self.damaged(f"{what} should be a mapping, not {_kind(value)}")

    def optional(self, value: Any, what: str) -> dict[Any, Any]:
        """A dict, or an empty one for None."""
        return {} if value is None else self.mapping(value, what)

    def sequence(self, value: Any, what: str) -> list[Any]:
        """A list or tuple."""
        meant = self.archive.values.meaning(value)
        return list(meant) if isinstance(meant, (list, tuple)) else self.damaged(f"{what} should be a list, not {_kind(value)}")

    def number(self, value: Any, what: str) -> int:
        """A whole number that is not negative; that of an enumeration, if it is one."""
        if type(value) is Made and len(value.args) == 1:
            (value,) = value.args
        return value if type(value) is int and value >= 0 else self.damaged(f"{what} should be a number, not {_kind(value)}")

    def meaning(self, value: Any) -> Any:
        return self.archive.values.meaning(value)

    def flat(self, value: Any, what: str) -> StoredView:
        """A tensor of one dimension whose elements lie one after another."""
        meant = self.archive.values.meaning(value)
        if type(meant) is not StoredView or len(meant.shape) != 1 or (meant.shape[0] > 1 and meant.strides != (1,)) or meant.lazy:
            self.damaged(f"{what} should be a flat tensor, not {_kind(value)}")
        return meant

    def shapes(self, value: Any, what: str) -> dict[str, tuple[int, ...]]:
        """Parameters and their shapes, in order."""
        shapes = {}
        for name, shape in self.mapping(value, what).items():
            shape = self.archive.values.meaning(shape)
            if type(name) is not str or not name or type(shape) not in (tuple, list, Size):
                self.damaged(f"{what} should be names and shapes")
            try:
                shapes[name] = counts(shape)
            except ValueError as err:
                self.damaged(f"{what} has a shape of {name} that is none ({err})")
            if math.prod(shapes[name]) >= 1 << 58:
                self.damaged(f"{what} has a shape {list(shapes[name])} that no parameter has")
        return shapes


def open_files(backend: Backend, paths: Iterable[str]) -> list[PickledFile]:
    """The objects of many files, several at a time."""
    numbered = list(enumerate(paths))
    return map_tasks(lambda n: PickledFile(open_archive(backend, n[1]), n[1], n[0]), numbered, _THREADS, "ckpt-open")


def _kind(value: Any) -> str:
    return f"{value.name or 'an object'}" if type(value) is Made else type(value).__name__
