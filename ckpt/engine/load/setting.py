"""The values of a state that are no tensors: objects take theirs before any tensor changes, all else is set when every byte is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ckpt.adapters.binding.targets import Binding
from ckpt.adapters.stateful import take_all
from ckpt.errors import CkptError

from .job import StateWrites


def accept(binding: Binding, writes: StateWrites, url: str) -> list[Callable[[], None]]:
    """Let the objects of the state take theirs. Returns what is left to set when all bytes are there."""
    if not binding.objects:
        return [*(each.take for each in binding.options), *binding.apply]
    refusal = take_all([*binding.options, *binding.objects])
    if refusal is not None:
        writes.begun = not refusal.undone
        if isinstance(refusal.error, CkptError):
            raise refusal.error
        raise _refused(refusal.error, f"{refusal.path} in {url}") from refusal.error
    return binding.apply


def set_all(setters: Iterable[Callable[[], None]], url: str) -> None:
    """Set the values, now that all bytes are there."""
    try:
        run_each(setters)
    except CkptError:
        raise
    except Exception as err:  # whatever an object of the user's raises: it has to say that the state was touched
        raise _refused(err, url) from err


def run_each(actions: Iterable[Callable[[], None]]) -> None:
    for action in actions:
        action()


def _refused(err: Exception, where: str) -> CkptError:
    return CkptError(
        f"an object of the state did not take its loaded value: {type(err).__name__}: {err}",
        where=where,
        hint="`ckpt inspect URL --state` shows what is stored; only=[...] leaves the object out",
    )
