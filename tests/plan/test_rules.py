"""Rules against a Megatron-style model that is cut by hand: every rank's local tensor lies where its rule says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import LayoutError
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.layout import Layout, ResolvedShard
from ckpt.plan.layout.mesh import Mesh, Numbered, experts, pipeline
from ckpt.plan.layout.placements import Flat, GlobalShape, Interleaved, OnMesh, Padded, Replicate, Shard, Stage, Uneven
from ckpt.plan.layout.tensor_layout import TensorLayout
from tests.plan.layout_strategies import chunked, numbered, through_pieces

# ---------------------------------------------------------------------------------------------------- a Megatron-style model

HIDDEN, QKV, FFN, VOCAB, EXPERTS = 4, (8, 4, 4), 8, 10, 8


def model(layers: int) -> dict[str, np.ndarray]:
    """The whole model as a checkpoint names it; every element of it is different."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (VOCAB, HIDDEN), "head.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    for i in range(layers):
        shapes |= {f"layers.{i}.qkv.weight": (sum(QKV), HIDDEN), f"layers.{i}.qkv.bias": (sum(QKV),), f"layers.{i}.out.weight": (HIDDEN, 8)}
        shapes |= {
            f"layers.{i}.gate_up.weight": (2 * FFN, HIDDEN),
            f"layers.{i}.down.weight": (HIDDEN, FFN),
            f"layers.{i}.ln.weight": (HIDDEN,),
        }
        shapes |= {f"layers.{i}.experts.{e}.w1.weight": (FFN, HIDDEN) for e in range(EXPERTS)}
    found, at = {}, 1
    for name, shape in shapes.items():
        found[name] = numbered(shape) + at
        at += found[name].size
    return found


def tp_part(name: str, array: np.ndarray, tp: int, size: int) -> np.ndarray:
    """What tensor parallelism leaves of one tensor of the model."""
    if ".qkv." in name:
        q, k, v = np.split(array, np.cumsum(QKV)[:-1].tolist())
        return np.concatenate([np.split(x, size)[tp] for x in (q, k, v)])
    if ".gate_up." in name:
        gate, up = np.split(array, 2)
        return np.concatenate([np.split(gate, size)[tp], np.split(up, size)[tp]])
    if ".out." in name or ".down." in name:
        return np.split(array, size, axis=1)[tp]
    if name in ("embedding.weight", "head.weight"):
        rows = -(-VOCAB // (4 * size)) * 4 * size
        return np.split(np.pad(array, ((0, rows - VOCAB), (0, 0))), size)[tp]
    return array


RULES: list[tuple[Any, ...]] = [
    ("*.qkv.*", Interleaved(0, "tp", QKV)),
    ("*.gate_up.weight", Interleaved(0, "tp", 2)),
    ("*.out.weight", Shard(1, "tp")),
    ("*.down.weight", Shard(-1, "tp")),
    ("embedding.weight", Shard(0, "tp"), Padded(0, VOCAB)),
    ("head.weight", Shard(0, "tp"), Padded(0, VOCAB)),
    ("*.experts.*", Replicate(), OnMesh("expert")),
    ("*", Replicate()),
]


def dealt(layers: int, stages: int, virtual: int) -> dict[tuple[int, int, int], int]:
    """(stage, model chunk, local number) → layer. Blocks of layers go round the stages, as they run."""
    per = layers // (stages * virtual)
    return {(i // per % stages, i // per // stages, i % per): i for i in range(layers)}


def local_model(
    whole: dict[str, np.ndarray], layers: int, pp: tuple[int, int], tp: tuple[int, int], virtual: int
) -> dict[str, tuple[str, np.ndarray]]:
    """Local name → stored name and array, for coordinate and size of pp and tp. Experts are left out."""
    stage, stages = pp
    chunk_name = "{}." if virtual > 1 else ""
    found: dict[str, tuple[str, np.ndarray]] = {}
    for (s, chunk, local), layer in dealt(layers, stages, virtual).items():
        for name in whole:
            if s == stage and name.startswith(f"layers.{layer}.") and ".experts." not in name:
                said = chunk_name.format(chunk) + name.replace(f"layers.{layer}.", f"layers.{local}.")
                found[said] = name, tp_part(name, whole[name], *tp)
    if stage == 0:
        found["embedding.weight"] = "embedding.weight", tp_part("embedding.weight", whole["embedding.weight"], *tp)
    if stage == stages - 1:
        found |= {n: (n, tp_part(n, whole[n], *tp)) for n in ("head.weight", "norm.weight")}
    return found


def padded_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.pad(array, [(0, n - m) for n, m in zip(shape, array.shape, strict=True)])


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize(("pp", "dp", "tp"), [(1, 1, 1), (2, 2, 2), (4, 1, 2), (2, 2, 4)])
def test_a_megatron_model_is_where_the_rules_say(pp: int, dp: int, tp: int, virtual: int) -> None:
    layers = 12 * virtual
    whole = model(layers)
    pattern = "{chunk}.layers.{n}" if virtual > 1 else "layers.{n}"
    layout = Layout(
        {"pp": pp, "dp": dp, "tp": tp},
        RULES,
        numbered=[pipeline(pattern, layers=layers, stages=pp, virtual=virtual)],
        meshes={"expert": {"pp": pp, "edp": dp * tp}},
    )
    ranks = np.arange(pp * dp * tp).reshape(pp, dp, tp)
    seen: dict[str, set[int]] = {}
    for (p, _, t), rank in np.ndenumerate(ranks):
        for said, (name, local) in local_model(whole, layers, (p, pp), (t, tp), virtual).items():
            placed = layout.place(said, local.shape, int(rank))
            assert placed.name == name
            assert placed.logical == (whole[name].shape if name in ("embedding.weight", "head.weight") else None)
            assert (placed.logical or placed.shape) == whole[name].shape
            assert np.array_equal(through_pieces(placed.layout, padded_to(whole[name], placed.shape), int(rank)), local)
            assert placed.layout.ranks() == set(ranks[p].ravel().tolist())
            seen.setdefault(name, set()).add(int(rank))
    dense = {n for n in whole if ".experts." not in n}
    assert seen.keys() == dense
    assert all(len(r) == dp * tp for r in seen.values())


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_virtual_pipelines_deal_layers_as_megatron_does(stages: int, virtual: int, per: int) -> None:
    layers = stages * virtual * per
    rule = pipeline("{chunk}.layers.{n}", layers=layers, stages=stages, virtual=virtual)
    layout = Layout({"pp": stages}, [("*", Replicate())], numbered=[rule])
    for (stage, chunk, local), layer in dealt(layers, stages, virtual).items():
        placed = layout.place(f"model.{chunk}.layers.{local}.w", (2,), stage)
        assert placed.name == f"model.layers.{layer}.w"
        # Megatron's own words: get_transformer_layer_offset.
        assert layer == chunk * (layers // virtual) + stage * (layers // virtual // stages) + local


@pytest.mark.parametrize(
    ("said", "stored"),
    [
        ("layers.1.w", "layers.5.w"),
        ("model.layers.1", "model.layers.5"),
        ("model.layers.1.layers_norm.1.w", "model.layers.5.layers_norm.1.w"),
        ("xlayers.1.w", "xlayers.1.w"),
        ("layers.1x.w", "layers.1x.w"),
        ("layers.w", "layers.w"),
    ],
)
def test_only_whole_segments_are_numbers(said: str, stored: str) -> None:
    layout = Layout({"pp": 2}, [("*", Replicate())], numbered=[pipeline("layers.{n}", layers=8, stages=2)])
    assert layout.place(said, (3,), 1).name == stored


def test_layers_may_be_assigned_by_hand() -> None:
    rule = Numbered(pattern="layers.{n}", to="blocks.{n}", over="pp", ids=(((0, 1, 2),), ((3,),)), stage=True)
    layout = Layout({"pp": 2, "dp": 2}, [("*", Replicate())], numbered=[rule])
    assert layout.place("layers.2.w", (1,), 1).name == "blocks.2.w"
    assert layout.place("layers.0.w", (1,), 2).name == "blocks.3.w"
    with pytest.raises(LayoutError, match=r"'layers.\{n\}' has no number for it on coordinate 1 of 'pp'(?s:.*)layers.1.w, rank 3"):
        layout.place("layers.1.w", (1,), 3)


def test_the_model_chunk_may_vanish_from_other_names_too() -> None:
    """Embedding and head of a virtual pipeline lie in a chunk, but have no layer."""
    layers = pipeline("{chunk}.layers.{n}", layers=8, stages=2, virtual=2)
    ends = [Numbered(pattern=f"{{chunk}}.{name}", to=name, over="pp", ids=layers.ids) for name in ("embed", "head")]
    layout = Layout({"pp": 2}, [("*", Replicate())], numbered=[layers, *ends])
    assert layout.place("model.0.embed.w", (1,), 0).name == "model.embed.w"
    assert layout.place("model.1.head.w", (1,), 1).name == "model.head.w"
    assert layout.place("model.1.head.w", (1,), 1).layout.ranks() == {1}
    with pytest.raises(LayoutError, match=r"no number for it on coordinate 1 of 'pp'"):
        layout.place("model.2.head.w", (1,), 1)


# ------------------------------------------------------------------------------------------------------------------- experts


def folded(*, stack: int | None, rule: tuple[Any, ...], layers: int = 4) -> Layout:
    """Dense tensors over pp·dp·tp, experts over pp·edp·ep on the same eight ranks."""
    numbers = [experts("experts.{n}", count=EXPERTS, ranks=4, mesh="expert", stack=stack), pipeline("layers.{n}", layers=layers, stages=2)]
    return Layout(
        {"pp": 2, "dp": 2, "tp": 2}, [("*.experts.*", *rule), *RULES], meshes={"expert": {"pp": 2, "edp": 1, "ep": 4}}, numbered=numbers
    )


def expert_places(layout: Layout) -> Iterator[tuple[int, int, int, ResolvedShard]]:
    """Rank, global layer, global expert and place of every expert tensor of the eight ranks."""
    for rank in range(8):
        stage, ep = divmod(rank, 4)
        for local_layer in range(2):
            for local in range(2):
                placed = layout.place(f"layers.{local_layer}.experts.{local}.w1.weight", (FFN, HIDDEN), rank)
                yield rank, stage * 2 + local_layer, ep * 2 + local, placed


def test_experts_of_their_own_are_on_one_coordinate() -> None:
    for rank, layer, expert, placed in expert_places(folded(stack=None, rule=(Replicate(),))):
        assert placed.name == f"layers.{layer}.experts.{expert}.w1.weight"
        assert (placed.shape, placed.stack, placed.layout.mesh.names) == ((FFN, HIDDEN), None, ("pp", "edp", "ep"))
        assert placed.layout.ranks() == {rank}


@pytest.mark.parametrize("stack", [0, 1, 2, -1, -3])
def test_stacked_experts_are_one_tensor(stack: int) -> None:
    for rank, layer, expert, placed in expert_places(folded(stack=stack, rule=(Replicate(),))):
        dim = stack % 3
        whole = np.stack([numbered((FFN, HIDDEN)) + 100 * e for e in range(EXPERTS)], axis=dim)
        first = rank % 4 * 2
        mine = np.stack([numbered((FFN, HIDDEN)) + 100 * e for e in (first, first + 1)], axis=dim)
        assert placed.name == f"layers.{layer}.experts.w1.weight"
        assert (placed.shape, placed.stack) == (whole.shape, (dim, expert))
        assert np.array_equal(through_pieces(placed.layout, whole, rank), mine)
        assert placed.layout.ranks() == set(range(rank // 4 * 4, rank // 4 * 4 + 4))


@pytest.mark.parametrize("split", [Shard(0, "etp"), Shard(-1, "etp"), Interleaved(0, "etp", 2), Shard(1, "etp", (1, 3))])
@pytest.mark.parametrize("stack", [None, 0, 1, 2])
def test_experts_may_be_cut_too(stack: int | None, split: Shard | Interleaved) -> None:
    """Expert tensor parallelism over a third mesh of the same ranks."""
    rule = experts("experts.{n}", count=6, ranks=2, mesh="expert", stack=stack)
    layout = Layout({"dp": 4}, [("*", split)], meshes={"expert": {"ep": 2, "etp": 2}}, numbered=[rule])
    whole = [numbered((FFN, HIDDEN)) + 100 * e for e in range(6)]

    def cut(array: np.ndarray, etp: int) -> np.ndarray:
        if isinstance(split, Interleaved):
            return np.concatenate([np.split(half, 2)[etp] for half in np.split(array, 2)])
        return np.split(array, [1] if split.sizes else 2, axis=split.dim)[etp]

    for rank in range(4):
        ep, etp = divmod(rank, 2)
        mine = [cut(whole[ep * 3 + n], etp) for n in range(3)]
        for n in range(3):
            placed = layout.place(f"experts.{n}.w", mine[n].shape, rank)
            array = whole[ep * 3 + n] if stack is None else np.stack(whole, axis=stack)
            expected = mine[n] if stack is None else np.stack(mine, axis=stack)
            assert placed.name == ("experts.w" if stack is not None else f"experts.{ep * 3 + n}.w")
            assert placed.shape == array.shape
            assert np.array_equal(through_pieces(placed.layout, array, rank), expected)


def test_stacked_experts_are_cut_like_those_that_the_model_stacks() -> None:
    """Otherwise the two could not read each other's checkpoints."""
    meshes = {"expert": {"pp": 2, "edp": 1, "ep": 4}}
    stacked = Layout({"pp": 2, "dp": 4}, [("*", Shard(0, "ep"), OnMesh("expert"), Stage("pp", 0))], meshes=meshes)
    theirs = stacked.place("layers.0.experts.w1.weight", (2, FFN, HIDDEN), 3)
    mine = folded(stack=0, rule=(Replicate(),)).place("layers.0.experts.1.w1.weight", (FFN, HIDDEN), 3)
    assert (mine.name, mine.shape) == (theirs.name, theirs.shape)
    assert [p.box for p in mine.layout.pieces(mine.shape, 3)] == [p.box for p in theirs.layout.pieces(theirs.shape, 3)]


def test_a_stack_needs_one_block_of_numbers_per_coordinate() -> None:
    rule = Numbered(pattern="experts.{n}", to="experts.{n}", over="ep", ids=(((0, 2),), ((1, 3),)), stack=0)
    layout = Layout({"ep": 2}, [("*", Replicate())], numbered=[rule])
    with pytest.raises(LayoutError, match=r"not one contiguous block(?s:.*)tensor experts.0.w, rank 1(?s:.*)stack=None"):
        layout.place("experts.0.w", (4,), 1)


def test_only_one_number_of_a_name_is_stacked() -> None:
    """Else tensors of different layers would get one name."""
    numbers = [experts("experts.{n}", count=4, ranks=2, stack=0), pipeline("layers.{n}", layers=4, stages=2, stack=0)]
    layout = Layout({"pp": 2, "ep": 2}, [("*", Replicate())], numbered=numbers)
    assert layout.place("layers.1.w", (3,), 3).shape == (4, 3)
    with pytest.raises(LayoutError, match=r"two numbers of its name are to be stacked \(tensor layers.0.experts.1.w, rank 0\)"):
        layout.place("layers.0.experts.1.w", (3,), 0)


@pytest.mark.parametrize("stack", [0, 1])
def test_a_stacked_tensor_has_to_fit_its_rule(stack: int) -> None:
    layout = Layout({"ep": 2, "tp": 2}, [("*", Shard(0, "tp", (1, 2)))], numbered=[experts("e.{n}", count=4, ranks=2, stack=stack)])
    assert layout.place("e.0", (2, 5), 1).shape == ((4, 3, 5) if stack == 0 else (3, 4, 5))
    with pytest.raises(LayoutError, match=r"shape \(1, 5\), but the tensor has \(2, 5\) \(tensor e.0, rank 0\)"):
        layout.place("e.0", (2, 5), 0)


# ------------------------------------------------------------------------------------------------------- sizes that one rank does not see


@given(st.integers(0, 20), st.integers(1, 5))
def test_uneven_dimensions_need_their_size(size: int, parts: int) -> None:
    layout = Layout({"dp": parts}, [("*", Shard(1, "dp"), Uneven(-1, size))])
    array = numbered((2, size))
    for rank, local in enumerate(chunked(array, parts, 1)):
        placed = layout.place("w", local.shape, rank)
        assert placed.shape == (2, size)
        assert np.array_equal(through_pieces(placed.layout, array, rank), local)


@given(st.integers(1, 5), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.booleans(), st.data())
def test_the_global_size_follows_from_several_splits_of_a_dimension(
    parts: int, unit: list[int], given_first: bool, data: st.DataObject
) -> None:
    """Given sizes or groups count what earlier splits left, so they hold at any place in the order."""
    layers = len(unit)
    first: Shard | Interleaved
    second: Shard | Interleaved
    if given_first:
        first, second = Shard(0, "tp", tuple(n * parts for n in unit)), Shard(0, "dp")
        array = numbered((sum(unit) * parts, 2))
        cut = [list(np.split(block, parts)) for block in np.split(array, np.cumsum(unit)[:-1] * parts)]
    else:
        first, second = Shard(0, "tp"), Interleaved(0, "dp", tuple(n * parts for n in unit))
        array = numbered((sum(unit) * parts * layers, 2))
        cut = []
        for block in np.split(array, layers):
            groups = np.split(block, np.cumsum(unit)[:-1] * parts)
            cut.append([np.concatenate([np.split(g, parts)[i] for g in groups]) for i in range(parts)])
    layout = Layout({"dp": parts, "tp": layers}, [("*", first, second)])
    for dp in range(parts):
        for tp in range(layers):
            rank = dp * layers + tp
            placed = layout.place("w", cut[tp][dp].shape, rank)
            assert placed.shape == array.shape
            assert np.array_equal(through_pieces(placed.layout, array, rank), cut[tp][dp])


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_flat_tensors_need_their_shape(rows: int, columns: int, parts: int) -> None:
    layout = Layout({"dp": parts}, [("*", Flat("dp"), GlobalShape((rows, columns)))])
    array = numbered((rows, columns))
    for rank, local in enumerate(chunked(array.ravel(), parts, 0)):
        placed = layout.place("w", local.shape, rank)
        assert placed.shape == (rows, columns)
        assert np.array_equal(through_pieces(placed.layout, array, rank), local)


def test_a_global_shape_is_checked_against_the_memory() -> None:
    layout = Layout({"dp": 2}, [("*", Flat("dp"), GlobalShape((3, 3)))])
    with pytest.raises(LayoutError, match=r"shape \(5,\), but the tensor has \(4,\) \(tensor w, rank 0\)"):
        layout.place("w", (4,), 0)


# -------------------------------------------------------------------------------------------------------------------- stages


def test_a_tied_embedding_is_on_both_ends() -> None:
    layout = Layout(
        {"pp": 3, "tp": 2},
        [("embedding.weight", Shard(0, "tp"), Stage("pp", (0, -1))), ("*", Replicate())],
        numbered=[pipeline("layers.{n}", layers=6, stages=3)],
    )
    places = [layout.place("embedding.weight", (4, 2), rank) for rank in (0, 1, 4, 5)]
    assert len({p.layout for p in places}) == 1
    assert places[0].layout.ranks() == {0, 1, 4, 5}
    assert places[0].layout.tiling((8, 2)).holders.tolist() == [[0, 4], [1, 5]]
    with pytest.raises(LayoutError, match=r"'pp': \(0, 2\)(?s:.*)tensor embedding.weight, rank 2(?s:.*)Stage"):
        layout.place("embedding.weight", (4, 2), 2)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_rank_off_the_stage_has_no_such_tensor(shape: tuple[int, ...]) -> None:
    """Its tensor would be neither saved nor loaded, and nobody would be told."""
    layout = Layout({"pp": 2}, [("*", Replicate(), Stage("pp", 1))])
    assert layout.place("w", shape, 1).layout.ranks() == {1}
    with pytest.raises(LayoutError, match=r"where this rank is not \(tensor w, rank 0\)"):
        layout.place("w", shape, 0)


def test_one_stage_is_both_ends() -> None:
    layout = Layout({"pp": 1, "dp": 2}, [("*", Replicate(), Stage("pp", (0, -1)))])
    assert layout.place("w", (3,), 1).layout.at == (("pp", (0,)),)


def test_without_numbers_a_tensor_is_on_its_own_stage() -> None:
    layout = Layout({"pp": 2, "dp": 2}, [("*", Replicate())], numbered=[pipeline("layers.{n}", layers=4, stages=2)])
    assert [layout.place("norm", (1,), r).layout.ranks() for r in range(4)] == [{0, 1}, {0, 1}, {2, 3}, {2, 3}]


# -------------------------------------------------------------------------------------------------------------------- vocabulary


def test_padding_is_told_from_real_rows() -> None:
    placed = Layout({"tp": 4}, [("*", Shard(0, "tp"), Padded(0, VOCAB))]).place("w", (3, HIDDEN), 3)
    assert (placed.shape, placed.logical) == ((12, HIDDEN), (VOCAB, HIDDEN))
    assert placed.layout.pieces(placed.shape, 3)[0].box == Box((9, 0), (3, HIDDEN))


def test_padding_along_two_dimensions_and_under_a_stack() -> None:
    rule = ("*", Shard(0, "tp"), Padded(0, 5), Padded(-1, 3))
    layout = Layout({"ep": 2, "tp": 2}, [rule], numbered=[experts("e.{n}", count=4, ranks=2, stack=1)])
    placed = layout.place("e.1.w", (3, 4), 2)
    assert (placed.shape, placed.logical, placed.stack) == ((6, 4, 4), (5, 4, 3), (1, 3))


# ------------------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("rule", "shape", "message"),
    [
        ((Shard(2, "tp"),), (4, 4), "does not fit a tensor of 2 dimensions"),
        ((Shard(0, "tp"),), (), "does not fit a tensor of 0 dimensions"),
        ((Shard(0, "cp"),), (4,), "no dimension 'cp'"),
        ((Stage("cp", 0),), (4,), "no dimension 'cp'"),
        ((Stage("tp", 2),), (4,), "'tp' has 2 coordinates"),
        ((Stage("tp", (0, -3)),), (4,), "'tp' has 2 coordinates"),
        ((Shard(0, "tp"), Shard(1, "tp")), (4, 4), "used twice"),
        ((Shard(0, "tp", (1, 2)),), (3,), r"shape \(2,\), but the tensor has \(3,\)"),
        ((Shard(0, "tp"), Uneven(0, 9)), (5,), r"shape \(4,\), but the tensor has \(5,\)"),
        ((Shard(0, "tp"), Uneven(1, 9)), (5,), "does not fit a tensor of 1 dimensions"),
        ((Padded(1, 9),), (5,), "does not fit a tensor of 1 dimensions"),
        ((Shard(0, "tp"), Padded(0, 11)), (5,), "dimension 0 has 10 elements, fewer than the 11 real ones"),
        ((Flat("tp"),), (5,), "global shape of a Flat tensor"),
        ((OnMesh("expert"),), (5,), "no mesh 'expert'"),
        ((Interleaved(0, "tp", (2, 4)),), (4,), r"shape \(3,\), but the tensor has \(4,\)"),
    ],
    ids=str,
)
def test_a_wrong_rule_names_tensor_and_rank(rule: tuple[Any, ...], shape: tuple[int, ...], message: str) -> None:
    layout = Layout({"dp": 2, "tp": 2}, [("w", *rule)])
    with pytest.raises(LayoutError, match=message) as err:
        layout.place("w", shape, 3)
    assert err.value.where == "tensor w, rank 3"


def test_a_name_without_a_rule() -> None:
    layout = Layout({"dp": 2}, [("*.weight", Replicate())])
    with pytest.raises(LayoutError, match=r"no rule of the layout matches \(tensor a.bias, rank 1\)") as err:
        layout.place("a.bias", (2,), 1)
    assert err.value.hint is not None
    assert "Replicate()" in err.value.hint


def test_a_rank_outside_of_the_mesh() -> None:
    with pytest.raises(LayoutError, match=r"not in the layout's mesh \{dp: 2\} \(tensor w, rank 2\)"):
        Layout({"dp": 2}, [("*", Replicate())]).place("w", (2,), 2)


def test_the_first_rule_that_matches_decides() -> None:
    layout = Layout({"tp": 2}, [("a.*", Shard(0, "tp")), ("*.w", Shard(1, "tp")), ("*", Replicate())])
    assert [layout.place(n, (2, 2), 0).shape for n in ("a.w", "b.w", "c")] == [(4, 2), (2, 4), (2, 2)]


def test_foreign_placements_are_refused() -> None:
    """Left out unseen, a rule with DTensor's own Shard would mean a replicated tensor."""

    class Shard:
        pass

    with pytest.raises(LayoutError, match=r"the rule for 'w' has .*Shard.* of .*test_rules"):
        Layout({"tp": 2}, [("w", Shard())])


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(LayoutError, match="different ranks"):
        Layout({"dp": 2}, [("*", Replicate())], meshes={"expert": Mesh(("ep",), (2,), (0, 2))})
    with pytest.raises(LayoutError, match=r"numbers for 4 coordinates, 'pp' has 2"):
        Layout({"pp": 2}, [("*", Replicate())], numbered=[pipeline("layers.{n}", layers=4, stages=4)])
    with pytest.raises(LayoutError, match="7 layers do not divide into 2 stages of 2 chunks"):
        pipeline("layers.{n}", layers=7, stages=2, virtual=2)
    with pytest.raises(LayoutError, match="7 experts do not divide over 2 ranks"):
        experts("experts.{n}", count=7, ranks=2)
    with pytest.raises(LayoutError, match="no mesh 'x'"):
        Layout({"ep": 2}, [("*", Replicate())], numbered=[experts("e.{n}", count=4, ranks=2, mesh="x")])


def test_every_rank_gets_the_same_layout() -> None:
    """Equal and hashable, or ranks could not agree on one table."""
    layout = folded(stack=0, rule=(Replicate(),))
    found = {layout.place("layers.0.experts.0.w1.weight", (FFN, HIDDEN), rank).layout for rank in range(4)}
    assert len(found) == 1
    assert isinstance(next(iter(found)), TensorLayout)
