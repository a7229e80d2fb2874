"""An engine's weights, taken from a running trainer: a recording and a sink in one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckpt import settings
from ckpt.errors import TornError, UsageError
from ckpt.live import Sink, Version
from ckpt.net.group import Job
from ckpt.telemetry.callbacks import ProgressCallback

from .recorded import Recorded, TensorDescription, record
from .recording import LoadWeights
from .resolving import Parameters

if TYPE_CHECKING:
    pass


class EngineSink:
    """Takes versions of a ``ckpt.live.Source`` into an engine, straight into its parameters. Collective over the engine's ranks.

    Args:
        address: of the source, ``"tcp://host:port/name"``.
        load_weights, into, stage, optional, after: as for :func:`record`.
        checkpoint: the names, shapes and dtypes that ``load_weights`` is given: the URL of a checkpoint, or what ``ckpt.open`` gives. None:
            those of the source's first version, which the first ``take`` hears of and records then.
        only, rename: as for ``ckpt.load``: the source's names → the checkpoint's.
        names, convention, numbers: as for ``ckpt.live.Sink``: how the source's names are translated into the checkpoint's.
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
            names=names,
            convention=convention,
            numbers=numbers,
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
            raise UsageError("the names of the source are not known before the first take", where=self._sink.address, hint=hint)
        return self._recorded

    @property
    def version(self) -> Version | None:
        """The version that the engine has; None before the first.

        Raises:
            TornError: the last take broke off while it changed the engine. The next one repairs it.
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
            as ``ckpt.live.Sink.take``; and in the first take, without a checkpoint, as :func:`record`.
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
