"""A reshard or a take into other names: fused tensors come apart, others are put together, turned or padded, on the way.

What comes is compared with numpy's own concatenations and transposes of the whole tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt import Layout, Mesh, Replicate, Shard, live
from ckpt.errors import ConsistencyError, MismatchError, NamesError, UsageError
from tests.distributed.ranks import Ranks
from tests.plan.layout_strategies import numbered

RULES = """
left = "apart"
right = "fused"

[[term]]
left = ["{layer}.q", "{layer}.k", "{layer}.v"]
right = "{layer}.qkv"
steps = [{ interleave = 0, groups = 2, sizes = [8, 4, 4] }]

[[term]]
left = ["{layer}.gate", "{layer}.up"]
right = "{layer}.gate_up"
steps = [{ concat = 0 }]

[[term]]
left = "{layer}.expert.{expert}.w"
right = "{layer}.experts"
steps = [{ transpose = [1, 0] }, { stack = 0, over = "expert", count = 3 }]

[[term]]
left = "embed"
right = "embedding"
steps = [{ pad = 0, real = 10, to = 12 }]

[[term]]
left = "{layer}.scale"
right = "{layer}.factor"
"""


def part(number: int, *shape: int) -> np.ndarray:
    return numbered(shape).astype(np.float32) + 1000 * number


APART = {
    "0.q": part(0, 8, 6),
    "0.k": part(1, 4, 6),
    "0.v": part(2, 4, 6),
    "0.gate": part(3, 4, 6),
    "0.up": part(4, 4, 6),
    **{f"0.expert.{i}.w": part(5 + i, 6, 4) for i in range(4)},
    "embed": part(9, 10, 6),
    "0.scale": np.float32(2.5),
}
FUSED = {
    "0.qkv": np.concatenate([APART[f"0.{n}"].reshape(2, -1, 6) for n in "qkv"], axis=1).reshape(16, 6),
    "0.gate_up": np.concatenate([APART["0.gate"], APART["0.up"]]),
    "0.experts": np.stack([APART[f"0.expert.{i}.w"].T for i in range(4)]),
    "embedding": np.concatenate([APART["embed"], np.zeros((2, 6), np.float32)]),
    "0.factor": APART["0.scale"],
}


def cut(whole: dict[str, np.ndarray], dim: int, ranks: tuple[int, ...], *, blank: bool) -> tuple[dict[str, torch.Tensor], Layout]:
    """The half of this rank, of all that has such a dimension."""
    at = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else 0
    state = {n: torch.from_numpy(np.array(a)) for n, a in whole.items()}
    state = {n: t.chunk(2, dim)[at].clone() if t.dim() else t for n, t in state.items()}
    layout = Layout(Mesh(("tp",), (2,), ranks), [("*.factor", Replicate()), ("*.scale", Replicate()), ("*", Shard(dim, "tp"))])
    return {n: torch.full_like(t, -7) if blank else t for n, t in state.items()}, layout


def other_names(convention: str, rules: object) -> ckpt.Translation:
    return ckpt.Translation(names=str(rules), convention=convention)


def both_ways(rules: str) -> list[str]:
    """Ranks 0 and 1 have halves of the rows, 2 and 3 get halves of the columns, and the other way round."""
    rank, problems = dist.get_rank(), []
    for source, target, convention in ((APART, FUSED, "fused"), (FUSED, APART, "apart")):
        old, layout = cut(source, 0, (0, 1), blank=False)
        new, new_layout = cut(target, 1, (2, 3), blank=True)
        right, _ = cut(target, 1, (2, 3), blank=False)
        report = live.reshard(
            old if rank < 2 else None,
            new if rank >= 2 else None,
            layout=layout if rank < 2 else None,
            new_layout=new_layout if rank >= 2 else None,
            translation=other_names(convention, rules),
        )
        if rank >= 2:
            problems += [f"{convention}: {n}" for n, t in right.items() if not torch.equal(t, new[n])]
            if report.bytes_received != report.bytes_needed:
                problems.append(f"{convention}: {report.bytes_received} of {report.bytes_needed} bytes")
    try:
        live.reshard({"0.scale": torch.ones(2)}, {"0.factor": torch.zeros(2)}, translation=other_names(("fused", "apart")[rank % 2], rules))
        problems.append("different translations were taken for one")
    except ConsistencyError:
        pass
    return problems


@pytest.fixture
def rules(tmp_path: Path) -> str:
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    return str(path)


def test_layouts_and_names_change_at_once(ranks: Ranks, rules: str) -> None:
    assert ranks.run(4, both_ways, rules) == [[], [], [], []]


@pytest.mark.parametrize("local", ["on", "off"])
@pytest.mark.parametrize("convention", ["fused", "apart"])
def test_a_sink_takes_other_names(rules: str, convention: str, local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped, and over the network; whole, then as changes."""
    monkeypatch.setenv("CKPT_LIVE_LOCAL", local)
    source, target = (APART, FUSED) if convention == "fused" else (FUSED, APART)
    state = {n: torch.from_numpy(np.array(a)) for n, a in source.items()}
    into = {n: torch.full(a.shape, -7.0) for n, a in target.items()}
    with (
        live.Source("tcp://127.0.0.1:0/names", state, secret="s", delta=True) as trainer,
        live.Sink(trainer.address, into, translation=other_names(convention, rules), secret="s") as sink,
        live.Sink(
            trainer.address, {}, translation=other_names(convention, rules), only="*q*", secret="s", rename={"0.*": "1.*"}
        ) as partial,
    ):
        for step in (1, 2):
            trainer.publish(step, capture="eager").result()
            sink.take()
            assert all(torch.equal(into[n], torch.from_numpy(np.array(a)) * step) for n, a in target.items())
            for tensor in state.values():
                tensor.mul_(2)
        offered = sink.tensors()
        assert {n: t.shape for n, t in offered.items()} == {n: torch.Size(a.shape) for n, a in target.items()} | (
            {"embedding": torch.Size((10, 6))} if convention == "fused" else {}  # what of it is no padding
        )
        assert all(t.is_meta and t.dtype == torch.float32 for t in offered.values())
        assert partial.tensors().keys() == {"1.qkv" if convention == "fused" else "1.q"}
        assert sink.version is not None and sink.version.step == 2 and partial.version is None


def test_what_a_sink_cannot_translate_is_an_error_before_anything_changes(rules: str) -> None:
    with pytest.raises(UsageError, match=r"translation= is a ckpt\.Translation"):
        live.Sink("tcp://127.0.0.1:1/names", {}, translation=rules, secret="s")  # type: ignore[arg-type]
    into = {"0.factor": torch.zeros(2)}
    with (
        live.Source("tcp://127.0.0.1:0/names", {"0.scale": torch.ones(2), "strange": torch.ones(2)}, secret="s") as trainer,
        live.Sink(trainer.address, into, translation=other_names("fused", rules), secret="s") as sink,
    ):
        trainer.publish(1).result()
        with pytest.raises(NamesError, match="strange"):
            sink.take()
        assert into["0.factor"].tolist() == [0, 0] and sink.version is None


def test_one_process_with_casts_meta_tensors_and_renames(rules: str) -> None:
    old = {n: torch.from_numpy(np.array(a)) for n, a in APART.items()}
    new: dict[str, Any] = {n: torch.full(a.shape, -7, dtype=torch.bfloat16) for n, a in FUSED.items()}
    report = live.reshard(old, new, translation=other_names("fused", rules), cast=True)
    assert all(torch.equal(new[n], torch.from_numpy(np.array(a)).bfloat16()) for n, a in FUSED.items())
    assert set(report.cast) == set(FUSED) and report.bytes_copied == report.bytes_needed == sum(a.nbytes for a in APART.values())
    with torch.device("meta"):
        module = torch.nn.Embedding(12, 6)
    live.reshard(old, {"m": module}, translation=other_names("fused", rules), rename={"embedding": "m.weight"}, only="m.weight")
    assert torch.equal(module.weight, torch.from_numpy(FUSED["embedding"]))
    fused = torch.zeros(16, 6)
    with pytest.raises(MismatchError, match=r"0\.qkv: its memory is also that of 0\.q in the old state"):
        live.reshard({**old, "0.q": fused[:8]}, {"0.qkv": fused}, strict=False, translation=other_names("fused", rules))


def test_an_optimizer_follows_names_unless_its_parameters_become_one(tmp_path: Path) -> None:
    def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        module = torch.nn.Linear(2, 3)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return module, optimizer

    rules = tmp_path / "rules.toml"
    rules.write_text("""
left = "one"
right = "other"
[[term]]
left = "weight"
right = "inner.weight"
steps = [{ transpose = [1, 0] }]
[[term]]
left = "bias"
right = "inner.bias"
""")
    module, optimizer = trained()
    new = torch.nn.Module()
    new.inner = torch.nn.Module()
    new.inner.weight, new.inner.bias = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(3))
    into = torch.optim.AdamW(new.parameters())
    live.reshard({"m": module, "o": optimizer}, {"m": new, "o": into}, translation=other_names("other", rules))
    assert torch.equal(new.inner.weight, module.weight.T)
    assert torch.equal(into.state[new.inner.weight]["exp_avg"], optimizer.state[module.weight]["exp_avg"].T)
    assert into.param_groups[0]["lr"] == 0.5 and into.state[new.inner.bias]["step"] == 1
    rules.write_text('left = "one"\nright = "other"\n[[term]]\nleft = ["weight", "bias"]\nright = "both"\nsteps = [{ concat = 0 }]')
    flat = torch.nn.ParameterDict({"weight": torch.ones(2), "bias": torch.ones(3)})
    adam = torch.optim.AdamW(flat.parameters())
    flat["weight"].sum().backward()
    flat["bias"].sum().backward()
    adam.step()
    with pytest.raises(UsageError, match="leave the optimizer out"):
        live.reshard({"m": flat, "o": adam}, {"m": {"both": torch.zeros(5)}}, translation=other_names("other", rules), strict=False)
    live.reshard({"m": flat}, {"m": {"both": (joined := torch.zeros(5))}}, translation=other_names("other", rules))
    assert torch.equal(joined, torch.cat([flat["weight"], flat["bias"]]))


def test_what_cannot_be_translated_is_an_error_before_anything_changes(rules: str) -> None:
    old, new = {"0.scale": torch.ones(2), "strange": torch.ones(2)}, {"0.factor": torch.zeros(2)}
    with pytest.raises(NamesError, match="strange"):
        live.reshard(old, new, translation=other_names("fused", rules))
    with pytest.raises(UsageError, match=r"translation= is a ckpt\.Translation"):
        live.reshard(old, new, translation=rules)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not to 'other'"):
        live.reshard(old, new, translation=other_names("other", rules))
    for wrong, text in (
        ({"convention": 3}, "convention= is text"),
        ({"numbers": 4}, "numbers by name"),
        ({"numbers": {"heads": -1}}, "heads"),
    ):
        with pytest.raises(UsageError, match=text):
            ckpt.Translation(**{"names": rules, "convention": "fused", **wrong})
    assert new["0.factor"].tolist() == [0, 0]
