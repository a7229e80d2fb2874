"""Random number generators of one process: they go on after a load as they would have gone on after the save."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import LayoutError, MismatchError, StateError, UsageError
from ckpt.training.rng import Generators, derived, stream_of


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "c")


class Tracker:
    """A generator of one's own, with the three methods."""

    def __init__(self) -> None:
        self.inner = torch.Generator().manual_seed(1)

    def get_state(self) -> torch.Tensor:
        return self.inner.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        self.inner.set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.inner.manual_seed(seed)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "random.Random": (lambda: random.Random(1), lambda g: [g.random(), g.gauss(0, 1)]),
    "RandomState": (lambda: np.random.RandomState(1), lambda g: [g.rand(), g.normal()]),
    "Tracker": (Tracker, lambda g: torch.randn(3, generator=g.inner).tolist()),
    "torch": (
        lambda: torch.Generator().manual_seed(1),
        lambda g: [torch.randn(3, generator=g).tolist(), torch.randperm(9, generator=g).tolist()],
    ),
    **{
        name: (lambda name=name: np.random.Generator(getattr(np.random, name)(1)), lambda g: [g.random(), g.integers(9, dtype="u1")])
        for name in ("PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937")
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_goes_on(url: str, kind: str) -> None:
    make, draw = KINDS[kind]
    generator = make()
    draw(generator)
    ckpt.save(url, {"rng": Generators({"mine": generator})})
    expected = [draw(generator) for _ in range(5)]
    other = make()
    state = {"rng": Generators({"mine": other})}
    ckpt.load(url, state)
    assert [draw(other) for _ in range(5)] == expected
    assert state["rng"].origin == "own"


def draw_all() -> list[Any]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.randn(5).tolist()]


def states() -> list[Any]:
    return [random.getstate(), [np.asarray(x).tolist() for x in np.random.get_state()], torch.get_rng_state().tolist()]


def test_the_global_generators_go_on(url: str) -> None:
    draw_all()
    before = states()
    ckpt.save(url, {"rng": Generators(), "w": torch.ones(3)})
    assert states() == before  # a save draws no random numbers
    expected = [draw_all() for _ in range(3)]
    ckpt.load(url, {"rng": Generators(), "w": torch.zeros(3)})
    assert states() == before
    assert [draw_all() for _ in range(3)] == expected


def test_a_background_save_keeps_the_states_of_the_call(url: str) -> None:
    before = states()
    handle = ckpt.save_async(url, {"rng": Generators(), "w": torch.ones(1_000_000)})
    expected = draw_all()
    handle.result()
    ckpt.load(url, {"rng": Generators(), "w": torch.zeros(1_000_000)})
    assert states() == before
    assert draw_all() == expected


def test_a_checkpointer_keeps_the_states_of_the_step(tmp_path: Path) -> None:
    from ckpt.policies import EverySteps

    state = {"rng": Generators()}
    with ckpt.Checkpointer(str(tmp_path), save=EverySteps(2)) as c:
        for n in range(3):
            draw_all()
            c.step(n, state)
    expected = draw_all()
    with ckpt.Checkpointer(str(tmp_path)) as c:
        assert c.restore(state) == 2
    assert draw_all() == expected


# ------------------------------------------------------------------------------------------------------------- derived


@pytest.mark.parametrize("kind", KINDS)
def test_a_derived_state_depends_on_the_state_and_the_number_alone(kind: str) -> None:
    make, draw = KINDS[kind]
    saved = stream_of(make(), "a").get()

    def from_(state: Any, number: int) -> Any:
        generator = make()
        draw(generator)
        stream_of(generator, "a").seed(derived(state, "a", number))
        return [draw(generator) for _ in range(4)]

    assert from_(saved, 3) == from_(saved, 3) != from_(saved, 4)
    later = make()
    draw(later)
    assert from_(stream_of(later, "a").get(), 3) != from_(saved, 3)
    assert from_(saved, 3) != [draw(later) for _ in range(4)]


def test_derived_states_never_change() -> None:
    """Written down once: a job that is resumed with another version must get the same streams."""
    assert (
        hex(derived({"b": torch.arange(3), "a": [1, 2.5, None, np.arange(2)]}, "torch", 5))
        == "0x2ba9399ee06caa39b8fde067911a6dec346ad7fe3d65bdc9f18b97d497827072"
    )
    generator = torch.Generator()
    stream_of(generator, "a").seed(2**255 + 12345)
    assert torch.randint(2**24, (3,), generator=generator).tolist() == [5371677, 8578342, 6073179]


def test_torch_streams_differ_in_more_than_32_bits() -> None:
    """torch alone would take equal streams from these."""
    found = []
    for entropy in (5, 5 + 2**32, 5 + 2**64, 5 + 2**255):
        generator = torch.Generator()
        stream_of(generator, "a").seed(entropy)
        found.append(torch.randint(2**31, (4,), generator=generator).tolist())
    assert len({tuple(x) for x in found}) == 4
    sample = torch.rand(200_000, generator=generator, dtype=torch.float64)
    assert abs(sample.mean() - 0.5) < 0.005 and abs(sample.var() - 1 / 12) < 0.001


# ---------------------------------------------------------------------------------------------------------- what differs


def test_other_generators_are_refused_before_anything_changes(url: str) -> None:
    ckpt.save(url, {"rng": Generators({"a": np.random.default_rng(1), "b": random.Random(1)})})
    mine = np.random.Generator(np.random.Philox(1))
    before = str(mine.bit_generator.state)
    with pytest.raises(
        MismatchError, match=r"a: numpy.PCG64 in the checkpoint, numpy.Philox in the state; b: python in the checkpoint, none"
    ):
        ckpt.load(url, {"rng": Generators({"a": mine})})
    assert str(mine.bit_generator.state) == before
    ckpt.save(url, {"rng": ckpt.PerRank(torch.get_rng_state())})
    with pytest.raises(MismatchError, match="rng: the checkpoint has something else there") as caught:
        ckpt.load(url, {"rng": Generators()})
    assert type(caught.value) is MismatchError


def test_arguments() -> None:
    with pytest.raises(StateError, match="not a random number generator: int"):
        Generators({"a": 5})
    with pytest.raises(UsageError, match="mesh and distinct go together"):
        Generators(mesh={"dp": 1})
    with pytest.raises(LayoutError, match="no dimension 'pp'"):
        Generators(mesh={"dp": 2, "tp": 2}, distinct=("dp", "pp"))
    assert repr(Generators()) == "Generators(python, numpy, torch)" or torch.cuda.is_initialized()


def test_a_mesh_of_other_ranks(url: str) -> None:
    with pytest.raises(LayoutError, match="the whole mesh"):
        ckpt.save(url, {"rng": Generators(mesh={"dp": 2}, distinct="dp")})


def test_every_kind_of_mesh(url: str) -> None:
    layout = ckpt.Layout({"dp": 1, "tp": 1}, [("*", ckpt.Replicate())])
    for mesh in (layout, layout.mesh, {"dp": 1, "tp": 1}):
        ckpt.save(url, {"rng": Generators(mesh=mesh, distinct="dp")})
        seat = ckpt.open(url).per_rank("rng", 0)["seat"]
        assert seat == {"names": ["dp", "tp"], "sizes": [1, 1], "at": [0, 0], "over": ["dp"]}


def test_random_states_lie_in_the_data_file(url: str) -> None:
    """The index is read by every rank: it does not hold the states of all others."""
    ckpt.save(url, {"rng": Generators()})
    assert sum(p.stat().st_size for p in Path(url).glob("index-*/state.json")) < 1000
    assert {"rng.streams.torch.state.state@rank0", "rng.streams.python.state.words@rank0"} <= set(ckpt.open(url))
