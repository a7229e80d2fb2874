"""``ckpt.integrations.accelerate`` in one process; `make trainers` and `make peers` have it on ranks and in accelerate's own tests."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import ConflictError, NotFoundError, StorageError, UsageError

accelerate = pytest.importorskip("accelerate")

from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration  # noqa: E402

from ckpt.integrations.accelerate import AcceleratorCheckpoints, use  # noqa: E402
from tests.distributed.ranks import Ranks  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # of torchdata's loader, by torch
    pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning"),
]


class Job:
    def __init__(self, folder: Path, **naming: Any) -> None:
        config = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, **naming)
        data = DataLoaderConfiguration(use_stateful_dataloader=True)
        self.accelerator = accelerate.Accelerator(cpu=True, project_config=config, dataloader_config=data)
        net = torch.nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        self.own = {"net": net, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
        loader = torch.utils.data.DataLoader(torch.arange(60.0).reshape(20, 3), batch_size=1)
        self.net, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(*self.own.values(), loader)
        self.custom = torch.optim.swa_utils.AveragedModel(net)
        self.accelerator.register_for_checkpointing(self.custom)

    def train(self, batches: Any) -> list[float]:
        losses = []
        for _ in range(2):
            loss = self.net(next(batches) + random.random()).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.custom.update_parameters(self.own["net"])
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def test_numbered_saves_go_on(tmp_path: Path) -> None:
    job = Job(tmp_path, total_limit=2)
    checkpoints = use(job.accelerator)
    called: list[Any] = []

    def save_itself(models: list[Any], weights: list[Any], folder: str) -> None:
        for model in models:  # as diffusers does
            assert torch.equal(weights.pop()["weight"], model.weight)
        called.append((weights, folder))

    job.accelerator.register_save_state_pre_hook(save_itself)
    batches = iter(job.loader)
    for _ in range(3):
        job.train(batches)
        url = job.accelerator.save_state()
    expected = job.train(batches), job.custom.state_dict()
    checkpoints.checkpointer.wait()
    assert [s.url for s in ckpt.list_steps(str(tmp_path / "checkpoints"))] == [
        str(tmp_path / f"checkpoints/checkpoint_{n}") for n in (1, 2)
    ]
    assert called[-1] == ([], url) and url.endswith("checkpoint_2")
    assert not [p for kind in ("*.bin", "*.pkl", "*.pt") for p in tmp_path.rglob(kind)]
    assert set(ckpt.open(url).state()) == {"model", "optimizer", "scheduler", "loader", "custom", "rng", "step", "epochs"}

    again = Job(tmp_path)
    use(again.accelerator)
    again.accelerator.project_configuration.iteration = 2
    with pytest.raises(ConflictError, match=r"checkpoint of this number.*\n(.*\n)*.*load_state"):
        again.accelerator.save_state()
    again.accelerator.register_load_state_pre_hook(lambda models, folder: called.append((models.pop(), folder)))
    again.accelerator.load_state()
    assert called[-1] == (again.net, url)
    assert again.accelerator.project_configuration.iteration == 3
    assert (again.train(iter(again.loader)), {k: v.tolist() for k, v in again.custom.state_dict().items()}) == (
        expected[0],
        {k: v.tolist() for k, v in expected[1].items()},
    )


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize(("seen", "ended"), [(3, False), (6, False), (6, True), (9, False), (12, False), (12, True)])
def test_each_epoch_keeps_its_own_order(tmp_path: Path, stateful: bool, seen: int, ended: bool) -> None:
    """accelerate shuffles by the number of the epoch, which it saves nowhere (its #3996). ``ended``: saved after the loop, not in it."""

    def job() -> tuple[Any, Any]:
        data = DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=True)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=data)
        use(accelerator, tmp_path, background=False)
        return accelerator, accelerator.prepare(torch.utils.data.DataLoader(range(6), shuffle=True))

    def samples(loader: Any) -> list[int]:
        return [int(sample) for sample in loader]

    _, loader = job()
    epochs = [samples(loader) for _ in range(3)]
    assert len(set(map(tuple, epochs))) == 3
    accelerator, loader = job()
    for _ in range(6, seen, 6):
        samples(loader)
    for batch, _ in enumerate(loader, 1):
        if batch == (seen - 1) % 6 + 1 and not ended:
            accelerator.save_state()
            break
    if ended:
        accelerator.save_state()
    accelerator, loader = job()
    accelerator.load_state()
    epoch, batch = divmod(seen, 6)
    if batch:
        assert samples(loader if stateful else accelerate.skip_first_batches(loader, batch)) == epochs[epoch][batch:]
        loader.set_epoch(epoch := epoch + 1)
    rest = samples(loader)
    assert (rest or samples(loader)) == epochs[epoch]  # a stateful loader that was at the end comes to it again


def test_directories_that_calls_name(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.accelerator.project_configuration.automatic_checkpoint_naming = False
    job.accelerator.save_state(str(tmp_path / "own"))  # by accelerate itself
    checkpoints: AcceleratorCheckpoints = use(job.accelerator, tmp_path, background=False, give_up_after=2)
    before = {name: value.clone() for name, value in job.net.state_dict().items()}
    job.accelerator.save_state(tmp_path / "a", safe_serialization=False)
    assert checkpoints.checkpointer.handle is None
    for folder in ("a", "own"):
        job.train(iter(job.loader))
        job.accelerator.load_state(str(tmp_path / folder))
        assert all(torch.equal(before[name], value) for name, value in job.net.state_dict().items())
    with pytest.raises(NotFoundError):
        job.accelerator.load_state(str(tmp_path / "none"))
    (tmp_path / "file").touch()
    for name in ("file/1", "b", "file/1", "file/2"):
        with pytest.raises(StorageError) if name == "file/2" else nullcontext():
            job.accelerator.save_state(tmp_path / name)
    with pytest.raises(UsageError, match="'exclude_frozen_parameters'"):
        job.accelerator.save_state(str(tmp_path / "b"), exclude_frozen_parameters=True)
    with pytest.raises(UsageError, match="map_location"):
        job.accelerator.load_state(str(tmp_path / "a"), map_location="meta")


def test_what_it_does_not_go_with(tmp_path: Path) -> None:
    job = Job(tmp_path, save_on_each_node=True)
    with pytest.raises(UsageError, match="save_on_each_node"):
        use(job.accelerator)
    with pytest.raises(UsageError, match="memory="):
        use(Job(tmp_path).accelerator, memory=ckpt.Memory())


def hooks_fail_on_one_rank(folder: str) -> list[str]:
    torch.manual_seed(0)
    job = Job(Path(folder))
    accelerator, errors = job.accelerator, []
    checkpoints = use(accelerator, job=ckpt.Job(timeout=100))

    def fail(*_: Any) -> None:
        raise OSError("no room for the configuration")

    def save(url: str | None) -> None:
        accelerator.save_state(url)
        checkpoints.checkpointer.wait()

    save(None)
    accelerator.project_configuration.automatic_checkpoint_naming = False
    save(f"{folder}/named")
    for alone in (0, 1):  # the leader, or another
        for numbered in (True, False):
            accelerator.project_configuration.automatic_checkpoint_naming = numbered
            for register, call in (
                (accelerator.register_save_state_pre_hook, save),
                (accelerator.register_load_state_pre_hook, accelerator.load_state),
            ):
                hook = register(fail if dist.get_rank() == alone else lambda *_: None)
                with pytest.raises((OSError, ckpt.errors.RankFailedError)) as caught:
                    call(None if numbered else f"{folder}/named")
                errors.append(type(caught.value).__name__)
                hook.remove()
    accelerator.project_configuration.automatic_checkpoint_naming = True
    accelerator.save_state()
    accelerator.load_state()
    checkpoints.checkpointer.wait()
    return errors


def test_a_hook_that_fails_on_one_rank_ends_the_call_on_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, hooks_fail_on_one_rank, str(tmp_path))
    assert first == ["OSError"] * 4 + ["RankFailedError"] * 4
    assert second == ["RankFailedError"] * 4 + ["OSError"] * 4
    assert [s.world_size for s in ckpt.list_steps(str(tmp_path / "checkpoints"))] == [2, 2]
