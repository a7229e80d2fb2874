"""The demo: its judgement of losses, its view of unfinished saves, that it leaves no process behind, and (slow) the whole of it. The
training script that saves in the background."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from tests.distributed.ranks import Ranks
from tests.memory.daemons import daemon_in
from tests.scripts import load_script

DEMO = Path(__file__).parent.parent / "examples" / "demo"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load_script("examples_demo_run", DEMO / "run.py")


# -------------------------------------------------------------------------------------------------------------- losses

STEPS = range(5, 9)
LOSSES = {5: 2.5, 6: 2.25, 7: 0.1 + 0.2, 8: 2.0}


def verdict_on(demo: ModuleType, work: Path, trained: dict[int, float], resumed: dict[int, float], straight: dict[int, float]):
    for name, losses in (("trained-0", trained), ("resumed-0", resumed), ("straight", straight)):
        rows = [json.dumps({"step": step, "loss": loss.hex()}) for step, loss in losses.items()]
        (work / f"{name}.losses").write_text("\n".join(rows))
    return demo.Demo(work, demo.QUICK).compare(STEPS)


def test_equal_losses_hold(demo: ModuleType, tmp_path: Path) -> None:
    verdict = verdict_on(demo, tmp_path, {4: 9.0, 5: 2.5, 6: 2.25 + 1e-6}, LOSSES, LOSSES)
    assert verdict.holds
    assert (verdict.differing, verdict.overlap) == ([], 2)
    assert verdict.drift == pytest.approx(1e-6)


def test_the_last_bit_of_a_loss_counts(demo: ModuleType, tmp_path: Path) -> None:
    verdict = verdict_on(demo, tmp_path, LOSSES, LOSSES, LOSSES | {7: math.nextafter(LOSSES[7], 1)})
    assert not verdict.holds
    assert verdict.differing == [7]


@pytest.mark.parametrize("lacking", ["resumed", "straight", "both"])
def test_a_step_that_was_not_run_is_not_equal(demo: ModuleType, tmp_path: Path, lacking: str) -> None:
    less = {step: loss for step, loss in LOSSES.items() if step != 6}
    resumed, straight = less if lacking != "straight" else LOSSES, less if lacking != "resumed" else LOSSES
    verdict = verdict_on(demo, tmp_path, LOSSES, resumed, straight)
    assert not verdict.holds
    assert verdict.differing == [6]


@pytest.mark.parametrize("trained", [{}, {4: 2.5}, {5: 2.6}], ids=str)
def test_the_killed_run_must_have_gone_the_same_way(demo: ModuleType, tmp_path: Path, trained: dict[int, float]) -> None:
    assert not verdict_on(demo, tmp_path, trained, LOSSES, LOSSES).holds


def test_a_step_run_twice_must_repeat_itself(demo: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "resumed-0.losses"
    twice = '{"step": 5, "loss": "0x1.0p+1"}\n{"step": 5, "loss": "0x1.0p+1"}\n'
    log.write_text(twice)
    assert demo.read_losses(log) == {5: 2.0}
    log.write_text(twice + '{"step": 5, "loss": "0x1.1p+1"}\n')
    with pytest.raises(demo.DemoError, match="step 5"):
        demo.read_losses(log)


def test_a_loss_that_is_no_number_is_an_error(demo: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "straight.losses"
    log.write_text('{"step": 5, "loss": "nan"}\n')
    with pytest.raises(demo.DemoError, match="step 5 is nan"):
        demo.read_losses(log)


# --------------------------------------------------------------------------------------------------------- saves and jobs


def test_a_save_under_way_has_data_and_no_commit_record(demo: ModuleType, tmp_path: Path) -> None:
    for name in ("step-00000004", "step-00000008", "step-00000012"):
        (tmp_path / name / "data").mkdir(parents=True)
    assert demo.saving(tmp_path) is None
    for name in ("step-00000004", "step-00000008"):
        (tmp_path / name / "data" / "0123456789abcdef-00000.safetensors").write_bytes(bytes(10_000))
    (tmp_path / "step-00000004" / "checkpoint.json").write_text("{}")
    found = demo.saving(tmp_path)
    assert found == tmp_path / "step-00000008"
    assert 10_000 <= demo.bytes_in(found) < 100_000


def job_of(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, work: Path, code: str):
    """Two processes that run ``code`` in place of train.py."""
    (work / "train.py").write_text(code)
    monkeypatch.setattr(demo, "HERE", work)
    return demo.Job("fake", 2, [], work)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_no_rank_outlives_its_job(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[BaseException]) -> None:
    pids = []

    def interrupted() -> None:
        with job_of(demo, monkeypatch, tmp_path, "import time; time.sleep(100)") as job:
            pids.extend(process.pid for process in job.ranks)
            assert job.running()
            raise error

    with pytest.raises(error):
        interrupted()
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_a_rank_that_fails_is_named_with_what_it_said(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no more memory')\ntime.sleep(100)"
    with job_of(demo, monkeypatch, tmp_path, code) as job, pytest.raises(demo.DemoError, match=r"rank 1(.|\n)*no more memory"):
        job.finish()
    assert all(gone(process.pid) for process in job.ranks)


def test_a_job_that_hangs_is_given_up(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "PATIENCE", 0.2)
    began = time.monotonic()
    with job_of(demo, monkeypatch, tmp_path, "import time; time.sleep(100)") as job, pytest.raises(demo.DemoError, match="not finished"):
        job.finish()
    assert time.monotonic() - began < 50


# ------------------------------------------------------------------------------------------------- training with saves in the background

ASYNC = DEMO.parent / "async_training.py"


def train(run: Path, *arguments: str) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(ASYNC), str(run), *arguments], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    view = ckpt.open(str(checkpoint))
    return {name: view[name][...].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name in view}


@pytest.mark.slow
def test_what_one_process_saved_while_training_went_on_is_what_was_there(tmp_path: Path) -> None:
    train(tmp_path / "a", "--steps", "8", "--every", "4")
    train(tmp_path / "b", "--steps", "4", "--every", "4")
    train(tmp_path / "b", "--steps", "8", "--every", "4")
    check_saves_of_async_training(tmp_path, 1)


def go_on_in_background(ranks: Ranks, folder: Path) -> None:
    """Run ``a``, by torchrun (``test_under_torchrun.py``), trained on while its step 4 was saved. ``b`` ends with step 4, so nothing
    changes any more, and goes on: what was saved is what was there."""
    for last in (4, 8):
        ranks.run(2, train_in_background, str(folder / "b"), last)
    check_saves_of_async_training(folder, 2)


def train_in_background(run: str, last: int) -> None:
    """On a rank: what the example does under torchrun."""
    import torch.distributed as dist

    example("async_training").train(run, last, 4, dist.get_rank(), dist.get_world_size())


def check_saves_of_async_training(root: Path, ranks: int) -> None:
    for step in (4, 8):
        a, b = (tensors_of(root / run / f"step-{step:08d}") for run in ("a", "b"))
        assert a == b
        assert ckpt.open(str(root / "a" / f"step-{step:08d}")).state()["step"] == step
    assert {"model.0.weight", "averaged.0.weight", "optimizer.state.model.0.weight.exp_avg"} <= set(a)
    assert tensors_of(root / "a" / "step-00000004") != a
    assert [(s.number, s.committed, s.world_size) for s in ckpt.list_steps(str(root / "a"))] == [(4, True, ranks), (8, True, ranks)]


# ------------------------------------------------------------------------------------------------------------- one for each task

EXAMPLES = DEMO.parent


def example(name: str) -> ModuleType:
    return load_script(f"examples_{name}", EXAMPLES / f"{name}.py")


def call(name: str, function: str, *args: Any) -> Any:
    """On a rank: the process group is there already."""
    return getattr(example(name), function)(*args)


def test_every_example_has_a_docstring_and_a_paragraph() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc is not None and f"examples/{path.name}" in doc, path.name
        assert f"## {path.name}" in readme or f", {path.name}" in readme, path.name


INCIDENTS = EXAMPLES / "incidents"


def test_the_page_has_the_incidents_that_are_played() -> None:
    page = (EXAMPLES.parent / "docs" / "incidents.md").read_text()
    rows = re.findall(r"^\| \[\S+?#(\d+)\]\(https://github.com/(\S+?)/(?:issues|pull)/(\d+)\)", page, re.MULTILINE)
    titles = [(ast.get_docstring(ast.parse(path.read_text())) or "").partition(":")[0] for path in INCIDENTS.glob("*_[0-9]*.py")]
    assert {f"{repository}#{number}" for _, repository, number in rows} == set(titles) and len(rows) == len(titles) == 10
    assert all(shown == number for shown, _, number in rows)


@pytest.mark.parametrize(
    "outcomes",
    [
        {"kempnerforge_114": "the next step is the same to the last bit", "vllm_53537": "CorruptError"},
        pytest.param(
            {"lightning_21813": "Checkpointer keeps it", "accelerate_3996": "the next epoch with use(accelerator)"}, marks=pytest.mark.slow
        ),
    ],
    ids=["ckpt alone", "trainers"],
)
def test_what_went_wrong_elsewhere_is_refused_or_right(outcomes: dict[str, str]) -> None:
    """Those whose packages are at hand; ``make incidents`` plays all."""
    command = [sys.executable, str(INCIDENTS), *outcomes]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [re.split("[:;\n]", text)[0] for text in re.split(r"^  ckpt \S+: ", done.stdout, flags=re.MULTILINE)[1:]] == [*outcomes.values()]
    assert "mended" not in done.stdout, done.stdout


def test_a_plain_loop_goes_on_as_if_it_had_not_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = example("plain_loop")
    plain.train(str(tmp_path / "whole"), 24, 8)
    plain.train(str(tmp_path / "parts"), 19, 8)
    assert "going on" not in capsys.readouterr().out
    plain.train(str(tmp_path / "parts"), 24, 8)
    assert "resuming after step 16\n" in capsys.readouterr().out
    whole, parts = (tensors_of(tmp_path / run / "step-00000024") for run in ("whole", "parts"))
    assert whole == parts and "rng" in whole


def test_weights_are_served_in_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    example("plain_loop").train(str(tmp_path / "run"), 4, 2)
    serve = example("serve")
    url = serve.newest(str(tmp_path / "run"))
    model = serve.weights(url)
    view = ckpt.open(url)
    for name, value in model.state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, view[f"model.{name}"].read().bfloat16())
    monkeypatch.setattr(sys, "argv", ["serve.py", str(tmp_path / "run")])
    serve.main()
    assert "step-00000004 has 17 tensors" in capsys.readouterr().out


def test_fsdp2_goes_on_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.run(2, call, "fsdp2", "train", str(tmp_path / "whole"), 20, 10)[0]
    ranks.run(2, call, "fsdp2", "train", str(tmp_path / "parts"), 15, 10)
    assert ranks.run(2, call, "fsdp2", "train", str(tmp_path / "parts"), 10, 10) == [None, None], "no step is left"
    assert ranks.run(3, call, "fsdp2", "train", str(tmp_path / "parts"), 20, 10)[0] == pytest.approx(whole, rel=1e-3)
    assert [(s.number, s.world_size) for s in ckpt.list_steps(str(tmp_path / "parts"))] == [(10, 2), (20, 3)]


@pytest.mark.parametrize("name", ["tp_fsdp2", "megatron_style"])
def test_tensor_parallel_runs_go_on_on_another_mesh(ranks: Ranks, tmp_path: Path, name: str) -> None:
    whole = ranks.run(1, call, name, "train", str(tmp_path / "whole"), 12, 6, 1)[0]
    first = ranks.run(4, call, name, "train", str(tmp_path / "parts"), 8, 6, 2)[0]
    then = ranks.run(2, call, name, "train", str(tmp_path / "parts"), 12, 6, 1)[0]
    assert len(first) == 8 and first == pytest.approx(whole[:8], rel=1e-3)
    assert len(then) == 6 and then == pytest.approx(whole[6:], rel=1e-3)
    assert whole[-1] < 0.8 * whole[0]


def test_another_world_size_has_the_same_tensors(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(4, call, "another_world_size", "save", str(tmp_path / "c"))
    loaded = ranks.run(3, call, "another_world_size", "load", str(tmp_path / "c"))
    assert len(saved[0]) == 16 and all(found == saved[0] for found in [*saved, *loaded])


def test_a_running_job_is_exported(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert all(0 < d < 0.05 for d in ranks.run(2, call, "export_hf", "run", str(tmp_path / "out"), 2))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1


def llama(folder: Path, **options: Any) -> Any:
    """A small random Llama, also as files in ``folder``."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 70, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, **options)).eval()
    model.save_pretrained(folder)
    return model


def engine_answers(url: str, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """On a rank: the logits of a prompt, and how it goes on."""
    import torch.distributed as dist

    engine = example("tiny_engine").engine_of(url, dist.group.WORLD)
    return engine(prompt), engine.generate(prompt, 5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_engine_answers_as_transformers_does(ranks: Ranks, tmp_path: Path, tied: bool) -> None:
    model = llama(tmp_path, tie_word_embeddings=tied)
    prompt = torch.randint(70, (2, 6))
    with torch.no_grad():
        logits, answer = model(prompt).logits, model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None)
    for size in (1, 2, 4):  # with 4 ranks, two share each head of keys and values
        for its_logits, its_answer in ranks.run(size, engine_answers, str(tmp_path), prompt):
            assert torch.allclose(its_logits, logits, atol=1e-5) and torch.equal(its_answer, answer)


def test_ranks_change_in_memory_as_through_a_checkpoint(tmp_path: Path) -> None:
    """Four ranks, three, six: the same losses to the last bit, and every byte from memory."""
    six = Ranks(6)
    live = six.run(6, call, "elastic_live", "train", 3)
    stored = six.run(6, call, "elastic_live", "train", 3, str(tmp_path))
    assert [losses for losses, _ in live] == [losses for losses, _ in stored]
    assert [len(losses) for losses, _ in live] == [9, 9, 9, 6, 3, 3]  # a rank that rests sees no losses
    assert len(set(live[0][0])) == 9 and sum(sent for _, sent in live) > 300_000


def test_a_rank_is_lost_and_the_losses_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, of which one is killed, then new jobs of three and of four: the losses of a run through storage that had the same."""
    four = Ranks(4)
    with daemon_in(tmp_path / "daemon"):
        folder = {"CKPT_MEMORY_DIR": str(tmp_path / "daemon")}
        for size, last, kill_at in ((4, 6, 4), (4, 6, None), (3, 9, None), (4, 12, None)):
            four.run(size, lost_rank, folder, str(tmp_path / "memory"), last, kill_at, allow_death=kill_at is not None)
    for size, last in ((4, 6), (3, 9), (4, 12)):
        four.run(size, lost_rank, {}, str(tmp_path / "storage"), last, None)
    memory, storage = (losses_of(tmp_path / f"{run}.log") for run in ("memory", "storage"))
    assert memory == storage and len(memory) == 12 and len(set(memory.values())) == 12
    lives = [line for line in (tmp_path / "memory.log").read_text().splitlines() if line.startswith("life")]
    assert [line.partition(" from ")[0] for line in lives] == ["life on 4 ranks", "life on 4 ranks", "life on 3 ranks", "life on 4 ranks"]
    assert all("memory of this host" in line and line.endswith("root 0 B") for line in lives[1:]), lives


def lost_rank(environment: dict[str, str], run: str, last: int, kill_at: int | None) -> None:
    os.environ.update(environment)
    example("lost_rank").train(run, last, kill_at, memory=bool(environment))


def losses_of(log: Path) -> dict[int, str]:
    """By step, to the last bit; no step was trained twice."""
    rows = [line.removeprefix("step ").split(": ") for line in log.read_text().splitlines() if line.startswith("step ")]
    assert len({step for step, _ in rows}) == len(rows), rows
    return {int(step): loss for step, loss in rows}


@pytest.mark.slow
def test_a_rank_is_lost_under_torchrun(tmp_path: Path) -> None:
    """As the example's docstring has it; a rank that torchrun starts again goes on with the losses of a run that nobody killed."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CKPT_MEMORY_DIR": str(tmp_path / "daemon")}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else restarted ranks find addresses of dead ones (pytorch#135712)
    jobs = [
        (4, ["memory", "--steps", "8", "--kill-at", "5"]),
        (3, ["memory", "--steps", "10"]),
        (4, ["storage", "--steps", "8", "--no-memory"]),
        (3, ["storage", "--steps", "10", "--no-memory"]),
    ]
    with daemon_in(tmp_path / "daemon"):
        for size, (run, *rest) in jobs:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "--max-restarts=3"]
            command = [sys.executable, *launcher, str(EXAMPLES / "lost_rank.py"), str(tmp_path / run), *rest]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr
    memory, storage = (losses_of(tmp_path / f"{run}.log") for run in ("memory", "storage"))
    assert memory == storage and len(set(memory.values())) == 10
    assert (tmp_path / "memory.log").read_text().count("life on 4 ranks") == 2


def test_engines_come_and_go_while_a_trainer_publishes(tmp_path: Path) -> None:
    """Each version that an engine has is one that the trainer published, whole: the sum of all bits is the same."""
    ranks, folder = Ranks(4), str(tmp_path)
    with ThreadPoolExecutor(3) as pool:
        trainer = pool.submit(ranks.run, 4, call, "rl_loop", "train", folder, 8, 2, timeout=120)
        one = pool.submit(ranks.run, 2, call, "rl_loop", "engine", folder, "one", timeout=120)
        other = pool.submit(ranks.run, 1, call, "rl_loop", "engine", folder, "other", 3, process_group=False, timeout=120)
        published, rewards = trainer.result()[0]
        stays, leaves = one.result(), other.result()
    assert stays[0] == stays[1] and stays[0][-1][0] == 7 and len(leaves[0]) == 3
    assert {*stays[0], *leaves[0]} <= {*published.items()}
    assert len(set(published.values())) == 8 and max(rewards[4:]) > rewards[0]


# ------------------------------------------------------------------------------------------------------------- the whole


@pytest.mark.slow
def test_the_second_engine_comes_before_the_trainer_has_ended() -> None:
    """Also where the first one skips versions, or there are few: the trainer waits half way."""
    command = [sys.executable, str(EXAMPLES / "rl_loop.py"), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^engine b \(TP 1\) leaves after versions \[\d", done.stdout, re.MULTILINE)
    assert re.search(r"^engine a \(TP 2\) leaves after versions .*2\]$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_the_demo_holds(tmp_path: Path) -> None:
    work = tmp_path / "demo"
    command = [sys.executable, str(DEMO / "run.py"), "--quick", "--keep", str(work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    summary = done.stdout.partition("All checks passed")[2]
    assert "8 of 8 steps" in summary
    rows = {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in work.glob("*.losses")}
    resumed = rows["resumed-0.losses"] + rows["resumed-1.losses"]
    assert len(resumed) == 8 and resumed == rows["straight.losses"]
    trained = {row["step"]: float.fromhex(row["loss"]) for row in rows["trained-0.losses"]}
    assert len(trained) >= 12 and trained[max(trained)] < trained[1] - 0.5


def test_parts_and_averages_go_on(tmp_path: Path) -> None:
    """Stopped half way and started again, the example ends with the loss of a run that was not stopped; checkpoints are small."""
    train = example("lora_ema").train
    train(str(tmp_path / "two"), 6, 3)
    train(str(tmp_path / "two"), 12, 3)
    train(str(tmp_path / "one"), 12, 3)
    one, two = (ckpt.open(str(tmp_path / run / "steps" / "step-00000012")) for run in ("one", "two"))
    assert set(one) == set(two) and not any(".base." in name for name in one)
    assert all(torch.equal(one[name].read(), two[name].read()) for name in one)
    assert ckpt.list_steps(str(tmp_path / "one" / "steps"))[-1].tensor_bytes < 50_000


# -------------------------------- The example of resumable data: over three lives on one and two ranks every sample is used once per epoch.

SCRIPT = Path(__file__).parent.parent / "examples" / "resumable_data.py"


def train_resumable(run: str, last: int) -> str:
    """On a rank: what the script does under torchrun; gives what it prints."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(SCRIPT))["train"](run, last, 5, rank, world)
    return out.getvalue()


def run_script(*arguments: str) -> str:
    """In a process without a group: the script as a program; gives what it prints."""
    sys.argv = [str(SCRIPT), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return out.getvalue()


def used(run: Path) -> list[list[int]]:
    """The samples of each step, of all ranks."""
    steps: dict[int, dict[str, list[int]]] = {}
    for path in sorted(run.glob("used-*.txt")):
        for line in path.read_text().splitlines():
            step, *samples = map(int, line.split())
            steps.setdefault(step, {})[path.name] = samples
    return [[n for part in steps[step].values() for n in part] for step in sorted(steps)]


def test_every_sample_once(tmp_path: Path) -> None:
    ranks = Ranks(2)
    assert "step 5," in ranks.run(1, run_script, str(tmp_path), "--steps", "5", process_group=False)[0]
    assert "step 15," in ranks.run(2, train_resumable, str(tmp_path), 15)[0]
    last = ranks.run(1, train_resumable, str(tmp_path), 25, process_group=False)[0]
    assert "step 25, epoch 2, 200 of its samples" in last
    flat = [n for step in used(tmp_path) for n in step]
    assert len(flat) == 25 * 48
    assert sorted(flat[:500]) == sorted(flat[500:1000]) == list(range(500))
    assert len(set(flat[1000:])) == 200
