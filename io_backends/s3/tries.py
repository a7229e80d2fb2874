"""How often and how long one request to an object store is tried. No requests."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from botocore.exceptions import ClientError

from ckpt.errors import CancelledError
from ckpt.io_backends import retries

from .errors import NoTagError, code_of, is_changed, is_misconfigured, is_passing, is_throttled, status_of, translated, words_of
from .options import DEFAULT, S3Options

log = logging.getLogger("ckpt")

FIRST, LONGEST = 0.1, 10.0
"""Seconds of the first and of the longest pause between two tries."""
STRANGE = 20.0
"""Seconds of trying to reach a store that has never answered: more likely it is not where the settings say."""
SILENT = 5.0
"""Seconds of trying before the log hears of it."""
MOST_CHANGED = 5
"""Times that a request is sent whose bytes do not arrive as they were sent, or whose answer has no ETag."""


@dataclass(kw_only=True, slots=True)
class Acquaintance:
    """What a client knows of its store."""

    reached: bool = False
    """It has answered at all."""
    accepted: bool = False
    """It has accepted one of our signatures."""
    tagged: bool = False
    """It has given an ETag, so an answer without one was cut off."""
    options: S3Options = DEFAULT
    """What decides, beside the environment, which store that is."""

    def note(self, err: ClientError | None) -> None:
        """An answer came: an error, or success."""
        self.reached = True
        self.accepted = self.accepted or err is None or status_of(err) in (404, 409, 412, 416)


class Tries:
    """One request's tries: pauses that grow, with chance in them, until it has failed for ``patience`` seconds.

    ``failed`` counts: a request that was tried before may have had its effect although nobody heard of it.
    """

    def __init__(self, what: str, where: str, patience: float, store: Acquaintance, over: Callable[[], bool] | None = None) -> None:
        self.what = what
        self.where = where
        self.failed = 0
        self._patience = patience
        self._store = store
        self._over = over
        self._changed = 0
        self._furthest = 0
        self._began = time.monotonic()
        self._warned = False

    def went_on(self) -> None:
        """Some bytes came: the patience is new."""
        self._began = time.monotonic()

    def sent(self, count: int) -> None:
        """So many bytes of a try were sent. Only what no try before has reached is progress: else a store that takes all of them and fails
        then would be tried for ever."""
        if count > self._furthest:
            self._furthest = count
            self.went_on()

    def again(self, err: Exception) -> None:
        """Pause before the next try; raises what ``err`` is in our words if there is none."""
        self.failed += 1
        if isinstance(err, ClientError):
            self._store.note(err)
        if self._over is not None and self._over():
            raise CancelledError(f"cannot {self.what}: it was given up", where=self.where) from err
        without_tags = isinstance(err, NoTagError) and not self._store.tagged
        if is_changed(err) or without_tags or (code_of(err) == "SignatureDoesNotMatch" and self._store.accepted):
            self._again_unchanged(err)
            return
        trying = time.monotonic() - self._began
        if not is_passing(err) or trying >= self._patience_for(err):
            raise translated(err, self.what, self.where, tries=self.failed, options=self._store.options) from err
        if trying > SILENT and not self._warned:
            self._warned = True
            log.warning("cannot %s %s for %.0f s now, still trying: %s", self.what, self.where, trying, words_of(err))
        retries.count(throttled=is_throttled(err))
        # Exponential backoff with jitter: thousands of ranks that were throttled at the same moment must not come
        # back at the same moment.
        longest = min(LONGEST, FIRST * 2.0 ** min(self.failed - 1, 16), max(FIRST, self._patience - trying))
        time.sleep(random.uniform(longest / 2, longest))

    def _again_unchanged(self, err: Exception) -> None:
        """A changed body breaks its checksum, a changed header the signature; half a head has no ETag."""
        # Time does not help: a few tries do, or nothing does.
        self._changed += 1
        if self._changed >= MOST_CHANGED:
            raise translated(err, self.what, self.where, tries=self.failed, options=self._store.options) from err
        retries.count(throttled=False)
        log.warning("cannot %s %s: %s; sending it again", self.what, self.where, words_of(err))
        time.sleep(random.uniform(FIRST / 2, FIRST))

    def _patience_for(self, err: Exception) -> float:
        if self._store.reached or isinstance(err, ClientError):
            return self._patience
        return 0.0 if is_misconfigured(err) else min(self._patience, STRANGE)
