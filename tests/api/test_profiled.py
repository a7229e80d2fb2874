"""What a save does stands in the trace of torch.profiler, beside what training does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ckpt


def ranges(root: Path, **more: object) -> dict[str, list[tuple[int, int]]]:
    """Name → start and end of the ranges of ckpt in a profile of a save and two steps of training."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.Checkpointer(str(root)) as c, profile(activities=[ProfilerActivity.CPU], **more) as profiled:  # type: ignore[arg-type]
        for n in (1, 2):
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            if n == 1:
                c.save(n, {"model": model, "optimizer": optimizer}).fence()
                c.save(n + 1, {"model": model, "optimizer": optimizer})
    found: dict[str, list[tuple[int, int]]] = {}
    for event in profiled.events() or ():
        if event.name.startswith(("ckpt.", "Optimizer.step")):
            found.setdefault(event.name.partition("#")[0], []).append((event.time_range.start, event.time_range.end))
    return found


def test_saves_are_ranges_beside_the_steps_of_training(tmp_path: Path) -> None:
    found = ranges(tmp_path)
    assert len(found["ckpt.save"]) == 2 and len(found["Optimizer.step"]) == 2 and "ckpt.wait" in found
    first, last = found["Optimizer.step"]
    assert all(first[1] <= start <= end <= last[1] for start, end in found["ckpt.save"])


def test_the_copy_shows_where_other_threads_do(tmp_path: Path) -> None:
    config = torch._C._profiler._ExperimentalConfig
    if "profile_all_threads" not in str(config.__init__.__doc__):
        pytest.skip("this torch profiles its own thread alone")
    assert len(ranges(tmp_path, experimental_config=config(profile_all_threads=True))["ckpt.capture"]) == 2


def test_without_a_profiler_there_is_no_range() -> None:
    from ckpt.engine.save.staging import in_trace

    @in_trace("ckpt.nothing")
    def nothing() -> int:
        return 3

    assert nothing() == 3
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert nothing() == 3
    assert [e.name for e in profiled.events() or ()].count("ckpt.nothing") == 1
