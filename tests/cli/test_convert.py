"""``ckpt convert`` as a command, and ``ckpt cp`` of a virtual checkpoint: what they say, and how they end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

import ckpt
from ckpt.cli.main import cli
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.verify import verify
from ckpt.io_backends import open_backend
from ckpt.io_backends.conformance.reading import everything
from tests.cli.checkpoints import data_files, flip, sample, write_checkpoint
from tests.cli.running import run

HF = Path(__file__).parents[1] / "fixtures" / "hf"


def test_ranks_of_megatron(tmp_path: Path) -> None:
    words = ["convert", "--to", "megatron", "--names", "llama", "--convention", "megatron", "--tp", "2", "--pp", "2"]
    found = run(*words, "--dry-run", str(HF / "llama"), str(tmp_path / "m"))
    assert found.exit_code == 0, found.output
    listed = [line.strip() for line in found.stdout.splitlines()[1:]]
    assert listed == [f"release/mp_rank_{t:02d}_{p:03d}/model_optim_rng.pt" for p in range(2) for t in range(2)]
    found = run(*words, "--arg", "transformer_impl=local", "--arg", "norm_epsilon=1e-5", "--json", str(HF / "llama"), str(tmp_path / "m"))
    assert json.loads(found.stdout)["files"] == listed and json.loads(found.stdout)["finished"]
    kept = ckpt.open(str(tmp_path / "m")).state()["args"]
    assert (kept["transformer_impl"], kept["norm_epsilon"], kept["pipeline_model_parallel_size"]) == ("local", 1e-5, 2)
    for wrong in (["--arg", "x"], ["--vpp", "0"], ["--arg", "expert_model_parallel_size=2"], ["--to", "torch"]):
        assert run(*words, *wrong, str(HF / "llama"), str(tmp_path / "n")).exit_code == 2, wrong


def test_numbers_of_the_model(tmp_path: Path) -> None:
    """What lacks is said at once, by the words of a configuration; what follows from it is not asked for; typing errors are found."""
    back = ["convert", "--to", "hf", "--names", "llama", "--convention", "huggingface"]
    made = run("convert", "--to", "torch_dist", "--names", "llama", "--convention", "megatron", str(HF / "llama"), str(tmp_path / "m"))
    assert made.exit_code == 0, made.output
    found = run(*back, str(tmp_path / "m"), str(tmp_path / "b"))
    assert found.exit_code == 2 and "are not given: head_size, heads, query_groups, vocabulary" in found.stderr
    assert "--set head_size=… --set heads=… --set query_groups=… --set vocabulary=… " in found.stderr
    found = run(*back, "--set", "query_group=2", str(tmp_path / "m"), str(tmp_path / "b"))
    assert found.exit_code == 2 and "no translation asks for a number 'query_group'" in found.stderr
    config = json.loads((HF / "llama" / "config.json").read_text())
    said = {"heads": config["num_attention_heads"], "query_groups": config["num_key_value_heads"], "vocabulary": config["vocab_size"]}
    said["head_size"] = config["hidden_size"] // said["heads"]
    (tmp_path / "m" / "release" / "config.json").write_text(json.dumps({**config, "num_key_value_heads": said["heads"]}))
    sets = [word for name, number in said.items() for word in ("--set", f"{name}={number}")]
    for place, words in (("b", sets), ("c", ["--set", f"query_groups={said['query_groups']}"])):  # with it, other key_rows follow
        found = run(*back, *words, str(tmp_path / "m"), str(tmp_path / place))
        assert found.exit_code == 0, found.output
        assert run("diff", str(HF / "llama"), str(tmp_path / place)).exit_code == 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--convention", "huggingface", "llama"], "--convention megatron for the other way"),
        (["--convention", "megatrn", "llama"], "huggingface or megatron"),
        (["--convention", "megatron", "."], "such as"),
        (["--convention", "megatron", "llama/config.json"], "name the directory"),
    ],
)
def test_what_to_do_after_a_mistake(tmp_path: Path, words: list[str], hint: str) -> None:
    found = run("import", "--names", "llama", *words[:-1], str(HF / words[-1]), str(tmp_path / "v"))
    assert found.exit_code and hint in found.stderr.splitlines()[-1], found.output
    assert not (tmp_path / "v").exists()


def test_a_data_file_of_dcp_is_not_damaged() -> None:
    found = run("inspect", str(HF.parent / "fsdp" / "fsdp2_ws2" / "__0_0.distcp"))
    assert found.exit_code == 12 and "name the directory" in found.stderr


def test_what_an_export_lacks(tmp_path: Path) -> None:
    megatron = str(tmp_path / "m")
    assert run("convert", "--to", "torch_dist", "--names", "llama", "--convention", "megatron", str(HF / "llama"), megatron).exit_code == 0
    found = run("convert", "--to", "hf", megatron, str(tmp_path / "named"))
    assert found.exit_code == 2 and "needs a config.json" in found.stderr and not (tmp_path / "named").exists()
    found = run("convert", "--to", "hf", "--no-config", "--config", str(HF / "llama"), megatron, str(tmp_path / "named"))
    assert found.exit_code == 2 and "give one of them" in found.stderr and not (tmp_path / "named").exists()
    found = run("convert", "--to", "hf", "--no-config", megatron, str(tmp_path / "named"))
    assert found.exit_code == 0 and "the tensors still have Megatron's names" in found.stderr
    found = run("convert", "--to", "hf", str(HF / "llama"), str(tmp_path / "whole"))
    assert found.exit_code == 0 and found.stderr == ""


def test_where_a_configuration_comes_from(tmp_path: Path) -> None:
    megatron, back = str(tmp_path / "m"), ["--to", "hf", "--names", "llama", "--convention", "huggingface"]
    there = ["--to", "megatron", "--names", "llama", "--convention", "megatron"]
    assert run("convert", *there, "--arg", "rotary_percent=1.0", str(HF / "llama"), megatron).exit_code == 0
    assert "config.json: made of the source's arguments" in run("convert", *back, megatron, str(tmp_path / "whole")).stderr
    assert run("convert", *there, str(HF / "llama"), str(tmp_path / "poor")).exit_code == 0
    refused = run("convert", *back, str(tmp_path / "poor"), str(tmp_path / "without"))
    assert refused.exit_code == 2 and "--config PATH" in refused.stderr and not (tmp_path / "without").exists()
    assert "none can be made: the source's arguments do not say rotary_percent" in refused.stderr
    message = run("convert", *back, "--no-config", str(tmp_path / "poor"), str(tmp_path / "without")).stderr
    assert "config.json is not written: the source's arguments do not say rotary_percent" in message


@pytest.fixture
def step(tmp_path: Path) -> str:
    arrays = {"w": np.arange(12, dtype=np.float32).reshape(4, 3), "b": np.arange(5)}
    write_checkpoint(str(tmp_path / "step"), arrays, state={"w": {"$tensor": "w"}, "b": {"$tensor": "b"}, "step": 3})
    return str(tmp_path / "step")


def test_what_it_says(tmp_path: Path, step: str) -> None:
    made = str(tmp_path / "made")
    assert run("convert", "--to", "hf", "--dry-run", step, made).exit_code == 2
    found = run("convert", "--to", "hf", "--no-config", "--dry-run", step, made)
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("would convert 2 tensors, 88 B in 1 file (ckpt 1 to hf)") and "model.safetensors" in found.stdout
    assert not Path(made).exists()
    found = run("convert", "--to", "hf", "--no-config", step, made, "--json", "--memory", "64MiB")
    said = json.loads(found.stdout)
    assert (said["tensors"], said["tensor_bytes"], said["files"], said["finished"]) == (2, 88, ["model.safetensors"], True)
    assert (said["source"], said["target"], said["to"], said["dry_run"], said["read_bytes"]) == (step, made, "hf", False, 88)
    assert load_file(f"{made}/model.safetensors")["w"].tolist() == np.arange(12.0).reshape(4, 3).tolist()
    assert run("convert", "-q", "--to", "native", "--only", "w", step, str(tmp_path / "n")).stdout == ""
    assert verify(str(tmp_path / "n")).ok


def test_a_translation(tmp_path: Path) -> None:
    made = str(tmp_path / "made")
    found = run("convert", "--to", "native", "--names", "llama", "--convention", "megatron", str(HF / "llama"), made, "--json")
    assert found.exit_code == 0, found.output
    names = {t["name"] for t in json.loads(run("inspect", "--json", made).stdout)["tensors"]}
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in names
    found = run("import", "--names", "llama", "--convention", "megatron", str(HF / "llama"), str(tmp_path / "virtual"))
    assert found.exit_code == 0, found.output
    assert {t["name"] for t in json.loads(run("inspect", "--json", str(tmp_path / "virtual")).stdout)["tensors"]} == names


def test_exit_codes(tmp_path: Path, step: str) -> None:
    made = str(tmp_path / "made")
    for code, arguments in (
        (2, ["--to", "gguf"]),
        (2, ["--to", "hf", "--names", "llama"]),
        (2, ["--to", "hf", "--set", "layers=3"]),
        (2, ["--to", "hf", "--memory", "much"]),
        (21, ["--to", "native", "--only", "z"]),
    ):
        assert run("convert", *arguments, step, made).exit_code == code, arguments
    assert run("convert", "--to", "hf", str(tmp_path / "absent"), made).exit_code == 10
    assert run("convert", "--to", "native", step, step).exit_code == 33
    assert not Path(made).exists()


def test_a_copy_of_a_virtual_checkpoint_is_self_contained(tmp_path: Path, step: str) -> None:
    virtual, copy = str(tmp_path / "virtual"), f"{tmp_path}/copies/"
    import_checkpoint(step, virtual)
    assert run("cp", "--dry-run", virtual, copy).stdout.startswith("would copy 1 file")
    said = json.loads(run("cp", "--json", virtual, copy).stdout)
    assert (said["committed"], said["files"], said["copied_files"]) == (True, 1, 1)
    for file in (Path(step) / "data").iterdir():
        file.unlink()
    assert not verify(virtual).ok
    assert verify(said["target"]).ok and verify(said["target"]).undigested == 0
    record = json.loads((tmp_path / "copies" / "virtual" / "checkpoint.json").read_text())
    assert record["id"] == said["id"] and record["features"] == []
    again = json.loads(run("cp", "--json", virtual, copy).stdout)
    assert (again["id"], again["copied_files"]) == (said["id"], 0)


def test_configuration_of_an_export(tmp_path: Path) -> None:
    """``--config`` gives what lies beside the weights; without it nothing is written, and the same command with it goes on."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer.json").write_text("{}")
    ckpt.save(str(tmp_path / "s"), {"model": {"w": torch.ones(3)}})
    wanted = {"with": ["--config", str(model)], "file": ["--config", str(model / "config.json")], "without": ["--no-config"]}
    refused = CliRunner().invoke(cli, ["convert", "--to", "hf", str(tmp_path / "s"), str(tmp_path / "with")])
    assert refused.exit_code == 2 and "--config PATH" in refused.output and not (tmp_path / "with").exists()
    files = {"with": {"config.json", "tokenizer.json"}, "file": {"config.json"}, "without": set()}
    for name, options in wanted.items():
        done = CliRunner().invoke(cli, ["convert", "--to", "hf", *options, str(tmp_path / "s"), str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        assert {p.name for p in (tmp_path / name).iterdir()} == files[name] | {"model.safetensors"}
    done = CliRunner().invoke(cli, ["convert", "--to", "torch", "--config", str(model), str(tmp_path / "s"), str(tmp_path / "t.pt")])
    assert done.exit_code == 2


# --------------------------------------------------------------------------------- ``ckpt cp`` as a command: what it says, and how it ends.


@pytest.fixture
def copied_step(tmp_path: Path) -> Path:
    write_checkpoint(str(tmp_path / "run" / "step-00000007"), sample())
    return tmp_path / "run" / "step-00000007"


def test_copies_into_a_run_under_its_own_name(tmp_path: Path, copied_step: Path) -> None:
    found = run("cp", str(copied_step), f"{tmp_path}/other/", "--json")
    assert found.exit_code == 0
    said = json.loads(found.stdout)
    expected = everything(open_backend(str(copied_step)))
    assert everything(open_backend(str(tmp_path / "other" / "step-00000007"))) == expected
    size = sum(len(d) for p, d in expected.items() if p != "checkpoint.json")
    assert said == {
        "source": str(copied_step),
        "target": f"{tmp_path}/other/step-00000007",
        "id": json.loads(expected["checkpoint.json"])["id"],
        "files": 6,
        "bytes": size,
        "copied_files": 6,
        "copied_bytes": size,
        "committed": True,
        "uncompared_bytes": 0,
        "seconds": said["seconds"],
        "dry_run": False,
    }
    assert "6 files already at the destination" in run("cp", str(copied_step), f"{tmp_path}/other/").stdout


def test_a_dry_run_only_tells(tmp_path: Path, copied_step: Path) -> None:
    found = run("cp", str(copied_step), str(tmp_path / "copy"), "--dry-run")
    assert found.exit_code == 0
    assert found.stdout.startswith("would copy 6 files")
    assert not (tmp_path / "copy").exists()
    assert run("cp", "-q", str(copied_step), str(tmp_path / "copy")).stdout == ""
    assert (tmp_path / "copy" / "checkpoint.json").exists()


@pytest.mark.parametrize("command", ["cp", "import", "convert"])
def test_nothing_is_put_beside_what_is_no_checkpoint_of_ours(tmp_path: Path, copied_step: Path, command: str) -> None:
    """A model of Hugging Face would be hidden by it; so would a directory of data files with other names."""
    arguments = [command, "--to", "native"] if command == "convert" else [command]
    target = tmp_path / "model"
    for name in ("model.safetensors", "data/train.bin", "logs/a/events"):
        file = target / name
        file.parent.mkdir(parents=True)
        file.write_bytes(b"{}")
        before = sorted(target.rglob("*"))
        refused = run(*arguments, str(copied_step), str(target))
        assert refused.exit_code == 33, refused.output
        assert f"something is there already: {name.partition('/')[0]}" in refused.stderr
        assert "remove the files there" not in refused.stderr  # other runs, perhaps
        assert sorted(target.rglob("*")) == before
        shutil.rmtree(target)
    (target / "empty").mkdir(parents=True)
    (target / ".hidden").touch()
    assert run(*arguments, str(copied_step), str(target)).exit_code == 0


def test_nothing_is_put_into_another_checkpoint(tmp_path: Path, copied_step: Path) -> None:
    target = tmp_path / "copy"
    assert run("cp", str(copied_step), str(target)).exit_code == 0
    before = sorted(target.rglob("*"))
    for inside in (f"{target}/", f"{target}/step-00000001"):
        refused = run("cp", str(copied_step), inside)
        assert (refused.exit_code, sorted(target.rglob("*"))) == (33, before)
        assert "this is a checkpoint itself" in refused.stderr


def test_exit_codes_of_cp(tmp_path: Path, copied_step: Path) -> None:
    assert run("cp", str(tmp_path / "no"), str(tmp_path / "copy")).exit_code == 10
    assert run("cp", str(copied_step), str(copied_step)).exit_code == 2
    write_checkpoint(str(tmp_path / "other"), {"x": np.ones(2)})
    assert run("cp", str(copied_step), str(tmp_path / "other")).exit_code == 33
    flip(data_files(copied_step)[0], data_files(copied_step)[0].stat().st_size - 1)
    assert run("cp", str(copied_step), str(tmp_path / "copy")).exit_code == 20
    assert run("cp", str(tmp_path / "run"), str(tmp_path / "copy")).exit_code == 12


# ------------------------------------------------------ ``ckpt merge`` as a command: what it says, which weights it takes, and how it ends.


def run_merge(*args: object) -> Result:
    return CliRunner().invoke(cli, ["merge", *map(str, args)])


@pytest.fixture
def steps(tmp_path: Path) -> list[str]:
    urls = [str(tmp_path / "run" / f"step-{i}") for i in range(3)]
    for i, url in enumerate(urls):
        ckpt.save(url, {"w": torch.full((2,), float(i)), "step": i})
    return urls


def value(url: Path) -> float:
    return float(ckpt.open(url)["w"].read()[0])


def test_what_merge_says(tmp_path: Path, steps: list[str]) -> None:
    out = tmp_path / "out"
    planned = run_merge(out, *steps, "--dry-run")
    assert planned.stdout.startswith("would write 1 tensor, 8 B in 1 file") and not out.exists()
    done = run_merge(out, *steps, "--weights", "1/2,0.3,1/5")
    first, *rows = done.stdout.splitlines()
    assert first.startswith(f"ok: {out}: 1 tensor, 8 B in 1 file")
    assert rows == [f"  {weight} x {url}" for weight, url in zip(("0.5", "0.3", "0.2"), steps, strict=True)]
    assert done.stderr == f"tensors: 1 averaged, 0 equal in all, 0 copied; step, options and other values come from {steps[0]}\n"
    assert value(out) == pytest.approx(0.7)


def test_the_newest_of_a_run(tmp_path: Path, steps: list[str]) -> None:
    """Their values come from the newest one."""
    done = run_merge(tmp_path / "out", "--last", 2, tmp_path / "run", "--json")
    document = json.loads(done.stdout)
    assert (document["sources"], document["weights"], document["values_from"]) == (steps[1:], [0.5, 0.5], steps[2])
    assert (document["averaged"], document["dry_run"], document["written"]["finished"]) == (1, False, True)
    assert value(tmp_path / "out") == 1.5 and ckpt.open(tmp_path / "out").state()["step"] == 2
    assert run_merge("-q", tmp_path / "quiet", *steps, "--values-from", 2).stdout == ""
    assert ckpt.open(tmp_path / "quiet").state()["step"] == 1


def test_exit_codes_of_merge(tmp_path: Path, steps: list[str]) -> None:
    out = tmp_path / "out"
    ckpt.save(tmp_path / "nan", {"w": torch.tensor([1.0, float("nan")]), "step": 0})
    ckpt.save(tmp_path / "other", {"v": torch.ones(2)})
    for arguments, code in (
        ((*steps, "--weights", "0.5,0.3,0.1"), 2),
        ((*steps, "--weights", "1/0,1,1"), 2),
        ((*steps, "--weights", "a,b"), 2),
        ((*steps, "--last", "2"), 2),
        ((*steps, "--values-from", "4"), 2),
        ((*steps, "--schedule", "step"), 2),
        ((tmp_path / "run", "--last", "4"), 10),
        ((steps[0], tmp_path / "other"), 21),
        ((steps[0], tmp_path / "nan"), 22),
    ):
        result = run_merge(out, *arguments)
        assert result.exit_code == code, result.stderr
        assert not out.exists() or not any(out.iterdir())
    assert run_merge(out, steps[0], tmp_path / "nan", "--allow-nan").exit_code == 0
    assert run_merge(tmp_path / "more", *steps, "--weights", "1,1,1", "--any-sum").exit_code == 0
    assert value(tmp_path / "more") == 3
