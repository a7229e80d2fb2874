"""``record``: from an engine's ``load_weights`` to a state that ``ckpt.load`` fills.

Engines fuse, cut, pad and copy the tensors of a checkpoint in ways that only their loaders know. One run of the loader, without values,
gives them as boxes, which a load reads straight into the engine's memory::

    record(engine.load_weights, ckpt.open(url), engine)      runs the loader once: moves no bytes
      │ recording    what is copied where, from which elements
      │ resolving    what can be loaded straight; what cannot, and why
      ▼
    Recorded.state   "layers.0.q_proj.weight" → rows 0:8 lie in qkv_proj[0:8]      ckpt.load(url, recorded.state, cast=True)
                     "layers.0.scale"         → whole: memory of its own           (staged)
    Recorded.finish()                                                              the loader gets what is staged
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Protocol

import torch

from ckpt import settings, units
from ckpt.api import open as open_checkpoint
from ckpt.converters.mapping.convention import Translation
from ckpt.errors import CoverageError, NamesError, StateError, TornError, UsageError
from ckpt.live import Sink, Version
from ckpt.net.group import Job, current_group
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Boxes
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.match import several
from ckpt.state.sharded import Sharded
from ckpt.telemetry.progress import ProgressCallback

from .recording import LoadWeights, Recording, ValueNeededError, record_writes
from .resolving import DirectPart, EngineMemory, ParameterMemory, Parameters, Resolution, left_over, overlap, placed_write, resolve


class TensorDescription(Protocol):
    """What is known of a tensor before it is read: a tensor of the meta device, or what ``ckpt.open`` gives."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class _Loader:
    """What :meth:`Recorded.finish` needs beside the state."""

    load_weights: LoadWeights
    memory: EngineMemory
    resolution: Resolution
    optional: tuple[str, ...]
    after: Callable[[], object] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """Where the tensors of a checkpoint go in one engine. Good for every checkpoint with the same names, shapes and dtypes, as long as the
    engine's parameters stay where they are.

    Load ``state``, then call :meth:`finish`.
    """

    state: dict[str, Any]
    """For ``ckpt.load``: the checkpoint's names. Parts of tensors that lie in the engine's memory, and whole tensors that are staged."""
    fallbacks: Mapping[str, str]
    """Names of tensors that are staged whole, in host memory, and given to ``load_weights`` at the end; and why."""
    unused: tuple[str, ...]
    """Names of tensors of which nothing goes into this engine: experts of other ranks, layers of other stages, what it does not use."""
    overwritten: Mapping[str, str]
    """Names of tensors whose elements the loader writes and then overwrites, at least in part; and by what."""
    unwritten: Mapping[str, str]
    """Parameters, and buffers filled in part, of which the loader fills nothing or not all; and what is missing of each."""
    _loader: _Loader

    @property
    def staged_bytes(self) -> int:
        """Host memory that staged tensors take beside the engine's."""
        return sum(self.state[name].nbytes for name in self.fallbacks)

    def __str__(self) -> str:
        straight = len(self.state) - len(self.fallbacks) - len(self.unused)
        lines = [
            f"{straight} tensors go straight into {len(self._loader.memory.memories())} parameters, {len(self.unused)} are not used here"
        ]
        lines += [f"{units.plural(len(self.fallbacks), 'tensor')} staged in {self.staged_bytes:,} bytes:"] if self.fallbacks else []
        lines += [f"  {name}: {reason}" for name, reason in self.fallbacks.items()]
        lines += [f"{name} is overwritten by {by}" for name, by in self.overwritten.items()]
        lines += [f"not filled: {text}" for text in self.unwritten.values()]
        return "\n".join(lines)

    def finish(self) -> None:
        """Complete the engine after ``state`` was loaded: copy what it has several times, give staged tensors to ``load_weights``, and call
        ``after``.

        Raises:
            UsageError: nothing has filled a staged tensor yet: its memory has no values.
            CoverageError: the engine's parameters are not filled, or ``load_weights`` wrote staged tensors over others.
        """
        staged = {name: self.state[name] for name in self.fallbacks}
        # torch counts writes, but for tensors of inference mode
        if unfilled := [n for n, t in staged.items() if t.numel() and not t.is_inference() and t._version == 0]:
            raise UsageError(
                f"staged tensors were not loaded yet: {', '.join(unfilled[:5])}", hint="ckpt.load(url, recorded.state) before finish()"
            )
        loader, resolution = self._loader, self._loader.resolution
        with torch.no_grad():
            for copy in resolution.copies:
                copy.into.copy_(copy.source.clone())
        recording = record_writes(loader.load_weights, staged, loader.memory.storages.keys()) if staged else Recording()
        placed = [placed_write(write, loader.memory, {}) for write in recording.writes if write.into.numel()]
        direct: dict[int, list[Box]] = {}
        for each in resolution.direct:
            direct.setdefault(id(each.memory), []).extend(each.boxes)
        for each in placed:
            if each.memory is not None and overlap(each.boxes, direct.get(id(each.memory), ())):
                raise CoverageError(
                    "load_weights wrote staged tensors over parts of a parameter that others fill",
                    where=each.memory.names[0],
                    hint="stage those too: record(..., stage=[globs of their names])",
                )
        _check_filled(left_over(placed, _in_question(resolution)), loader.optional)
        if loader.after is not None:
            loader.after()


def record(
    load_weights: LoadWeights,
    checkpoint: str | os.PathLike[str] | Mapping[str, TensorDescription],
    into: Parameters,
    *,
    stage: str | Sequence[str] = (),
    optional: str | Sequence[str] = (),
    after: Callable[[], object] | None = None,
) -> Recorded:
    """Find out where an engine's ``load_weights`` puts the tensors of a checkpoint. Each rank of the engine for itself.

    The loader runs on tensors without values; what it writes by itself, such as zeros for padding, it does write. Parameters have to be as
    they are when it runs: not yet transposed, packed or quantised.

    Args:
        load_weights: takes an iterable of names and whole tensors, as engines' do. Called here, and again by :meth:`Recorded.finish` if
            there is something to stage.
        checkpoint: names, shapes and dtypes: the URL of a checkpoint, ``ckpt.open(url)``, or a dict of tensors of the meta device.
        into: the engine's module, or its parameters by name.
        stage: globs of names that are to be staged whole, whatever the loader does with them.
        optional: globs of parameters that the checkpoint need not fill.
        after: called at the end of :meth:`Recorded.finish`: what the engine does with weights that are loaded.

    Raises:
        UsageError: the arguments are something else, or in another order.
        NamesError: a glob of ``stage`` matches no tensor.
        StateError: a parameter has no separate memory, or the loader replaced it.
        CoverageError: a parameter is not filled, or not all of it.
        Exception: whatever ``load_weights`` raises.
    """
    if not callable(load_weights) or isinstance(load_weights, torch.nn.Module):
        hint = "record(engine.load_weights, ckpt.open(url), engine)"
        raise UsageError(f"load_weights is a function, not {type(load_weights).__name__}", hint=hint)
    described = checkpoint if isinstance(checkpoint, Mapping) else open_checkpoint(checkpoint)
    tensors = {name: torch.empty(tuple(t.shape), dtype=t.dtype, device="meta") for name, t in described.items()}
    if not tensors:
        raise UsageError("the checkpoint has no tensors", hint="give record() what ckpt.open(url) returns")
    memory = EngineMemory(into)
    if idle := [glob for glob in several(stage) if not any(fnmatchcase(name, glob) for name in tensors)]:
        raise NamesError(f"stage= has globs that match no tensor of the checkpoint: {', '.join(map(repr, idle))}")
    staged = {name: "asked for by stage=" for name in tensors if any(fnmatchcase(name, glob) for glob in several(stage))}
    recording = _run(load_weights, tensors, memory, staged)
    if replaced := memory.replaced(into):
        hint = "record before the engine transposes, packs or quantises its weights"
        raise StateError(f"load_weights replaced parameters instead of filling them: {', '.join(replaced[:5])}", hint=hint)
    resolution = resolve(recording, memory, tensors, staged)
    unsure = any(reason.startswith(_VALUES) for reason in staged.values())  # what these fill is seen when they are loaded
    globs = several(optional)
    left = _in_question(resolution)
    if not unsure:
        _check_filled(left, globs)
    used = {name for each in resolution.direct for name in each.write.names} | resolution.refused.keys()
    return Recorded(
        state=_state(tensors, resolution),
        fallbacks={name: resolution.refused[name] for name in tensors if name in resolution.refused},
        unused=tuple(name for name in tensors if name not in used),
        overwritten=resolution.overwritten,
        unwritten={m.names[0]: _missing(m, boxes) for m, boxes in left},
        _loader=_Loader(load_weights=load_weights, memory=memory, resolution=resolution, optional=globs, after=after),
    )


_VALUES = "load_weights asks for its values"
_TRIES = 32


def _run(load_weights: LoadWeights, tensors: Mapping[str, torch.Tensor], memory: EngineMemory, staged: dict[str, str]) -> Recording:
    """Run the loader, again without those tensors of which it needs values, and without their like in other layers. Adds to ``staged``."""
    for _ in range(_TRIES):
        unsure = {name for name, reason in staged.items() if reason.startswith(_VALUES)}
        try:
            return record_writes(load_weights, {n: t for n, t in tensors.items() if n not in unsure}, memory.storages.keys())
        except ValueNeededError as error:
            if not error.names - unsure:
                raise
            kinds = {_kind(name) for name in error.names}
            staged |= {name: f"{_VALUES} ({error.what})" for name in tensors if _kind(name) in kinds}
    raise UsageError(
        f"load_weights asked for values of ever more tensors: {_TRIES} kinds of them",
        hint='load_weights of this engine cannot be recorded; record(..., stage=["*"]) loads all tensors through it',
    )


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _state(tensors: Mapping[str, torch.Tensor], resolution: Resolution) -> dict[str, Any]:
    """What stands for each tensor of the checkpoint: parts of the engine's memory, or memory of its own."""
    mesh, state = Mesh(("engine",), (1,), (current_group().rank,)), dict[str, Any]()
    for name, tensor in tensors.items():
        if name in resolution.refused:
            state[name] = torch.empty_like(tensor, device="cpu")
            continue
        parts: Sequence[DirectPart] = resolution.parts.get(name, ())
        boxes = Boxes("engine", (tuple((part.box.offset, part.box.shape) for part in parts),))
        blocks = tuple(part.memory for part in parts)
        memory = blocks[0] if blocks else torch.empty(0, dtype=tensor.dtype)
        state[name] = Sharded(memory, tuple(tensor.shape), TensorLayout(mesh, (boxes,)), blocks)
    return state


def _in_question(resolution: Resolution) -> list[tuple[ParameterMemory, Sequence[Box]]]:
    """What is not written of parameters, and of buffers that are written in part."""
    return [(m, boxes) for m, boxes in resolution.unwritten if m.required or list(boxes) != [m.visible]]


def _missing(memory: ParameterMemory, boxes: Sequence[Box]) -> str:
    count = sum(box.numel for box in boxes)
    return f"{memory.text(boxes[0])}{', …' if len(boxes) > 1 else ''}: {count} of {memory.visible.numel} elements"


def _check_filled(left: Sequence[tuple[ParameterMemory, Sequence[Box]]], optional: Sequence[str]) -> None:
    wanted = [row for row in left if not any(fnmatchcase(name, glob) for name in row[0].names for glob in optional)]
    if wanted:
        listed = [_missing(memory, boxes) for memory, boxes in wanted]
        more = f"\n  and {len(listed) - 20} more" if len(listed) > 20 else ""
        count = f"{len(listed)} parameter{'s' * (len(listed) != 1)}"
        raise CoverageError(
            f"load_weights does not fill {count}\n  " + "\n  ".join(listed[:20]) + more,
            hint="look whether the checkpoint has them; record(..., optional=[globs]) names parameters that need no value from it",
        )


def translation_in(names: Any, convention: Any, numbers: Any) -> Translation | None:
    """The translation that an engine's options ask for, which are words of JSON; None if they ask for none."""
    if names is None and convention is None and not numbers:
        return None
    if names is None or convention is None:
        raise UsageError("names and convention go together", hint='give convention= and names=, such as "huggingface" and "llama"')
    return Translation(names=names, convention=convention, numbers=numbers or {})


# An engine's weights, taken from a running trainer: a recording and a sink in one.


class EngineSink:
    """Takes versions of a ``ckpt.live.Source`` into an engine, straight into its parameters. Collective over the engine's ranks.

    Args:
        address: of the source, ``"tcp://host:port/name"``.
        load_weights, into, stage, optional, after: as for :func:`record`.
        checkpoint: the names, shapes and dtypes that ``load_weights`` is given: the URL of a checkpoint, or what ``ckpt.open`` gives. None:
            those of the source's first version, which the first ``take`` hears of and records then.
        only, rename: as for ``ckpt.load``: the source's names → the checkpoint's.
        names, convention, numbers: as for ``ckpt.Translation``: from the source's names into the checkpoint's.
        secret, job: as for ``ckpt.live.Sink``.

    Raises:
        as :func:`record` and ``ckpt.live.Sink``.
    """

    def __init__(
        self,
        address: str,
        load_weights: LoadWeights,
        into: Parameters,
        checkpoint: str | os.PathLike[str] | Mapping[str, TensorDescription] | None = None,
        *,
        only: str | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        names: str | os.PathLike[str] | None = None,
        convention: str | None = None,
        numbers: Mapping[str, int] | None = None,
        stage: str | Sequence[str] = (),
        optional: str | Sequence[str] = (),
        after: Callable[[], object] | None = None,
        secret: str | bytes | None = None,
        job: Job | None = None,
    ) -> None:
        def record_weights(names: str | os.PathLike[str] | Mapping[str, TensorDescription]) -> Recorded:
            return record(load_weights, names, into, stage=stage, optional=optional, after=after)

        self._record = record_weights
        self._recorded: Recorded | None = None
        self._state: dict[str, Any] = {}
        if checkpoint is not None:
            self._recorded = record_weights(checkpoint)
            self._state.update(self._recorded.state)
        self._timeout = settings.timeout(Job.of(job).timeout)
        self._sink = Sink(
            address,
            self._state,
            only=only,
            rename=rename,
            translation=translation_in(names, convention, numbers),
            cast=True,
            secret=secret,
            job=job,
        )
        self._unfinished = False

    @property
    def recorded(self) -> Recorded:
        """What goes where.

        Raises:
            UsageError: no checkpoint was given, and nothing was taken yet.
        """
        if self._recorded is None:
            hint = "take a version first, or give the checkpoint that the engine was started from"
            raise UsageError("the names of the source are not known before the first update", where=self._sink.address, hint=hint)
        return self._recorded

    @property
    def version(self) -> Version | None:
        """The version that the engine has; None before the first.

        Raises:
            TornError: the last update broke off while it changed the engine. The next one repairs it.
        """
        if self._unfinished:
            raise TornError("the engine has parts of a version only", where=self._sink.address, hint="take again before it answers")
        return self._sink.version

    def take(
        self, newer_than: Version | None = None, timeout: float | None = None, *, progress: bool | ProgressCallback | None = None
    ) -> Version:
        """Bring the newest version into the engine, which must not answer meanwhile; collective.

        Args:
            newer_than, timeout, progress: as for ``ckpt.live.Sink.take``.

        Raises:
            CoverageError: as :meth:`Recorded.finish`. If it raises on one rank, the engine is torn on all.
            as ``ckpt.live.Sink.take``; and in the first update, without a checkpoint, as :func:`record`.
        """
        end = time.monotonic() + (self._timeout if timeout is None else timeout)
        if self._recorded is None:
            tensors = self._sink.tensors(timeout=max(0.0, end - time.monotonic()))
            recorded: list[Recorded] = []
            self._sink.run_on_all(lambda: recorded.append(self._record(tensors)))
            (self._recorded,) = recorded  # now that it went well on all ranks: they begin the next take alike
            self._state.update(self._recorded.state)
        version = self._sink.take(newer_than=newer_than, timeout=max(0.0, end - time.monotonic()), progress=progress)
        self._unfinished = True
        self._sink.run_on_all(self.recorded.finish)
        self._unfinished = False
        return version

    def close(self) -> None:
        """End the connection to the source. The engine stays as it is."""
        self._sink.close()

    def __enter__(self) -> EngineSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
