"""What reports print, and which checkpoint of a run is the newest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.live import Sink, Source


def test_reports_print_as_one_line(tmp_path: Path) -> None:
    url, state = str(tmp_path / "run" / "step-3"), {"w": torch.ones(300, 300)}
    assert str(ckpt.save(url, state, dry_run=True)).startswith(f"would save 352 KiB to {url}")
    assert str(ckpt.save(url, state)).startswith(f"saved 352 KiB to {url} in ")
    loaded = ckpt.load(url, {"w": torch.ones(300, 300), "v": torch.ones(3)}, strict=False)
    assert str(loaded).startswith(f"loaded 1 tensor, 352 KiB, from {url} in ") and str(loaded).endswith(", 1 missing")
    assert str(ckpt.verify(url)) == "ok: 1 file, 1 chunk, 352 KiB"
    target = str(tmp_path / "copy")
    assert f" to {target} in " in str(ckpt.copy(url, target))
    assert str(ckpt.convert(url, str(tmp_path / "torch"), to="torch")).startswith("wrote 1 tensor, 352 KiB, to ")
    merged = ckpt.merge(str(tmp_path / "merged"), [url, target])
    assert str(merged).startswith("averaged 1 tensor of 2 checkpoints; wrote 1 tensor")
    assert all("\n" not in str(report) for report in (loaded, merged))


def test_every_public_report_prints_itself() -> None:
    modules = [ckpt, *(getattr(ckpt, face) for face in ckpt.FACES)]
    reports = {getattr(module, name) for module in modules for name in getattr(module, "__all__", ()) if name.endswith("Report")}
    assert len(reports) >= 10 and [r.__name__ for r in reports if r.__str__ is object.__str__] == []


def names_of(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_what_a_run_is_shown_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckpt.Checkpointer(tmp_path) as c:
        assert repr(c) == f"<ckpt.Checkpointer of {tmp_path}: saves EverySteps(1000), keeps All()>"
        c.save(1, {"w": torch.ones(3)})
        assert c.handle is not None
        ends = {"url", "captured", "durable", "fence", "wait", "done", "result", "progress", "cancel"}
        assert names_of(c.handle) == ends
        done = {"best", "latest", "preempted", "steps", "url", "handle", "restored_from", "uncopied", "unpublished", "root"}
        assert names_of(c) == done | {"close", "requested", "restore", "save", "step", "wait"}
    assert repr(c).endswith("; closed>")
    monkeypatch.setenv("CKPT_LIVE_SECRET", "secret")
    state = {"w": torch.ones(3)}
    with Source("tcp://127.0.0.1:0/a", state) as source, Sink(source.address, state) as sink:
        assert repr(source) == f"<ckpt.live.Source at {source.address}>" and repr(sink) == f"<ckpt.live.Sink of {source.address}>"
        publication = source.publish(1)
        publication.result()
        assert str(publication.report).startswith("published step 1, 12 B, in ")
        assert names_of(publication) == {"step", "captured", "sealed", "report", "fence", "done", "result"}
        assert names_of(source) == {"address", "publish", "report", "close"}
        assert names_of(sink) == {"address", "version", "report", "take", "tensors", "run_on_all", "close"}
        assert sink.take().step == 1 and str(sink.report).startswith("took step 1, 12 B, in ")
    assert repr(sink).endswith(": closed>") and repr(source).endswith(": closed>")


def test_the_newest_of_a_run(tmp_path: Path) -> None:
    assert ckpt.latest(tmp_path / "nothing") is None
    for name in ("b", "step-9", "step-10", "a"):
        ckpt.save(tmp_path / name, {"w": torch.ones(3)})
    assert ckpt.latest(tmp_path) == str(tmp_path / "step-10")
    (tmp_path / "step-10" / "checkpoint.json").unlink()
    (tmp_path / "step-9" / "checkpoint.json").unlink()
    assert ckpt.latest(tmp_path) == str(tmp_path / "a")  # saved last
    assert ckpt.latest(tmp_path / "a") == str(tmp_path / "a")
