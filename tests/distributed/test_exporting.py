"""Exports of running jobs: in every layout what torch gathers, bit for bit; all of it or nothing, whoever dies."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt
from ckpt import convert, export
from ckpt.converters.mapping.convention import translated_views
from ckpt.errors import GroupError, NotCommittedError
from tests.distributed import exporting as work
from tests.distributed.plain import world_size
from tests.distributed.ranks import Lost, Ranks, at_once

LAYOUTS = ("ddp2", "fsdp3", "hsdp2x2", "tp2", "fsdp2-tp2", "pp2-tp2", "moe-ep2-dp2")
DELTAS = ("fsdp3", "fsdp2-tp2", "pp2-tp2", "moe-ep2-dp2")
MANY: dict[str, Any] = {"shard_size": 13_000}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_every_layout_and_what_changed_in_it(ranks: Ranks, tmp_path: Path, request: pytest.FixtureRequest, world: int) -> None:
    calls: list[tuple[Any, ...]] = []
    slow = request.config.getoption("--slow")
    for layout in [name for name in LAYOUTS if world_size(name) == world and (slow or name not in ("hsdp2x2", "pp2-tp2"))]:
        works = (work.deltas, work.everywhere) if layout in DELTAS else (work.everywhere,)
        calls += [(call, layout, str(tmp_path / layout / call.__name__)) for call in works]
    for (call, layout, _), (problems, *_) in zip(calls, ranks.run_in_turn(world, calls), strict=True):
        assert (call.__name__, layout, problems) == (call.__name__, layout, [])


@pytest.mark.parametrize("way", ["ranges", "parts"])
def test_transformers_loads_a_translated_export(ranks: Ranks, tmp_path: Path, way: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(8)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "original")
    views = translated_views(str(tmp_path / "original"), "llama", "megatron", {})
    convert(str(tmp_path / "original"), str(tmp_path / "megatron.safetensors"), to="hf", views=views)
    whole = load_file(tmp_path / "megatron.safetensors")
    assert any("linear_qkv" in name for name in whole)
    ranks.run(4, work.translated, whole, config.to_dict(), str(tmp_path / "exported"), way)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert found.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in found.state_dict().items())
    assert len(list((tmp_path / "exported").glob("model-*.safetensors"))) > 1


def right(url: Path, seed: int) -> bool:
    found = load_file(url) if url.is_file() else work.loaded(str(url))
    wanted = work.whole_of(seed)
    return found.keys() == wanted.keys() and all(torch.equal(found[n], t) for n, t in wanted.items())


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def test_a_rank_is_killed(ranks: Ranks, tmp_path: Path) -> None:
    def check(name: str, at: int) -> None:
        folder, options = tmp_path / f"{name}-{at}", MANY if name == "out" else {}
        (folder / "out").mkdir(parents=True)
        found = ranks.run(3, work.die_at_write, str(folder / name), 1, options, at, allow_death=True)
        assert all(isinstance(x, Lost) for x in found) and found[1].exitcode == -9, (name, at)
        assert all(isinstance(found[r].error, GroupError) for r in (0, 2)), (name, at)
        assert visible(folder) == ["out"] and visible(folder / "out") == []
        ranks.run(2, work.export_some, str(folder / name), 2, options)
        assert right(folder / name, 2)
        assert [p.name for p in folder.rglob(".*")] == []

    at_once(check, product(("out", "out.safetensors"), (0, 3)))


def test_killed_while_it_would_replace(ranks: Ranks, tmp_path: Path) -> None:
    def check(name: str) -> None:
        url, options = tmp_path / name, {"overwrite": True, **(MANY if name == "out" else {})}
        export(str(url), work.whole_of(5), shard_size=20_000)
        before = work.contents(str(url)) if name == "out" else url.read_bytes()
        ranks.run(2, work.die_at_write, str(url), 1, options, 1, allow_death=True)
        assert right(url, 5)
        assert before == ({n: b for n, b in work.contents(str(url)).items() if n[0] != "."} if name == "out" else url.read_bytes())
        ranks.run(2, work.export_some, str(url), 2, options)
        assert right(url, 2)

    at_once(check, [("out",), ("out.safetensors",)])


def test_a_rank_is_killed_where_files_cannot_be_shared(ranks: Ranks, tmp_path: Path) -> None:
    url = tmp_path / "out"
    found = ranks.run(2, work.die_at_write, f"local://{url}", 1, MANY, 0, allow_death=True)
    assert found[1].exitcode == -9 and isinstance(found[0].error, GroupError)
    assert not [n for n in visible(url) if n.endswith("safetensors")]
    ranks.run(2, work.export_some, f"local://{url}", 2, MANY)
    assert right(url, 2) and "convert.json" not in visible(url)


def test_killed_while_files_get_their_names(ranks: Ranks, tmp_path: Path) -> None:
    url = tmp_path / "out"
    found = ranks.run(2, work.die_while_publishing, str(url), 1, MANY, 1, allow_death=True)
    assert found[0].exitcode == -9
    assert "convert.json" in visible(url) and "model-00001-of-00003.safetensors" in visible(url)
    with pytest.raises(NotCommittedError):
        ckpt.open(str(url))
    ranks.run(2, work.export_some, str(url), 2, MANY)
    assert right(url, 2) and "convert.json" not in visible(url) and not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_a_rank_that_fails_ends_it_on_all_and_leaves_what_was_there(ranks: Ranks, tmp_path: Path, name: str) -> None:
    url, options = tmp_path / name, {"overwrite": True, **(MANY if name == "out" else {})}
    ranks.run(2, work.export_some, str(url), 1, options)
    before = sorted(tmp_path.rglob("*"))
    told = ranks.run(3, work.fail_at_write, str(url), 2, options)
    assert told[1] == "NoSpaceError: the disk is full"
    assert all("RankFailedError" in told[r] and "rank 1" in told[r] and "the disk is full" in told[r] for r in (0, 2))
    assert right(url, 1) and sorted(tmp_path.rglob("*")) == before


def test_nothing_is_replaced_unless_asked(ranks: Ranks, tmp_path: Path) -> None:
    one, many = tmp_path / "a.safetensors", tmp_path / "many"
    ranks.run(2, work.export_some, str(one), 1, {})
    ranks.run(2, work.export_some, str(many), 1, MANY)
    for url in (one, many):
        found = ranks.run(2, work.export_some, str(url), 2, {}, allow_death=True)
        assert all("ConflictError" in x.text for x in found) and right(url, 1)
    ranks.run(2, work.export_some, str(one), 2, {"overwrite": True})
    ranks.run(3, work.export_some, str(many), 2, {"overwrite": True})
    assert right(one, 2) and right(many, 2) and visible(many) == ["model.safetensors"]
    ranks.run(2, work.export_some, str(many), 3, {"overwrite": True, **MANY})
    assert right(many, 3) and "model.safetensors" not in visible(many)


def test_other_things_are_never_replaced(ranks: Ranks, tmp_path: Path) -> None:
    ckpt.save(str(tmp_path / "step"), {"a": torch.ones(2)})
    found = ranks.run(2, work.export_some, str(tmp_path / "step"), 1, {"overwrite": True}, allow_death=True)
    assert all("ConflictError" in x.text for x in found)
    assert ckpt.open(str(tmp_path / "step"))["a"][0] == 1
    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    ranks.run(2, work.export_some, str(tmp_path / "b.safetensors"), 1, {})
    assert visible(tmp_path) == ["b.safetensors", "other.safetensors", "step"]


def test_different_options(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, work.differ, str(tmp_path / "out")) == ["ConsistencyError"] * 2
    assert not (tmp_path / "out").exists()


def test_tensors_of_one_name_with_other_bytes(ranks: Ranks, tmp_path: Path) -> None:
    expected = ["replicas differ: tensor expert: rank 1 ≠ rank 2", "replicas differ: tensor gate: rank 0 ≠ ranks 1-2", *["nothing"] * 3]
    assert ranks.run(3, work.called_alike, str(tmp_path)) == [expected] * 3
    assert load_file(tmp_path / "unchecked.safetensors")["expert"].tolist() in ([1.0] * 4, [2.0] * 4)
    assert list(load_file(tmp_path / "gate.safetensors")) == ["gate"]
    own = {name: tensor.tolist() for name, tensor in load_file(tmp_path / "own.safetensors").items()}
    assert own == {"gate": [1.0] * 4, **{f"expert.{rank}": [float(rank)] * 4 for rank in range(3)}}
    assert sorted(p.stem for p in tmp_path.rglob("*") if p.is_file()) == ["gate", "own", "unchecked"]


def test_few_writes_and_no_gathering(ranks: Ranks, tmp_path: Path) -> None:
    """Columns go to windows, rows straight to the file: no rank sends more than its share, and none writes small runs."""
    reports = ranks.run(2, work.export_some, str(tmp_path / "a.safetensors"), 1, {})
    columns, rest = 32 * 96 * 4, (60 * 80 + 7 * 11 + 5 * 3 + 7) * 4
    assert sum(r.rank_bytes for r in reports) == columns + rest
    assert columns // 2 <= sum(r.sent_bytes for r in reports) < columns // 2 + 5 * 3 * 4
    assert sum(r.writes for r in reports) <= 11  # the header, two of rows and table, at most four of flat, the columns, the small one
