"""What a training loop gives to ``Checkpointer``, checked where it is given: a mistake is named by the call that has it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt.errors import UsageError
from ckpt.nodes.rendezvous import is_memory
from ckpt.policies import KeepPolicy
from ckpt.state.walk import check_state
from ckpt.text import url_text

from .node_tier import Memory, NodeLocal

State = Mapping[str, Any]


def check_memory(memory: object, local: object, local_keep: KeepPolicy | None) -> None:
    if isinstance(local, Memory):
        raise UsageError("local= takes a directory or a ckpt.NodeLocal, not a ckpt.Memory", hint=f"memory={local!r}")
    if local_keep is not None and local is None:
        hint = "ckpt.Memory(keep=2) says how many steps stay in memory" if memory is not None else "keep= says what stays at the root"
        raise UsageError("local_keep= is for a local tier, and there is none", hint=hint)
    if memory is None:
        return
    if not isinstance(memory, Memory):
        raise UsageError(f"memory= takes a ckpt.Memory, not {memory!r}", hint="memory=ckpt.Memory(keep=2)")
    if isinstance(local, NodeLocal) and is_memory(url_text(local.directory)):
        raise UsageError("local= is in the memory of the machines, and so is memory=", hint="leave one of them out")


def check_signals(signals: Iterable[object]) -> tuple[int, ...]:
    try:
        return tuple(signal.Signals(number) for number in signals)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UsageError(f"signals= takes numbers of signals, not {signals!r}", hint="signals=[signal.SIGTERM, signal.SIGUSR1]") from None


def state_of(given: State | Callable[[], State]) -> State:
    """The state, or what the function makes that gives it."""
    if not isinstance(given, dict) and callable(given) and not hasattr(given, "state_dict"):
        given = given()
    check_state(given)
    return given  # type: ignore[return-value]  # no model comes here


def metric_values(metrics: Mapping[str, float] | None) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (AttributeError, TypeError, ValueError):
        raise UsageError(f"metrics= are numbers by name, not {metrics!r}", hint='metrics={"loss": float(loss)}') from None
