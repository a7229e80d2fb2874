"""A job goes on from a checkpoint that another framework wrote on another layout: whole states, bit for bit, without a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.converters.importer import import_checkpoint
from ckpt.converters.mapping.convention import translated_views
from tests.distributed.ranks import Ranks
from tests.formats.memory import megatron_memory
from tests.formats.reading import FIXTURES, same
from tests.matrix.cases import CASES, SIZES
from tests.matrix.jobs import ASIDE, PARAMETER, Shapes, into_fsdp, into_megatron, into_mesh, parts_of
from tests.matrix.oracles import Tensors, of_megatron, typed

BY_PATH = {case.path: case for case in CASES}


def known(path: str, megatron_files: Path, tmp_path: Path) -> tuple[str, Tensors]:
    """Where a fixture is and what it holds; masters left out, which torch's optimizers do not keep."""
    case = BY_PATH[path]
    url = case.url(megatron_files)
    found = {n: t for n, t in case.holds(url, tmp_path).items() if not n.endswith(".master")}
    if case.step_values:
        found |= {n.removesuffix("exp_avg") + "step": torch.tensor(3.0) for n in found if n.endswith(".exp_avg")}
    return str(url), found


def weights_of(tensors: Tensors, prefix: str = "model.") -> Shapes:
    return {n.removeprefix(prefix): (tuple(t.shape), t.dtype) for n, t in tensors.items() if n.startswith(prefix)}


def differing(found: Tensors, expected: Tensors) -> list[str]:
    names = sorted(found.keys() ^ expected.keys())
    return names + [n for n in sorted(found.keys() & expected.keys()) if not same(found[n], expected[n])]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("megatron/tp2pp2vpp2ep2/legacy", {}),
        pytest.param("megatron/tp2pp2vpp2/dp_reshardable", {}, marks=pytest.mark.slow),
        pytest.param("megatron/pp2tied/dp_reshardable", {}, marks=pytest.mark.slow),
        pytest.param("deepspeed/pipeline", {"tied": {"0.weight": "tied_modules.embed.weight"}}, marks=pytest.mark.slow),
        ("deepspeed/experts", {"tied": {"head.weight": "emb.weight"}, "frozen": ["frozen", "buf"]}),
        ("deepspeed/zero3", {"frozen": ["frozen", "buf"]}),
    ],
)
def test_into_fsdp_on_three_ranks(path: str, more: dict[str, Any], ranks: Ranks, megatron_files: Path, tmp_path: Path) -> None:
    """Megatron of any layout, and DeepSpeed with stages, experts and partitions of everything."""
    url, expected = known(path, megatron_files, tmp_path)
    for found, rates in ranks.run(3, into_fsdp, url, weights_of(expected), ASIDE, more):
        assert differing(found, expected) == []
        assert 9.0 not in rates


CUTS = {"emb.weight": 0, "l0.weight": 0, "l0.bias": 0, "l1.weight": 1, "head.weight": 0}
OF_DCP = {"optim.state.*": f"{PARAMETER}*", "optim.*": "optimizer.*"}
"""DCP names the parameters of an optimizer within the model; this one is called otherwise too."""


@pytest.mark.parametrize("sizes", [pytest.param((2,), marks=pytest.mark.slow), (2, 2)])
@pytest.mark.parametrize("name", ["fsdp1_sharded_orig0", "fsdp1_sharded_orig1", "fsdp2_ws2"])
def test_fsdp_of_two_into_tensor_parallelism(name: str, sizes: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    """On two ranks, and on two by two with FSDP2 over the parts; sizes do not divide."""
    url, stored = known(f"fsdp/{name}", tmp_path, tmp_path)
    expected = {n.replace("optim.state.", PARAMETER): t for n, t in stored.items()}
    shapes = weights_of(expected)
    for found, rates in ranks.run(2 ** len(sizes), into_mesh, url, shapes, OF_DCP, sizes, CUTS, {}):
        assert differing(found, expected) == []
        assert rates == {0.01}


ROWS = {"embed_tokens.weight": 0, "lm_head.weight": 0, "q_proj.weight": 0, "k_proj.weight": 0, "v_proj.weight": 0}
COLUMNS = {"o_proj.weight": 1, "gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1, "w1.weight": 0, "w2.weight": 1}


@pytest.mark.parametrize(("name", "sizes"), [pytest.param("llama", (2,), marks=pytest.mark.slow), ("llama", (2, 2)), ("mixtral", (3, 1))])
def test_hugging_face_into_tensor_parallelism(name: str, sizes: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    url, stored = known(f"hf/{name}", tmp_path, tmp_path)
    expected = {f"model.{n}": t for n, t in stored.items()}
    cuts = ROWS | COLUMNS
    world = torch.Size(sizes).numel()
    for found, _ in ranks.run(world, into_mesh, url, weights_of(expected), {"*": "model.*"}, sizes, cuts, {"only": ["model.*"]}):
        assert differing(found, expected) == []


@pytest.mark.parametrize(
    ("layout", "world", "job"),
    [
        ("tp2pp2vpp2", 1, {}),
        ("tp2pp2vpp2", 4, {"pp": 4}),
        pytest.param("tp2pp2vpp2", 4, {"tp": 4}, marks=pytest.mark.slow),
        pytest.param("tp2pp2vpp2ep2", 1, {}, marks=pytest.mark.slow),
        ("tp2pp2vpp2ep2", 4, {"tp": 4, "ep": 4}),
        pytest.param("tp2pp2vpp2ep2", 4, {"pp": 2, "ep": 2}, marks=pytest.mark.slow),
        ("tp2pp2vpp2ep2", 8, {"tp": 2, "pp": 2, "vpp": 2, "ep": 2}),
        ("tp2ep2", 4, {"pp": 2, "vpp": 2, "tp": 2}),
        ("pp2tied", 2, {"tp": 2}),
        pytest.param("pp2vpp2ep2", 2, {"tp": 2, "ep": 2}, marks=pytest.mark.slow),
        ("model_space_tp2", 4, {"tp": 4, "padded": 60}),
        ("tp2ep2", 1, {"padded": 42}),
    ],
)
def test_megatron_into_megatron(layout: str, world: int, job: dict[str, int], ranks: Ranks, megatron_files: Path, tmp_path: Path) -> None:
    """Other tensor, pipeline, virtual pipeline and expert parallelism: each rank's own parts."""
    job = {"padded": 48} | job
    case = BY_PATH[f"megatron/{layout}/{'fully_sharded_model_space' if layout == 'model_space_tp2' else 'dp_reshardable'}"]
    url, whole = known(case.path, megatron_files, tmp_path)
    whole |= padded_of(case.url(megatron_files).parent)
    for rank, found in enumerate(ranks.run(world, into_megatron, url, job, weights_of(whole), {})):
        expected: Tensors = {}
        for ending in ("", ".exp_avg", ".exp_avg_sq", ".step"):
            head = PARAMETER if ending else "model."
            of = {n.removeprefix(head).removesuffix(ending): t for n, t in whole.items() if n.startswith(head) and n.endswith(ending)}
            scalar = ending == ".step"
            parts = parts_of(rank, world, job, {n: torch.zeros(whole[f"model.{n}"].shape) for n in of} if scalar else of)
            expected |= {f"{head}{n}{ending}": torch.tensor(3.0) if scalar else t for n, t in parts.items()}
        assert differing(found, expected) == []


def padded_of(folder: Path) -> Tensors:
    """The tensors that have a vocabulary, with the rows that pad it."""
    memory = folder / "memory"
    found = typed(megatron_memory(memory)) if memory.exists() else of_megatron(folder / "legacy", rows=None, **SIZES[folder.name])
    return {n: t for n, t in found.items() if len(t) == 48 and not n.endswith(".master") and ("embeddings" in n or "output" in n)}


def test_hugging_face_into_megatron(ranks: Ranks, tmp_path: Path) -> None:
    """Llama's files, spelled as Megatron without copying, into tensor parallelism over two ranks: QKV in groups, gate and up in halves."""
    url = str(FIXTURES / "hf/llama")
    import_checkpoint(url, str(tmp_path / "v"), views=translated_views(url, "llama", "megatron", {}))
    stored = BY_PATH["hf/llama"].holds(FIXTURES / "hf/llama", tmp_path)
    parts = ranks.run(2, into_halves, str(tmp_path / "v"))
    for rank, found in enumerate(parts):
        assert len(found) == 8
        q, k, v = (stored[f"model.layers.1.self_attn.{p}_proj.weight"].reshape(4, -1, 64) for p in "qkv")
        groups = torch.cat([q, k, v], 1)[2 * rank : 2 * rank + 2]
        assert same(found["decoder.layers.1.self_attention.linear_qkv.weight"], groups.reshape(-1, 64))
        gate, up = (stored[f"model.layers.0.mlp.{p}_proj.weight"].chunk(2)[rank] for p in ("gate", "up"))
        assert same(found["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate, up]))
        padded = torch.cat([stored["model.embed_tokens.weight"], torch.zeros(6, 64).bfloat16()])
        assert same(found["embedding.word_embeddings.weight"], padded[128 * rank : 128 * rank + 128])
        down = stored["model.layers.1.mlp.down_proj.weight"]
        assert same(found["decoder.layers.1.mlp.linear_fc2.weight"], down.chunk(2, 1)[rank])


def into_halves(url: str) -> Tensors:
    layers = [f"decoder.layers.{i}." for i in range(2)]
    shapes = {f"{at}self_attention.linear_qkv.weight": (64, 64) for at in layers}
    shapes |= {f"{at}mlp.linear_fc1.weight": (96, 64) for at in layers} | {f"{at}mlp.linear_fc2.weight": (64, 48) for at in layers}
    state = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items()}
    state |= {n: torch.ones(128, 64, dtype=torch.bfloat16) for n in ("embedding.word_embeddings.weight", "output_layer.weight")}
    padded = ("*embedding*", "output_layer*")
    layout = ckpt.Layout(
        {"tp": 2},
        [
            *((glob, ckpt.Shard(0, "tp"), ckpt.Padded(0, 250)) for glob in padded),
            ("*qkv*", ckpt.Shard(0, "tp")),
            ("*fc1*", ckpt.Interleaved(0, "tp", groups=2)),
            ("*fc2*", ckpt.Shard(1, "tp")),
        ],
    )
    ckpt.load(url, state, only=list(state), layout=layout)
    return state
