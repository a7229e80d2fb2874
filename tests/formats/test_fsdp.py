"""Directories with one file per rank: what ShardedTensors and DTensors say, and what plain tensors do not."""

from __future__ import annotations

import shutil
import zipfile

import numpy as np
import pytest
import torch

import ckpt
from ckpt.converters.semantic import check_semantic
from ckpt.errors import CkptError, CorruptError, FormatError
from ckpt.formats.fsdp import rank_sets
from ckpt.formats.registry import open_catalog
from tests.formats.reading import FIXTURES, same


def test_flat_parameters_of_two_ranks():
    """FSDP1's local state: the flat parameter is the concatenation of what both ranks hold (stored as torch reads its records)."""
    path = FIXTURES / "fsdp/fsdp1_local_orig0"
    catalog = open_catalog(str(path))
    assert (catalog.format, catalog.world_size, list(catalog.tensors)) == ("torch.save files of ranks", 2, ["model._flat_param"])
    halves = [torch._C.PyTorchFileReader(str(path / f"local_rank{rank}.pt")).get_record("data/0") for rank in range(2)]
    whole = torch.from_numpy(np.frombuffer(b"".join(halves), "<f4")[:1905].copy())
    view = ckpt.open(str(path))
    assert same(view["model._flat_param"].read(), whole) and same(view["model._flat_param"][900:1000], whole[900:1000])
    full = torch.load(FIXTURES / "fsdp/fsdp1_full_orig0/full.pt")["model"]
    assert all(part in whole.numpy().tobytes() for part in (t.numpy().tobytes() for t in full.values()))


def test_plain_tensors_belong_to_their_ranks(tmp_path):
    for rank in range(2):
        shutil.copy(FIXTURES / f"fsdp/fsdp2_ws2/local_rank{rank}.pt", tmp_path)
    view = ckpt.open(str(tmp_path))
    for rank in range(2):
        expected = torch.load(tmp_path / f"local_rank{rank}.pt")["model"]
        for name, tensor in expected.items():
            assert same(view.per_rank(f"model.{name}", rank).read(), tensor)
    assert {e.rank for e in open_catalog(str(tmp_path)).tensors.values()} == {0, 1}


def test_one_file_of_many_is_refused():
    with pytest.raises(FormatError, match="the part of one rank") as caught:
        ckpt.open(str(FIXTURES / "fsdp/fsdp1_local_orig0/local_rank0.pt"))
    assert "directory" in caught.value.hint


def test_values_of_ranks(tmp_path):
    for rank in range(2):
        state = {"step": 5, "text": "x@rank0", "rng": [1, rank], "only": {f"r{rank}": rank}, "deep": {1: {"x": rank}, 2: "same"}}
        torch.save(state, tmp_path / f"extra_state_world_size_2_rank_{rank}.pt")
    view = ckpt.open(str(tmp_path))
    state = view.state()
    assert (state["text"], state["step"], state["only"], state["deep"][2]) == ("x@rank0", 5, {"r0": 0, "r1": 1}, "same")
    assert [view.per_rank("rng", rank) for rank in range(2)] == [[1, 0], [1, 1]]
    assert view.per_rank("deep.1.x", 1) == 1


def test_several_sets(tmp_path):
    for rank in range(2):
        torch.save({"a": rank}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        torch.save({"a": 7}, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
    view = ckpt.open(str(tmp_path))
    assert view.state()["optim"] == {"a": 7} and view.per_rank("model.a", 1) == 1


def test_which_names_make_a_set():
    two = ["m_rank0.pt", "m_rank1.pt"]
    assert rank_sets([*two, "config.json"]) == {"m": {0: "m_rank0.pt", 1: "m_rank1.pt"}}
    for names in (["m_rank0.pt"], ["m_rank0.pt", "m_rank2.pt"], [*two, "other.pt"], [*two, "n_rank0.pt"], ["rank0.pt", "rank00.pt"], []):
        assert rank_sets(names) == {}


def test_files_of_different_saves(tmp_path):
    source = FIXTURES / "fsdp/fsdp1_local_orig0"
    for rank in range(2):
        shutil.copy(source / "local_rank0.pt", tmp_path / f"local_rank{rank}.pt")  # twice the same half
    with pytest.raises(CkptError, match="stored parts of tensor"):
        ckpt.open(str(tmp_path))["model._flat_param"].read()
    with zipfile.ZipFile(source / "local_rank1.pt") as old, zipfile.ZipFile(tmp_path / "local_rank1.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"M\x71\x07", b"M\x72\x07"))  # 1905 elements become 1906
    with pytest.raises(CorruptError, match="on one rank"):
        open_catalog(str(tmp_path))


@pytest.mark.parametrize("present", [[0, 1, 2], [1, 2, 3], [0]])
def test_files_of_ranks_that_are_missing(present, tmp_path):
    for rank in present:
        torch.save({"a": rank}, tmp_path / f"model_world_size_4_rank_{rank}.pt")
    absent = ", ".join(f"model_world_size_4_rank_{rank}.pt" for rank in range(4) if rank not in present)
    with pytest.raises(CkptError, match=f"files of ranks are missing: {absent}"):
        ckpt.open(str(tmp_path))
    assert ckpt.open(str(tmp_path / f"model_world_size_4_rank_{present[0]}.pt")).state() == {"a": present[0]}


def test_copies_of_a_box_that_differ(tmp_path):
    """What hybrid sharding writes: each part in the files of several ranks."""
    source = FIXTURES / "fsdp/fsdp1_local_orig0"
    for rank in range(4):
        shutil.copy(source / f"local_rank{rank % 2}.pt", tmp_path / f"local_rank{rank}.pt")
    report = check_semantic(open_catalog(str(tmp_path)))
    assert (report.replicas, report.problems) == (2, ())
    half = ckpt.open(str(tmp_path))["model._flat_param"].read()[953:].numpy().tobytes()
    path = tmp_path / "local_rank3.pt"
    data = bytearray(path.read_bytes())
    data[data.index(half) + 40] ^= 1
    path.write_bytes(data)
    (problem,) = check_semantic(open_catalog(str(tmp_path))).problems
    assert (problem.tensor, problem.box.offset) == ("model._flat_param", (963,))
    assert problem.message == "1 of 952 elements differ from the copy in local_rank3.pt"


def test_a_job_of_verl_goes_on_in_one_process(tmp_path):
    """Its own files of two ranks, by verl 0.9.1: the optimizer's numbers become names, the buffer and the steps are the job's, and what
    lies beside is no hindrance. Compared with what torch reads of each file."""
    shutil.copytree(FIXTURES / "verl", tmp_path / "actor")
    torch.save({"epoch": 1}, tmp_path / "actor" / "data_0.pt")
    url = str(tmp_path / "actor")
    names = ["embed_tokens.weight", *(f"layers.0.{n}.weight" for n in VERL_LAYER), "norm.weight"]
    shapes = [tuple(ckpt.open(url)[f"model.model.{name}"].shape) for name in names]
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    for name, shape in zip(names, shapes, strict=True):
        *inside, last = name.split(".")
        owner = model.model
        for part in inside:
            owner = getattr(owner, part, None) or owner.register_module(part, torch.nn.Module()) or getattr(owner, part)
        owner.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))
    model.lm_head = torch.nn.Module()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.register_buffer("scale", torch.zeros(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    state = {"model": model, "optim": optimizer, "extra_state": {"lr_scheduler": schedule}}
    ckpt.load(url, state, only=["model.*", "optim.*", "extra_state.lr_scheduler.*"])
    halves = [[torch.load(f"{url}/{kind}_world_size_2_rank_{r}.pt", weights_only=False) for r in (0, 1)] for kind in ("model", "optim")]
    for name, tensor in model.state_dict().items():
        assert same(tensor, joined(half[name] for half in halves[0])), name
    assert len(optimizer.state) == len(names)
    for number, states in enumerate(optimizer.state.values()):
        assert states.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(same(tensor, joined(half["state"][number][key] for half in halves[1])) for key, tensor in states.items())
    assert (optimizer.param_groups[0]["lr"], schedule.last_epoch) == (halves[1][0]["param_groups"][0]["lr"], 2)


VERL_LAYER = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
VERL_LAYER += ["input_layernorm", "post_attention_layernorm"]


def joined(parts):
    parts = list(parts)
    return torch.cat([part._local_tensor for part in parts]) if hasattr(parts[0], "_local_tensor") else parts[0]


def test_what_is_equal_on_all_ranks_is_one_tensor_beside_sharded_ones(tmp_path):
    """Only there, and only by the archives' checksums: the extra state of verl's fixture without the sharded sets is each rank's."""
    for rank in range(2):
        shutil.copy(FIXTURES / f"verl/extra_state_world_size_2_rank_{rank}.pt", tmp_path)
    assert {e.rank for e in open_catalog(str(tmp_path)).tensors.values()} == {0, 1}
    report = check_semantic(open_catalog(str(FIXTURES / "verl")))
    assert report.replicas and report.problems == ()
    torch.save({"w": torch.ones(2)}, tmp_path / "model_world_size_1_rank_0.pt")
    for file in tmp_path.glob("extra*"):
        file.unlink()
    assert open_catalog(str(tmp_path)).tensors["w"].rank is None
