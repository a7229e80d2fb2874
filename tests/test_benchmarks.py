"""The benchmarks: a run of all scenarios on very little data, and the arithmetic between what is measured and what is said."""

from __future__ import annotations

import json
import math
import operator
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.contestants import CONTESTANTS, cut, share
from benchmarks.faults import damage, job_of, resume, state
from benchmarks.findings import at_least, at_most
from benchmarks.measure import RankCost, Sample
from benchmarks.places import Place
from benchmarks.replay import FIGURES, LOADS, NAMES, SEEN, UNSEEN, Fit, Load, Storage, Trace, fits_of, simulated
from benchmarks.report import aligned, checks_of, rows_of
from benchmarks.scenarios import Measurement, turns
from benchmarks.states import pattern, shapes
from benchmarks.walks import MARKS

ROOT = Path(__file__).parent.parent
SIZE, REPEAT, SMALL = 1_000_000, 2, 300
ALL, RESHARD = {"ckpt", "dcp", "torch.save", "raw"}, {"ckpt", "ckpt partial", "ckpt alone", "dcp", "raw"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """One rank (two where the scenario doubles them), a megabyte, two repetitions; the finished process and its JSON."""
    folder = tmp_path_factory.mktemp("bench")
    options = {
        "size": 1,
        "ranks": 1,
        "repeat": REPEAT,
        "small-tensors": SMALL,
        "large-layers": 2,
        "large-ranks": 512,
        "scale-ranks": 128,
        "scale-layers": 1,
        "steady-saves": 10,
    }
    command = [sys.executable, "-m", "benchmarks", "--dir", str(folder), "--json", str(folder / "out.json"), "-q"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (folder / "out.json").exists(), done.stderr
    assert [p.name for p in folder.iterdir()] == ["out.json"]
    return done, json.loads((folder / "out.json").read_text())


def of(document: dict[str, Any], **wanted: str) -> list[dict[str, Any]]:
    return [row for row in document["results"] if all(row[k] == v for k, v in wanted.items())]


# ---------------------------------------------------------------------------------------------------------- a small run


@pytest.mark.slow
def test_every_contestant_is_measured_in_every_scenario(run: tuple[Any, dict[str, Any]]) -> None:
    _, document = run
    found = {(r["scenario"], r["ranks"], r["operation"], r["contestant"]) for r in document["results"]}
    both = {("sharded", "1"), ("replicated", "1"), ("replicated", "2"), ("small", "1")}
    moved = {(*kind, operation, c) for kind in both for operation in ("save", "load") for c in ALL}
    kinds = ("1→1, dim 0 → dim 1", "1→2, dim 0 → dim 0", "2→1, dim 0 → dim 0", "2→2, FSDP × TP 2 → dim 0")
    loads = {("reshard", ranks, "load", c) for ranks in kinds for c in RESHARD}
    assert found == moved | loads
    assert document["schema"] == 1
    assert document["settings"]["places"][0].keys() == {"directory", "filesystem"}
    assert {"processor", "cores", "memory", "system", "python"} <= document["machine"].keys()
    assert {"ckpt", "torch", "numpy"} <= document["versions"].keys()


@pytest.mark.slow
def test_the_bytes_are_those_of_the_states(run: tuple[Any, dict[str, Any]]) -> None:
    _, document = run
    model = sum(12 * math.prod(shape) + 4 for shape in shapes(SIZE).values())
    held = {"sharded": {"1": model}, "replicated": {"1": model, "2": model}, "small": {"1": 64 * SMALL}}
    for scenario, by_ranks in held.items():
        for ranks, nbytes in by_ranks.items():
            assert {r["state_bytes"] for r in of(document, scenario=scenario, ranks=ranks, operation="save")} == {nbytes}
            assert {r["state_bytes"] for r in of(document, scenario=scenario, ranks=ranks, operation="load")} == {nbytes * int(ranks)}
            (raw,) = of(document, scenario=scenario, ranks=ranks, operation="save", contestant="raw")
            assert raw["stored_bytes"] == nbytes
    for row in document["results"]:
        moved = row["written"] if row["operation"] == "save" else row["read"]
        assert moved >= row["state_bytes"] * 0.99  # the scalars of a state may be stored in an index
        assert row["stored_bytes"] >= row["state_bytes"] / int(row["ranks"][0]) * 0.99 or row["operation"] == "load"


@pytest.mark.slow
def test_rows_hold_medians_and_ratios_of_their_samples(run: tuple[Any, dict[str, Any]]) -> None:
    _, document = run
    for row in document["results"]:
        assert len(row["samples"]) == REPEAT
        assert all(s["wall"] > 0 and s["cpu"] > 0 and 0 <= s["elsewhere"] <= 1 for s in row["samples"])
        assert row["wall"] == pytest.approx(np.median([s["wall"] for s in row["samples"]]))
        same = {k: row[k] for k in ("scenario", "place", "ranks", "operation")}
        for rival in ("raw", "dcp"):
            (other,) = of(document, contestant=rival, **same)
            assert row[f"cpu_over_{rival}"] == pytest.approx(row["cpu"] / other["cpu"])


@pytest.mark.slow
def test_every_other_scenario_gives_its_findings(run: tuple[Any, dict[str, Any]]) -> None:
    done, document = run
    found = [(f["scenario"], len(f["rows"])) for f in document["findings"]]
    others = [("async", 4), ("steady", 5), ("gpu", 10 if torch.cuda.is_available() else 0)]
    assert [one for one in found if one[0] != "scale"] == others and len(found) > len(others)
    assert all(f"{f['scenario']}: {f['title']}" in done.stdout for f in document["findings"])


@pytest.mark.slow
def test_the_exit_code_follows_the_printed_checks(run: tuple[Any, dict[str, Any]]) -> None:
    done, document = run
    printed = [line for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL"))]
    assert [line.startswith("PASS") for line in printed] == [c["ok"] for c in document["checks"]]
    assert done.returncode == (0 if all(c["ok"] for c in document["checks"]) else 1)
    names = " ".join(printed)
    for text in (
        "save CPU seconds below DCP's",
        "load CPU seconds below DCP's",
        "bytes per rank max/mean <= 1.05",
        "eager call in copies of the same bytes",
        "lazy call",
    ):
        assert text in names


# ----------------------------------------------------------------------------------------------------------- the parts


def cost(began: float, ended: float, cpu: float, **more: Any) -> RankCost:
    return RankCost(began=began, ended=ended, cpu=cpu, **{"read": 0, "written": 0, "machine": 0.0, "said": {}} | more)


def test_a_sample_spans_all_ranks() -> None:
    sample = Sample.of([cost(10.0, 11.0, 0.5, written=3, machine=0.7), cost(10.5, 12.5, 0.25, written=4)])
    assert (sample.wall, sample.cpu, sample.written, sample.elsewhere) == (2.5, 0.75, (3, 4), 0.0)


def measured(contestant: str, cpu: float, *, operation: Any = "save", rank_bytes: tuple[int, ...] = (10, 10)) -> Measurement:
    costs = [cost(0.0, 1.0, cpu / 2, read=1, written=n, said={"rank_bytes": n}) for n in rank_bytes]
    return Measurement(
        scenario="replicated",
        place="here",
        ranks="2",
        operation=operation,
        contestant=contestant,
        state_bytes=20,
        stored=20,
        samples=[Sample.of(costs)],
    )


@pytest.mark.parametrize(("ours", "ok"), [(0.9, True), (1.0, False), (1.5, False)])
def test_more_cpu_time_than_dcp_fails(ours: float, ok: bool) -> None:
    rows = rows_of([measured("ckpt", ours), measured("dcp", 1.0), measured("raw", 0.1)])
    found = {c.name.split(":")[0]: c.ok for c in checks_of(rows)}
    assert found == {"save CPU seconds below DCP's": ok, "bytes per rank max/mean <= 1.05": True}


@pytest.mark.parametrize(("written", "ok"), [((105, 95), True), ((106, 94), False), ((200, 0), False)])
def test_unbalanced_replicas_fail(written: tuple[int, ...], ok: bool) -> None:
    (check,) = checks_of(rows_of([measured("ckpt", 1.0, rank_bytes=written)]))
    assert check.ok is ok


def test_each_contestant_takes_each_turn_and_each_begins() -> None:
    found = list(turns("abc", 2))
    assert sorted(found) == [(i, c) for i in range(3) for c in "abc"]
    assert [c for _, c in found[::3]] == ["a", "b", "c"]


@given(st.lists(st.binary(max_size=9), max_size=6), st.data())
def test_cut_is_a_slice_of_the_concatenation(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    assert b"".join(cut([memoryview(p) for p in parts], start, stop)) == whole[start:stop]


@given(st.integers(0, 1000), st.integers(1, 9))
def test_shares_follow_each_other(total: int, ranks: int) -> None:
    shares = [share(total, r, ranks) for r in range(ranks)]
    assert [i for begin, end in shares for i in range(begin, end)] == list(range(total))
    assert max(e - b for b, e in shares) - min(e - b for b, e in shares) <= 1


def test_a_block_of_the_pattern_is_a_slice_of_the_whole() -> None:
    index = np.arange(5 * 7, dtype=np.int64).reshape(5, 7)
    whole = ((index * 2_654_435_761 + 3 * 40_503) & 0x3FFF_FFFF).astype(np.int32).view(np.float32)
    assert np.isfinite(whole).all()
    assert len(np.unique(whole)) == whole.size
    np.testing.assert_array_equal(pattern((5, 7), 3).numpy(), whole)
    np.testing.assert_array_equal(pattern((5, 7), 3, (1, 2), (3, 4)).numpy(), whole[1:4, 2:6])


def test_a_place_is_on_its_file_system_and_leaves_nothing(tmp_path: Path) -> None:
    assert Place("/proc/self").filesystem == "proc"
    with Place(str(tmp_path)) as place:
        Path(place.fresh("a b")).mkdir()
        assert Path(place.path).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_marks_are_limits_that_may_be_reached() -> None:
    assert [at_most("a", v, 2.0).ok for v in (1.9, 2.0, 2.1)] == [True, True, False]
    assert [at_least("a", v, 2.0).ok for v in (1.9, 2.0, 2.1)] == [False, True, True]


def test_columns_are_aligned() -> None:
    assert aligned([("a", "1"), ("bc", "234")]) == ["a     1", "bc  234"]


# ------------------------------------------------------------------------------------------------------ the table, and replays

COSTS = {"leader": (0.01, 2e-5, 6e-10, 1e-3, 4e-6), "member": (0.004, 2e-5, 6e-10, 0, 0)}


def traces(figures: Any, noise: float = 0.0) -> list[Trace]:
    """Saves and loads on 2, 4 and 8 ranks that cost what ``figures`` says of a load."""
    chance = random.Random(1)
    every = [Load(ranks=ranks, tensors=tensors, nbytes=nbytes) for ranks in (*SEEN, UNSEEN) for tensors, nbytes in LOADS]
    counts = {"requests": 3, "stored": 0, "served": 1, "sent": 0}
    return [
        Trace(
            contestant="ckpt",
            operation=operation,
            load=load,
            **counts | {figure: value * (1 + chance.uniform(-noise, noise)) for figure, value in figures(load).items()},
        )
        for load in every
        for operation in ("save", "load")
    ]


def costs(load: Load) -> dict[str, float]:
    """Of ``COSTS``; and counts of the job as a whole."""
    sums = {figure: sum(map(operator.mul, names, load.features)) for figure, names in COSTS.items()}
    return sums | {"stored": load.ranks * (load.nbytes + 100 * load.tensors), "served": 8 * load.ranks, "sent": 900 * load.ranks}


def test_named_costs_are_those_that_were_paid_and_hold_for_ranks_that_were_left_out() -> None:
    assert len(NAMES) == len(COSTS["leader"])
    fits, off = fits_of(traces(costs), "ckpt", "save")
    assert off.keys() == set(FIGURES) and max(map(abs, off.values())) < 1e-6
    for figure, names in COSTS.items():
        np.testing.assert_allclose(fits[figure].costs, names, rtol=1e-5, atol=1e-15)


def test_a_cost_that_the_named_ones_cannot_say_is_seen_at_the_ranks_that_were_left_out() -> None:
    _, off = fits_of(traces(lambda load: costs(load) | {"leader": 0.001 * load.ranks**2}), "ckpt", "save")
    assert off["leader"] < -0.2 and abs(off["member"]) < 1e-6


def test_noise_is_not_played_for_thousands_of_ranks() -> None:
    """No figure grows with the ranks, and none that is off by a twentieth may look so."""
    flat = traces(lambda load: costs(load) | {"leader": costs(load)["member"]}, noise=0.05)
    fits, off = fits_of(flat, "ckpt", "save")
    assert max(map(abs, off.values())) < 0.1
    few, many = (fits["leader"].at(Load(ranks=ranks, tensors=1000, nbytes=10**9)) for ranks in (8, 16_384))
    assert many == few
    alone = Fit.of([t.load for t in traces(costs)], [t.leader for t in traces(costs)], alone=True)
    assert not alone.costs[3:].any()  # who sends no message pays for no other rank


def test_a_declared_storage_gives_the_seconds() -> None:
    storage = Storage(host=8.0, total=16.0, latency=0.5, ranks_per_host=2, message=0.25, wire=2.0)
    figures = {"leader": 3.0, "member": 2.0, "requests": 4, "served": 8, "sent": 6}
    seconds = {ranks: storage.seconds(Load(ranks=ranks, tensors=1, nbytes=8), figures | {"stored": 8 * ranks}) for ranks in (1, 2, 4, 8)}
    assert seconds == {1: 3 + 2 + 2 + 3 + 1, 2: 3 + 2 + 2 + 3 + 2, 4: 3 + 2 + 2 + 3 + 2, 8: 3 + 2 + 2 + 3 + 4}
    tiers = {"memory": storage, "node-local": storage, "storage": storage}
    fits = {operation: fits_of(traces(costs), "ckpt", operation)[0] for operation in ("save", "load")}
    rows = simulated(fits, tiers, Load(ranks=1, tensors=64, nbytes=10**6))
    assert [row["ranks"] for row in rows] == [8, 64, 1024, 16_384]
    assert all(row["rate"] == pytest.approx(row["ranks"] * 10**6 / row["save"] / 1e9) for row in rows)


@pytest.mark.slow
def test_the_commands_of_the_table_run_and_counts_are_as_predicted(tmp_path: Path) -> None:
    def run_json(*words: str) -> Any:
        command = [sys.executable, "-m", *words, "--json", str(tmp_path / "out.json")]
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
        return json.loads((tmp_path / "out.json").read_text())

    place = tmp_path / "place"
    place.mkdir()
    where = ("--memory", str(place), "--local", str(place))
    table = run_json("benchmarks.table", "--size", "1", "--repeat", "1", "--restarts", "1", *where)
    kinds = [figures.keys() for figures in table["figures"].values()]
    assert {"ckpt", "dcp", "raw"} <= table["figures"].keys() and all(keys == kinds[0] for keys in kinds)
    assert all(value >= 0 for figures in table["figures"].values() for value in figures.values())
    replay = run_json("benchmarks.replay", "--repeat", "1", "--dir", str(place))
    assert list(place.iterdir()) == []
    for operation in ("save", "load"):
        for contestant in ("ckpt", "dcp", "raw"):
            off = replay["residuals"][f"{contestant} {operation}"]
            assert abs(off["stored"]) < 0.05 and abs(off["requests"]) < 0.2 and abs(off["served"]) < 0.3


# ---------------------------------------------------------------------------------------------------------------- faults


def test_a_fault_is_one_bit_or_one_cut_and_its_outcome_is_what_a_load_gives(tmp_path: Path) -> None:
    chance, raw = random.Random(1), CONTESTANTS["raw"]
    for kind in ("flipped bit", "truncated file"):
        raw.save(job_of(state(1)), str(tmp_path / kind / "step-1"))
        assert resume(raw, str(tmp_path / kind)) == "whole"
        (path,) = (path for path in (tmp_path / kind).rglob("*") if path.is_file())
        before = np.frombuffer(path.read_bytes(), np.uint8)
        damage(str(tmp_path / kind), kind, chance)
        after = np.frombuffer(path.read_bytes(), np.uint8)
        if kind == "flipped bit":
            assert len(after) == len(before) and int(np.unpackbits(before ^ after).sum()) == 1
        else:
            assert len(after) < len(before) and (after == before[: len(after)]).all()
        assert resume(raw, str(tmp_path / kind)) == "wrong"  # nothing is checked by plain reads


def test_calls_enter_no_more_than_their_marks() -> None:
    """Threads that poll, and what a first failure imports, add a few; so a twentieth more is no failure."""
    calls = ["save", "load", "convert", "open"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.walks", *calls], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    entered = {line.split()[0]: (int(line.split()[1]), int(line.split(" in ")[1].split()[0])) for line in done.stdout.splitlines()}
    assert list(entered) == calls
    assert {c: n for c, n in entered.items() if n[0] > 1.05 * MARKS[c][0] or n[1] > 1.05 * MARKS[c][1]} == {}
