"""Every checkpoint that a framework wrote × everything that can be done with it, against what that framework says it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt import convert
from ckpt.cli.main import cli
from ckpt.converters.comparison import compare
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.verify import verify
from ckpt.engine.view import StoredTensor
from tests.formats.megatron_files import load
from tests.formats.reading import FIXTURES, same
from tests.matrix.cases import CASES, ONE_OF_EACH, Case
from tests.matrix.oracles import PREFIX, Tensors, flattened, nested_of_dcp


@dataclass(frozen=True)
class Held:
    """A case, where it is, and every tensor of it."""

    case: Case
    url: str
    tensors: Tensors


@pytest.fixture(scope="session")
def known(megatron_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Held]:
    """What an oracle says of a case, asked once."""

    @cache
    def found(case: Case) -> Held:
        url = case.url(megatron_files)
        return Held(case, str(url), case.holds(url, tmp_path_factory.mktemp("oracle")))

    return found


@pytest.fixture(params=CASES, ids=lambda case: case.path)
def held(request: pytest.FixtureRequest, known: Callable[[Case], Held]) -> Held:
    return known(request.param)


@pytest.fixture(params=ONE_OF_EACH, ids=lambda case: case.path)
def one(request: pytest.FixtureRequest, known: Callable[[Case], Held]) -> Held:
    return known(request.param)


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert sorted(found) == sorted(expected)
    assert [n for n, t in expected.items() if not same(found[n], t)] == []


def read(url: str) -> Tensors:
    return {t.name: t.read() for t in ckpt.open(url).tensors()}


def loaded(url: str, like: Tensors) -> Tensors:
    """What ``ckpt.load`` puts into fresh tensors."""
    fresh = {n: torch.full_like(t, 1) for n, t in like.items()}
    report = ckpt.load(url, fresh, strict=False)
    assert report.missing == ()
    return fresh


def test_every_tensor(held: Held) -> None:
    """All of it, and a box of it: slices with steps, single rows, and nothing."""
    random, view = np.random.default_rng(7), ckpt.open(held.url)
    assert_same({t.name: t.read() for t in view.tensors()}, held.tensors)
    for name, tensor in held.tensors.items():
        key = tuple(slice(*sorted(random.integers(0, n + 1, 2).tolist()), int(random.integers(1, 3))) for n in tensor.shape)
        assert same(view[name][key], tensor[key]), (name, key)
        if tensor.ndim:
            row = int(random.integers(0, len(tensor)))
            assert same(view[name][row], tensor[row]), (name, row)


def test_loaded(one: Held) -> None:
    assert_same(loaded(one.url, one.tensors), one.tensors)


def test_imported(one: Held, tmp_path: Path) -> None:
    """Without copying: the same tensors and values, and digests that all hold."""
    url = str(tmp_path / "v")
    import_checkpoint(one.url, url, digest=True)
    assert_same(loaded(url, one.tensors), one.tensors)
    assert compare(one.url, url).same
    found = verify(url)
    assert found.ok and not found.undigested


def within_modules(names: Tensors) -> Tensors:
    """As torch names the parameters of an optimizer: within their module."""
    return {n.replace(PREFIX, "optimizer.state.", 1) if n.startswith(PREFIX) else n: t for n, t in names.items()}


TARGETS = ("native", "torch", "dcp")
CONVERTED = [
    pytest.param(case, to, id=f"{case.path}-{to}", marks=pytest.mark.slow if (number + target) % 3 and case.format in seen else ())
    for number, case in enumerate(ONE_OF_EACH)
    for seen in [{earlier.format for earlier in ONE_OF_EACH[:number]}]
    for target, to in enumerate(TARGETS)
]
"""The first checkpoint of each format into all targets, the others into one each."""


@pytest.mark.parametrize(("case", "to"), CONVERTED)
def test_converted(known: Callable[[Case], Held], case: Case, to: str, tmp_path: Path) -> None:
    """What the framework of the new format loads. Steps that were values are tensors there, as torch's optimizers keep them."""
    one = known(case)
    url = tmp_path / "made"
    convert(one.url, str(url), to=to, verify=True)
    if to == "native":
        full = {n.replace("optim.state.", "optim.state.model.", 1): t for n, t in one.tensors.items()}  # as ckpt.load asks for them
        assert_same(loaded(str(url), full), full)
        assert (
            compare(one.url, str(url), rename={"optim.state.": "optim.state.model."} if full.keys() != one.tensors.keys() else {}).same
            and verify(str(url)).undigested == 0
        )
        return
    expected = within_modules(one.tensors)
    if one.case.step_values:
        moments = [n for n in expected if n.endswith(".exp_avg")]
        expected |= {n.removesuffix("exp_avg") + "step": torch.tensor(3.0) for n in moments}
    nested: Any = torch.load(url, weights_only=True) if to == "torch" else nested_of_dcp(url)
    assert_same(flattened(nested), expected)
    read_again = read(str(url))
    assert read_again and not [n for n, t in read_again.items() if not same(t, expected[n])]
    if one.case.step_values:
        assert compare(one.url, str(url), rename={PREFIX: "optimizer.state."}).same
        assert compare(str(url), one.url, rename={"optimizer.state.": PREFIX}).same


def run(*arguments: object) -> tuple[int, Any]:
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_meaning(held: Held) -> None:
    """``verify --semantic``: masters round to weights, moments and steps fit; copies of several ranks were compared."""
    code, report = run("verify", "--semantic", held.url)
    meant, case = report["semantic"], held.case
    assert code == 0 and report["ok"] and meant["ok"], meant
    assert (meant["masters"], meant["moments"], meant["steps"]) == (case.masters, case.moments, case.moments // 2)
    assert meant["replicas"] >= case.replicas


def test_inspect(held: Held) -> None:
    code, shown = run("inspect", held.url)
    assert (code, shown["format"]) == (0, held.case.format)
    assert {t["name"]: t["dtype"] for t in shown["tensors"]} == {n: str(t.dtype).removeprefix("torch.") for n, t in held.tensors.items()}


def test_differences(one: Held, tmp_path: Path) -> None:
    """``diff`` with the same tensors in our own format, but for one bit of one element, and one tensor that has another name."""
    gone, name, *_ = sorted(one.tensors, key=lambda n: (n[::-1], n)) if len(one.tensors) > 1 else ("", *one.tensors)
    changed = one.tensors[name].clone()
    at = tuple(n // 2 for n in changed.shape)
    changed.view({2: torch.int16, 4: torch.int32}[changed.element_size()])[at] ^= 1
    others = {n: t for n, t in one.tensors.items() if n != gone}
    ckpt.save(str(tmp_path / "c"), others | {name: changed, "~more": torch.zeros(2)})
    code, report = run("diff", "--no-values", one.url, tmp_path / "c")
    found = {d["name"]: (d["kind"], d["elements"], d["first"]) for d in report["differences"]}
    expected = {name: ("values", 1, list(at)), "~more": ("only-right", 0, None), gone: ("only-left", 0, None)}
    assert (code, found) == (3, {n: d for n, d in expected.items() if n})
    assert report["tensors"] == len(others)


def plain(value: Any) -> Any:
    """A nested value without what is a tensor on either side."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items() if not isinstance(v, (torch.Tensor, StoredTensor))}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", ["fsdp1_sharded_orig0", "fsdp1_sharded_orig1", "fsdp2_ws2"])
def test_values_of_dcp(name: str) -> None:
    path = FIXTURES / "fsdp" / name
    assert plain(ckpt.open(str(path)).state()) == plain(nested_of_dcp(path))


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2vpp2ep2", "pp2tied"])
def test_values_of_megatron(layout: str, megatron_files: Path) -> None:
    """Arguments, iteration and the options of groups as the first rank's file has them; every parameter is in a group."""
    folder = megatron_files / layout / "legacy"
    stored = load(next(p for p in sorted(folder.rglob("model_optim_rng.pt"))))
    view = ckpt.open(str(folder))
    state = view.state()
    assert (state["args"], state["iteration"]) == (vars(stored["args"]), stored["iteration"])
    chain = stored["optimizer"] if isinstance(stored["optimizer"], list) else [stored["optimizer"]]
    options = [plain({k: v for k, v in g.items() if k not in ("params", "step")}) for o in chain for g in o["optimizer"]["param_groups"]]
    groups = state["optimizer"]["param_groups"]
    assert [plain({k: v for k, v in g.items() if k not in ("params", "step")}) for g in groups] == options
    named = [n for g in groups for n in g["params"]]
    assert sorted(named) == sorted(n for n in view if n.startswith("model."))
    assert all((len(view[n].shape) > 1) == (g["wd_mult"] == 1.0) for g in groups for n in g["params"])
