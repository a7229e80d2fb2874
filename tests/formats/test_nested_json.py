"""A file of six kilobytes, ``[[[[…``, in place of any JSON that a command meets: an error of ours, and all else is listed.

``json.loads`` raises RecursionError for it, which no reader expects.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

import ckpt
from ckpt.cli.main import cli
from ckpt.converters.importer import import_checkpoint
from ckpt.errors import CkptError, CorruptError
from ckpt.formats.native.runlog import PATH as LOG
from tests.formats.megatron_files import ARCHIVES

NESTED = b"[" * 6000
CONFIG = {"model_type": "x", "num_attention_heads": 2, "hidden_size": 4}
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["a"]}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory of each kind, beside one another as in a run."""
    root = tmp_path_factory.mktemp("samples") / "run"
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    with ckpt.Checkpointer(str(root)) as checkpointer:
        checkpointer.save(1, {"model": model, "plain": {"lr": 0.1}})
    ckpt.convert(str(root / "step-00000001"), str(root / "hf"), to="hf", shard_size=100, config=CONFIG)
    ckpt.export(str(root / "delta"), model, since=ckpt.export(str(root / "full"), model, config=CONFIG).url)
    import_checkpoint(str(root / "hf"), str(root / "virtual"))
    (root / "adapter").mkdir()
    lora = {"base_model.model.a.lora_A.weight": torch.ones(2, 4), "base_model.model.a.lora_B.weight": torch.ones(4, 2)}
    save_file(lora, root / "adapter" / "adapter_model.safetensors")
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(ADAPTER))
    with tarfile.open(ARCHIVES / "dp2.tar.xz") as archive:
        archive.extractall(root.parent / "megatron", filter="data")
    (found,) = (root.parent / "megatron").rglob("dp_reshardable")
    shutil.copytree(found, root / "megatron")
    for name, file in {"begun": "convert.json", "ended": "convert-0123456789abcdef/finish", "other": "metadata.json", ".": LOG}.items():
        (root / name / file).parent.mkdir(parents=True, exist_ok=True)
        (root / name / file).write_text("{}")
    return root


def json_files(root: Path) -> Iterator[Path]:
    return (p.relative_to(root) for p in sorted(root.rglob("*")) if p.is_file() and p.read_bytes()[:1] in b"{[")


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    assert "Traceback" not in result.output and result.exit_code != 1, (arguments, result.output)
    return result


def test_every_json_file_of_every_kind(samples: Path, tmp_path: Path) -> None:
    paths = {str(path) for path in json_files(samples)}
    assert {"hf/config.json", "hf/model.safetensors.index.json", "adapter/adapter_config.json", "megatron/metadata.json"} <= paths
    assert {"step-00000001/checkpoint.json", "delta/ckpt-delta.json", "begun/convert.json"} <= paths and any(
        "state.json" in p for p in paths
    )
    healthy = {line.split()[0] for line in run("ls", samples).stdout.splitlines()}
    for path in map(Path, sorted(paths)):
        root, name = tmp_path / "run", path.parts[0]
        shutil.copytree(samples, root, symlinks=True)
        (root / path).write_bytes(NESTED)
        listed = {line.split()[0] for line in run("ls", root).stdout.splitlines()}
        assert healthy - listed <= {name}, path
        for command in ("inspect", "verify", "ls"):
            run(command, root / name)
        run("convert", "--to", "hf", "--no-config", root / name, tmp_path / "out")
        run("convert", "--to", "native", root / "step-00000001", root / name)
        run("convert", "--to", "hf", "--config", root / "hf", root / "step-00000001", tmp_path / "configured")
        run("lora", "merge", root / "full", root / "adapter", tmp_path / "merged")
        run("stats", root)
        with pytest.raises(CkptError):
            ckpt.load(str(root / name), {"absent": torch.zeros(3)})
        for made in tmp_path.iterdir():
            shutil.rmtree(made)


def test_headers_of_safetensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(NESTED).to_bytes(8, "little") + NESTED)
    with pytest.raises(CorruptError, match="nested too deeply"):
        ckpt.open(str(tmp_path))


def test_options_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert run("convert", "--to", "torch_dist", "--arg", f"a={'[' * 6000}", tmp_path, tmp_path / "out").exit_code == 2
    (tmp_path / "options.json").write_bytes(NESTED)
    monkeypatch.setenv("CKPT_STORAGE_OPTIONS", str(tmp_path / "options.json"))
    result = run("ls", "s3://bucket/run")
    assert result.exit_code == 2 and "options.json cannot be read: it is nested too deeply" in result.output
