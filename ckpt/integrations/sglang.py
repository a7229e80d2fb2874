"""SGLang takes weights from a ``ckpt.live.Source``: each worker the parts that it keeps, straight into its parameters.

Start it with ``--weight-update-receivers ckpt.integrations.sglang.receiver``. A request's ``init_payload`` has the ``address`` of the
source, and whatever else ``EngineSink`` takes; that of an update may have a ``step``. This module imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ckpt.errors import UsageError

from .engines import EngineSink
from .reading import take_step

_OPTIONS = ("checkpoint", "only", "rename", "names", "convention", "numbers", "stage", "optional", "timeout")


class ReceiverContext(Protocol):
    """What is used of SGLang's ``WeightUpdateReceiverContext``."""

    @property
    def model(self) -> Any: ...
    @property
    def init_payload(self) -> Mapping[str, Any] | None: ...


class CkptReceiver:
    """Fills one worker's model. The secret comes from ``CKPT_LIVE_SECRET``: requests do not carry it."""

    def __init__(self, sink: EngineSink) -> None:
        self.sink = sink

    def receive(self, payload: Mapping[str, Any] | None) -> None:
        """Take the newest version, or wait for the ``step`` of the payload, for its ``timeout``; with ``progress``, show a bar."""
        given = dict(payload or {})
        _check(given, ("step", "timeout", "progress"))
        take_step(self.sink, given.get("step"), given.get("timeout"), progress=bool(given.get("progress")))

    def destroy(self) -> None:
        """End the connection."""
        self.sink.close()


def receiver(context: ReceiverContext) -> CkptReceiver:
    """A factory for ``--weight-update-receivers``. Connects; the model's ``load_weights`` is recorded now if the payload has a
    ``checkpoint``, else with the first version.

    Raises:
        UsageError: the ``init_payload`` lacks ``address``, or has something unknown.
    """
    given = dict(context.init_payload or {})
    _check(given, ("address", *_OPTIONS), needed=("address",))
    options = {name: given[name] for name in _OPTIONS if name in given}
    return CkptReceiver(EngineSink(given["address"], context.model.load_weights, context.model, **options))


def _check(given: Mapping[str, Any], known: tuple[str, ...], needed: tuple[str, ...] = ()) -> None:
    wrong = [*(f"no {name!r}" for name in needed if name not in given), *(f"unknown {name!r}" for name in given if name not in known)]
    if wrong:
        raise UsageError(f"the payload has {', '.join(wrong)}", hint=f"it may have {', '.join(known)}")
