"""The leader's check of what the ranks say: what makes one checkpoint passes, and what does not is named with tensor, box and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.dtypes import DTYPES
from ckpt.errors import ConsistencyError, CoverageError
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Flat, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec, assign
from ckpt.plan.tables import PARTS, Table, join_tables, ranks_of, ranks_text, split_tables
from tests.plan.layout_strategies import meshes, tensor_lists

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
    assert all(f"tensor {n}: shape (8, 4) on rank 0, (9, 4) on ranks 1-3" in text for n in names[:20])
    assert "and 5 more" in text
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
