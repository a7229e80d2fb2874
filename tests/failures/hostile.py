"""What a made-up checkpoint may do to those who read it: give one of our errors, or tensors that are right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import ckpt
from ckpt.engine.verify import verify
from ckpt.errors import CkptError, CorruptError, FormatError
from tests.failures import rich
from tests.failures.damage import Copy

SECONDS = 10.0
"""No use of a checkpoint of a few kilobytes may take longer, on however busy a machine."""


def loaded(url: str) -> dict[str, bytes]:
    target = rich.target()
    ckpt.load(url, target, job=ckpt.Job(threads=1))
    return {name: raw(tensor) for name, tensor in rich.tensors_of(target).items()}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


@contextmanager
def tampering(copy: Copy) -> Iterator[Copy]:
    copy.restore()
    try:
        yield copy
    finally:
        copy.restore()


def survives(copy: Copy, right: dict[str, bytes]) -> dict[str, type[CkptError] | None]:
    """Use the checkpoint in every way. Gives what each raised, which must be ours and say what to do."""
    raised: dict[str, CkptError | None] = dict.fromkeys(rich.USES)
    for name, use in rich.USES.items():
        began = time.monotonic()
        try:
            if name == "load":
                # A name may stand for another tensor now, if the index says so; but never for bytes that were not read.
                assert set(loaded(copy.url).values()) <= set(right.values()), "the load succeeded with bytes that nobody stored"
            else:
                use(copy.url)
        except CkptError as err:
            raised[name] = err
        assert time.monotonic() - began < SECONDS, name
    assert [repr(err) for err in raised.values() if err is not None and not err.hint] == []
    refusal = raised["open and read"]
    if isinstance(refusal, CorruptError | FormatError) and raised["verify"] is None and "this torch knows no device" not in refusal.message:
        assert not verify(copy.url, threads=1).ok, f"verify finds nothing wrong where reading raises {refusal}"
    return {name: None if err is None else type(err) for name, err in raised.items()}


def refuses(copy: Copy, right: dict[str, bytes], error: type[CkptError] = CorruptError) -> None:
    """A load raises this error, and nothing else goes wrong either."""
    assert survives(copy, right)["load"] is error
