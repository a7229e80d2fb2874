"""Saves that do not hash frozen tensors again: what torch counts is noticed at once, what it does not by every so many saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.engine.save import reuse
from ckpt.engine.verify import verify
from ckpt.errors import ConsistencyError, UsageError
from ckpt.policies import EverySteps, TrustFrozen
from tests.formats import oracle

FROZEN = 2
"""Tensors of a ``Job`` without gradients."""


class Job:
    """A frozen layer and a trained one, and how many chunks the last save hashed."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch, policy: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model[1].parameters(), lr=0.1)
        self.run, self.hashed, self.step = run, 0, 0
        self.checkpointer = ckpt.Checkpointer(run, save=EverySteps(1), reuse=policy)
        hash_chunks: Callable[..., None] = reuse._hash

        def counted(source: Any, numbers: list[int], digests: dict[int, str]) -> None:
            self.hashed += len(numbers)
            hash_chunks(source, numbers, digests)

        monkeypatch.setattr(reuse, "_hash", counted)

    @property
    def frozen(self) -> nn.Parameter:
        weight = self.model[0].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def save(self) -> int:
        """One step of training and a save; gives how many chunks it hashed, and sees that it has the state's bytes."""
        self.model(torch.ones(3, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.hashed, self.step = 0, self.step + 1
        self.checkpointer.save(self.step, {"model": self.model, "optimizer": self.optimizer}).result()
        self.checkpointer.wait()
        return self.hashed

    def is_exact(self) -> bool:
        url = self.run / f"step-{self.step:08d}"
        stored = oracle.read(url)  # compares digests of 128 bits, too
        assert not verify(url).problems
        return all(stored[f"model.{name}"][2] == p.detach().numpy().tobytes() for name, p in self.model.named_parameters())


def test_what_is_vouched_for_is_hashed_by_every_so_many_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path / "run", monkeypatch, TrustFrozen(names="model.0.*", hash_every=3))
    hashed = []
    for _ in range(8):
        hashed.append(job.save())
        assert job.is_exact()
    assert hashed == [FROZEN, 0, 0, FROZEN, 0, 0, FROZEN, 0]
    assert job.checkpointer.save(9, {"model": job.model, "optimizer": job.optimizer}).result().reused_bytes == (8 * 8 + 8) * 4
    job.checkpointer.close()


def test_names_that_cover_nothing_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path / "run", monkeypatch, TrustFrozen(names="nope.*"))
    assert [job.save() for _ in range(3)] == [FROZEN] * 3
    assert [r.message for r in caplog.records if "TrustFrozen" in r.message] == [
        "TrustFrozen(names='nope.*') covers no frozen parameter of this rank: all of its bytes are hashed"
    ]
    job.checkpointer.close()


def test_without_it_every_save_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path / "run", monkeypatch, True)
    assert [job.save() for _ in range(3)] == [FROZEN] * 3
    job.checkpointer.close()


def in_place(job: Job) -> None:
    with torch.no_grad():
        job.frozen[0, 0] += 1


def other_memory(job: Job) -> None:
    job.frozen.data = job.frozen.data + 1


def same_address(job: Job) -> None:
    """Other memory that begins where the old did, with a tensor as young as the old one."""
    before, shape = job.frozen.data_ptr(), job.frozen.shape
    job.frozen.data = torch.empty(0)
    held = []
    for _ in range(64):
        again = torch.full(shape, 7.0)
        if again.data_ptr() == before:
            break
        held.append(again)
    job.frozen.data = again


def other_module(job: Job) -> None:
    job.model[0] = nn.Linear(8, 8).requires_grad_(False)


def loaded(job: Job) -> None:
    ckpt.save(job.run.parent / "other", {"w": torch.ones(8, 8)})
    ckpt.load(job.run.parent / "other", {"w": job.frozen})


@pytest.mark.parametrize("change", [in_place, other_memory, same_address, other_module, loaded])
def test_what_torch_counts_or_moves_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Job], None]
) -> None:
    # A directory of its own: older pytest gives the next test the path of one that has passed, which the process remembers.
    job = Job(tmp_path / change.__name__, monkeypatch, TrustFrozen(hash_every=100))
    for _ in range(3):
        job.save()
    assert job.hashed == 0
    change(job)
    assert job.save() > 0 and job.is_exact()
    job.save()
    assert job.save() == 0 and job.is_exact()
    job.checkpointer.close()


def test_a_write_past_torch_fails_the_next_save_that_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path / "run", monkeypatch, TrustFrozen(hash_every=4))
    assert [job.save(), job.save()] == [FROZEN, 0]
    job.frozen.detach().numpy()[0] += 1
    for _ in (3, 4):
        assert job.save() == 0
        assert not job.is_exact(), "what the user vouched for was not so"
    with pytest.raises(
        ConsistencyError, match=r"past torch, such as model.0.weight: up to 3 saves before this one may have their old bytes"
    ):
        job.save()
    assert job.save() == FROZEN and job.is_exact()
    assert job.save() == 0 and job.is_exact()
    job.checkpointer.close()


def test_what_an_optimizer_updates_is_never_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer with kernels of its own writes past torch."""
    job = Job(tmp_path / "run", monkeypatch, TrustFrozen(names="*", hash_every=100))
    job.optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    for n in range(4):
        job.model[1].weight.detach().numpy()[:] = n
        job.save()
        assert job.is_exact()
    job.checkpointer.close()


def test_what_kernels_of_torch_write_without_counting_is_never_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of batch normalization, and what a fused optimizer updates: also if it is frozen again by the time of the save."""
    job = Job(tmp_path / "run", monkeypatch, TrustFrozen(hash_every=100))
    job.model.insert(1, nn.BatchNorm1d(8).requires_grad_(False))
    job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        job.save()
        stored = oracle.read(job.run / f"step-{job.step:08d}")
        assert all(stored[f"model.{name}"][2] == tensor.numpy().tobytes() for name, tensor in job.model.state_dict().items())
        version = job.frozen._version
        job.model[0].requires_grad_(True)
        job.model(torch.randn(3, 8)).sum().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.model[0].requires_grad_(False)
        assert job.frozen._version == version, "torch counts it now"
    job.checkpointer.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrustFrozen(hash_every=0), "is a whole number"),
        (lambda: TrustFrozen(names=[]), "is a glob of names"),
        (lambda: TrustFrozen(names=3), "is a glob of names"),  # type: ignore[arg-type]
        (lambda: ckpt.Checkpointer("runs/a", reuse="frozen"), "reuse= is True, False, a TrustFrozen or an Anchor"),
    ],
)
def test_arguments_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_a_tensor_that_overlaps_another_is_never_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts its versions apart: a write to one is not seen at the other."""
    job = Job(tmp_path / "run", monkeypatch, TrustFrozen())
    job.model[0].register_parameter("top", nn.Parameter(job.frozen.data[:4], requires_grad=False))
    assert [job.save() for _ in range(2)] == [FROZEN + 1, 2]
    for rows in (slice(0, 2), slice(6, 8)):
        with torch.no_grad():
            job.frozen[rows] += 1
        job.save()
        assert job.is_exact()
    job.checkpointer.close()
