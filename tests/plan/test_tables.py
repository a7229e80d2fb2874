"""The leader's check of what the ranks say: what makes one checkpoint passes, and what does not is named with tensor, box and ranks."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.catalog import Contents, DataFile, Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.errors import ConsistencyError, CoverageError, UsageError
from ckpt.formats.native.index import decode_index, encode_index
from ckpt.plan import tree
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Flat, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import ChunkAssignment, TensorSpec, assign
from ckpt.plan.tables import PARTS, Table, join_tables, ranks_of, ranks_text, split_tables
from ckpt.plan.values import join_values
from tests.plan.layout_strategies import meshes, tensor_lists
from tests.test_tree import no_leaf, no_special, same

F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]
PP_DP = Mesh.of({"pp": 2, "dp": 2})
STAGE = [TensorLayout(PP_DP, (Shard(0, "dp"),), (("pp", (s,)),)) for s in (0, 1)]
EVERYWHERE = TensorLayout(PP_DP)


def table(*tensors: TensorSpec, **aliases: str) -> Table:
    return Table(tensors=tensors, aliases=aliases)


def tensor(name: str, layout: TensorLayout, shape: tuple[int, ...] = (8, 4), **changed: Any) -> TensorSpec:
    return TensorSpec(name, changed.get("dtype", F32), shape, layout, changed.get("logical"))


def tables_of(tensors: Sequence[TensorSpec]) -> list[tuple[list[int], Table]]:
    """What the ranks of a job say: each rank the tensors that its layouts give it; ranks with the same tensors together."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted({r for t in tensors for r in t.layout.mesh.ranks}):
        groups.setdefault(tuple(t.name for t in tensors if rank in t.layout.ranks()), []).append(rank)
    return [(ranks, table(*(t for t in tensors if t.name in names))) for names, ranks in groups.items()]


def in_parts(said: Sequence[tuple[Sequence[int], Table]]) -> list[tuple[list[int], Table]]:
    """The parts of tables as a leader gets them: equal ones once, with all ranks that have them."""
    parts: dict[bytes, list[int]] = {}
    for ranks, of_ranks in said:
        for part in of_ranks.parts():
            parts.setdefault(part.to_bytes(), []).extend(ranks)
    return [(ranks, Table.from_bytes(data)) for data, ranks in parts.items()]


# ------------------------------------------------------------------------------------------------------------ what is right


def test_a_table_is_split_in_what_others_know_and_what_is_this_ranks_own() -> None:
    a, b, c = (tensor(name, EVERYWHERE) for name in "abc")
    shared, own = split_tables([a, b, c], {"a2": "a", "b2": "b"}, {"b", "b2"})
    assert (shared.tensors, dict(shared.aliases)) == ((a, c), {"a2": "a"})
    assert (own.tensors, dict(own.aliases)) == ((b,), {"b2": "b"})


@given(meshes().flatmap(tensor_lists))
def test_what_all_ranks_say_is_what_one_would_plan(tensors: list[TensorSpec]) -> None:
    expected = assign(tensors)
    for joined in (join_tables(tables_of(tensors)), join_tables(in_parts(tables_of(tensors)))):
        assert joined.tensors == {t.name: t for t in tensors}
        assert joined.assignments.keys() == expected.keys()
        for name, owned in joined.assignments.items():
            assert owned.cuts == expected[name].cuts
            assert np.array_equal(owned.owners, expected[name].owners)
            assert [owned.box(i) for i in range(len(owned.owners))] == [expected[name].box(i) for i in range(len(owned.owners))]
    live = join_tables(tables_of(tensors), stored=False)
    assert (live.tensors, live.assignments) == ({t.name: t for t in tensors}, {})


@given(meshes().flatmap(tensor_lists), st.data())
def test_a_rank_that_lacks_a_tensor_is_found(tensors: list[TensorSpec], data: st.DataObject) -> None:
    """Whatever the layout: also a replica that is not needed to cover the tensor is missed, since it would have to write its part."""
    lost = data.draw(st.sampled_from(tensors))
    rank = data.draw(st.sampled_from(sorted(lost.layout.ranks())))
    said = []
    for ranks, of_ranks in tables_of(tensors):
        said += [([r for r in ranks if r != rank], of_ranks)] if rank in ranks else [(ranks, of_ranks)]
        if rank in ranks:
            said.append(([rank], table(*(t for t in of_ranks.tensors if t.name != lost.name))))
    said = [(ranks, t) for ranks, t in said if ranks]
    if all(t.name != lost.name for _, of_ranks in said for t in of_ranks.tensors):
        assert lost.name not in join_tables(said).tensors  # nobody has it: it is not part of the state
        return
    for tables, stored in ((said, True), (in_parts(said), True), (said, False)):
        with pytest.raises(CoverageError, match=rf"tensor {lost.name}: rank {rank} should hold"):
            join_tables(tables, stored=stored)


@given(meshes().flatmap(tensor_lists), st.dictionaries(st.sampled_from("abc"), st.sampled_from(["t0", "t1"])), st.randoms())
def test_table_round_trip(tensors: list[TensorSpec], aliases: dict[str, str], random: Any) -> None:
    first = Table(tensors=tuple(tensors), aliases=aliases)
    again = Table.from_bytes(first.to_bytes())
    assert sorted(again.tensors, key=lambda t: t.name) == sorted(tensors, key=lambda t: t.name)
    assert again.aliases == aliases
    shuffled, names = list(tensors), list(aliases)
    random.shuffle(shuffled)
    random.shuffle(names)
    other = Table(tensors=tuple(shuffled), aliases={n: aliases[n] for n in names})
    assert other.to_bytes() == first.to_bytes() == again.to_bytes()


@pytest.mark.parametrize("meshes", [1, 3, 40])
def test_parts_are_few_and_lack_nothing(meshes: int) -> None:
    """Tensors of the same ranks are in one part, with the names that are tied to them."""
    layouts = [TensorLayout(Mesh.flat(range(i, i + 2))) for i in range(meshes)]
    mine = table(*(tensor(f"{kind}{i}", at) for kind in "ab" for i, at in enumerate(layouts)), tied="b0", more="gone")
    parts = mine.parts()
    assert len(parts) == min(meshes, PARTS)
    assert sorted(t.name for p in parts for t in p.tensors) == sorted(t.name for t in mine.tensors)
    for i in range(meshes):
        assert any({f"a{i}", f"b{i}"} <= {t.name for t in p.tensors} for p in parts)
    (tied,) = (p for p in parts if "tied" in p.aliases)
    assert "b0" in {t.name for t in tied.tensors}
    assert {n: to for p in parts for n, to in p.aliases.items()} == mine.aliases
    assert table().parts()[0].to_bytes() == table().to_bytes()


def test_groups_of_experts_send_what_all_ranks_have_once() -> None:
    everywhere, groups = TensorLayout(Mesh.flat(range(64))), [TensorLayout(Mesh.flat(range(g, 64, 16))) for g in range(16)]
    dense = [tensor(f"dense.{i}", everywhere) for i in range(50)]
    said = [(list(range(g, 64, 16)), table(*dense, *(tensor(f"expert.{g}.{i}", groups[g]) for i in range(5)))) for g in range(16)]
    parts = in_parts(said)
    assert sum(len(p.tensors) for _, p in parts) == 50 + 16 * 5
    assert join_tables(parts).tensors == join_tables(said).tensors


def test_tables_that_differ_have_different_bytes() -> None:
    base = tensor("w", STAGE[0])
    others = [
        tensor("v", STAGE[0]),
        tensor("w", STAGE[1]),
        tensor("w", STAGE[0], (4, 8)),
        tensor("w", STAGE[0], dtype=BF16),
        tensor("w", STAGE[0], logical=(7, 4)),
    ]
    assert len({table(t).to_bytes() for t in (base, *others)} | {table(base, v="w").to_bytes(), table().to_bytes()}) == 8


def test_a_tied_embedding_on_both_ends_is_one_tensor() -> None:
    both = TensorLayout(Mesh.of({"pp": 3, "dp": 1}), (), (("pp", (0, 2)),))
    joined = join_tables([([0], table(tensor("w", both))), ([1], table()), ([2], table(tensor("w", both)))])
    assert joined.assignments["w"].holders.tolist() == [[0, 2]]


@pytest.mark.parametrize("order", [1, -1])
def test_who_writes_is_what_the_ranks_of_the_mesh_say(order: int) -> None:
    """A rank beside a DTensor's mesh may have the tensor object, without memory, and not know the mesh's other tensors."""
    mesh = TensorLayout(Mesh(("dp",), (2,), (2, 3)))
    small, large = tensor("small", mesh, (5,)), tensor("large", mesh, (9,))
    said = [([0, 1], table(small)), ([2, 3], table(small, large))][::order]
    assert assign([small])["small"].owners.tolist() != assign([small, large])["small"].owners.tolist()
    joined = join_tables(said)
    assert joined.assignments["small"].owners.tolist() == assign([small, large])["small"].owners.tolist() == [3]
    assert joined.assignments["large"].owners.tolist() == [2]


def test_aliases_may_be_on_some_ranks_only() -> None:
    """A stage that has the embedding but not the head knows nothing of the tie."""
    tied = table(tensor("emb", EVERYWHERE), head="emb")
    plain = table(tensor("emb", EVERYWHERE))
    assert join_tables([([0, 1], tied), ([2, 3], plain)]).aliases == {"head": "emb"}


# -------------------------------------------------------------------------------------------------------- what does not agree


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shape": (8, 5)}, r"tensor w: shape \(8, 4\) on ranks 0-1, 3, \(8, 5\) on rank 2"),
        ({"dtype": BF16}, "tensor w: dtype float32 on ranks 0-1, 3, bfloat16 on rank 2"),
        ({"logical": (7, 4)}, r"tensor w: padding None on ranks 0-1, 3, \(7, 4\) on rank 2"),
    ],
    ids=lambda x: str(x)[:12],
)
def test_ranks_that_disagree_are_named(changed: dict[str, Any], message: str) -> None:
    said = [([0, 1, 3], table(tensor("w", EVERYWHERE))), ([2], table(tensor("w", EVERYWHERE, **changed)))]
    with pytest.raises(ConsistencyError, match=message):
        join_tables(said)


def test_all_disagreements_are_told_at_once() -> None:
    names = [f"w{i:02}" for i in range(25)]
    said = [([0], table(*(tensor(n, EVERYWHERE) for n in names))), ([1, 2, 3], table(*(tensor(n, EVERYWHERE, (9, 4)) for n in names)))]
    with pytest.raises(ConsistencyError) as err:
        join_tables(said)
    text = str(err.value)
    assert all(f"tensor {n}: shape (8, 4) on rank 0, (9, 4) on ranks 1-3" in text for n in names[:5])
    assert "and 20 more" in text
    assert err.value.hint is not None


def test_two_stages_that_claim_one_tensor_are_named() -> None:
    said = [([0, 1], table(tensor("emb", STAGE[0]))), ([2, 3], table(tensor("emb", STAGE[1])))]
    message = r"ranks 0-1 and ranks 2-3 both claim tensor emb \[0:8,0:4\](?s:.*)stored twice(?s:.*)Stage(?s:.*)PerRank"
    with pytest.raises(CoverageError, match=message):
        join_tables(said)


ROWS = (Shard(0, "dp"),)
PAIRS = [TensorLayout(Mesh(("dp",), (2,), ranks), ROWS) for ranks in ((0, 1), (2, 3), (4, 5))]
COLUMNS = [TensorLayout(Mesh(("dp",), (2,), ranks), ROWS) for ranks in ((0, 2), (1, 3))]
EXPERT = [TensorLayout(Mesh.of({"ep": 2, "pp": 2}), (), (("ep", (i,)), ("pp", (i,)))) for i in (0, 1)]


@pytest.mark.parametrize(
    ("name", "layouts", "hint"),
    [
        ("emb", STAGE, 'add ckpt.Stage("pp", (0, 1)) to the placements of its rule'),
        ("emb", PAIRS[:2], 'ckpt.Layout({"pp": 2, "dp": 2}, rules=[("emb", ckpt.Stage("pp", (0, 1))), ("*", ckpt.Replicate())])'),
        ("emb", PAIRS, 'ckpt.Layout({"pp": 3, "dp": 2}, rules=[("emb", ckpt.Stage("pp", (0, 1, 2))), ("*"'),
        ("emb", PAIRS[::2], 'ckpt.Layout({"pp": 3, "dp": 2}, rules=[("emb", ckpt.Stage("pp", (0, 2))), ("*"'),
        ("emb", COLUMNS, 'ckpt.Layout({"dp": 2, "pp": 2}, rules=[("emb", ckpt.Stage("pp", (0, 1))), ("*"'),
        ("aa.state.other.exp_avg", PAIRS[:2], 'rules=[("other", ckpt.Stage("pp", (0, 1)))'),
        ("emb", [PAIRS[0], TensorLayout(PAIRS[1].mesh)], "same placements and mesh dimensions on each of them, which this one has not"),
        ("emb", [PAIRS[0], TensorLayout(Mesh(("dp",), (2,), (3, 2)), ROWS)], "with the names that its meshes' dimensions have"),
        (
            "emb",
            [PAIRS[0], TensorLayout(Mesh(("dp",), (2,), (1, 2)), ROWS)],
            'a layout with a rule such as ckpt.Stage("pp", (0, -1)) says so',
        ),
        ("emb", EXPERT, 'a layout with a rule such as ckpt.Stage("pp", (0, -1)) says so'),
    ],
    ids=["layout", "dtensor", "three", "gap", "columns", "optimizer", "placements", "order", "overlap", "two-dimensions"],
)
def test_the_rule_that_makes_one_tensor_of_two_claims_is_named(name: str, layouts: list[TensorLayout], hint: str) -> None:
    everyone = range(max(r for layout in layouts for r in layout.mesh.ranks) + 1)
    other = tensor("other", TensorLayout(Mesh.flat(everyone)))
    said = [(sorted(layout.ranks()), table(tensor(name, layout), other)) for layout in layouts]
    bystanders = sorted(set(everyone).difference(*(ranks for ranks, _ in said)))
    with pytest.raises(CoverageError) as err:
        join_tables([*said, *([(bystanders, table(other))] if bystanders else [])])
    assert hint in (err.value.hint or "")
    assert (err.value.hint or "").endswith("if the ranks have different values, use ckpt.PerRank")


def test_ranks_that_cut_a_tensor_in_different_ways_are_named() -> None:
    rows, columns = TensorLayout(PP_DP, (Shard(0, "dp"),)), TensorLayout(PP_DP, (Shard(1, "dp"),))
    with pytest.raises(CoverageError, match="rank 0 and ranks 1-3 both claim tensor w"):
        join_tables([([0], table(tensor("w", rows))), ([1, 2, 3], table(tensor("w", columns)))])


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (STAGE[1], r"tensor w: rank 3 should hold \[4:8,0:4\], but does not have it"),
        (TensorLayout(PP_DP, (Shard(1, "dp"), Shard(0, "pp"))), r"tensor w: rank 3 should hold \[4:8,2:4\], but do"),
        (TensorLayout(PP_DP, (Flat("dp"),), (("pp", (1,)),)), r"tensor w: rank 3 should hold \[4:8,0:4\], but do"),
        (EVERYWHERE, "tensor w: rank 3 should hold a replica, but do"),
    ],
    ids=["rows", "cells", "flat", "replica"],
)
def test_a_hole_is_named_with_its_box(layout: TensorLayout, message: str) -> None:
    having = sorted(layout.ranks() - {3})
    said = [(having, table(tensor("w", layout), tensor("v", layout))), ([3], table(tensor("v", layout)))]
    with pytest.raises(CoverageError, match=message) as err:
        join_tables(said)
    assert "tensor v" not in str(err.value)
    with pytest.raises(CoverageError, match=message):
        join_tables(said, stored=False)


def test_several_holes_of_one_tensor_are_counted() -> None:
    layout = TensorLayout(Mesh.of({"dp": 4}), (Shard(0, "dp"),))
    with pytest.raises(CoverageError, match=r"tensor w: ranks 1-3 should hold \[2:4,0:4\] and 2 more"):
        join_tables([([0], table(tensor("w", layout))), ([1, 2, 3], table())])


def test_a_rank_that_has_nothing_of_an_uneven_tensor_needs_it_too() -> None:
    """It takes part in the layout, and another number of rows may give it some."""
    layout = TensorLayout(Mesh.of({"dp": 4}), (Shard(0, "dp"),))
    assert layout.pieces((5, 4), 3) == []
    with pytest.raises(CoverageError, match="tensor w: rank 3 should hold a replica, but do"):
        join_tables([([0, 1, 2], table(tensor("w", layout, (5, 4)))), ([3], table())])


# ------------------------------------------------------------------------------------------------------------------- aliases


def test_an_alias_of_two_tensors() -> None:
    both = [tensor("a", EVERYWHERE), tensor("b", EVERYWHERE)]
    with pytest.raises(ConsistencyError, match="tensor head: tied to b on some ranks only"):
        join_tables([([0, 1], table(*both, head="a")), ([2, 3], table(*both, head="b"))])


def test_an_alias_that_is_a_tensor_of_its_own_elsewhere() -> None:
    tied, untied = table(tensor("emb", EVERYWHERE), head="emb"), table(tensor("emb", EVERYWHERE), tensor("head", EVERYWHERE))
    for said in ([([0, 1], tied), ([2, 3], untied)], [([0, 1], untied), ([2, 3], tied)]):
        with pytest.raises(ConsistencyError, match="tensor head: tied to emb on some ranks only"):
            join_tables(said)


# --------------------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([5, 1, 2, 0, 9, 8], "ranks 0-2, 5, 8-9"),
        (list(range(16384)), "ranks 0-16383"),
        ([0, 2], "ranks 0, 2"),
    ],
)
def test_ranks_are_written_as_runs(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_many_runs_of_ranks_are_cut_short() -> None:
    text = ranks_text(range(0, 200, 2))
    assert text.startswith("ranks 0, 2, 4,")
    assert text.endswith("38, …")


def test_ranks_of_some_tables() -> None:
    said = [([4, 5], table()), ([0], table()), ([2, 1], table())]
    assert ranks_of(said, [0, 2]) == [1, 2, 4, 5]


# --------------------------------------------------------- Values of several ranks join as plain dicts would, and what differs is an error.

plain_leaves = st.integers(0, 1) | st.sampled_from([0.0, -0.0, True, None, "a", ()]) | st.lists(st.integers(0, 1), max_size=2)
plain_trees = st.recursive(
    plain_leaves, lambda inner: st.dictionaries(st.sampled_from(["a", "b", "$", 1, (2,)]), inner, max_size=4), max_leaves=8
)


def united(a: Any, b: Any) -> Any:
    """The two as one dict; AssertionError if some path has two values."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {k: united(a[k], b[k]) if k in a and k in b else {**a, **b}[k] for k in {**a, **b}}
    assert same(a, b)
    return a


@given(st.dictionaries(st.sampled_from("abc"), plain_trees), st.lists(st.sets(st.sampled_from("abc")), min_size=1, max_size=4))
def test_parts_of_one_state_make_it_whole_again(state: dict[str, Any], parts: list[set[str]]) -> None:
    nodes = [([i], tree.encode({k: state[k] for k in state if k in part}, "", no_leaf)) for i, part in enumerate(parts)]
    seen = set.union(*parts)
    assert tree.decode(join_values(nodes), no_special) == {k: v for k, v in state.items() if k in seen}


@given(plain_trees, plain_trees)
def test_two_states_join_exactly_if_no_path_has_two_values(a: Any, b: Any) -> None:
    nodes = [([0], tree.encode({"r": a}, "", no_leaf)), ([1], tree.encode({"r": b}, "", no_leaf))]
    try:
        wanted = united({"r": a}, {"r": b})
    except AssertionError:
        with pytest.raises(ConsistencyError):
            join_values(nodes)
    else:
        assert same(tree.decode(join_values(nodes), no_special), wanted)


def test_different_values_are_reported_with_path_values_and_ranks() -> None:
    same_part = {"lr": 0.1, "deep": {"a": 1}}
    nodes = [
        ([0, 1, 2], {**same_part, "seed": 1}),
        ([5, 3], {**same_part, "seed": 2, "deep": {"a": 1.0}}),
        ([4], {**same_part, "seed": 1}),
    ]
    with pytest.raises(ConsistencyError) as caught:
        join_values(nodes)
    lines = caught.value.message.splitlines()
    assert "2 values" in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "deep.a: 1 on ranks 0-2, 4, 1.0 on ranks 3, 5",
        "seed: 1 on ranks 0-2, 4, 2 on ranks 3, 5",
    ]
    assert "ckpt.PerRank" in (caught.value.hint or "")


def test_at_most_ten_conflicts_are_shown_and_all_are_counted() -> None:
    with pytest.raises(ConsistencyError) as caught:
        join_values([([r], {f"k{i}": r for i in range(25)}) for r in range(2)])
    assert "25 values" in caught.value.message
    assert sum(" on rank 1" in line for line in caught.value.message.splitlines()) == 10
    assert "15 more" in caught.value.message


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        (0.0, -0.0),
        (None, {}),
        ([1], [1, 2]),
        ([1], {"$tuple": [1]}),
        ([[1]], {"$tuple": [[1]]}),
        ([[1]], [[1], [2]]),
        ([[1], [2]], [[1]]),
        ({"$tensor": "a"}, {"$tensor": "b"}),
        ("1", 1),
    ],
)
def test_values_that_python_or_json_may_take_for_equal_are_not(a: tree.Node, b: tree.Node) -> None:
    with pytest.raises(ConsistencyError, match="x: "):
        join_values([([0], {"x": a}), ([1], {"x": b})])


def test_nan_is_equal_to_itself() -> None:
    node = tree.encode({"loss": math.nan, "a": np.array([math.nan])}, "", no_leaf)
    assert join_values([([0], node), ([1], json.loads(json.dumps(node)))]) == node


def test_plain_and_typed_mappings_are_united() -> None:
    parts: list[dict[Any, Any]] = [{"a": 1, "m": {0: "x"}}, {5: 2, "m": {1: "y", "0": "z"}}, {"m": {}, "$": 3}]
    joined = join_values([([i], tree.encode(p, "", no_leaf)) for i, p in enumerate(parts)])
    assert tree.decode(joined, no_special) == {"a": 1, "m": {0: "x", 1: "y", "0": "z"}, 5: 2, "$": 3}


def test_lists_of_containers_join_by_element_and_lists_of_scalars_conflict_whole() -> None:
    chunks = [([0], {"m": [{"a": 1}, {"b": 2}], "t": {"$tuple": [{}]}}), ([1], {"m": [{"a": 1}, {"c": 3}], "t": {"$tuple": [{"k": 1}]}})]
    assert join_values(chunks) == {"m": [{"a": 1}, {"b": 2, "c": 3}], "t": {"$tuple": [{"k": 1}]}}
    random = [([r], {"rng": {"$tuple": [3, {"$tuple": [r] * 624}, None]}}) for r in range(2)]
    with pytest.raises(ConsistencyError, match=r"1 value of") as caught:
        join_values(random)
    assert "rng.1: " in caught.value.message
    assert len(caught.value.message) < 400


def test_a_module_joins_with_the_same_module_that_has_extra_states_on_other_ranks() -> None:
    plain, prefix = {"model": {"$tensors": "model"}}, {"": {"$tensors": "model"}}
    nodes = [([0], plain), ([1], {"model": {**prefix, "a": 1}}), ([2], {"model": {**prefix, "b": 2}})]
    assert join_values(nodes) == {"model": {**prefix, "a": 1, "b": 2}}
    assert join_values([([0], plain), ([1], plain)]) == plain
    with pytest.raises(ConsistencyError, match="model"):
        join_values([([0], plain), ([1], {"model": {"$tensors": "other"}})])


def groups(*pairs: tuple[str, Any]) -> tree.Node:
    return {"g": {"$param_groups": [{"params": list(names), "options": {"lr": lr}} for names, lr in pairs]}}


def test_param_groups_with_equal_options_are_one_wherever_they_stand() -> None:
    joined = join_values([([0], groups(("ab", 1), ("c", 2))), ([1], groups(("cd", 2), ("be", 1))), ([2], groups(("f", 3), ("", 4)))])
    assert joined == groups(("abe", 1), ("cd", 2), ("f", 3), ("", 4))


def test_equal_param_groups_stay_as_they_are() -> None:
    node = groups(("a", 1), ("b", 1))
    assert join_values([([0], node), ([1], groups(("a", 1), ("b", 1)))]) == node


def test_a_parameter_with_two_options_is_one_conflict_per_option() -> None:
    with pytest.raises(ConsistencyError) as caught:
        join_values([([0, 1], groups(("abc", 0.1), ("z", 5))), ([2], groups(("bcd", 0.2), ("z", 5)))])
    assert caught.value.message.splitlines()[1:] == ["  g.b.lr: 0.1 on ranks 0-1, 0.2 on rank 2 (and so for 1 more parameters)"]
    with pytest.raises(ConsistencyError) as caught:
        join_values([([0], groups(("a", 0.1))), ([1], groups(("a", 0.2))), ([2], groups(("a", 0.2), ("b", 0.1)))])
    assert caught.value.message.splitlines()[1:] == ["  g.a.lr: 0.1 on rank 0, 0.2 on ranks 1-2"]


def test_an_option_that_one_side_lacks_is_a_conflict() -> None:
    with_wd = {"$param_groups": [{"params": ["w"], "options": {"lr": 1, "wd": 0}}]}
    with pytest.raises(ConsistencyError, match=re.escape('g.w: {"lr":1} on rank 0, {"lr":1,"wd":0} on rank 1')):
        join_values([([0], groups(("w", 1))), ([1], {"g": with_wd})])


def test_merging_nothing_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        join_values([])


def test_merging_changes_no_input() -> None:
    nodes = [
        groups(("a", 1)),
        groups(("b", 1)),
        {"g": groups(("b", 1))["g"], "m": {"$map": [[1, {"x": 1}]]}},
        {"m": {"$map": [[1, {"y": 1}]]}},
    ]
    before = json.dumps(nodes)
    join_values([([i], n) for i, n in enumerate(nodes)])
    assert json.dumps(nodes) == before


# ------------------------------------------------------------------------------ An index is small: tensors that are cut alike share a grid.

RANKS = 64


def decoder(layers: int, hidden: int, ffn: int, vocab: int, kv: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama-style model."""
    found: list[tuple[str, tuple[int, ...]]] = [("embed", (vocab, hidden)), ("norm", (hidden,)), ("head", (vocab, hidden))]
    block = {
        "wq": (hidden, hidden),
        "wk": (kv, hidden),
        "wv": (kv, hidden),
        "wo": (hidden, hidden),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
    }
    block |= {"down": (hidden, ffn)}
    for i in range(layers):
        found += [(f"layers.{i}.{name}", shape) for name, shape in block.items()]
        found += [(f"layers.{i}.ln_{n}", (hidden,)) for n in (1, 2)]
    return found


def adam(model: Sequence[tuple[str, tuple[int, ...]]], layout: TensorLayout) -> list[TensorSpec]:
    """A bf16 weight and two fp32 moments for each tensor."""
    weights = [TensorSpec(f"model.{name}.weight", BF16, shape, layout) for name, shape in model]
    moments = [TensorSpec(f"optim.{name}.weight.{m}", F32, shape, layout) for m in ("exp_avg", "exp_avg_sq") for name, shape in model]
    return weights + moments


def data_file(rank: int) -> DataFile:
    """A row as a save writes it: nothing about its size or digest can be guessed, so neither can be compressed away."""
    digest = hashlib.md5(str(rank).encode(), usedforsecurity=False)
    size = int.from_bytes(digest.digest()[:4], "little")
    return DataFile(
        path=f"data/{'x7' * 8}-{rank:05}.safetensors", size=size + (1 << 24), header=4096 * 12, digest=digest.hexdigest(), rank=rank
    )


def contents_of(tensors: Sequence[TensorSpec], owned: dict[str, ChunkAssignment], ranks: int) -> Contents:
    """What the leader of a save with one file per rank writes; tensors that are cut and dealt alike share a grid."""
    files = [data_file(r) for r in range(ranks)]
    grids: dict[int, Grid] = {}
    entries = []
    for t in tensors:
        mine = owned[t.name]
        grid = grids.setdefault(id(mine), Grid(cuts=mine.cuts, boxes=mine.boxes, files=mine.owners.astype(np.int32)))
        entries.append(TensorEntry(name=t.name, dtype=t.dtype, shape=t.shape, grid=grid))
    return Contents(tensors=tuple(entries), files=tuple(files), state={"step": 1})


def different(values: Sequence[int]) -> list[int]:
    """Sizes near the given ones, none of which 64 divides."""
    return [v + 1 if (v + 1) % RANKS else v + 2 for v in values]


FSDP = TensorLayout(Mesh.of({"dp": RANKS}), (Shard(0, "dp"),))
DDP = TensorLayout(Mesh.of({"dp": RANKS}))
ZERO = TensorLayout(Mesh.of({"dp": RANKS}), (Flat("dp"),))
EVEN = decoder(148, 2048, 8192, 32768, 512)
ODD = decoder(148, *different([2048, 8192, 32768, 512]))


@pytest.mark.parametrize("model", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("layout", [FSDP, DDP, ZERO], ids=["fsdp", "ddp", "zero"])
def test_an_index_of_4000_tensors_on_64_ranks_is_below_1_mb(layout: TensorLayout, model: list[tuple[str, tuple[int, ...]]]) -> None:
    tensors = adam(model, layout)
    assert len(tensors) == 4005
    owned = assign(tensors)
    contents = contents_of(tensors, owned, RANKS)
    index = encode_index(contents)
    sizes = {name: len(data) for name, data in index.items()}
    chunks = sum(len(o.owners) for o in owned.values())
    grids = len({id(o) for o in owned.values()})
    print(f"{len(tensors)} tensors, {chunks} chunks, {grids} grids, {sum(sizes.values())} bytes: {sizes}")
    assert sum(sizes.values()) < 1_000_000
    again = decode_index(index, "x")
    assert len(again.tensors) == len(tensors)
    assert sum(len(t.grid) for t in again.tensors) == chunks


def test_fsdp_has_a_grid_per_shape() -> None:
    tensors = adam(EVEN, FSDP)
    owned = assign(tensors)
    cut_alike = {(t.shape, t.dtype.itemsize) for t in tensors}
    assert len({id(o) for o in owned.values()}) <= len(cut_alike) < 20
