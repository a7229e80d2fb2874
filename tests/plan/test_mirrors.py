"""Mirrors: each has the bytes, in another domain; owner, mirror and leader know the same files without a message."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import settings
from ckpt.catalog import DataFile
from ckpt.dtypes import DTYPES
from ckpt.engine.save import index_rows as grids_module
from ckpt.engine.save import plan as plan_module
from ckpt.engine.save.index_rows import Chunking, Grids
from ckpt.engine.save.plan import RankPlan, plan_mirrored
from ckpt.formats.native import datafile
from ckpt.formats.native.datafile import plan_data_files
from ckpt.formats.native.paths import data_number
from ckpt.plan import ownership
from ckpt.plan.copies import MirrorPlacement, backup_domains, domain_groups, even_groups, is_complete, missing_copies
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Interleaved, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.machines import ancestors, has_descendants, neighbours, numbers_of, spell
from ckpt.plan.ownership import TensorSpec, assign
from ckpt.plan.parity import ParityLayout, ParityTable, ParityTerm, plan_parity, protected_files
from tests.plan.layout_strategies import local_array, meshes, numbered, tensor_lists


@pytest.fixture(params=[None, 400])
def small_limits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small chunks, dealt out to replicas from 9 bytes on; and headers that are too long for one file, or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "CHUNK", 32)
        patch.setattr(settings, "UNDIVIDED", 9)
        if request.param is not None:
            for module in (plan_module, grids_module):
                patch.setattr(module, "plan_data_files", partial(plan_data_files, limit=request.param))
            patch.setattr(datafile, "HEADER_BLOCK", 16)
        ownership._assignment.cache_clear()
        yield
    ownership._assignment.cache_clear()


def placed(domains: dict[int, str], copies: int) -> MirrorPlacement:
    return MirrorPlacement(domains=domains, copies=copies)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[TensorSpec], MirrorPlacement]:
    mesh = draw(meshes())
    names = st.sampled_from([f"host{n}" for n in range(draw(st.integers(1, 6)))])
    return draw(tensor_lists(mesh)), placed({rank: draw(names) for rank in sorted(mesh.ranks)}, draw(st.integers(1, 3)))


def plan_of(tensors: list[TensorSpec], mirrors: MirrorPlacement, rank: int) -> RankPlan:
    """From the tensors that the rank has, as in a job: it knows of no others."""
    mine = [t for t in tensors if local_array(t.layout, numbered(t.shape), rank) is not None]
    return plan_mirrored(mine, assign(mine), mirrors, rank=rank)


def chunks_in(plan: RankPlan, file: int) -> list[tuple[str, int]]:
    of = plan.files[file]
    return [(c.name, c.number) for c in plan.chunks[of.first : of.first + len(of)]]


@pytest.mark.usefixtures("small_limits")
@given(jobs())
def test_all_who_write_a_file_have_its_bytes_and_make_it_alike(job: tuple[list[TensorSpec], MirrorPlacement]) -> None:
    tensors, mirrors = job
    by_name, assignments = {t.name: t for t in tensors}, assign(tensors)
    elements = {
        (t.name, r): set() if (local := local_array(t.layout, numbered(t.shape), r)) is None else {*local.ravel().tolist()}
        for t in tensors
        for r in mirrors.domains
    }
    files: dict[str, dict[int, list[tuple[str, int]]]] = {}
    layouts: dict[str, set[tuple[int, bytes]]] = {}
    rows, expected = [], {}
    for rank in mirrors.domains:
        plan = plan_of(tensors, mirrors, rank)
        own = len(plan.files) - plan.mirrored
        assert all((f.rank == mirrors.positions[rank]) == (n < own) for n, f in enumerate(plan.files))
        for n, f in enumerate(plan.files):
            chunks = chunks_in(plan, n)
            files.setdefault(f.path, {})[rank] = chunks
            layouts.setdefault(f.path, set()).add((f.size, b"".join(f.parts) + f.offsets.tobytes() + f.digest_order.tobytes()))
            if n < own:
                expected |= dict.fromkeys(chunks, len(rows))
                rows.append(DataFile(path=f.path, size=f.size, header=f.header, digest="", rank=f.rank))
    assert sorted(expected) == sorted((name, i) for name, o in assignments.items() for i in range(len(o.owners)))
    for path, writers in files.items():
        assert len(layouts[path]) == 1 and len({tuple(chunks) for chunks in writers.values()}) == 1
        assert len({mirrors.domains[rank] for rank in writers}) == len(writers)
        for name, number in next(iter(writers.values())):
            box = set(numbered(by_name[name].shape)[assignments[name].box(number).slices].ravel().tolist())
            assert all(box <= elements[name, rank] for rank in writers)
            there = {mirrors.domains[rank] for rank in assignments[name].holders[number].tolist()}
            assert len(writers) == min(mirrors.copies + 1, len(there))
    grids = Grids(rows, assignments, by_name, list(mirrors.domains), Chunking(mirrors=mirrors))
    assert {(name, i): grids.of(name).file(i) for name, i in expected} == expected


def model(mesh: Mesh, *split: str) -> list[TensorSpec]:
    layout = TensorLayout(mesh, tuple(Shard(0, over) for over in split))
    return [TensorSpec(f"w{n}", DTYPES["float32"], (4096, 64), layout) for n in range(3)]


@pytest.mark.usefixtures("small_limits")
def test_several_cells_of_one_rank_are_mirrored_in_the_order_of_their_owner() -> None:
    layout = TensorLayout(Mesh.of({"pp": 2, "dp": 3}), (Interleaved(1, "pp", groups=2),))
    tensors = [TensorSpec("w", DTYPES["float64"], (2, 3, 3), layout)]
    mirrors = placed({rank: f"host{int(rank == 2)}" for rank in range(6)}, 1)
    writers: dict[str, list[list[tuple[str, int]]]] = {}
    for rank in range(6):
        plan = plan_of(tensors, mirrors, rank)
        for n, f in enumerate(plan.files):
            writers.setdefault(f.path, []).append(chunks_in(plan, n))
    assert {len(each) for each in writers.values()} == {1, 2}
    assert all(chunks == several[0] for several in writers.values() for chunks in several)


def on_hosts(ranks: int, per_host: int) -> dict[int, str]:
    return {rank: f"host{rank // per_host:05}" for rank in range(ranks)}


def test_replicas_on_other_hosts_leave_one_file_and_no_copy() -> None:
    """Data parallelism, and HSDP whose shards are within hosts or over two: ranks that are alike mirror each other."""
    for mesh, split in (
        (Mesh.of({"dp": 16}), ()),
        (Mesh.of({"dp": 4, "shard": 4}), ("shard",)),
        (Mesh.of({"dp": 2, "shard": 8}), ("shard",)),
    ):
        mirrors = placed(on_hosts(16, 4), 1)
        plans = [plan_of(model(mesh, *split), mirrors, rank) for rank in range(16)]
        assert {(len(p.files), p.mirrored) for p in plans} == {(2, 1)}
        holders = {f.path: {mirrors.domains[r] for r, p in enumerate(plans) if f.path in {g.path for g in p.files}} for f in plans[0].files}
        assert {len(there) for there in holders.values()} == {2}


@pytest.mark.parametrize(
    ("mesh", "split", "survived"),
    [
        (Mesh.of({"dp": 16}), (), 112),  # mirrors and copies go the same way
        (Mesh.of({"shard": 16}), ("shard",), 112),
        (Mesh.of({"dp": 2, "shard": 8}), ("shard",), 111),  # pairs of replicas, and the neighbours that have the norm
    ],
)
def test_pairs_of_sixteen_machines_that_may_be_lost(mesh: Mesh, split: tuple[str, ...], survived: int) -> None:
    tensors, mirrors = [*model(mesh, *split), TensorSpec("norm", DTYPES["float32"], (64,), TensorLayout(mesh))], placed(on_hosts(16, 1), 1)
    files: dict[str, set[int]] = {}
    for rank in range(16):
        for f in plan_of(tensors, mirrors, rank).files:
            files.setdefault(f.path, set()).add(rank)
    for path, _, target in missing_copies(files, mirrors.names, mirrors.copies):
        files[path].add(target)
    assert {len(machines) for machines in files.values()} == {2}
    pairs = list(combinations(range(16), 2))
    assert sum(all(not machines <= {*lost} for machines in files.values()) for lost in pairs) == survived and len(pairs) == 120


def test_replicated_norms_beside_tensor_parallel_weights_share_their_file() -> None:
    mesh = Mesh.of({"dp": 4, "tp": 4})
    tensors = [*model(mesh, "tp"), TensorSpec("norm", DTYPES["float32"], (64,), TensorLayout(mesh, ()))]
    plans = [plan_of(tensors, placed(on_hosts(16, 4), 1), rank) for rank in range(16)]
    assert {(len(p.files), p.mirrored) for p in plans} == {(2, 1)}


def test_a_job_of_many_machines_is_planned_in_time() -> None:
    """The leader's part grows with ranks, and not with their square, where every rank has everything."""
    costs = {}
    for ranks in (1024, 8192):
        mesh, domains = Mesh.of({"dp": ranks}), on_hosts(ranks, 8)
        tensors = [TensorSpec(f"w{n}", DTYPES["float32"], (ranks * 64, 256), TensorLayout(mesh)) for n in range(20)]
        assignments = assign(tensors)
        began = time.thread_time()
        mirrors = placed(domains, 1)
        plan = plan_mirrored(tensors, assignments, mirrors, rank=5)
        files = [
            DataFile(path=plan.files[0].path.replace("-00005-14.", f"-{r:05}-{1 + (r ^ 8)}."), size=1, header=1, digest="", rank=r)
            for r in domains
        ]
        assert data_number(files[5].path) == 14
        grids = Grids(files, assignments, {t.name: t for t in tensors}, range(ranks), Chunking(mirrors=mirrors))
        assert len({id(grids.of(t.name)) for t in tensors}) <= 20
        costs[ranks] = time.thread_time() - began
        assert np.array_equal(grids.of("w3").files, assignments["w3"].owners)
    print(costs)
    assert costs[8192] < 8**1.3 * (costs[1024] + 0.1)


# ------------------------------------------------------------------------------------------------------------------------------------------
# Second copies: never in the same domain, never more than asked for, and as many losses survived as placement in groups can.

NAMES = st.lists(st.sampled_from([f"host{n}" for n in range(12)]), min_size=1, max_size=20)


def after(holders: dict[str, set[int]], domains: list[str], copies: int) -> dict[str, set[int]]:
    done = {path: set(nodes) for path, nodes in holders.items()}
    for path, source, target in missing_copies(holders, domains, copies):
        assert source in done[path] and target not in done[path]
        done[path].add(target)
    return done


@st.composite
def held(draw: st.DrawFn) -> tuple[dict[str, set[int]], list[str], int]:
    domains = draw(NAMES)
    nodes = st.sets(st.integers(0, len(domains) - 1), min_size=1, max_size=3)
    return draw(st.dictionaries(st.text("abc", min_size=1, max_size=3), nodes, max_size=6)), domains, draw(st.integers(1, 3))


@given(held())
def test_every_file_gets_into_so_many_domains_and_no_more(case: tuple[dict[str, set[int]], list[str], int]) -> None:
    holders, domains, copies = case
    done = after(holders, domains, copies)
    for path, nodes in done.items():
        before, now = {domains[n] for n in holders[path]}, {domains[n] for n in nodes}
        assert len(now) >= min(copies + 1, len({*domains}))
        assert len(nodes - holders[path]) == len(now - before)  # each copy is in a domain that had none
        assert len(nodes - holders[path]) <= max(0, copies + 1 - len(before))
    assert is_complete(done, domains, copies) and missing_copies(done, domains, copies) == []


@given(NAMES, st.integers(1, 3))
def test_groups_are_as_small_as_they_can_be(domains: list[str], copies: int) -> None:
    groups = domain_groups(domains, copies)
    assert sorted(name for group in groups for name in group) == sorted({*domains})
    assert all(len(group) == copies + 1 for group in groups[:-1])
    assert len(groups[-1]) < 2 * (copies + 1) and (len(groups) == 1 or len(groups[-1]) >= copies + 1)
    for name, backups in backup_domains(domains, copies).items():
        group = next(g for g in groups if name in g)
        assert name not in backups and {*backups} <= {*group} and len(backups) == min(copies, len({*domains}) - 1)


def test_a_file_that_replicas_have_on_two_machines_is_not_copied() -> None:
    assert missing_copies({"a": {0, 2}, "b": {1}}, ["x", "y", "z"], 1) == [("b", 1, 2)]
    assert not is_complete({"a": set()}, ["x", "y"], 1)  # lost


def survived(domains: list[str], copies: int, losses: int) -> float:
    """The part of all losses of so many domains that leaves a holder of each domain's files, counted one by one."""
    backups = backup_domains(domains, copies)

    def whole(lost: Collection[str]) -> bool:
        return all(not {name, *backups[name]} <= {*lost} for name in lost)

    cases = list(combinations(sorted({*domains}), losses))
    return sum(map(whole, cases)) / len(cases)


def of_pairs(machines: int, losses: int) -> float:
    """The same by arithmetic, for pairs: ways to lose at most one of each, over all ways."""
    return comb(machines // 2, losses) * 2**losses / comb(machines, losses)


def test_losses_that_are_survived() -> None:
    sixteen = [f"host{n:02}" for n in range(16)]
    assert round(survived(sixteen, 1, 2), 3) == 0.933 and round(survived(sixteen, 1, 3), 3) == 0.8
    assert all(survived(sixteen[:n], 1, k) == pytest.approx(of_pairs(n, k)) for n in (4, 8, 12, 16) for k in (1, 2, 3))
    assert survived(sixteen[:15], 2, 2) == 1.0
    assert of_pairs(10_000, 2) > 0.9998


def test_ten_thousand_machines_take_no_time() -> None:
    domains = [f"host{n:05}" for n in range(10_000)]
    wanted = missing_copies({f"data/{n}": {n} for n in range(10_000)}, domains, 1)
    assert len(wanted) == 10_000
    assert {(c.source, c.target) for c in wanted} == {(n, n ^ 1) for n in range(10_000)}


# ---------------------------------------------------------------------- Machines of ranks in few bytes, against a search through all ranks.

LISTS = st.one_of(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=20),
    st.lists(st.integers(1, 4), min_size=1, max_size=6).map(lambda sizes: [f"m{i}" for i, n in enumerate(sizes) for _ in range(n)]),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 30)).map(lambda t: [f"m{i // t[0] % t[1]}" for i in range(t[2])]),
)


@given(LISTS)
def test_neighbours_are_those_of_the_same_machine(machines: list[str]) -> None:
    ranks = range(100, 100 + len(machines))
    spelled = json.loads(json.dumps(spell(machines)))
    assert numbers_of(spelled, len(machines)).tolist() == [[*dict.fromkeys(machines)].index(name) for name in machines]
    for place, name in enumerate(machines):
        assert neighbours(spelled, place, ranks) == {rank for rank, other in zip(ranks, machines, strict=True) if other == name}


@pytest.mark.parametrize("size", [1, 8, 10000])
@pytest.mark.parametrize("count", [1, 2000])
def test_usual_placements_take_as_few_bytes_for_any_number_of_ranks(size: int, count: int) -> None:
    """What each of n ranks reads must not grow with n."""
    dealt = [i // size % count for i in range(16384)]
    short_last = [i // size for i in range(16383)]
    one_lacks_two = [i // 8 for i in range(2, 16384)]
    for machines in (dealt, short_last, one_lacks_two):
        assert len(json.dumps(spell(machines))) < 50


@given(LISTS, st.integers(1, 8))
def test_a_value_comes_to_every_rank_and_once_to_every_machine(machines: list[str], fan: int) -> None:
    numbers = numbers_of(spell(machines), len(machines))
    above = [ancestors(place, numbers, fan) for place in range(len(machines))]
    assert above[0] == []
    for place, path in enumerate(above[1:], 1):
        assert path == [path[0], *above[path[0]]], "the ancestors of the first one are the others"
        assert path[-1] == 0
        assert place not in path
    into = [machines[place] for place, path in enumerate(above) if path and machines[path[0]] != machines[place]]
    assert sorted(into) == sorted({*machines} - {machines[0]})
    below = [sum(path[:1] == [place] for path in above) for place in range(len(machines))]
    assert max(below) <= 2 * fan
    assert [has_descendants(place, numbers, fan) for place in range(len(machines))] == [count > 0 for count in below]


# ------------------------------ Parity over groups: any one domain of each may be lost, and every byte of it is computed from what is left.

Files = dict[str, bytes]


def parity_of(layout: ParityLayout, files: Files) -> bytes:
    """The XOR of the terms."""
    result = np.zeros(layout.size, dtype=np.uint8)
    for term in layout.terms:
        assert len(files[term.path]) == term.size and term.offset + term.length <= term.size
        result[term.at : term.at + term.length] ^= np.frombuffer(files[term.path], np.uint8, term.length, term.offset)
    return result.tobytes()


def computed(table: ParityTable, parity: dict[str, bytes], files: Files, path: str, start: int, stop: int) -> bytes | None:
    pieces = table.pieces(path, start, stop)
    if pieces is None:
        return None
    out = b""
    for piece in pieces:
        assert piece.at == len(out)
        block = np.frombuffer(parity[piece.layout.name], np.uint8, piece.length, piece.offset).copy()
        for t in piece.terms:
            block[t.at : t.at + t.length] ^= np.frombuffer(files[t.path], np.uint8, t.length, t.offset)
        out += block.tobytes()
    return out


class Job:
    """Nodes with files of random bytes, and the parity that is planned for them."""

    def __init__(self, domains: Sequence[str], lengths: Sequence[Sequence[int]], members: int) -> None:
        self.domains = domains
        randomness = random.Random(0)
        self.holders = {f"data/{node}-{n}": {node} for node, sizes in enumerate(lengths) for n in range(len(sizes))}
        self.files = {
            path: randomness.randbytes(lengths[int(path[5:].split("-")[0])][int(path[5:].split("-")[1])]) for path in self.holders
        }
        self.sizes = {path: len(data) for path, data in self.files.items()}
        self.groups = even_groups(domain_groups(domains, members - 1), members)
        self.planned = plan_parity(self.holders, self.sizes, domains, self.groups)
        self.parity = {one.layout.name: parity_of(one.layout, self.files) for one in self.planned}

    def without(self, lost: set[str]) -> ParityTable:
        left = {path for path, (node,) in self.holders.items() if self.domains[node] not in lost}
        layouts = [one.layout for one in self.planned if self.domains[one.target] not in lost]
        return ParityTable(layouts, lambda path, size: path in left and self.sizes[path] == size)

    def of(self, domain: str) -> list[str]:
        return [path for path, (node,) in self.holders.items() if self.domains[node] == domain]


@st.composite
def jobs_with_parity(draw: st.DrawFn) -> Job:
    """Up to nine nodes, some of them in one domain, with up to three files each, of unequal lengths."""
    nodes = draw(st.integers(2, 9))
    domains = [f"host{draw(st.integers(0, n))}" for n in range(nodes)]
    lengths = [draw(st.lists(st.sampled_from([0, 1, 7, 4095, 4096, 5000, 20_000]), max_size=3)) for _ in domains]
    return Job(domains, lengths, draw(st.integers(3, 5)))


@given(jobs_with_parity(), st.randoms(use_true_random=False))
def test_whatever_domain_is_lost_every_byte_comes_back(job: Job, randomness: random.Random) -> None:
    lost = {randomness.choice(group) for group in job.groups}  # one of each group
    if len({*job.domains}) == 1:
        assert not job.planned
        return
    table = job.without(lost)
    for path in (path for domain in lost for path in job.of(domain) if job.sizes[path]):
        size = job.sizes[path]
        first = randomness.randrange(size)
        last = randomness.randrange(first, size) + 1
        for start, stop in ((0, size), (first, last)):
            assert computed(table, job.parity, job.files, path, start, stop) == job.files[path][start:stop]


@given(jobs_with_parity())
def test_no_parity_has_two_terms_of_one_domain_at_a_place_nor_one_of_its_own(job: Job) -> None:
    for target, layout in job.planned:
        assert {t.domain for t in layout.terms} <= {*job.domains} - {job.domains[target]}
        for at in {t.at for t in layout.terms}:
            domains = [t.domain for t in layout.overlapping(at, at + 1)]
            assert len(domains) == len({*domains})
    stored = [(job.domains[target], layout) for target, layout in job.planned]
    safe = protected_files(stored, job.holders, job.sizes, job.domains)
    assert safe == {path for path in job.holders if job.sizes[path] and len({*job.domains}) > 1}
    if stored:  # without one of them something is not safe, and nothing that it does not cover is lost
        assert {t.path for t in stored[0][1].terms} & (safe - protected_files(stored[1:], job.holders, job.sizes, job.domains))


def test_groups_are_as_even_as_they_can_be() -> None:
    names = [f"host{n:02}" for n in range(11)]
    assert [len(group) for group in even_groups(domain_groups(names, 3), 4)] == [6, 5]
    assert [len(group) for group in even_groups(domain_groups(names[:2], 3), 4)] == [2]
    assert sorted(name for group in even_groups(domain_groups(names, 3), 4) for name in group) == names


@pytest.mark.parametrize("members", [3, 4, 8])
def test_space_and_traffic(members: int) -> None:
    """Of equal files: parity takes 1 / (members - 1) of them, and each byte travels once."""
    job = Job([f"host{n}" for n in range(members)], [[(members - 1) * 8192]] * members, members)
    data = sum(job.sizes.values())
    assert sum(one.layout.size for one in job.planned) * (members - 1) == data
    assert sum(t.length for one in job.planned for t in one.layout.terms) == data
    assert len(job.planned) == members


def test_nodes_of_a_domain_share_its_parity() -> None:
    job = Job(["a", "a", "b", "c"], [[9000], [9000], [20_000], [16_000]], 3)
    shares = [sum(one.layout.size for one in job.planned if one.target == node) for node in range(4)]
    assert shares[0] and shares[1] and shares[0] + shares[1] <= shares[2] + 4096


def test_two_losses_in_a_group_are_named() -> None:
    job = Job(["a", "b", "c"], [[9000], [9000], [9000]], 3)
    table = job.without({"a", "b"})
    assert table.size("data/0-0") == 9000 and table.pieces("data/0-0", 0, 9000) is None
    assert {(t.path, t.domain) for t in table.missing("data/0-0")} == {("data/1-0", "b")}
    assert table.size("data/9-9") is None and table.pieces("data/9-9", 0, 1) is None


def test_bytes_that_nothing_missing_was_mixed_into_can_be_computed() -> None:
    """The parity is of a file and of a shorter one, which is gone, too: the rest is there."""
    layout = ParityLayout((ParityTerm("x", 100, 0, 100, 0, "a"), ParityTerm("y", 30, 0, 30, 20, "b")))
    table = ParityTable([layout], lambda path, size: False)
    assert table.pieces("x", 0, 100) is None and table.pieces("x", 0, 20) is not None and table.pieces("x", 50, 100) is not None


def test_the_same_plan_has_the_same_names() -> None:
    one, other = (Job(["a", "b", "c"], [[90], [50], [70]], 3) for _ in range(2))
    assert [p.layout.name for p in one.planned] == [p.layout.name for p in other.planned]
    assert len({p.layout.name for p in one.planned}) == 3


def test_parity_of_ten_thousand_machines_takes_no_time() -> None:
    domains = [f"host{n:05}" for n in range(10_000)]
    holders: dict[str, set[int]] = {f"data/{n:05}": {n} for n in range(10_000)}
    planned = plan_parity(holders, dict.fromkeys(holders, 1 << 30), domains, domain_groups(domains, 3))
    assert len(planned) == 10_000 and {one.target for one in planned} == {*range(10_000)}
