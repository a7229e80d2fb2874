"""A loop that changes the state right after the call, without a fence: the bytes of the call are stored, or the save fails."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.engine.save import capture
from ckpt.engine.save.capture import Capture
from ckpt.errors import ConsistencyError
from tests.engine.lost_fences import CASES, Loop, outcome

URL = "inprocess://lost-fences/test"


@pytest.mark.parametrize("staging", [None, 4 << 20])
@pytest.mark.parametrize("name", CASES)
def test_what_nothing_waits_for_was_captured_and_what_waits_is_compared(
    name: str, staging: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture in the background begins when the line is over, or waits for its step."""
    loop, over, fill = Loop(600), threading.Event(), Capture._fill
    change = CASES[name].start(loop)

    def late(self: Capture, *args: Any) -> None:
        over.wait(5 if name == "next step" else 30)
        fill(self, *args)

    def line() -> None:
        if name == "next step":
            over.set()
        change()
        over.set()

    monkeypatch.setattr(Capture, "_fill", late)
    unseen = CASES[name].must_pass or name == "evaluation with swapped weights"  # swapped back before the capture
    assert outcome(URL, loop.state(), line, staging_bytes=staging) == ("right" if unseen else "error")


@pytest.mark.parametrize("device", [False, True])
def test_weights_that_are_swapped_for_the_moment_of_the_copy(monkeypatch: pytest.MonkeyPatch, *, device: bool) -> None:
    """Before and after it they are those of the call, so only the copy tells. ``device``: as on one, where all is summed."""
    monkeypatch.setattr(capture, "_summed", lambda raw: device)
    if device:
        monkeypatch.setattr("ckpt.engine.save.tensor_source.ChunkSource.address", lambda self, number: 0)
    loop, fill = Loop(600), Capture._fill
    own = [p.detach().clone() for p in loop.weights()]

    def swapping(self: Capture, *args: Any) -> None:
        for p in loop.weights():
            p.data.mul_(2)
        fill(self, *args)
        for p, before in zip(loop.weights(), own, strict=True):
            p.data.copy_(before)

    monkeypatch.setattr(Capture, "_fill", swapping)
    assert outcome(URL, loop.state(), lambda: None) == "error"


def test_a_sparse_write_on_a_device_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_summed", lambda raw: True)
    monkeypatch.setattr("ckpt.engine.save.tensor_source.ChunkSource.address", lambda self, number: 0)
    for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.uint8):
        raw = torch.ones(300, 300, dtype=dtype)
        before = capture.sample_of(capture.raw_view(raw))
        assert before.same(capture.sample_of(capture.raw_view(raw)))
        raw[150, 150] = 3  # no sample has it
        assert torch.equal(before.lines, capture.sample_of(capture.raw_view(raw)).lines)
        assert not before.same(capture.sample_of(capture.raw_view(raw)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex128])
def test_samples_are_the_bytes_at_their_places_in_memory_of_any_strides(dtype: torch.dtype) -> None:
    values = torch.arange(210_000).to(dtype)
    for tensor in (values, values[7:], values.view(300, 700).t(), values.view(10, 30, 7, 100)[:, ::2], values[:3], values[:0]):
        given = np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), np.uint8)
        if len(given) <= 4096:
            expected = given
        else:
            expected = np.concatenate([given[at : at + 128] for at in range(0, len(given) - 127, 257 * 128)])
        lines = capture.sample_of(capture.raw_view(tensor)).lines
        assert lines.contiguous().view(torch.uint8).numpy().tobytes() == expected.tobytes()
        if tensor.is_contiguous() and len(given):
            assert capture._lines_at(tensor.data_ptr(), len(given)) == expected.tobytes()


def test_what_is_smaller_than_its_sample_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fill = nn.Linear(4, 4), Capture._fill
    before = model.weight.detach().clone()

    def written(self: Capture, *args: Any) -> None:
        model.weight.data.add_(1)
        fill(self, *args)

    monkeypatch.setattr(Capture, "_fill", written)
    ckpt.save_async(URL, {"model": model, "optimizer": torch.optim.SGD(model.parameters())}).result()
    loaded = {"model": {"weight": torch.zeros(4, 4)}}
    ckpt.load(URL, loaded, strict=False)
    assert torch.equal(loaded["model"]["weight"], before)


def test_nan_is_what_it_was() -> None:
    """Bytes are compared: as numbers of the dtype that 16 bytes are moved as, a NaN would have changed."""
    weight = nn.Parameter(torch.full((64, 64), complex("nan"), dtype=torch.complex128).t())
    model = nn.ParameterDict({"weight": weight})
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    assert ckpt.save_async(URL, state).result().tensor_bytes == weight.nbytes


def test_places_that_are_sampled_are_of_all_columns() -> None:
    """A column of a matrix whose rows have a power of two of elements is sampled in some row."""
    for columns in (256, 1024, 4096, 8192):
        matrix = torch.zeros(16 << 20 >> 2, dtype=torch.float32).view(-1, columns)
        before = capture.sample_of(matrix.view(torch.int32))
        for column in (0, 63, columns // 2 + 1, columns - 1):
            matrix[:, column] = 1
            assert not before.same(capture.sample_of(matrix.view(torch.int32))), (columns, column)
            matrix[:, column] = 0


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 5).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.experts = nn.ModuleList([nn.Linear(200, 200, bias=False) for _ in range(4)])


@pytest.mark.parametrize("which", ["conv.weight", "experts.2.weight"])
def test_parameters_that_are_strided_or_stacked_in_the_checkpoint(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ckpt.Layout(
        {"dp": 1},
        rules=[("*", ckpt.Replicate())],
        numbered=[ckpt.experts("*experts.{n}.weight", to="*experts.weight", count=4, ranks=1, over="dp", stack=0)],
    )
    model, fill = Strided(), Capture._fill
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    assert ckpt.save_async(URL, state, layout=layout).result().tensor_bytes
    tensor = dict(model.named_parameters())[which]

    def written(self: Capture, *args: Any) -> None:
        tensor.data.add_(1)
        fill(self, *args)

    monkeypatch.setattr(Capture, "_fill", written)
    with pytest.raises(ConsistencyError, match=rf"tensor model\.{which.partition('.')[0]}.*was changed before it was captured"):
        ckpt.save_async(URL, state, layout=layout).result()


def test_whose_step_runs_no_hooks_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapped(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.state, self.param_groups, self.defaults = inner.state, inner.param_groups, inner.defaults  # no Optimizer.__init__

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(1)

    loop = Loop(300)
    loop.optimizer = Wrapped(loop.optimizer)
    monkeypatch.setattr("ckpt.state.collect.seen", set())
    assert outcome(URL, loop.state(), loop.optimizer.step) == "right"


def test_an_embedding_that_its_forward_pass_scales_is_captured_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """``max_norm`` renormalises the rows that are looked up, in place, although an optimizer steps the weight."""
    over, fill = threading.Event(), Capture._fill

    def late(self: Capture, *args: Any) -> None:
        over.wait(30)
        fill(self, *args)

    monkeypatch.setattr(Capture, "_fill", late)
    model = torch.nn.Sequential(torch.nn.Embedding(3000, 64, max_norm=0.5), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(10)).sum().backward()
    optimizer.step()

    def forward() -> None:
        model(torch.arange(3000))
        over.set()

    assert outcome(URL, {"model": model, "optimizer": optimizer}, forward) == "right"
