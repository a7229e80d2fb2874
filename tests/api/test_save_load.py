"""What save and load promise about places, reports, replacing, order of events and errors."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from xxhash import xxh3_128_hexdigest

import ckpt
from ckpt.errors import (
    CkptError,
    CorruptError,
    FormatError,
    MismatchError,
    NamesError,
    NotCommittedError,
    NotFoundError,
    ShapeError,
    StateError,
    StorageError,
    UsageError,
)
from ckpt.io_backends.inprocess import InProcessBackend
from tests.api.checked import data_files, described, files_below, raw, same, save
from tests.formats import oracle


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def job(seed: int, steps: int) -> dict[str, Any]:
    """The state of the README, after some steps of training."""
    net = model(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    state = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    for _ in range(steps):
        train(state)
    return state


def train(state: dict[str, Any]) -> float:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(state["step"]))
    loss = state["model"](inputs).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    state["step"] += 1
    return float(loss.detach())


def everything(state: dict[str, Any]) -> dict[str, Any]:
    """All of a job as torch itself gives it."""
    optimizer = state["optimizer"].state_dict()
    by_key = {k: dict(sorted(v.items())) for k, v in optimizer["state"].items()}
    return {
        "model": dict(state["model"].state_dict()),
        "optimizer": {"state": by_key, "param_groups": optimizer["param_groups"]},
        "scheduler": state["scheduler"].state_dict(),
        "step": state["step"],
    }


# --------------------------------------------------------------------------------------------------------- round trip


def test_training_goes_on_as_if_it_had_not_stopped(url: str) -> None:
    uninterrupted = job(0, 3)
    save(url, uninterrupted)
    resumed = job(1, 1)
    ckpt.load(url, resumed)
    assert same(everything(resumed), everything(uninterrupted))
    assert [train(resumed) for _ in range(3)] == [train(uninterrupted) for _ in range(3)]
    assert same(everything(resumed), everything(uninterrupted))


def test_the_oracle_finds_the_values_of_the_model_and_its_optimizer(url: str) -> None:
    state = job(0, 2)
    found = save(url, state)
    expected = {f"model.{name}": t for name, t in state["model"].state_dict().items()}
    for name, param in state["model"].named_parameters():
        expected |= {f"optimizer.state.model.{name}.{key}": t for key, t in state["optimizer"].state[param].items()}
    assert found == {name: described(t) for name, t in expected.items()}


def test_an_empty_state(url: str) -> None:
    report = ckpt.save(url, {})
    assert report.tensor_bytes == 0
    assert oracle.read(url) == {}
    loaded = ckpt.load(url, {})
    assert (loaded.tensors, loaded.bytes_read, loaded.missing, loaded.unexpected) == (0, 0, (), ())
    assert len(ckpt.open(url)) == 0


# ------------------------------------------------------------------------------------------------------------ reports


def test_what_the_save_report_says(url: str) -> None:
    state = {"a": torch.ones(3, 5), "b": torch.ones(7, dtype=torch.int8), "tied": None, "own": ckpt.PerRank(torch.ones(2))}
    state["tied"] = state["a"]
    began = time.perf_counter()
    report = ckpt.save(url, state)
    took = time.perf_counter() - began
    record = json.loads(Path(url, "checkpoint.json").read_bytes())
    assert report.url == url
    assert report.id == record["id"]
    assert report.tensor_bytes == record["tensor_bytes"] == 60 + 7 + 8
    assert report.rank_bytes == sum(p.stat().st_size for p in data_files(url))
    assert 0 < report.seconds <= took


def test_what_the_load_report_says(url: str) -> None:
    ckpt.save(url, {"a": torch.ones(3, 5), "old": torch.ones(7, dtype=torch.int8), "gone": torch.ones(2), "step": 1, "lost": 2})
    state = {"a": torch.zeros(3, 5, dtype=torch.float64), "new": torch.zeros(7, dtype=torch.int8), "absent": torch.zeros(1), "more": 0}
    began = time.perf_counter()
    report = ckpt.load(url, state | {"step": 0}, rename={"old": "new"}, cast=True, strict=False)
    took = time.perf_counter() - began
    assert report.url == url
    assert report.tensors == 2
    assert report.missing == ("absent", "more")
    assert report.unexpected == ("gone", "lost")
    assert report.renamed == {"old": "new"}
    assert report.cast == ("a",)
    assert report.bytes_needed == report.bytes_read == 60 + 7
    assert report.bytes_unverified == 0
    assert 0 < report.seconds <= took


def test_reports_cannot_be_changed(url: str) -> None:
    saved, loaded = ckpt.save(url, {}), ckpt.load(url, {})
    with pytest.raises(AttributeError):
        saved.id = "x"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        loaded.missing = ()  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------------- places


def test_a_second_save_replaces_the_first_and_removes_its_files(url: str) -> None:
    first = ckpt.save(url, {"a": torch.zeros(4), "old": torch.ones(2), "step": 1})
    before = files_below(url)
    second = ckpt.save(url, {"a": torch.ones(4), "step": 2})
    after = files_below(url)
    assert first.id != second.id
    assert set(before) & set(after) == {"checkpoint.json"}
    assert all(second.id in path for path in after if path != "checkpoint.json")
    assert oracle.read(url) == {"a": described(torch.ones(4))}
    assert oracle.read_state(url)["state"] == {"a": {"$tensor": "a"}, "step": 2}
    assert {p.name for p in Path(url).iterdir()} == {"checkpoint.json", "data", f"index-{second.id}"}


def test_a_save_that_fails_leaves_what_was_there(url: str) -> None:
    ckpt.save(url, {"a": torch.zeros(4)})
    before = files_below(url)
    with pytest.raises(StateError):
        ckpt.save(url, {"a": torch.ones(4), "bad": object()})
    assert files_below(url) == before


def test_a_failed_first_save_leaves_no_checkpoint(url: str) -> None:
    with pytest.raises(StateError):
        ckpt.save(url, {"bad": object()})
    with pytest.raises(NotFoundError):
        ckpt.load(url, {})


def test_a_view_that_was_opened_before_a_replacement_fails_loudly(url: str) -> None:
    ckpt.save(url, {"a": torch.zeros(4)})
    view = ckpt.open(url)
    ckpt.save(url, {"a": torch.ones(4)})
    with pytest.raises(CkptError):
        view["a"].read()
    assert torch.equal(ckpt.open(url)["a"].read(), torch.ones(4))


@pytest.mark.parametrize("call", [lambda u: ckpt.save(u, {}), lambda u: ckpt.load(u, {}), ckpt.open], ids=["save", "load", "open"])
@pytest.mark.parametrize("bad", [Path("s3://bucket/x"), "", 7, "nosuch://bucket/x", "s3:/bucket/x", None, b"/tmp/x"], ids=repr)
def test_what_is_no_url(call: Callable[[Any], object], bad: object) -> None:
    with pytest.raises(UsageError) as caught:
        call(bad)
    assert isinstance(caught.value, ValueError)


def test_urls_of_the_same_place(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    ckpt.save("run/step-1", {"a": torch.ones(2)})
    for url in (f"{root}/run/step-1", f"file://{root}/run/step-1", "./run/step-1", "run/step-1/", f"{root}/run/../run/step-1"):
        target = torch.zeros(2)
        ckpt.load(url, {"a": target})
        assert torch.equal(target, torch.ones(2)), url


def test_memory_is_a_place() -> None:
    InProcessBackend.reset()
    ckpt.save("inprocess://a/b", {"a": torch.arange(5), "step": 3})
    state: dict[str, Any] = {"a": torch.zeros(5, dtype=torch.int64), "step": 0}
    ckpt.load("inprocess://a/b", state)
    assert (state["a"].tolist(), state["step"]) == ([0, 1, 2, 3, 4], 3)
    InProcessBackend.reset()
    with pytest.raises(NotFoundError):
        ckpt.load("inprocess://a/b", {})


def _empty(url: str) -> None:
    os.makedirs(url)


def _not_committed(url: str) -> None:
    ckpt.save(url, {"a": torch.ones(1)})
    os.unlink(f"{url}/checkpoint.json")


def _foreign(url: str) -> None:
    os.makedirs(url)
    Path(url, "weights.bin").write_bytes(b"123")


def _cut(url: str) -> None:
    ckpt.save(url, {"a": torch.ones(1)})
    record = Path(url, "checkpoint.json")
    record.write_bytes(record.read_bytes()[:-20])


def _newer(url: str) -> None:
    ckpt.save(url, {"a": torch.ones(1)})
    record = Path(url, "checkpoint.json")
    members = json.loads(record.read_bytes()) | {"version": 2, "digest": "0" * 32}
    data = json.dumps(members).encode()
    record.write_bytes(data.replace(b"0" * 32, xxh3_128_hexdigest(data).encode()))


def _no_index(url: str) -> None:
    ckpt.save(url, {"a": torch.ones(1)})
    (index,) = Path(url).glob("index-*")
    shutil.rmtree(index)


def _no_data(url: str) -> None:
    ckpt.save(url, {"a": torch.ones(1)})
    shutil.rmtree(Path(url, "data"))


UNREADABLE: dict[str, tuple[Callable[[str], None], type[CkptError]]] = {
    "nothing": (lambda url: None, NotFoundError),
    "an empty directory": (_empty, NotFoundError),
    "no commit record": (_not_committed, NotCommittedError),
    "foreign files": (_foreign, FormatError),
    "a cut commit record": (_cut, CorruptError),
    "a newer version": (_newer, FormatError),
    "no index": (_no_index, CorruptError),
    "no data": (_no_data, CorruptError),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_places_that_cannot_be_loaded(url: str, kind: str) -> None:
    prepare, error = UNREADABLE[kind]
    prepare(url)
    state = {"a": torch.zeros(1)}
    with pytest.raises(error) as caught:
        ckpt.load(url, state)
    assert url in str(caught.value)
    assert torch.equal(state["a"], torch.zeros(1))
    if kind != "no data":
        with pytest.raises(error):
            ckpt.open(url)


def test_a_file_where_the_checkpoint_should_be(url: str) -> None:
    os.makedirs(os.path.dirname(url))
    Path(url).write_bytes(b"x")
    with pytest.raises(StorageError):
        ckpt.save(url, {})
    with pytest.raises(CkptError):
        ckpt.load(url, {})
    assert Path(url).read_bytes() == b"x"


# ----------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("state", [[torch.ones(1)], torch.ones(1), nn.Linear(1, 1), None, "x"], ids=lambda s: type(s).__name__)
def test_the_state_must_be_a_dict(url: str, state: Any) -> None:
    for call in (ckpt.save, ckpt.load):
        if call is ckpt.load:
            ckpt.save(url, {})
        with pytest.raises(UsageError, match=type(state).__name__):
            call(url, state)


@pytest.mark.parametrize(
    "options",
    [
        *({"timeout": wrong} for wrong in (0, -1.0, float("inf"), float("nan"), "60")),
        *({"threads": wrong} for wrong in (0, -2, 2.5)),
        *({"process_group": wrong} for wrong in ("dp", 3)),
    ],
    ids=str,
)
def test_bad_options(url: str, options: dict[str, Any]) -> None:
    ckpt.save(url, {})
    for call in (ckpt.save, ckpt.load):
        with pytest.raises(UsageError, match=next(iter(options))):
            call(url, {}, job=ckpt.Job(**options))


def test_options_by_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_THREADS", "none")
    with pytest.raises(UsageError, match="CKPT_THREADS"):
        ckpt.save(url, {})
    ckpt.save(url, {}, job=ckpt.Job(threads=1))
    monkeypatch.setenv("CKPT_THREADS", "2")
    monkeypatch.setenv("CKPT_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="CKPT_TIMEOUT"):
        ckpt.load(url, {})


def test_verify_has_three_modes(url: str) -> None:
    ckpt.save(url, {})
    with pytest.raises(UsageError, match="'full', 'partial' or 'off'"):
        ckpt.load(url, {}, read=ckpt.ReadOptions(verify="none"))  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 7])
def test_any_number_of_threads_gives_the_same(url: str, threads: int, chunks_of: Callable[[int], None]) -> None:
    chunks_of(1000)
    state = {f"t{i}": torch.arange(i * 37, dtype=torch.float32) for i in range(40)}
    assert save(url, dict(state), job=ckpt.Job(threads=threads)) == {name: described(t) for name, t in state.items()}
    target = {name: torch.zeros_like(t) for name, t in state.items()}
    ckpt.load(url, dict(target), job=ckpt.Job(threads=threads))
    assert same(target, state)


# ------------------------------------------------------------------------------------------------------------- verify


def _damage(url: str, tensor: torch.Tensor) -> None:
    """Flip a bit of the last byte of a tensor's bytes."""
    (path,) = data_files(url)
    data = bytearray(path.read_bytes())
    at = data.index(raw(tensor)) + len(raw(tensor)) - 1
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_byte_is_found_and_named(url: str) -> None:
    ckpt.save(url, {"fine": torch.arange(9), "hurt": torch.arange(100.0)})
    _damage(url, torch.arange(100.0))
    for verify in ("full", "partial"):
        with pytest.raises(CorruptError) as caught:
            ckpt.load(url, {"fine": torch.zeros(9, dtype=torch.int64), "hurt": torch.zeros(100)}, read=ckpt.ReadOptions(verify=verify))  # type: ignore[arg-type]
        text = str(caught.value)
        assert "hurt" in text and "[0:100]" in text and data_files(url)[0].name in text and "overwritten" in text
    target = torch.zeros(9, dtype=torch.int64)
    ckpt.load(url, {"fine": target}, only="fine")
    assert torch.equal(target, torch.arange(9))


def test_without_verify_damage_is_loaded_and_the_report_says_that_it_may_be(url: str) -> None:
    ckpt.save(url, {"hurt": torch.arange(100.0)})
    _damage(url, torch.arange(100.0))
    target = torch.zeros(100)
    report = ckpt.load(url, {"hurt": target}, read=ckpt.ReadOptions(verify="off"))
    assert report.bytes_unverified == report.bytes_read == report.bytes_needed == 400
    assert torch.equal(target[:99], torch.arange(99.0)) and target[99] != 99


def _columns(first: int, count: int) -> ckpt.Layout:
    return ckpt.Layout({"one": 1}, rules=[("*", ckpt.Padded(0, first), ckpt.Replicate())])


def test_partial_reads_less_than_full_and_says_what_it_did_not_check(url: str) -> None:
    """Six of eight rows are wanted, so the only chunk is not read whole."""
    stored = torch.arange(24.0).reshape(8, 3)
    ckpt.save(url, {"t": stored}, layout=_columns(6, 8))
    full, partial = torch.zeros(6, 3), torch.zeros(6, 3)
    report = ckpt.load(url, {"t": full}, read=ckpt.ReadOptions(verify="full"))
    assert (report.bytes_needed, report.bytes_read, report.bytes_unverified) == (72, 96, 0)
    report = ckpt.load(url, {"t": partial}, read=ckpt.ReadOptions(verify="partial"))
    assert (report.bytes_needed, report.bytes_read, report.bytes_unverified) == (72, 72, 72)
    assert torch.equal(full, stored[:6]) and torch.equal(partial, stored[:6])


# ----------------------------------------------------------------------------------------------------------- in place


def test_tensors_and_containers_stay_the_same_objects(url: str) -> None:
    ckpt.save(
        url, {"a": {"w": torch.ones(2, 3), "list": [torch.ones(1), 5, {"x": 1}]}, "param": nn.Parameter(torch.ones(2)), "plain": {"k": 1}}
    )
    state: dict[str, Any] = {
        "a": {"w": torch.zeros(2, 3), "list": [torch.zeros(1), 0, {"x": 0}]},
        "param": nn.Parameter(torch.zeros(2)),
        "plain": {"k": 0},
    }
    held = [state["a"], state["a"]["w"], state["a"]["list"], state["a"]["list"][0], state["a"]["list"][2], state["param"], state["plain"]]
    places = [t.data_ptr() for t in (state["a"]["w"], state["a"]["list"][0], state["param"])]
    ckpt.load(url, state)
    assert all(
        now is before
        for now, before in zip(
            [state["a"], state["a"]["w"], state["a"]["list"], state["a"]["list"][0], state["a"]["list"][2], state["param"], state["plain"]],
            held,
            strict=True,
        )
    )
    assert [t.data_ptr() for t in (state["a"]["w"], state["a"]["list"][0], state["param"])] == places
    assert same(state["a"], {"w": torch.ones(2, 3), "list": [torch.ones(1), 5, {"x": 1}]})
    assert state["plain"] == {"k": 1}
    assert state["param"].requires_grad and torch.equal(state["param"].detach(), torch.ones(2))


def test_values_in_a_dict_that_the_caller_keeps_are_loaded(url: str) -> None:
    """The state is often made on the fly, of objects that live elsewhere."""
    progress = {"step": 7, "seen": {"tokens": 5}, "history": [1, 2]}
    ckpt.save(url, {"w": torch.ones(1), "progress": progress})
    kept: dict[str, Any] = {"step": 0, "seen": {"tokens": 0}, "history": []}
    seen, history = kept["seen"], kept["history"]
    ckpt.load(url, {"w": torch.zeros(1), "progress": kept})
    assert kept == progress
    assert kept["seen"] is seen and kept["history"] is history


def test_gradients_and_the_graph_are_left_alone(url: str) -> None:
    ckpt.save(url, {"w": torch.full((3,), 2.0)})
    weight = torch.ones(3, requires_grad=True)
    (weight * 5).sum().backward()
    grad = weight.grad
    ckpt.load(url, {"w": weight})
    assert weight.is_leaf and weight.requires_grad and weight.grad is grad
    assert torch.equal(weight.detach(), torch.full((3,), 2.0))


def test_views_of_one_memory_in_one_state(url: str) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    save(url, {"base": base, "row": base[1], "t": base.t(), "flat": base.view(12)})
    other = torch.zeros(3, 4)
    ckpt.load(url, {"base": other, "row": other[1], "t": other.t(), "flat": other.view(12)})
    assert torch.equal(other, base)


# --------------------------------------------------------------------------------------------------- what does not fit


def _full(seed: int) -> dict[str, Any]:
    return {"fine": torch.full((2,), float(seed)), "shape": torch.zeros(3), "dtype": torch.zeros(2), "gone": torch.zeros(1), "step": seed}


def test_all_problems_are_told_at_once_and_nothing_is_touched(url: str) -> None:
    saved = _full(1) | {"model": model(0), "extra": {"a": 1, "b": 2}}
    ckpt.save(url, saved)
    net = model(1)
    optimizer = torch.optim.Adam(net.parameters())
    state: dict[str, Any] = {
        "fine": torch.zeros(2),
        "shape": torch.zeros(4),
        "dtype": torch.zeros(2, dtype=torch.int32),
        "step": 0,
        "new": torch.zeros(1),
        "number": 5,
        "model": net,
        "optimizer": optimizer,
    }
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(MismatchError) as caught:
        ckpt.load(url, state)
    text = str(caught.value)
    for name in ("new", "number", "optimizer.param_groups of model.0.weight", "gone", "extra.a", "extra.b"):
        assert f"\n    {name}\n" in text, name
    assert "\n    shape: shape [3] in the checkpoint, [4] in the state" in text
    assert "\n    dtype: dtype float32 in the checkpoint, int32 in the state (cast=True converts)" in text
    assert "do not fit (2)" in text
    assert url in text and "strict=False" in text and "nothing in the state was changed" in text
    assert (state["fine"].tolist(), state["step"], state["number"]) == ([0, 0], 0, 5)
    assert same(dict(net.state_dict()), before)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("state", "error", "builtin"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(1)}, NamesError, KeyError),
        ({}, NamesError, KeyError),
        ({"a": torch.zeros(3)}, ShapeError, ValueError),
        ({"a": torch.zeros(2, dtype=torch.int64)}, ShapeError, ValueError),
        ({"a": torch.zeros(2, 1)}, ShapeError, ValueError),
        ({"a": torch.zeros(3), "b": 1}, MismatchError, CkptError),
    ],
    ids=["missing", "unexpected", "shape", "dtype", "dimensions", "both"],
)
def test_the_class_of_a_mismatch(url: str, state: dict[str, Any], error: type[CkptError], builtin: type[Exception]) -> None:
    ckpt.save(url, {"a": torch.ones(2)})
    with pytest.raises(error) as caught:
        ckpt.load(url, state)
    assert type(caught.value) is error
    assert isinstance(caught.value, builtin)


def test_not_strict_loads_what_is_on_both_sides(url: str) -> None:
    ckpt.save(url, {"both": torch.ones(2), "gone": torch.ones(1), "value": 1, "nested": {"a": torch.ones(1), "b": 2}})
    state: dict[str, Any] = {"both": torch.zeros(2), "new": torch.zeros(1), "other": 5, "nested": {"a": torch.zeros(1), "c": 6}}
    report = ckpt.load(url, state, strict=False)
    assert report.missing == ("nested.c", "new", "other")
    assert report.unexpected == ("gone", "nested.b", "value")
    assert same(state, {"both": torch.ones(2), "new": torch.zeros(1), "other": 5, "nested": {"a": torch.ones(1), "c": 6}})


def test_not_strict_does_not_excuse_shapes(url: str) -> None:
    ckpt.save(url, {"a": torch.ones(2), "b": torch.ones(2)})
    state = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(ShapeError):
        ckpt.load(url, state, strict=False)
    assert torch.equal(state["a"], torch.zeros(2))


def test_an_optimizer_that_the_state_lacks_is_unexpected_also_without_state(url: str) -> None:
    net = model(0)
    ckpt.save(url, {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)})
    with pytest.raises(NamesError, match=r"optimizer\.param_groups"):
        ckpt.load(url, {"model": model(1)})
    assert ckpt.load(url, {"model": model(1)}, strict=False).unexpected == ("optimizer.param_groups",)


def test_a_tensor_where_the_checkpoint_has_a_value_and_the_other_way_round(url: str) -> None:
    ckpt.save(url, {"a": torch.ones(2), "b": 1})
    state = {"a": None, "b": torch.zeros(2)}
    with pytest.raises(MismatchError, match=r"(?s)a: tensors in the checkpoint, a plain value in the state"):
        ckpt.load(url, state)
    assert state["a"] is None and torch.equal(state["b"], torch.zeros(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("background", [False, True])
def test_an_empty_tensor_that_lies_where_a_large_one_begins(tmp_path: Path, background: bool) -> None:
    state = {"big": torch.arange(3 << 20).to(torch.uint8), "small": torch.ones(8, dtype=torch.int8), "void": torch.empty(0, 2)}
    ckpt.save_async(tmp_path / "a", state).result() if background else ckpt.save(tmp_path / "a", state)
    loaded = {name: torch.full_like(tensor, 7) for name, tensor in state.items()}
    ckpt.load(tmp_path / "a", loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
