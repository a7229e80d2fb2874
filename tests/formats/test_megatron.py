"""Megatron checkpoints beyond what tests/matrix shows of each form: that its tensors, in every use, are those that plain torch finds."""

from __future__ import annotations

import argparse
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from ckpt.converters.importer import import_checkpoint
from ckpt.errors import CkptError, CorruptError, FormatError, NotCommittedError, UsageError
from ckpt.formats.megatron.buffers import BUCKET_DIVISOR
from ckpt.formats.megatron.repair import repaired_states
from ckpt.formats.megatron.stored_buffers import Buckets
from ckpt.formats.megatron.training import MegatronCatalog
from ckpt.formats.registry import find_format, open_catalog
from tests.formats.megatron_files import STATE, assert_same, bits, load, read_all, states
from tests.formats.memory import megatron_memory
from tests.formats.reading import counted


def opened(url: Path) -> MegatronCatalog:
    catalog = open_catalog(str(url))
    assert isinstance(catalog, MegatronCatalog)
    return catalog


# ---------------------------------------------------------------------------------------------------------- tensors


def test_weights_of_single_layers_and_experts(megatron_files):
    """Written with ``singleton_local_shards``: a key for each layer and expert, and for gate and up."""
    found, expected = (
        read_all(megatron_files / "moe_singleton" / "fully_reshardable"),
        read_all(megatron_files / "moe_singleton" / "legacy"),
    )
    assert sorted(found) == sorted(expected)
    assert_same({n: a for n, a in found.items() if n.startswith("model.")}, {n: a for n, a in expected.items() if n.startswith("model.")})


# ----------------------------------------------------------------------------------------------------------- the rest


def test_names_and_padding(megatron_files):
    moe, dense = opened(megatron_files / "tp2ep2" / "dp_reshardable"), opened(megatron_files / "dp2" / "legacy")
    assert "model.decoder.layers.3.pre_mlp_layernorm.weight" in moe.tensors
    assert "model.decoder.layers.3.mlp.experts.local_experts.3.linear_fc1.weight" in moe.tensors
    assert "model.decoder.layers.3.mlp.linear_fc1.layer_norm_weight" in dense.tensors
    assert not any("_extra_state" in name or "rng" in name for name in moe.tensors)
    for catalog in (moe, dense):
        for name in ("model.embedding.word_embeddings.weight", f"{STATE}output_layer.weight.exp_avg"):
            assert (catalog.tensors[name].shape, catalog.tensors[name].logical) == ((48, 24), (42, 24))
    assert dense.arguments["num_query_groups"] == 2
    assert dense.state["iteration"] == opened(megatron_files / "common_state" / "dp_reshardable").state["iteration"] == 3


def test_replicas_are_told(megatron_files):
    catalog = opened(megatron_files / "tp2pp2vpp2" / "legacy")
    named = {r.name.removeprefix(STATE).removeprefix("model.") for r in catalog.replicas()}
    assert "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight" in named
    assert "decoder.layers.2.mlp.linear_fc1.weight" not in named


def test_loading_a_module_and_its_optimizer(megatron_files):
    """The names are those of a state ``{"model": …, "optimizer": …}``, and the step is a tensor, as torch wants it."""
    url = str(megatron_files / "tp2pp2vpp2" / "legacy")
    module = torch.nn.Module()
    module.output_layer = torch.nn.Linear(24, 42, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters())
    ckpt.load(url, {"model": module, "optimizer": optimizer}, strict=False)
    found = read_all(url)
    state = optimizer.state[module.output_layer.weight]
    assert np.array_equal(bits(module.output_layer.weight.detach()), found["model.output_layer.weight"][:42])
    for key in ("exp_avg", "exp_avg_sq", "master"):
        assert np.array_equal(bits(state[key]), found[f"{STATE}output_layer.weight.{key}"][:42]), key
    assert state["step"].dtype == torch.float32 and state["step"].item() == 3
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_the_displaced_form_is_suspect_and_repaired(megatron_files):
    """The fixture has the defect: nearly all states differ from those of the other forms. Repaired, all that was written is equal."""
    catalog = opened(megatron_files / "dp2" / "fully_reshardable")
    assert catalog.suspect is not None
    assert opened(megatron_files / "dp2" / "dp_reshardable").suspect is None
    truth, wrong = read_all(megatron_files / "dp2" / "legacy"), read_all(megatron_files / "dp2" / "fully_reshardable")
    assert sum(not np.array_equal(wrong[n], a) for n, a in states(truth).items()) > 40
    repaired = repaired_states(catalog, Buckets(2000, 2, BUCKET_DIVISOR))
    for name, expected in states(truth).items():
        found, known = np.zeros_like(expected), np.zeros(expected.shape, dtype=np.int64)
        for piece in repaired.pieces[name]:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
            found[box] = catalog.table.read_piece(name, piece)
            known[box] += 1
        for box in repaired.lost.get(name.removeprefix(STATE).rpartition(".")[0], ()):
            assert not known[box.slices].any()
            found[box.slices] = expected[box.slices]
            known[box.slices] += 1
        assert (known == 1).all(), name
        assert np.array_equal(found, expected), name
    assert sum(b.numel for boxes in repaired.lost.values() for b in boxes) == 528


def test_other_buckets_are_noticed(megatron_files):
    catalog = opened(megatron_files / "dp2" / "fully_reshardable")
    with pytest.raises(UsageError, match="other sizes"):
        repaired_states(catalog, Buckets(3000, 2, BUCKET_DIVISOR))
    with pytest.raises(UsageError, match="not of a form"):
        repaired_states(opened(megatron_files / "dp2" / "legacy"), Buckets(2000, 2, BUCKET_DIVISOR))


def test_little_is_read(megatron_files):
    """Opening reads headers; a tensor then its own bytes and a header."""
    url, name = str(megatron_files / "dp2" / "legacy"), f"{STATE}output_layer.weight.exp_avg"
    size = sum(p.stat().st_size for p in (megatron_files / "dp2" / "legacy").rglob("*") if p.is_file())
    with counted() as counts:
        view = ckpt.open(url)
        opening = counts.bytes
        tensor = view[name].read()
    assert counts.bytes - opening < tensor.numel() * 4 + 1024
    assert opening < size / 3


def test_without_torch(megatron_files):
    url = str(megatron_files / "tp2ep2" / "dp_zero_gather_scatter")
    code = f"import sys; from ckpt.formats.registry import open_catalog; open_catalog({url!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------------------------------------------------------ other ways to save


def saved(folder: Path, model: dict[str, torch.Tensor], optimizer: object = None, distributed: object = None, **arguments: object) -> Path:
    """A checkpoint of one rank, as Megatron-LM lays it out."""
    rank = folder / "mp_rank_00"
    rank.mkdir(parents=True)
    state = {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 1, "model": model}
    torch.save(state | ({} if optimizer is None else {"optimizer": optimizer}), rank / "model_optim_rng.pt")
    if distributed is not None:
        torch.save(distributed, rank / "distrib_optim.pt")
    return folder


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def transposed(folder: Path) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A checkpoint with all experts in one parameter for each layer, which are given too."""
    first, second = random(8, 3 * 12), random(3 * 6, 8)
    layer = "decoder.layers.0.mlp"
    model = {f"{layer}.router.weight": random(3, 8), f"{layer}.experts.weight1": first, f"{layer}.experts.weight2": second}
    padded = torch.zeros(192 + 320 + 24)  # the reverse of the model's order, each from a multiple of 64 on
    for start, numel in ((0, 144), (192, 288), (192 + 320, 24)):
        padded[start : start + numel] = torch.arange(numel)
    keys = {key: padded + i for i, key in enumerate(("param", "exp_avg", "exp_avg_sq"))}
    distributed = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): {**keys, "numel_unpadded": len(padded)}}}
    return saved(folder, model, distributed=distributed), first, second


def test_experts_in_one_parameter(tmp_path):
    """GroupedMLP sees the parameter as [experts, hidden, …] (megatron/core/transformer/moe/experts.py); layers are transposed."""
    folder, first, second = transposed(tmp_path / "c")
    found = read_all(folder)
    ones, twos = first.view(3, 8, 12), second.view(3, 6, 8)
    for expert in range(3):
        at = f"decoder.layers.0.mlp.experts.local_experts.{expert}"
        assert np.array_equal(found[f"model.{at}.linear_fc1.weight"], bits(ones[expert].T))
        assert np.array_equal(found[f"model.{at}.linear_fc2.weight"], bits(twos[expert].T))
        average = torch.arange(288, dtype=torch.float32).view(3, 8, 12)[expert].T + 1
        assert np.array_equal(found[f"{STATE}{at}.linear_fc1.weight.exp_avg"], bits(average))
        whole = ckpt.open(str(folder))[f"model.{at}.linear_fc2.weight"].read()
        assert torch.equal(whole, twos[expert].T)


def test_an_optimizer_that_is_not_distributed(tmp_path):
    """Torch's own state by number; masters by group. Groups are of parameters with and without weight decay."""
    order = ["embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"]
    model = {order[0]: random(6, 4), order[2]: random(4), order[1]: random(6, 5)}
    full = [model[n].float() for n in order]
    torch_state = {i: {"exp_avg": t + i, "exp_avg_sq": t * i, "step": torch.tensor(2.0)} for i, t in enumerate(full)}
    groups = [{"wd_mult": 1.0, "lr": 0.1, "step": 2, "params": [0, 1]}, {"wd_mult": 0.0, "lr": 0.1, "step": 2, "params": [2]}]
    masters = [[full[0], full[1]], [full[2]]]
    optimizer = {"optimizer": {"state": torch_state, "param_groups": groups}, "fp32_from_fp16_params": masters}
    found = read_all(saved(tmp_path / "c", model, optimizer))
    for i, name in enumerate(order):
        assert np.array_equal(found[f"{STATE}{name}.exp_avg"], bits(torch_state[i]["exp_avg"]))
        assert np.array_equal(found[f"{STATE}{name}.exp_avg_sq"], bits(torch_state[i]["exp_avg_sq"]))
        assert np.array_equal(found[f"{STATE}{name}.master"], bits(full[i]))


def test_imported_without_a_copy(megatron_files, tmp_path):
    """A virtual checkpoint has the same padding, state and options; and tensors where experts are transposed (others: tests/matrix)."""
    for number, source in enumerate((megatron_files / "tp2ep2" / "legacy", transposed(tmp_path / "c")[0])):
        url = str(tmp_path / str(number))
        import_checkpoint(str(source), url)
        one, other = open_catalog(url), open_catalog(str(source))
        assert one.state == other.state
        assert {n: t.logical for n, t in one.tensors.items()} == {n: t.logical for n, t in other.tensors.items()}
    assert_same(read_all(url), read_all(source))


@pytest.mark.parametrize("form", ["legacy", "plain"])
def test_training_goes_on_with_an_optimizer_that_is_not_distributed(megatron_files, form):
    """Loaded into torch's AdamW, one more step gives the bits that it gives from what the ranks held in memory."""
    held = {n: torch.from_numpy(a.view(np.float32)) for n, a in megatron_memory(megatron_files / "plain_fp32" / "memory").items()}
    names = [n.removeprefix("model.") for n in held if n.startswith("model.")]
    options = {"lr": 0.01, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}

    def made(start):
        parameters = {n: torch.nn.Parameter(start(held[f"model.{n}"])) for n in names}
        groups = [[n for n in names if (parameters[n].ndim > 1) == decayed] for decayed in (True, False)]
        return parameters, torch.optim.AdamW([{"params": [parameters[n] for n in own]} for own in groups], **options)

    expected, known = made(torch.clone)
    for n, p in expected.items():
        known.state[p] = {"step": torch.tensor(3.0), **{k: held[f"{STATE}{n}.{k}"].clone() for k in ("exp_avg", "exp_avg_sq")}}
    parameters, optimizer = made(torch.zeros_like)
    module = torch.nn.Module()
    for n, p in parameters.items():
        *above, last = n.split(".")
        inner = module
        for part in above:
            if not hasattr(inner, part):
                inner.add_module(part, torch.nn.Module())
            inner = getattr(inner, part)
        inner.register_parameter(last, p)
    ckpt.load(
        str(megatron_files / "plain_fp32" / form), {"model": module, "optimizer": optimizer}, only=["model.*", "optimizer.*"], strict=False
    )
    for one, of in ((parameters, optimizer), (expected, known)):
        for i, p in enumerate(one.values()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        of.step()
    assert [n for n, p in parameters.items() if not (p.any() and torch.equal(p[:42], expected[n][:42]))] == []


def test_groups_that_do_not_name_their_parameters(megatron_files, tmp_path):
    """The groups of both kinds of parameters are told apart; two alike are not, and then the step alone is known."""
    options = {"params": [], "lr": 0.1, "wd_mult": 1.0, "step": 7}
    model = {"output_layer.weight": random(8, 8)}
    state = {"param": torch.zeros(64), "numel_unpadded": 64}
    distributed = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): state}}
    alike = saved(tmp_path / "c", model, {"optimizer": {"param_groups": [options, options]}}, distributed)
    shutil.copy(alike / "mp_rank_00" / "distrib_optim.pt", alike / "mp_rank_00" / "layer_wise_optimizer_0.pt")
    catalog = opened(alike)
    assert "param_groups" not in catalog.state["optimizer"]
    assert catalog.state["optimizer"]["state"]["model.output_layer.weight"]["step"]["$inline"][0] == "float32"
    assert [n for n in catalog.notes if "groups" in n] and [n for n in catalog.notes if "layer_wise_optimizer_0.pt" in n]
    told = opened(megatron_files / "tp2ep2" / "dp_reshardable").state["optimizer"]["param_groups"]["$param_groups"]
    kinds = [{(".experts." in n, "norm" in n) for n in group["params"]} for group in told]
    assert kinds == [{(False, False)}, {(False, True)}, {(True, False)}]


# ------------------------------------------------------------------------------------------------------------ refused


def copied(megatron_files: Path, tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(megatron_files / name, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("layout", "gone"), [("tp2pp2vpp2", "01_001"), ("tp2ep2", "0?_000"), ("tp2ep2", "0?_001"), ("tp2pp2vpp2", "00_00?")]
)
def test_missing_ranks(megatron_files, tmp_path, layout, gone):
    copy = copied(megatron_files, tmp_path, f"{layout}/legacy")
    for folder in copy.glob(f"iter_0000003/mp_rank_{gone}"):
        shutil.rmtree(folder)
    with pytest.raises(CorruptError, match="files of ranks are missing"):
        open_catalog(str(copy))


def test_files_of_two_saves(megatron_files, tmp_path):
    copy = copied(megatron_files, tmp_path, "tp2pp2vpp2/legacy")
    path = copy / "iter_0000003" / "mp_rank_01_000" / "model_optim_rng.pt"
    state = dict(load(path))
    state["model0"] = {**state["model0"], "decoder.layers.0.mlp.linear_fc2.weight": random(24, 12)}
    torch.save(state, path)
    with pytest.raises((CorruptError, FormatError), match=r"decoder\.layers\.0|buffer 0"):
        open_catalog(str(copy))


def test_parameters_that_are_not_known(tmp_path):
    """On one rank they are whole; on two nobody knows how they were cut."""
    one = saved(tmp_path / "one", {"decoder.layers.0.mixer.in_proj.weight": random(8, 4)})
    assert list(read_all(one)) == ["model.decoder.layers.0.mixer.in_proj.weight"]
    two = Path(shutil.copytree(one, tmp_path / "two"))
    shutil.copytree(two / "mp_rank_00", two / "mp_rank_01")
    with pytest.raises(FormatError, match=r"in_proj\.weight is spread over 2"):
        open_catalog(str(two))


def test_buffers_that_do_not_fit(tmp_path):
    model = {"embedding.word_embeddings.weight": random(6, 4), "output_layer.weight": random(6, 4)}
    state = {"param": torch.zeros(80), "numel_unpadded": 80}
    distributed = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): state}}
    with pytest.raises(FormatError, match="which are not those of its 2 parameters"):
        open_catalog(str(saved(tmp_path / "c", model, distributed=distributed)))


def test_states_that_are_not_known(tmp_path):
    model = {"output_layer.weight": random(8, 8)}
    state = {"param": torch.zeros(64), "master_remainder": torch.zeros(64), "numel_unpadded": 64}
    distributed = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): state}}
    with pytest.raises(FormatError, match="master_remainder"):
        open_catalog(str(saved(tmp_path / "c", model, distributed=distributed)))
    with pytest.raises(FormatError, match="before 2024"):
        open_catalog(str(saved(tmp_path / "d", model, distributed={0: {torch.float32: [{}]}})))


def test_other_optimizers_of_torch_dist(megatron_files, tmp_path):
    """States of any name belong to their parameters; of parameters that are not there they are an error, not left out."""
    copy = copied(megatron_files, tmp_path, "pp2tied/fully_reshardable")
    data = (copy / ".metadata").read_bytes()
    (copy / ".metadata").write_bytes(data.replace(b"optimizer.state.exp_avg_sq.", b"optimizer.state.remainder_."))
    found = opened(copy)
    name = "embedding.word_embeddings.weight"
    assert found.tensors[f"{STATE}{name}.remainder_"].shape == found.tensors[f"model.{name}"].shape
    (copy / ".metadata").write_bytes(data.replace(b"optimizer.state.exp_avg_sq.decoder", b"optimizer.state.exp_avg_sq.decoded"))
    with pytest.raises(FormatError, match=r"of a parameter that the model has not, which is not read"):
        open_catalog(str(copy))


@pytest.mark.parametrize("form", ["pp2tied/fully_reshardable", "tp2ep2/dp_reshardable"])
def test_an_optimizer_without_its_model(megatron_files, tmp_path, form):
    """As verl's Megatron engine stores it: the model is another checkpoint, beside it. The error names that."""
    folder = shutil.copytree(megatron_files / form, tmp_path / "actor" / "optimizer" / "dist_ckpt")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    held = metadata.state_dict_metadata
    metadata.state_dict_metadata = {name: value for name, value in held.items() if "optimizer" in name}
    metadata.storage_data = {index: item for index, item in metadata.storage_data.items() if index.fqn in metadata.state_dict_metadata}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for command in ("inspect", "verify"):
        result = CliRunner().invoke(cli, [command, str(folder)])
        assert result.exit_code and f"the model in {tmp_path}/actor/model/dist_ckpt: inspect or convert that" in result.output
    other = folder.rename(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="without its model") as caught:
        ckpt.open(str(other))
    assert "in a directory of its own, model/dist_ckpt: " in str(caught.value)


def test_old_orders_of_queries(tmp_path):
    folder = saved(tmp_path / "c", {"output_layer.weight": random(8, 8)})
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    torch.save({**torch.load(path, weights_only=False), "checkpoint_version": 1.0}, path)
    with pytest.raises(FormatError, match=r"checkpoint version 1\.0"):
        open_catalog(str(folder))


def test_damage_is_a_checkpoint_error(megatron_files, tmp_path):
    """Whatever bytes of the metadata are changed: a checkpoint, or an error that says so."""
    copy = copied(megatron_files, tmp_path, "tp2ep2/dp_reshardable")
    data = (copy / ".metadata").read_bytes()
    random_places = np.random.default_rng(0).integers(0, len(data), 15)
    for at in random_places.tolist():
        (copy / ".metadata").write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            open_catalog(str(copy))
        except CkptError:
            continue


def test_recognised_by_content(megatron_files, tmp_path):
    assert find_format(str(megatron_files / "dp2" / "legacy")) == "Megatron"
    assert find_format(str(megatron_files / "dp2" / "legacy" / "iter_0000003")) == "Megatron"
    assert find_format(str(megatron_files / "dp2" / "dp_zero_gather_scatter")) == "Megatron"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    assert find_format(str(tmp_path)) is None


# ------------------------------------------------------------------------------------------------- saves that died


@pytest.mark.parametrize("torn", [False, True], ids=["common alone", "torn data files"])
def test_a_save_that_died_is_no_checkpoint(torn: bool, tmp_path: Path) -> None:
    """Megatron writes ``common.pt``, then data files, and ``metadata.json`` last."""
    died = tmp_path / "iter_0000010"
    died.mkdir()
    torch.save({"iteration": 10, "args": argparse.Namespace(num_layers=2)}, died / "common.pt")
    for rank in range(2 * torn):
        (died / f"__{rank}_0.distcp").write_bytes(bytes(range(256)))
    results = {name: CliRunner().invoke(cli, [name, str(died)]) for name in ("verify", "inspect", "ls")}
    assert {name: result.exit_code for name, result in results.items()} == {"verify": 11, "inspect": 11, "ls": 0}
    assert "a Megatron save that was not finished" in results["verify"].output and "unfinished Megatron save" in results["ls"].stdout
    with pytest.raises(NotCommittedError, match="not finished"):
        ckpt.load(str(died), {"model": torch.nn.Linear(2, 2)}, strict=False)
    assert find_format(str(died / "common.pt")) == "torch.save archive"  # a file that is named is what it is


def test_other_metadata_beside_common(tmp_path: Path) -> None:
    torch.save({"iteration": 10}, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(FormatError, match="in the form 'zarr', of which torch_dist alone is read"):
        open_catalog(str(tmp_path))
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "ckpt"}')  # what a removal leaves that was killed
    with pytest.raises(NotCommittedError, match="its commit record is gone"):
        ckpt.load(str(tmp_path), {"model": torch.nn.Linear(2, 2)}, strict=False)
