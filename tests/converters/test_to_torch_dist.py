"""Conversions to Megatron-Core's torch_dist: what torch's own loader finds in them is what Megatron itself wrote, bit for bit.

tests/real/test_megatron.py loads them with Megatron-Core.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

import ckpt
from ckpt import convert
from ckpt.converters.importer import import_checkpoint
from ckpt.converters.mapping.convention import numbers_of_files, translated_views
from ckpt.converters.targets import torch_dist
from ckpt.errors import NotCommittedError, UsageError
from ckpt.formats.megatron.training import MegatronCatalog
from ckpt.formats.native.writer import publish
from ckpt.formats.registry import open_catalog
from tests.formats.megatron_files import STATE, Arrays, assert_same, bits, read_all, states, whole_model

HF = Path(__file__).parents[1] / "fixtures" / "hf"
VALUES = {
    "checkpoint_version": 3.0,
    "iteration": 12,
    "opt_param_scheduler": {"max_lr": 0.5, "num_steps": 96, "lr_decay_style": "cosine"},
    "num_floating_point_operations_so_far": 10**21,
}
KINDS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def described(folder: Path) -> Metadata:
    return dcp.FileSystemReader(folder).read_metadata()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor, put together by DCP."""
    rows = described(folder).state_dict_metadata
    found: dict[str, Any] = {
        n: torch.full(m.size, 7, dtype=m.properties.dtype) for n, m in rows.items() if isinstance(m, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def objects(folder: Path) -> set[str]:
    """Names of the objects, all of which must be None, as Megatron's own loader unpacks them."""
    metadata = described(folder)
    names = {n for n, m in metadata.state_dict_metadata.items() if isinstance(m, BytesStorageMetadata)}
    for index, place in metadata.storage_data.items():
        if index.fqn in names:
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                (folder / "object").write_bytes(file.read(place.length))
            assert torch.load(folder / "object", weights_only=True) == [None]
    assert names <= {i.fqn for i in metadata.storage_data}
    return names


def common(folder: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):  # as Megatron-Core registers it
        found: dict[str, Any] = torch.load(folder / "common.pt", weights_only=True)
    return found


def converted(source: Path, target: Path, **options: Any) -> Path:
    """The directory of the iteration."""
    assert convert(str(source), str(target), to="torch_dist", **options).finished
    return target / f"iter_{int((target / 'latest_checkpointed_iteration.txt').read_text()):07d}"


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert np.array_equal(bits(found[name]), bits(tensor)), name


# ------------------------------------------------------------------------------------------ what Megatron writes itself


@pytest.mark.parametrize("form", ["legacy", "dp_reshardable"])
def test_is_what_megatron_writes(megatron_files, tmp_path, form):
    """All keys, shapes, dtypes and bytes of tensors, and all that is not sharded, are those of the same state as Megatron saved it."""
    folder, truth = (
        converted(megatron_files / "pp2tied" / form, tmp_path / "c", verify=True),
        megatron_files / "pp2tied" / "fully_reshardable",
    )
    same(stored(folder), stored(truth))
    assert objects(folder) > {n for n, m in described(truth).state_dict_metadata.items() if isinstance(m, BytesStorageMetadata)}
    assert (folder / "metadata.json").read_text() == (truth / "metadata.json").read_text()
    found, expected = common(folder), common(truth)
    arguments, content = vars(found.pop("args")), found.pop("content_metadata")
    assert (arguments.pop("no_save_rng"), arguments.pop("no_save_optim")) == (True, False)
    assert arguments == vars(expected.pop("args"))
    assert content == {k: v for k, v in expected.pop("content_metadata").items() if k != "non_homogeneous_layers"}
    found.pop("ckpt_version")
    assert found == expected
    steps = [g["step"] for g in found["optimizer"]["optimizer"]["param_groups"]]
    assert [type(s) for s in steps] == [int, int]  # what fused optimizers take


def test_experts_are_stacked_as_megatron_stacks_them(megatron_files, tmp_path):
    folder = converted(megatron_files / "tp2ep2" / "legacy", tmp_path / "c")
    found = stored(folder)
    truth = {n: t for n, t in stored(megatron_files / "tp2ep2" / "dp_reshardable").items() if not n.startswith("chained_")}
    same({n: t for n, t in found.items() if not n.startswith("optimizer.")}, truth)
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in truth  # what the specification without Transformer Engine calls it
    assert objects(folder) > {
        n
        for n, m in described(megatron_files / "tp2ep2" / "dp_reshardable").state_dict_metadata.items()
        if n.split("/")[0].endswith("_extra_state")
    }
    chain = common(folder)["optimizer"]
    assert [[g["is_expert_parallel"] for g in chain[i]["optimizer"]["param_groups"]] for i in (0, 1)] == [[False, False], [True]]
    expected = states(read_all(megatron_files / "tp2ep2" / "legacy"))
    for kind, key in KINDS.items():
        for layer in "linear_fc1", "linear_fc2":
            own = found[f"optimizer.state.{kind}.decoder.layers.mlp.experts.experts.{layer}.weight"]
            assert own.dtype == torch.float32 and own.shape[:2] == (4, 4)
            for n, e in np.ndindex(4, 4):
                name = f"{STATE}decoder.layers.{n}.mlp.experts.local_experts.{e}.{layer}.weight.{key}"
                assert np.array_equal(bits(own[n, e]), expected[name]), name


@pytest.mark.parametrize(("layout", "numbers"), [("tp2pp2vpp2", {"tp": 2, "pp": 2, "vpp": 2}), ("moe_singleton", {})])
def test_weights_are_those_of_the_files_of_ranks(megatron_files, tmp_path, layout, numbers):
    """From files of ranks, and from the form with a key for each layer and expert into the one without."""
    source = megatron_files / layout / ("legacy" if numbers else "fully_reshardable")
    found: Arrays = {}
    for name, tensor in stored(converted(source, tmp_path / "c")).items():
        name = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
        if name.startswith("optimizer."):
            continue
        for layer in range(4) if name.startswith("decoder.layers.") else ():
            own = f"model.decoder.layers.{layer}.{name.removeprefix('decoder.layers.')}"
            if ".experts.experts." in own:
                found |= {own.replace("experts.experts", f"experts.local_experts.{e}"): bits(tensor[layer, e]) for e in range(4)}
            else:
                found[own] = bits(tensor[layer])
        if not name.startswith("decoder.layers."):
            found[f"model.{name}"] = bits(tensor)
    assert_same(found, whole_model(megatron_files / layout / "legacy" / "iter_0000003", **numbers))
    assert_same(read_all(tmp_path / "c"), read_all(source))


def test_who_may_be_wrong_is_said_only_of_those(megatron_files, tmp_path):
    """Megatron-Core wrote some optimizers wrongly in this form; a conversion does not, but keeps what was wrong."""

    def suspect(url: Path) -> str | None:
        catalog = open_catalog(str(url))
        assert isinstance(catalog, MegatronCatalog)
        return catalog.suspect

    for name, form in (("right", "legacy"), ("wrong", "fully_reshardable")):
        converted(megatron_files / "dp2" / form, tmp_path / name)
        convert(str(tmp_path / name), str(tmp_path / f"native-{name}"), to="native")
        converted(tmp_path / f"native-{name}", tmp_path / f"again-{name}")
    assert [suspect(tmp_path / f"{way}right") for way in ("", "again-")] == [None, None]
    assert None not in [suspect(tmp_path / f"{way}wrong") for way in ("", "again-")]


# -------------------------------------------------------------------------------------------------- layers that differ


def saved(folder: Path, model: dict[str, torch.Tensor], **arguments: object) -> Path:
    """A checkpoint of one rank without an optimizer, as Megatron-LM lays it out."""
    rank = folder / "iter_0000012" / "mp_rank_00"
    rank.mkdir(parents=True)
    state = {"args": argparse.Namespace(**arguments), **VALUES, "model": model, "rng_state": [{"random_rng_state": 1}]}
    torch.save(state, rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("12")
    return folder


def mixed(dense: int, layers: int = 3) -> dict[str, torch.Tensor]:
    """Layers with two experts each, but for the first ones."""
    torch.manual_seed(1)
    model = {"embedding.word_embeddings.weight": torch.randn(8, 4)}
    for n in range(layers):
        model |= {f"decoder.layers.{n}.self_attention.linear_proj.weight": torch.randn(4, 4)}
        mlps = ["mlp"] if n < dense else [f"mlp.experts.local_experts.{e}" for e in range(2)]
        if n >= dense:
            model[f"decoder.layers.{n}.mlp.router.weight"] = torch.randn(2, 4)
            model[f"decoder.layers.{n}.pre_mlp_layernorm.weight"] = torch.randn(4)
        for mlp in mlps:
            model[f"decoder.layers.{n}.{mlp}.linear_fc1.weight"] = torch.randn(6, 4)
            model[f"decoder.layers.{n}.{mlp}.linear_fc2.weight"] = torch.randn(4, 3)
    return model


@pytest.mark.parametrize(
    ("dense", "frequency", "wide"),
    [(1, 1, 4), (0, 1, 5), (1, [0, 1, 1], 4), (0, [1, 1, 1], 4), (0, 2, 4)],
    ids=["names differ", "shapes differ", "both", "asked for by a list", "asked for by a number"],
)
def test_layers_one_by_one(tmp_path, dense, frequency, wide):
    model = mixed(dense)
    model["decoder.layers.1.self_attention.linear_proj.weight"] = torch.randn(4, wide)
    folder = converted(saved(tmp_path / "s", model, moe_layer_freq=frequency), tmp_path / "c")
    expected = {n: t for n, t in model.items() if "experts" not in n}
    for n in range(dense, 3):
        for layer in "linear_fc1", "linear_fc2":
            own = [model[f"decoder.layers.{n}.mlp.experts.local_experts.{e}.{layer}.weight"] for e in range(2)]
            expected[f"decoder.layers.{n}.mlp.experts.experts.{layer}.weight"] = torch.stack(own)
    same(stored(folder), expected)
    state = common(folder)
    form = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "non_homogeneous_layers": True}
    assert vars(state.pop("args")) == {"moe_layer_freq": frequency, "no_save_rng": True, "no_save_optim": True}
    assert state == {**VALUES, "content_metadata": form}
    names = objects(folder)
    assert "decoder.layers.2.mlp.experts.experts.linear_fc1._extra_state/shard_1_2" in names
    assert "decoder.layers.0.self_attention.linear_proj._extra_state/shard_0_1" in names
    assert_same(read_all(tmp_path / "c"), read_all(tmp_path / "s"))


def test_one_form_into_the_other(tmp_path):
    """Layers that are stacked, one by one where not all are taken: nothing could be stacked with a hole."""
    model = mixed(0)
    stacked = converted(saved(tmp_path / "s", model), tmp_path / "stacked")
    assert stored(stacked)["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape == (3, 2, 6, 4)
    single = stored(converted(stacked, tmp_path / "single", exclude=["model.decoder.layers.0.*"]))
    assert torch.equal(single["decoder.layers.2.mlp.router.weight"], model["decoder.layers.2.mlp.router.weight"])
    assert {n.split(".")[2] for n in single if n.startswith("decoder.layers.")} == {"1", "2"}


def test_gate_and_up_are_boxes_of_their_own(tmp_path):
    """A rank asks for its part of each: it reads no other part then."""
    folder = converted(saved(tmp_path / "s", mixed(0)), tmp_path / "c")
    row = described(folder).state_dict_metadata["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert isinstance(row, TensorStorageMetadata)
    boxes = {(tuple(c.offsets), tuple(c.sizes)) for c in row.chunks}
    assert boxes == {((n, e, start, 0), (1, 1, 3, 4)) for n in range(3) for e in range(2) for start in (0, 3)}


def test_norms_are_called_as_the_layers_say(tmp_path):
    """With Transformer Engine, and without it."""
    for local, key in ((False, "pre_mlp_layernorm.weight"), (True, "mlp.linear_fc1.layer_norm_weight")):
        source = saved(tmp_path / f"s{local}", mixed(0), transformer_impl="local" if local else "transformer_engine")
        assert f"decoder.layers.{key}" in stored(converted(source, tmp_path / f"c{local}"))


# ------------------------------------------------------------------------------------------------- names of others


@pytest.mark.parametrize("names", ["llama", "mixtral"])
def test_there_and_back(tmp_path, names):
    """A model of transformers has no iteration: Megatron-LM calls such a checkpoint a release."""
    source, there, back = str(HF / names), str(tmp_path / "there"), str(tmp_path / "back")
    convert(source, there, to="torch_dist", views=translated_views(source, names, "megatron", {}))
    assert (tmp_path / "there" / "latest_checkpointed_iteration.txt").read_text() == "release"
    folder = tmp_path / "there" / "release"
    assert "decoder.layers.self_attention.linear_qkv.weight" in stored(folder) and "optimizer" not in common(folder)
    convert(there, back, to="hf", views=translated_views(there, names, "huggingface", numbers_of_files(source)))
    found = {n: t for f in (tmp_path / "back").glob("*.safetensors") for n, t in load_file(f).items()}
    expected = {n: t for f in (HF / names).glob("*.safetensors") for n, t in load_file(f).items()}
    same(found, expected)


def test_our_own_checkpoints_keep_everything(megatron_files, tmp_path):
    """By way of the native format, and of a virtual checkpoint; values of the state and the optimizer's groups stay."""
    source = megatron_files / "tp2pp2vpp2" / "legacy"
    truth = converted(source, tmp_path / "truth")
    convert(str(source), str(tmp_path / "native"), to="native")
    import_checkpoint(str(source), str(tmp_path / "virtual"))
    for kind in "native", "virtual":
        folder = converted(tmp_path / kind, tmp_path / f"from-{kind}")
        same(stored(folder), stored(truth))
        assert common(folder) == common(truth)


# -------------------------------------------------------------------------------------------------------- the rest


def test_an_optimizer_that_is_not_whole_is_left_out(megatron_files, tmp_path):
    source = megatron_files / "dp2" / "legacy"
    report = convert(str(source), str(tmp_path / "c"), to="torch_dist", exclude=["*.layers.1.*.exp_avg"])
    assert set(report.left_out) == set(states(read_all(source)))
    folder = tmp_path / "c" / "iter_0000003"
    assert not [n for n in stored(folder) if n.startswith("optimizer.")]
    state = common(folder)
    assert "optimizer" not in state and "distrib_optim_sharding_type" not in state["content_metadata"]
    assert state["args"].no_save_optim is True
    again = convert(str(source), str(tmp_path / "d"), to="torch_dist", optimizer=False)
    assert again.left_out == report.left_out


def test_a_native_optimizer_is_none_of_megatrons(tmp_path):
    """Its groups do not say what Megatron tells them apart by."""
    module = torch.nn.Module()
    module.output_layer, module.embedding = torch.nn.Linear(4, 8, bias=False), torch.nn.Module()
    module.embedding.word_embeddings = torch.nn.Embedding(8, 4)
    module.output_layer.weight = module.embedding.word_embeddings.weight
    optimizer = torch.optim.AdamW(module.parameters())
    module.output_layer(torch.ones(4)).sum().backward()
    optimizer.step()
    ckpt.save(str(tmp_path / "s"), {"net": module, "optimizer": optimizer})
    report = convert(str(tmp_path / "s"), str(tmp_path / "release"), to="torch_dist", root="net")
    found = stored(tmp_path / "release")
    assert list(found) == ["embedding.word_embeddings.weight"]  # the output layer is tied to it
    assert torch.equal(found["embedding.word_embeddings.weight"], module.output_layer.weight.detach())
    assert any(".exp_avg" in name for name in report.left_out)


def test_at_the_directory_of_an_iteration(megatron_files, tmp_path):
    """There it is the checkpoint itself: a run that it lies in is left alone."""
    target = tmp_path / "run" / "iter_0000500"
    report = convert(str(megatron_files / "dp2" / "legacy"), str(target), to="torch_dist", shard_size=20_000, verify=True)
    assert len(report.files) > 3 and sorted(report.files) == sorted(p.name for p in target.glob("*.distcp"))
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["iter_0000500"]
    assert_same(read_all(target), read_all(megatron_files / "dp2" / "legacy"))


def test_what_is_not_megatrons(megatron_files, tmp_path):
    with pytest.raises(UsageError, match="names of Megatron-Core's parameters"):
        convert(str(HF / "llama"), str(tmp_path / "a"), to="torch_dist")
    odd = saved(tmp_path / "odd", {**mixed(0), "decoder.layers.0.mixer.in_proj.weight": torch.ones(4, 4)})
    with pytest.raises(UsageError, match=r"it is not known how Megatron-Core stores decoder\.layers\.0\.mixer\.in_proj\.weight"):
        convert(str(odd), str(tmp_path / "b"), to="torch_dist")
    assert convert(str(odd), str(tmp_path / "b"), to="torch_dist", exclude=["*.mixer.*"]).left_out
    with pytest.raises(UsageError, match="some are missing"):
        convert(str(saved(tmp_path / "e", mixed(1))), str(tmp_path / "f"), to="torch_dist", exclude=["*.1.*.local_experts.0.*"])
    assert not (tmp_path / "a").exists() and not (tmp_path / "f").exists()


def test_processes_divide_the_files(megatron_files, tmp_path):
    """Whoever finds all files there finishes, and nothing can be opened before."""
    source, target = str(megatron_files / "dp2" / "legacy"), str(tmp_path / "c")
    first = convert(source, target, to="torch_dist", shard_size=100_000, part=(1, 2))
    assert not first.finished and first.written_files and not list((tmp_path / "c").rglob("metadata.json"))
    with pytest.raises(NotCommittedError):
        open_catalog(target)
    assert convert(source, target, to="torch_dist", shard_size=100_000, part=(0, 2)).finished
    assert_same(read_all(target), read_all(source))


SMALL = ["common.pt", ".metadata", "metadata.json", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("number", range(4))
def test_died_while_finishing(megatron_files, tmp_path, monkeypatch, number):
    """Megatron-Core takes a directory with metadata.json for a checkpoint, and Megatron-LM what the run's file names: these are last."""

    def dies(backend: Any, path: str, data: bytes) -> None:
        if path.endswith(SMALL[number]):
            raise KeyboardInterrupt
        publish(backend, path, data)

    source, target = str(megatron_files / "dp2" / "legacy"), tmp_path / "c"
    with monkeypatch.context() as patched:
        patched.setattr(torch_dist, "publish", dies)
        with pytest.raises(KeyboardInterrupt):
            convert(source, str(target), to="torch_dist")
    assert {p.name for p in target.rglob("*")} & set(SMALL) == set(SMALL[:number])
    with pytest.raises(NotCommittedError):
        open_catalog(str(target))
    assert convert(source, str(target), to="torch_dist").written_files == 0
    assert_same(read_all(target), read_all(source))
