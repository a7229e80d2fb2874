"""The training loop's face: when to save, what to keep, and where to go on.

Invariant: what is newest is found by listing commit records; no file that says "latest" is ever written or trusted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from . import settings
from .api import load
from .engine.background import SaveHandle, settle, start_save
from .engine.save import SaveOptions
from .errors import CkptError, CorruptError, NotFoundError, RankFailedError, UsageError
from .group import current_group
from .io_backends.registry import join_url
from .notices import Due, Notices, own_store
from .policies import All, EverySteps, KeepPolicy, Moment, SavePolicy, retention
from .preemption import SIGNALS, Preemption
from .rules import Layout
from .runs import Step, infos, list_steps, remove_step

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
        signals: what counts as such a notice.
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
        """The last save that was begun, until somebody was told how it ended."""
        self._began = time.monotonic()
        self._started_step: int | None = None
        self._last_step: int | None = None
        self._last_at: float | None = None
        self._before: tuple[int | None, float | None] = None, None
        self._answered = False
        self._local, self._led = save.local, save.led
        self._preemption = Preemption(signals)
        self._notices: Notices | None = None
        if save.heeds_notices:
            self._preemption.watch()
        if self._led is not None and self.group.size > 1:
            self._notices = Notices(self.group, own_store(self.group), self.timeout)
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
            CkptError: an earlier save failed, which is told once; if a save is due now, it is begun all the same. Or what
                :func:`ckpt.save_async` raises.
        """
        if self._started_step is None:
            self._started_step = n - 1
        due = self._due(n)
        if due is None:
            if self.handle is not None and self.handle.done():
                _raise(self._ended())
            return False
        log.info("step %d is saved: %s", n, due.reason)
        failed = self._begin(n, state() if callable(state) else state, metrics)
        if due.final:
            self.wait()
            self._answered = True
        _raise(failed)
        return True

    @property
    def preempted(self) -> bool:
        """The job will be stopped, and its last save is durable: leave the loop and end the program."""
        return self._answered

    def _due(self, n: int) -> Due | None:
        noticed = self._noticed() and not self._answered
        moment = Moment(
            step=n,
            started_step=self._started_step if self._started_step is not None else n - 1,
            last_saved_step=self._last_step,
            seconds=time.monotonic() - self._began,
            last_saved_at=self._last_at,
            preempted=noticed,
        )
        reason = self._local.due(moment) if self._local is not None else None
        if self._led is None:
            return Due(reason=reason) if reason is not None else None
        if self._notices is None:
            reason = reason or self._led.due(moment)
            return Due(reason=reason, final=noticed) if reason is not None else None
        if self.group.rank == self.group.leader and not self._notices.pending:
            led = self._led.due(moment)
            if led is not None:
                self._notices.propose(n, Due(reason=led, final=noticed))
        # Whether it is the last save follows from what was agreed, not from what this rank has heard of meanwhile.
        return self._notices.due(n) or (Due(reason=reason) if reason is not None else None)

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
            CkptError: an earlier save failed, which is told once; step ``n`` is being saved all the same (:attr:`handle`). Or what
                :func:`ckpt.save_async` raises.
        """
        _raise(self._begin(n, state, metrics))
        assert self.handle is not None
        return self.handle

    def _begin(self, n: int, state: Mapping[str, Any], metrics: Mapping[str, float] | None) -> BaseException | None:
        """Begin to save; gives what the save before it failed with, if nobody was told. Ranks may be told at different steps, since their
        saves do not end at one moment; so being told must not keep one of them from a save that the others begin."""
        failed = self._ended()
        settle(self.group)
        options = SaveOptions(metrics={k: float(v) for k, v in (metrics or {}).items()}, **self._options)
        url = self.url(n)
        self._before = self._last_step, self._last_at
        self._last_step, self._last_at = n, time.monotonic() - self._began
        try:
            self.handle = start_save(url, state, self.group, options, self.capture, self._retain)
        except BaseException:
            self._still_due()
            raise
        return failed

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
        _raise(self._ended())

    def _ended(self) -> BaseException | None:
        """Wait for the last save; gives what it failed with, once."""
        if self.handle is None:
            return None
        handle, self.handle = self.handle, None
        handle.wait()
        error = handle.durable.exception()
        if error is not None:
            self._still_due()
        return error

    def _still_due(self) -> None:
        """The last save failed. Several ranks do not come here at the same step, so each must still count that step as dealt with."""
        step, self._last_at = self._before
        if self.group.size == 1:
            self._last_step = step

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
            steps = self.steps()
            by_number = {s.number: s for s in steps}
            for step in retention(self.keep, infos(steps), datetime.now(timezone.utc)).removed:
                remove_step(self.root, by_number[step])
                log.info("step %d is removed", step)
        except CkptError as err:
            log.warning("old checkpoints stay behind in %s: %s", self.root, err)

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
            else:
                self._ended()  # what it failed with is logged; what training raised matters more
        finally:
            self._stop()


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
