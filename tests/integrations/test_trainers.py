"""The trainers of Hugging Face and Lightning: stopped and gone on with, they do what they would have done, to the last bit.

They warn and set global things when they are imported, so they run in processes of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.verify import verify
from ckpt.formats.registry import open_catalog

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(tmp_path: Path, code: str, *, launcher: list[str] | None = None) -> Any:
    """What ``code`` put into ``told``, on the first rank; ``runs`` there is ``tmp_path``."""
    script = tmp_path / "script.py"
    before = f"import json, os, sys\nsys.path.insert(0, {str(EXAMPLES)!r})\nruns = {str(tmp_path)!r}\n"
    script.write_text(f"{before}{code}\nif os.environ.get('RANK', '0') == '0':\n    print('TOLD', json.dumps(told))\n")
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *(launcher or []), str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("TOLD"))[5:])


def tensors_of(url: str) -> dict[str, bytes]:
    view = ckpt.open(url)
    return {name: view[name].read().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name in view}


def steps_of(root: Path) -> list[int | None]:
    return [s.number for s in ckpt.list_steps(str(root)) if s.committed]


TRAINER = """
import ckpt
from hf_trainer import train
from ckpt.policies import AtSteps
def logs(trainer):
    return {e["step"]: [e["loss"], e["grad_norm"], e["epoch"]] for e in trainer.state.log_history if "loss" in e}
epochs = 3 * int(os.environ.get("WORLD_SIZE", "1"))  # 18 steps
straight = train(f"{runs}/a", epochs=epochs)
train(f"{runs}/b", epochs=epochs, stop_after=9, save=AtSteps((8,)))
steps = [s.number for s in ckpt.list_steps(f"{runs}/b")]
resumed = train(f"{runs}/b", epochs=epochs)
told = [logs(straight), logs(resumed), resumed.state.global_step, steps]
"""


def same_runs(tmp_path: Path, told: Any) -> None:
    straight, resumed, last, before = told
    assert before == [5, 8]
    assert len(straight) == 18 == last == max(map(int, resumed))
    assert {step: loss for step, loss in straight.items() if step != "8"} == {step: loss for step, loss in resumed.items() if step != "8"}
    final = f"step-{last:08d}"
    assert tensors_of(str(tmp_path / "a" / final)) == tensors_of(str(tmp_path / "b" / final))


@pytest.fixture(scope="module")
def trainer_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """``TRAINER`` and ``OLDER`` in one process: the directory of the runs, and what each told."""
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "older").mkdir()
    return folder, *run(folder, f"{TRAINER}\nfirst, runs = told, f'{{runs}}/older'\n{OLDER}\ntold = [first, told]")


def test_a_trainer_that_was_stopped_goes_on(trainer_runs: tuple[Path, Any, Any]) -> None:
    """It stops in the middle of the second epoch, at step 9, and goes on from step 8, which a policy saved."""
    folder, told, _ = trainer_runs
    same_runs(folder, told)
    assert steps_of(folder / "b") == [15, 18]
    newest = ckpt.list_steps(str(folder / "b"))[-1]
    assert verify(newest.url).ok
    state = json.loads(ckpt.open(newest.url).state()["trainer"])
    assert newest.metrics["loss"] == state["log_history"][-1]["loss"]
    assert isinstance(state["stateful_callbacks"]["TrainerControl"], dict)  # a list only if there are several, as in the trainer's own


OLDER = """
import ckpt
from hf_trainer import train
from ckpt.integrations.transformers import use
def losses(trainer, after):
    return {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e and e["step"] > after}
trainer = train(f"{runs}/a", epochs=1)  # 6 steps
straight = losses(trainer, 5)
trainer.train(resume_from_checkpoint=f"{runs}/a/step-00000005")
told = [straight, losses(trainer, 5)]
import ckpt.integrations.transformers as integration
agreed, integration.agreed_latest = integration.agreed_latest, lambda checkpointer: 5  # the leader has not seen step 6 yet
trainer.train()
told += [losses(trainer, 5)]
integration.agreed_latest = agreed
use(trainer, f"{runs}/b")
trainer.train(resume_from_checkpoint=f"{runs}/a/step-00000005")  # of another run
told += [losses(trainer, 5)]
def refused(call):
    try:
        call()
    except ValueError as error:
        told.append(f"{type(error).__name__}: {error}")
use(trainer, f"{runs}/nothing")
refused(lambda: trainer.train(resume_from_checkpoint=True))
import functools
import hf_trainer
import torch
from transformers import AutoModelForCausalLM
rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(9))]
plain = hf_trainer.TrainingArguments
worst = {"eval_strategy": "steps", "eval_steps": 5, "metric_for_best_model": "loss", "greater_is_better": True, "save_total_limit": 1}
hf_trainer.TrainingArguments = lambda **given: plain(**given, **worst, load_best_model_at_end=True)
hf_trainer.Trainer = functools.partial(hf_trainer.Trainer, eval_dataset=rows)
hf_trainer.use = lambda trainer, run, **given: use(trainer, run, weights=True)
best = [train(f"{runs}/best", epochs=3), train(f"{runs}/best", epochs=4)]
for trainer in best:
    model = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    pairs = zip(model.state_dict().items(), trainer.model.state_dict().items(), strict=True)
    told += [trainer.state.best_global_step, all(n == m and torch.equal(a, b) for (n, a), (m, b) in pairs)]
worst.update(eval_steps=1, greater_is_better=False)
trainer = train(f"{runs}/unsaved", epochs=1)
told += [trainer.state.best_global_step in (1, 2, 3, 4), trainer.state.best_model_checkpoint]
hf_trainer.TrainingArguments = lambda **given: plain(**given, save_only_model=True)
hf_trainer.use = use
train(f"{runs}/only", epochs=1)
trainer = train(f"{runs}/only", epochs=2)
ckpt.convert(f"{runs}/only/step-00000012", f"{runs}/out", to="hf")  # with the configuration that lies beside the step
model = AutoModelForCausalLM.from_pretrained(f"{runs}/out")
told += [trainer.state.global_step, torch.equal(model.lm_head.weight, trainer.model.lm_head.weight)]
wait, calls = integration.Sidecars.wait, []
def failing(self):
    wait(self)
    calls.append(None)
    if len(calls) == 2:
        raise ckpt.errors.StorageError("the storage failed")
integration.Sidecars.wait = failing
hf_trainer.use = lambda trainer, run, **given: use(trainer, run, give_up_after=2)
trainer = train(f"{runs}/outage", epochs=1)
told += [trainer.state.global_step]
import transformers.integrations
from transformers.trainer_utils import HPSearchBackend
transformers.integrations.hp_params = dict  # as of the packages that search
class Full(hf_trainer.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5 and trainer._train_batch_size == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
trainer.args.auto_find_batch_size = True
trainer.add_callback(Full())
use(trainer, f"{runs}/full")
trainer.train()
told += [json.loads(ckpt.open(f"{runs}/full/step-00000005").state()["trainer"])["train_batch_size"]]
class Trial(dict):
    params = {}
use(trainer, f"{runs}/search")
trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.OPTUNA, lambda trial: {"per_device_train_batch_size": 3}
for Trial.number in (0, 1, 1):
    trainer.train(trial=Trial())
    told += [len(losses(trainer, 0)), [s.number for s in ckpt.list_steps(f"{runs}/search/run-{Trial.number}")]]
trainer.args.push_to_hub = True
refused(lambda: use(trainer, f"{runs}/search"))
class Own(type(trainer)):
    def _save_checkpoint(self, model, trial): ...
trainer.args.push_to_hub, trainer.__class__ = False, Own
import ckpt.integrations.transformers as adapter
adapter.log.addFilter(lambda record: told.append(record.getMessage()))
use(trainer, f"{runs}/own")
"""


def test_a_trainer_goes_on_from_the_step_that_is_named(trainer_runs: tuple[Path, Any, Any]) -> None:
    straight, again, agreed, elsewhere, error, *_ = trainer_runs[2]
    assert list(straight) == ["6"]
    assert straight == again == agreed == elsewhere
    assert error.startswith("UsageError: no valid checkpoint found in")


def test_the_best_model_is_loaded_and_the_model_alone_saved(trainer_runs: tuple[Path, Any, Any]) -> None:
    """The best is an early step, by a metric that gets worse: it outlives ``save_total_limit``, and a resumed run still knows it; a best
    step that was not saved is no checkpoint. What ``from_pretrained`` needs lies beside it, and goes with what retention removes."""
    runs, (best, *rest) = trainer_runs[0] / "older", trainer_runs[2][5:]
    assert best in (5, 10, 15) and rest[:8] == [True, best, True, True, None, 12, True, 6]
    assert steps_of(runs / "best") == [best, 24]
    there = sorted(path.name for path in (runs / "best").iterdir())
    assert there == ["ckpt-log.json", "logs", f"step-{best:08d}", "step-00000024"]
    beside = {path.name for path in (runs / "best" / there[2]).iterdir() if path.is_file()}
    assert beside == {"checkpoint.json", "config.json", "generation_config.json", "model.safetensors"}
    assert {"model", "trainer"} == ckpt.open(str(runs / "only" / "step-00000012")).state().keys()
    assert not (runs / "only" / "step-00000012" / "model.safetensors").exists()


def test_a_smaller_batch_and_each_trial_begin_anew(trainer_runs: tuple[Path, Any, Any]) -> None:
    """What the trainer makes of an error of memory is saved over what it had; no trial of a search goes on from another one."""
    size, *trials, refused, warned = trainer_runs[2][14:]
    assert size == 3 and trials == [8, [5, 8]] * 3
    assert warned == "Own._save_checkpoint is not called: what it writes beside a checkpoint is not there"
    assert "a push of each checkpoint: set hub_strategy to end" in refused


@pytest.mark.slow
def test_two_ranks_that_were_stopped_go_on(tmp_path: Path) -> None:
    same_runs(tmp_path, run(tmp_path, TRAINER, launcher=TWO_RANKS))
    assert ckpt.list_steps(str(tmp_path / "b"))[-1].world_size == 2


FSDP2 = """
import hf_trainer
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
made = AcceleratorState.__init__
def made_with_fsdp(self, *given, **named):  # accelerate leaves FSDP out on CPUs
    made(self, *given, **named)
    if named.get("fsdp_plugin") is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, named["fsdp_plugin"]
AcceleratorState.__init__ = made_with_fsdp
arguments = hf_trainer.TrainingArguments
config = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["GPT2Block"]}
hf_trainer.TrainingArguments = lambda **given: arguments(**given, fsdp="full_shard", fsdp_config=config)
"""


@pytest.mark.slow
def test_two_ranks_with_fsdp_that_were_stopped_go_on(tmp_path: Path) -> None:
    code = f"{FSDP2}{TRAINER}\nassert all(isinstance(p, DTensor) for p in resumed.model.parameters())"
    same_runs(tmp_path, run(tmp_path, code, launcher=TWO_RANKS))
    name = "model.transformer.h.0.mlp.c_fc.weight"
    assert len(open_catalog(str(tmp_path / "b" / "step-00000018")).tensors[name].grid) == 2


LIGHTNING = """
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning_fit import Model, fit
from ckpt.errors import StateError, UsageError
from ckpt.integrations.lightning import CkptIO, load_from_checkpoint
straight = fit(f"{runs}/a", epochs=4)
loaded = load_from_checkpoint(Model, f"{runs}/a/last.ckpt", map_location="cpu")
assert loaded.hparams.width == 16
assert all(torch.equal(a, b) for a, b in zip(straight.state_dict().values(), loaded.state_dict().values(), strict=True))
try:
    load_from_checkpoint(Model, f"{runs}/a/last.ckpt", width=8)
    raise AssertionError("another width was taken")
except RuntimeError as error:
    assert "size mismatch" in str(error)
first = fit(f"{runs}/b", epochs=2, background=True)
second = fit(f"{runs}/b", epochs=4)
same = all(torch.equal(a, b) for a, b in zip(straight.state_dict().values(), second.state_dict().values(), strict=True))
told = [straight.losses, first.losses, second.losses, same]

state = {"a": torch.arange(3.0), "b": {5: (1, None), "c": [torch.ones(2)]}}
slow = AsyncCheckpointIO(CkptIO(codec="zstd"))
slow.save_checkpoint(state, f"{runs}/c")
state["a"].zero_()
slow.teardown()
back = CkptIO().load_checkpoint(f"{runs}/c", map_location="cpu")
told += [back["a"].tolist(), str(back["b"][5]), back["b"]["c"][0].tolist()]
later = CkptIO(background=True)
for plugin in (CkptIO(), later):
    try:
        plugin.save_checkpoint({"x": object()}, f"{runs}/d")
        plugin.teardown()
    except StateError as error:
        told.append(str(error))
for where, options in ((f"{runs}/e", {"key": "k"}), ("s3://bucket/e", {"anon": "perhaps"})):
    try:
        CkptIO().save_checkpoint(state, where, storage_options=options)
    except UsageError as error:
        told.append(str(error))
"""


LINKS = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from ckpt.errors import ConflictError, UsageError
from ckpt.integrations.lightning import CkptFSDPStrategy, CkptIO, CkptModelParallelStrategy

io, here = CkptIO(), f"{runs}/links"
os.mkdir(here)
io.save_checkpoint({"w": torch.ones(3)}, f"{here}/a.ckpt")
os.symlink("a.ckpt", f"{here}/last.ckpt")
assert io.load_checkpoint(f"{here}/last.ckpt")["w"].tolist() == [1.0] * 3
try:
    io.save_checkpoint({"w": torch.zeros(3)}, f"{here}/last.ckpt")
    raise SystemExit("it was written through a link")
except ConflictError as err:
    assert f"symbolic link to {os.path.realpath(here)}/a.ckpt" in err.message
io.remove_checkpoint(f"{here}/last.ckpt")
assert os.listdir(here) == ["a.ckpt"] and io.load_checkpoint(f"{here}/a.ckpt")["w"].tolist() == [1.0] * 3
io.remove_checkpoint(f"{here}/a.ckpt")
io.remove_checkpoint(f"{here}/a.ckpt")
whole = {CkptFSDPStrategy: {"state_dict_type": "full"}, CkptModelParallelStrategy: {"save_distributed_checkpoint": False}}
for strategy in whole:
    try:
        strategy(**whole[strategy])
        raise SystemExit("it would have saved shards")
    except UsageError:
        pass
assert os.listdir(here) == []

class Named(ModelCheckpoint):
    CHECKPOINT_NAME_LAST = "last-{epoch}"

keeps = Named(dirpath=here, save_top_k=-1, save_last="link", filename="{epoch}")
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
Trainer(max_epochs=3, limit_train_batches=2, limit_val_batches=0, callbacks=[keeps], plugins=[CkptIO()], **quiet).fit(BoringModel())
"""


@pytest.fixture(scope="module")
def lightning_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """``LIGHTNING`` and ``LINKS`` in one process: the directory of the runs, and what the first told."""
    pytest.importorskip("lightning")
    folder = tmp_path_factory.mktemp("lightning")
    return folder, run(folder, f"{LIGHTNING}\n{LINKS}")


def test_a_fit_that_was_stopped_goes_on(lightning_runs: tuple[Path, Any]) -> None:
    tmp_path, (straight, first, second, same, *others) = lightning_runs
    assert len(first) == 8 and len(second) == 8
    assert first | second == straight and same
    left = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert left == ["epoch=2-step=12.ckpt", "epoch=3-step=16.ckpt", "last.ckpt"]
    assert all(verify(str(tmp_path / "b" / name)).ok for name in left)
    assert others[:3] == [[0.0, 1.0, 2.0], "(1, None)", [1.0, 1.0]]
    assert len(others) == 7 and all("'x' cannot be stored" in text for text in others[3:5])
    assert "no storage options" in others[5]
    assert "the storage option anon is true or false" in others[6]


def test_lightning_removes_links_alone(lightning_runs: tuple[Path, Any]) -> None:
    """``save_last="link"`` with a name that changes: Lightning removes the link of the epoch before."""
    here = lightning_runs[0] / "links"
    assert sorted(p.name for p in here.iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt", "last-epoch=2.ckpt"]
    assert all(verify(str(p)).ok for p in here.iterdir())
    assert (here / "last-epoch=2.ckpt").is_symlink() and ckpt.open(str(here / "last-epoch=2.ckpt")).state()["epoch"] == 2


@pytest.mark.parametrize("library", ["transformers", "accelerate", "deepspeed", "lightning", "torchtitan"])
def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    # also its modules: one that another test has imported is taken from sys.modules without asking for its package
    for name in {library, *(name for name in sys.modules if name.startswith(f"{library}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"ckpt.integrations.{library}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'ckpt-toolkit\[{library}\]'"):
        importlib.import_module(f"ckpt.integrations.{library}")


# ----------------- Lightning's strategies for sharded models on ckpt: a fit that was stopped goes on alike, also on other numbers of ranks.


def ranks(folder: Path, number: int, life: str) -> list[dict[str, Any]]:
    """What each rank told."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
    here = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = str(Path(__file__).parent / "sharded_fits.py")
    ended = subprocess.run([*command, script, str(folder), life], env=here, capture_output=True, text=True, timeout=500, check=False)
    told = [json.loads(line[5:]) for line in ended.stdout.splitlines() if line.startswith("TOLD ")]
    assert len(told) == number, ended.stdout[-2000:] + ended.stderr[-4000:]
    return told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sharded_fit_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    began = ranks(tmp_path, 2, "begin")
    for kind in ("parallel", "fsdp"):
        for told in began:
            whole = told[f"{kind} whole"]
            assert list(whole) == list("0123456") and told[f"{kind} first"] == {n: whole[n] for n in "01234"}
            assert told[f"{kind} again"] == {n: whole[n] for n in "456"}, "weights, moments and rate, to the last bit"
        left = sorted(path.name for path in (tmp_path / kind / "first").iterdir())
        assert left == ["epoch=0-step=4.ckpt", "last.ckpt"] and all(verify(str(tmp_path / kind / "first" / name)).ok for name in left)
        view = ckpt.open(str(tmp_path / kind / "first" / "last.ckpt"))
        assert view.state()["trainer"]["global_step"] == 4 and view["model.net.0.weight"].shape == (16, 8)
    for number in (1, 3):
        for told in ranks(tmp_path, number, "resume"):
            assert told["parallel again"]["4"] == began[0]["parallel whole"]["4"]
            assert list(told["parallel again"]) == list(told["fsdp again"]) == list("456")
