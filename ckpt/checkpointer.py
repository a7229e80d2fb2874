"""The training loop's face: when to save, what to keep, and where to go on.

Invariant: what is newest is found by listing commit records; no file that says "latest" is ever written or trusted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from . import settings
from .api import load
from .engine.background import SaveHandle, settle, start_save
from .engine.save import SaveOptions
from .errors import CkptError, CorruptError, NotFoundError, RankFailedError, UsageError
from .formats.native.writer import remove_checkpoint
from .group import Store, current_group
from .io_backends.registry import join_url, open_backend
from .notices import Notices
from .policies import All, EverySteps, KeepPolicy, Moment, SavePolicy, retention
from .preemption import SIGNALS, Preemption
from .rules import Layout
from .runs import Step, infos, list_steps

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("ckpt")

C = TypeVar("C", bound="Checkpointer")


class Checkpointer:
    """Saves a training job's state by policy, in the background, and goes on from the newest checkpoint.

    ``root`` holds a directory for each step. All ranks of a job make it alike and call its methods in the same order; a context manager,
    so that the last save is waited for. One job at a time saves to a root.

    Args:
        root: path or URL of the run.
        save: when :meth:`step` saves (docs/policies.md). With :class:`OnPreemption` among them, SIGTERM and SIGUSR1 on any rank are
            noticed, and the handlers that were there before run too.
        keep: what stays; the newest checkpoint and tagged ones always do.
        capture, staging_bytes, layout, check_replicas, merge, codec, timeout, threads, process_group: as for :func:`ckpt.save_async`.
    """

    def __init__(
        self,
        root: str,
        *,
        save: SavePolicy = EverySteps(1000),  # noqa: B008  a value
        keep: KeepPolicy = All(),  # noqa: B008  a value
        capture: Literal["lazy", "eager"] = "lazy",
        staging_bytes: int | None = None,
        layout: Layout | None = None,
        check_replicas: bool = True,
        merge: bool = True,
        codec: Literal["zstd", "planes-zstd"] | None = None,
        timeout: float | None = None,
        threads: int | None = None,
        process_group: ProcessGroup | None = None,
        signals: Sequence[int] = SIGNALS,
    ) -> None:
        if not isinstance(save, SavePolicy) or not isinstance(keep, KeepPolicy):
            raise UsageError(f"save and keep are policies, not {save!r} and {keep!r}", hint="see docs/policies.md")
        self.root = root
        self.policy = save
        self.keep = keep
        self.capture = capture
        self.timeout = settings.timeout(timeout)
        self._process_group = process_group
        self._options: dict[str, Any] = {
            "layout": layout,
            "timeout": self.timeout,
            "check_replicas": check_replicas,
            "threads": settings.threads(threads),
            "merge": merge,
            "codec": codec,
            "spans": settings.spans(),
            "staging": staging_bytes,
        }
        self.group = current_group(process_group)
        self.handle: SaveHandle | None = None
        """The last save that was begun; None before the first."""
        self._began = time.monotonic()
        self._started_step: int | None = None
        self._last_step: int | None = None
        self._last_at: float | None = None
        self._before: tuple[int | None, float | None] = None, None
        self._answered = False
        self._local, self._led = save.local, save.led
        self._preemption = Preemption(signals)
        self._notices: Notices | None = None
        if self._led is not None:
            self._preemption.watch()
            if self.group.size > 1:
                self._notices = Notices(self.group, _own_store(self.group.store), self.timeout)
                self._notices.start()

    # ---- going on

    def restore(self, state: Mapping[str, Any], *, step: int | None = None, **options: Any) -> int | None:
        """Load the newest checkpoint that is committed and intact, or that of ``step``, and give its step; None if there is none.

        A damaged checkpoint is passed over, with a warning that says why; the next older one is loaded instead. ``options`` are those of
        :func:`ckpt.load`.

        Raises:
            NotFoundError: ``step`` is not there.
            CorruptError: the checkpoint of ``step`` is damaged, or all are.
            MismatchError: the checkpoint does not fit the state: an older one is not tried.
        """
        candidates = self._candidates(step)
        failed: CkptError | None = None
        for number, url in candidates:
            try:
                self._load(url, state, options)
            except CkptError as err:
                if step is not None or not self._damaged(url, err):
                    raise
                log.warning("%s is passed over: %s", url, err)
                failed = err
                continue
            self._started_step = self._last_step = number
            return number
        if failed is not None:
            raise failed
        return None

    def _candidates(self, step: int | None) -> list[tuple[int, str]]:
        """Step and URL, the newest first, as the leader sees them."""
        call = self.group.call("restore", self.root, self.timeout)

        def listed() -> list[list[Any]]:
            found = [s for s in list_steps(self.root) if s.number is not None]
            for s in found:
                if not s.committed:
                    log.warning("%s is passed over: %s", s.url, s.reason)
            good = [[s.number, s.url] for s in reversed(found) if s.committed and step in (None, s.number)]
            if step is not None and not good:
                raise NotFoundError(f"there is no checkpoint of step {step}", where=self.root, hint="`ckpt ls` shows what is there")
            return good

        return [(int(number), str(url)) for number, url in call.agree("list", dict, lambda rows: listed())]

    def _load(self, url: str, state: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        given = {"layout": self._options["layout"], "timeout": self.timeout, "threads": self._options["threads"], **options}
        load(url, state, process_group=self._process_group, **given)

    def _damaged(self, url: str, err: CkptError) -> bool:
        """Whether any rank found damage; all ranks come here together, since a load fails on all."""
        mine = isinstance(err, CorruptError) or (isinstance(err, RankFailedError) and "raised CorruptError" in err.message)
        call = self.group.call("restore", url, self.timeout)
        return bool(call.agree("damaged", lambda: {"damaged": mine}, lambda rows: any(row["damaged"] for row in rows.values())))

    # ---- saving

    def step(
        self, n: int, state: Mapping[str, Any] | Callable[[], Mapping[str, Any]], *, metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Tell that training step ``n`` is over; saves if the policy says so. Returns whether it began to.

        ``state`` may be a function that makes it, which is called only if a save is due. ``metrics`` are kept with the checkpoint, for
        ``keep=Best(...)``; the leading rank's count. When nothing is due it costs no message.

        Raises:
            CkptError: an earlier save failed; what :func:`ckpt.save_async` raises.
        """
        if self._started_step is None:
            self._started_step = n - 1
        reason = self._due(n)
        if reason is None:
            if self.handle is not None and self.handle.done():
                self._take()
            return False
        log.info("step %d is saved: %s", n, reason)
        self.save(n, state() if callable(state) else state, metrics=metrics)
        if self._preemption.noticed.is_set() or (self._notices is not None and self._notices.asked.is_set()):
            self._answered = True
            self.wait()
        return True

    @property
    def preempted(self) -> bool:
        """The job will be stopped, and its last save is durable: leave the loop and end the program."""
        return self._answered

    def _due(self, n: int) -> str | None:
        moment = Moment(
            step=n,
            started_step=self._started_step if self._started_step is not None else n - 1,
            last_saved_step=self._last_step,
            seconds=time.monotonic() - self._began,
            last_saved_at=self._last_at,
            preempted=self._noticed() and not self._answered,
        )
        reason = self._local.due(moment) if self._local is not None else None
        if self._led is None:
            return reason
        if self._notices is None:
            return reason or self._led.due(moment)
        if self.group.rank == self.group.leader and not self._notices.pending:
            led = self._led.due(moment)
            if led is not None:
                self._notices.propose(n, led)
        agreed = self._notices.due(n)
        return reason or agreed

    def _noticed(self) -> bool:
        mine = self._preemption.noticed.is_set()
        if self._notices is None:
            return mine
        if mine:
            self._notices.ask()
        return mine or self._notices.asked.is_set()

    def save(self, n: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None) -> SaveHandle:
        """Begin to save step ``n`` now, whatever the policy says. Waits for the save before it.

        Raises:
            CkptError: an earlier save failed; what :func:`ckpt.save_async` raises.
        """
        self._take()
        settle(self.group)
        options = SaveOptions(metrics={k: float(v) for k, v in (metrics or {}).items()}, **self._options)
        self.handle = start_save(self.url(n), state, self.group, options, self.capture, self._retain)
        self._before = self._last_step, self._last_at
        self._last_step, self._last_at = n, time.monotonic() - self._began
        return self.handle

    def url(self, n: int) -> str:
        """Where step ``n`` is saved."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise UsageError(f"a step is a whole number, not {n!r}")
        return join_url(self.root, f"step-{n:08d}")

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
            CkptError: it failed.
        """
        if self.handle is not None:
            self.handle.wait()
            self._take()

    def _take(self) -> None:
        """Raise what the last save raised, once."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            try:
                handle.result()
            except BaseException:
                self._last_step, self._last_at = self._before  # so what was due is still due
                raise

    # ---- what is there

    def steps(self) -> list[Step]:
        """The committed checkpoints, the lowest step first. Every rank may ask; it talks to the storage alone."""
        return [s for s in list_steps(self.root) if s.committed and s.number is not None]

    @property
    def latest(self) -> int | None:
        """The highest committed step."""
        found = self.steps()
        return found[-1].number if found else None

    def best(self, metric: str, *, mode: Literal["min", "max"]) -> int | None:
        """The committed step with the lowest or highest ``metric``; None if none has it."""
        found = [(s.metrics[metric], s.number) for s in self.steps() if metric in s.metrics and s.metrics[metric] == s.metrics[metric]]
        if not found:
            return None
        return (min(found) if mode == "min" else max(found))[1]

    def _retain(self) -> None:
        """Remove what the keeping policy does not keep. A failure here harms no checkpoint."""
        if self.keep == All():
            return
        try:
            for step in retention(self.keep, infos(self.steps()), datetime.now(timezone.utc)).removed:
                remove_checkpoint(open_backend(self.url_of(step)))
                log.info("step %d is removed", step)
        except CkptError as err:
            log.warning("old checkpoints stay behind in %s: %s", self.root, err)

    def url_of(self, step: int) -> str:
        """The URL of a step that is there, whatever its directory is called."""
        return next((s.url for s in self.steps() if s.number == step), self.url(step))

    # ---- the end

    def close(self) -> None:
        """Wait for the last save, and stop watching signals."""
        try:
            self.wait()
        finally:
            self._stop()

    def _stop(self) -> None:
        self._preemption.restore()
        if self._notices is not None:
            self._notices.stop()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            if self.handle is not None and not self.handle.wait(self.timeout):
                log.error("the save of %s is still going on", self.handle.url)
            with suppress(CkptError):  # it is logged; what training raised matters more
                self._take()
        finally:
            self._stop()


_made = 0


def _own_store(store: Store | None) -> Store:
    """A part of the job's store for one Checkpointer: ranks make them in the same order."""
    global _made
    import torch.distributed as dist

    _made += 1
    return cast(Store, dist.distributed_c10d.PrefixStore(f"notices/{_made}", cast(Any, store)))
