"""ckpt.open: parts of tensors as torch would give them, values as they were, and nothing read before it is asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckpt
from ckpt import settings as limits
from ckpt.errors import CkptError, CorruptError, NamesError, UsageError
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import wrap_backends
from ckpt.plan import ownership
from tests.api.checked import data_files, described, empty_directory, pattern, raw, same

# ------------------------------------------------------------------------------------------------------------ slicing

SHAPES = [(), (0,), (1,), (9,), (7, 5), (4, 0, 3), (3, 4, 5), (2, 1, 3, 2)]


@pytest.fixture(scope="module")
def cut_small() -> Iterator[tuple[ckpt.View, list[torch.Tensor]]]:
    """Tensors that are cut into chunks of a few elements."""
    limit = limits.CHUNK
    ownership._assignment.cache_clear()
    limits.CHUNK = 24
    tensors = [pattern(torch.int32, *shape, seed=i) for i, shape in enumerate(SHAPES)]
    with empty_directory() as root:
        ckpt.save(root, {"t": tensors})
        limits.CHUNK = limit
        ownership._assignment.cache_clear()
        yield ckpt.open(root), tensors


_bounds = st.none() | st.integers(-12, 12)
_slices = st.builds(slice, _bounds, _bounds, st.none() | st.integers(1, 4))
_keys = st.lists(_slices | st.integers(-9, 9), max_size=5)


@settings(max_examples=100)
@given(which=st.integers(0, len(SHAPES) - 1), keys=_keys, dots=st.integers(-1, 5), alone=st.booleans())
def test_indexing_is_that_of_torch(
    cut_small: tuple[ckpt.View, list[torch.Tensor]], which: int, keys: list[Any], dots: int, alone: bool
) -> None:
    view, tensors = cut_small
    index: Any = [*keys[:dots], ..., *keys[dots:]] if 0 <= dots <= len(keys) else keys
    index = index[0] if alone and len(index) == 1 else tuple(index)
    try:
        expected = tensors[which][index]
    except IndexError:
        with pytest.raises(IndexError):
            view[f"t.{which}"][index]
        return
    found = view[f"t.{which}"][index]
    assert described(found) == described(expected)
    assert found.device.type == "cpu" and not found.requires_grad


def test_integers_of_numpy_index_too(cut_small: tuple[ckpt.View, list[torch.Tensor]]) -> None:
    view, tensors = cut_small
    stored = view["t.4"]
    for key in (np.int64(2), (np.int8(-1), slice(np.int32(1), np.uint8(4))), (slice(0, np.int64(3), np.int64(2)),)):
        assert torch.equal(stored[key], tensors[4][key])  # type: ignore[index]


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (7, IndexError),
        (-8, IndexError),
        ((0, 0, 0), IndexError),
        ((..., 0, 0, 0), IndexError),
        (slice(None, None, -1), UsageError),
        (slice(None, None, 0), ValueError),
        (None, UsageError),
        (True, UsageError),
        ([0, 1], UsageError),
        (torch.tensor([1]), UsageError),
        (1.0, UsageError),
        ("name", UsageError),
        ((..., ...), UsageError),
    ],
    ids=repr,
)
def test_indices_that_do_not_fit(cut_small: tuple[ckpt.View, list[torch.Tensor]], key: Any, error: type[Exception]) -> None:
    view, _ = cut_small
    with pytest.raises(error):
        view["t.4"][key]


def test_a_tensor_can_be_walked_row_by_row(cut_small: tuple[ckpt.View, list[torch.Tensor]]) -> None:
    view, tensors = cut_small
    assert torch.equal(torch.stack(list(view["t.4"])), tensors[4])  # type: ignore[call-overload]


def test_what_is_read_is_a_copy(url: str) -> None:
    ckpt.save(url, {"t": torch.zeros(3)})
    stored = ckpt.open(url)["t"]
    stored.read().fill_(5)
    assert torch.equal(stored.read(), torch.zeros(3))


# ------------------------------------------------------------------------------------------------------------ mapping


def test_a_view_is_a_mapping(url: str) -> None:
    ckpt.save(url, {"b": torch.ones(2), "a": {"x": torch.zeros(1, 3, dtype=torch.int8)}, "own": ckpt.PerRank(torch.ones(1)), "step": 3})
    view = ckpt.open(url)
    assert isinstance(view, Mapping) and isinstance(view, ckpt.View)
    assert list(view) == list(view.keys()) == ["a.x", "b", "own@rank0"]
    assert len(view) == 3
    assert "b" in view and "c" not in view and 5 not in view
    assert [t.name for t in view.tensors()] == [t.name for t in view.values()] == list(view)
    assert {name: (t.shape, t.dtype) for name, t in view.items()}["a.x"] == ((1, 3), torch.int8)
    assert view.url == url
    assert repr(view) == f"View({url!r}, 3 tensors)"
    assert repr(view["a.x"]) == "StoredTensor('a.x', shape=[1, 3], dtype=int8)"


def test_a_name_that_is_not_there(url: str) -> None:
    ckpt.save(url, {"model": {"layer": {"weight": torch.ones(1), "bias": torch.ones(1)}}})
    view = ckpt.open(url)
    with pytest.raises(NamesError, match=r"(?s)no tensor 'model\.layer\.wieght'.*model\.layer\.weight") as caught:
        view["model.layer.wieght"]
    assert isinstance(caught.value, KeyError)
    with pytest.raises(NamesError, match="ckpt inspect"):
        view["zzz"]
    assert view.get("zzz") is None and view.get("zzz", 5) == 5  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------- state


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": 3, "t": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None: ...


def test_the_state_reads_like_what_was_saved(url: str) -> None:
    net = nn.Sequential(Extra(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam([{"params": net[0].parameters(), "lr": 0.5}, {"params": net[1].parameters()}], lr=torch.tensor(0.25))
    net(torch.randn(3, 2)).square().sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=1.0), 3)
    state = {
        "model": net,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": 7,
        "mixed": [torch.zeros(2), (1, {"t": torch.ones(1), 5: None})],
        "own": ckpt.PerRank({"seed": 5, "t": torch.ones(4)}),
    }
    ckpt.save(url, state)
    view = ckpt.open(url)
    found = view.state()
    assert found.keys() == state.keys()
    assert {k: described(t.read()) for k, t in found["model"].items() if k != "0._extra_state"} == {
        k: described(t) for k, t in net.state_dict().items() if k != "0._extra_state"
    }
    extra = found["model"]["0._extra_state"]
    assert extra["calls"] == 3 and torch.equal(extra["t"].read(), torch.ones(2))
    for name, param in net.named_parameters():
        values = found["optimizer"]["state"][f"model.{name}"]
        assert {k: described(t.read()) for k, t in values.items()} == {k: described(t) for k, t in optimizer.state[param].items()}
    first, second = found["optimizer"]["param_groups"]
    assert (first["params"], first["lr"], second["betas"]) == (["model.0.weight", "model.0.bias"], 0.5, (0.9, 0.999))
    assert same(second["lr"], torch.tensor(0.25))
    assert same(found["scheduler"], dict(sorted(scheduler.state_dict().items())))
    assert found["step"] == 7
    assert torch.equal(found["mixed"][0].read(), torch.zeros(2)) and found["mixed"][1][1][5] is None
    assert found["own"].ranks == (0,)
    own = view.per_rank("own", 0)
    assert own["seed"] == 5 and torch.equal(own["t"][1:3], torch.ones(2))


def test_values_that_look_like_ours(url: str) -> None:
    """Keys such as "state", "param_groups" and "" in dicts of the caller."""
    state = {"a": {"state": {"": {"x": 1}}, "param_groups": [{"params": [1]}]}, "": {"": 5}, "b": {"": [torch.ones(1)]}}
    ckpt.save(url, state)
    found = ckpt.open(url).state()
    assert found["a"] == state["a"] and found[""] == {"": 5}
    assert torch.equal(found["b"][""][0].read(), torch.ones(1))


def test_tied_names_read_alike(url: str) -> None:
    tensor = pattern(torch.float32, 3, 3)
    ckpt.save(url, {"a": tensor, "b": tensor})
    view = ckpt.open(url)
    assert described(view["a"].read()) == described(view["b"].read()) == described(tensor)


# --------------------------------------------------------------------------------------------------------------- lazy


class _Counting:
    """A backend that counts the bytes of data files that are read."""

    def __init__(self, inner: Backend, counts: list[int]) -> None:
        self._inner = inner
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_into(self, path: str, offset: int, target: Any) -> Any:
        if path.startswith("data/"):
            self._counts.append(len(memoryview(target).cast("B")))
        return self._inner.read_into(path, offset, target)

    def read_hashed(self, path: str, offset: int, target: Any, update: Any) -> Any:
        if path.startswith("data/"):
            self._counts.append(len(memoryview(target).cast("B")))
        return self._inner.read_hashed(path, offset, target, update)

    def read(self, path: str, *args: Any, **kwargs: Any) -> Any:
        data = self._inner.read(path, *args, **kwargs)
        if path.startswith("data/"):
            self._counts.append(len(data))
        return data


def test_only_the_chunks_of_what_is_asked_for_are_read(url: str, chunks_of: Callable[[int], None]) -> None:
    chunks_of(4096)
    tensor = pattern(torch.int32, 64, 128)  # 8 rows a chunk
    ckpt.save(url, {"t": tensor, "other": pattern(torch.int32, 1000)})
    counts: list[int] = []
    with wrap_backends(lambda backend: _Counting(backend, counts)):  # type: ignore[arg-type,return-value]
        view = ckpt.open(url)
        names = (list(view), view["t"].shape, view.state(), repr(view["t"]))
        assert names and not counts
        assert torch.equal(view["t"][20:22, 5], tensor[20:22, 5])
        header = int.from_bytes(data_files(url)[0].read_bytes()[:8], "little") + 8
        assert 4096 <= sum(counts) <= 4096 + header + 8
        counts.clear()
        assert torch.equal(view["t"][6:10], tensor[6:10])
        assert sum(counts) == 2 * 4096  # the header is known by now
        counts.clear()
        assert view["t"][5:5].shape == (0, 128)
        assert not counts


def test_lost_data_is_found_when_it_is_asked_for(url: str) -> None:
    ckpt.save(url, {"t": torch.ones(3), "v": {"x": 1}})
    shutil.rmtree(Path(url, "data"))
    view = ckpt.open(url)
    assert view["t"].shape == (3,) and view.state()["v"] == {"x": 1}
    with pytest.raises(CkptError):
        view["t"].read()


def test_damage_is_found_where_it_is_and_only_there(url: str, chunks_of: Callable[[int], None]) -> None:
    chunks_of(100)
    tensor = pattern(torch.uint8, 10, 50)  # two rows a chunk
    ckpt.save(url, {"t": tensor})
    (path,) = data_files(url)
    data = bytearray(path.read_bytes())
    data[data.index(raw(tensor[4])) + 7] ^= 0x10
    path.write_bytes(data)
    stored = ckpt.open(url)["t"]
    assert torch.equal(stored[:4], tensor[:4]) and torch.equal(stored[6:], tensor[6:])
    for key in (slice(None), 4, 5, slice(3, 5)):
        with pytest.raises(CorruptError, match=r"\[4:6,0:50\] of tensor t"):
            stored[key]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3, 2), (0,)])
def test_what_torch_and_numpy_make_of_a_stored_tensor(url: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    w = torch.randint(0, 2, shape).to(dtype)
    ckpt.save(url, {"w": w})
    stored = ckpt.open(url)["w"]
    assert torch.equal(torch.as_tensor(stored), w) and torch.equal(torch.asarray(stored), w)
    if dtype is not torch.bfloat16:
        found = np.asarray(stored)
        assert found.dtype == w.numpy().dtype and found.shape == shape and (found == w.numpy()).all()
        assert np.asarray(stored, dtype=np.complex128).dtype == np.complex128
