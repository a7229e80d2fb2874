"""``ckpt diff``: differences that were put in, and what torch says of the same tensors."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpt
from ckpt import convert
from ckpt import settings as limits
from ckpt.cli.main import cli
from ckpt.converters import comparison
from ckpt.converters.comparison import Tolerance, compare
from ckpt.converters.element_differences import numbers
from ckpt.converters.importer import import_checkpoint
from ckpt.converters.mapping.convention import translated_views
from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError, NamesError, UsageError
from ckpt.plan.layout.geometry import Box
from ckpt.plan.views import stack, whole
from tests.cli.running import run
from tests.formats.reading import FIXTURES


def saved(path: Path, state: dict[str, Any], **options: Any) -> str:
    ckpt.save(str(path), state, **options)
    return str(path)


def some(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 5), "b": (33,), "c": ()}
    return {"model": {n: torch.randn(s, generator=generator) for n, s in shapes.items()}, "step": 3, "lr": [0.5, 0.25]}


def test_the_same_in_other_formats(tmp_path: Path) -> None:
    state = some()
    one = saved(tmp_path / "one", state)
    torch.save(state, tmp_path / "two.pt")
    for other in (saved(tmp_path / "coded", state, codec="planes-zstd"), str(tmp_path / "two.pt")):
        report = compare(one, other)
        assert report.same and (report.tensors, report.values, report.bytes) == (3, 2, 4 * (35 + 33 + 1))


def test_an_export_beside_what_it_was_made_of(tmp_path: Path) -> None:
    state = some()
    one, two = saved(tmp_path / "one", state), str(tmp_path / "two.safetensors")
    save_file(state["model"], two)
    report = compare(one, two, root="model")
    assert report.same and (report.tensors, report.values) == (3, 0)
    save_file({**state["model"], "a": state["model"]["a"] + 1}, two)
    assert [(d.name, d.kind) for d in compare(one, two, root="model").differences] == [("a", "values")]
    assert "compare without --root, with --only 'model.*'" in run("diff", "--root", "model", one, one).stderr  # B is not below it
    for sides, told in (((one, two), "--root model\n"), ((two, one), "--root model and B before A\n")):
        found = CliRunner().invoke(cli, ["diff", *sides])
        assert found.exit_code == 3 and found.stderr.endswith(told)
    with pytest.raises(NamesError, match="no tensor lies below 'mode'"):
        compare(one, two, root="mode")


def test_everything_that_can_differ(tmp_path: Path) -> None:
    left, right = some(), some()
    right["model"]["a"][3, 2] += 0.5
    right["model"]["a"][6, 4] -= 0.25
    right["model"]["b"] = right["model"]["b"].bfloat16()
    left["only"], right["more"] = torch.zeros(2), torch.zeros(2)
    left["shape"], right["shape"] = torch.zeros(2, 3), torch.zeros(3, 2)
    right["step"], right["text"] = 4, "x"
    report = compare(saved(tmp_path / "one", left), saved(tmp_path / "two", right))
    assert not report.same
    found = {(d.name, d.kind): d for d in report.differences}
    assert set(found) == {
        ("model.a", "values"),
        ("model.b", "dtype"),
        ("model.b", "values"),
        ("more", "only-right"),
        ("only", "only-left"),
        ("shape", "shape"),
    }
    a = found["model.a", "values"]
    expected = (left["model"]["a"].double() - right["model"]["a"].double()).abs()
    larger = torch.maximum(left["model"]["a"].abs(), right["model"]["a"].abs()).double()
    assert (a.elements, a.max_abs, a.first) == (2, expected.max().item(), (3, 2))
    assert a.max_rel == (expected / larger).max().item()
    b = found["model.b", "values"]
    rounded = left["model"]["b"].double() - right["model"]["b"].double()
    assert b.elements == int((rounded != 0).sum()) and b.max_abs == rounded.abs().max().item()
    assert (found["shape", "shape"].left, found["shape", "shape"].right) == ("[2, 3]", "[3, 2]")
    assert (found["model.b", "dtype"].left, found["model.b", "dtype"].right) == ("float32", "bfloat16")
    assert [(v.path, v.left, v.right) for v in report.value_differences] == [("step", "3", "4"), ("text", None, '"x"')]


def test_a_cast_is_within_its_tolerance(tmp_path: Path) -> None:
    model = {"w": torch.randn(64, 64)}
    paths = saved(tmp_path / "one", {"model": model}), saved(tmp_path / "two", {"w": model["w"].bfloat16()})
    command = ["diff", "--root", "model", "--tolerance", "0,0.004", *paths]
    exact, allowed = (CliRunner().invoke(cli, [*command, *more]) for more in ((), ("--no-dtypes",)))
    assert exact.exit_code == 3 and "dtype float32 ≠ bfloat16" in exact.output and "--no-dtypes --tolerance" in exact.output
    assert allowed.exit_code == 0, allowed.output
    assert CliRunner().invoke(cli, ["diff", "--root", "model", "--no-dtypes", *paths]).exit_code == 3  # what is rounded differs


def test_tolerances_by_glob(tmp_path: Path) -> None:
    left, right = some(), some()
    for tensor in right["model"].values():
        tensor += 1e-3
    one, two = saved(tmp_path / "one", left), saved(tmp_path / "two", right)

    def differing(*tolerances: Tolerance) -> set[str]:
        return {d.name for d in compare(one, two, tolerances=tolerances).differences}

    assert differing() == {"model.a", "model.b", "model.c"}
    assert differing(Tolerance(glob="*", absolute=2e-3)) == set()
    assert differing(Tolerance(glob="*.a", absolute=2e-3)) == {"model.b", "model.c"}
    assert differing(Tolerance(glob="*.a"), Tolerance(glob="*", absolute=2e-3)) == {"model.a"}
    assert differing(Tolerance(glob="*", relative=1.0)) == set()
    with pytest.raises(UsageError, match="tolerance"):
        Tolerance(glob="*", absolute=math.nan)


def test_beginnings_of_names(tmp_path: Path) -> None:
    a, b = (
        {"m": {"w": torch.ones(3), "b": torch.zeros(2)}, "lr": {"x": 1}},
        {"n": {"w": torch.ones(3), "b": torch.ones(2)}, "rate": {"x": 1}},
    )
    ckpt.save(str(tmp_path / "a"), a)
    ckpt.save(str(tmp_path / "b"), b)
    left, right = str(tmp_path / "a"), str(tmp_path / "b")
    assert len(compare(left, right).differences) == 4
    assert run("diff", left, right).stderr == "2 names begin with 'm.' in A and with 'n.' in B: add --rename m.=n.\n"
    found = compare(left, right, rename={"m.": "n.", "lr.": "rate."})
    assert [(d.name, d.kind) for d in found.differences] == [("n.b", "values")] and found.value_differences == ()
    with pytest.raises(NamesError, match="no name begins with 'q'"):
        compare(left, right, rename={"q": ""})
    with pytest.raises(NamesError, match="two names become 'n.'"):
        compare(left, right, rename={"m.w": "n.", "m.b": "n."})
    done = CliRunner().invoke(cli, ["diff", "--rename", "m.=n.", "--rename", "lr.=rate.", "--only", "n.w", "--only", "rate.x", left, right])
    assert done.exit_code == 0, done.output


def test_a_conversion_to_other_names_is_the_same_with_the_options_that_the_hint_names(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    one, two, bare = saved(tmp_path / "one", {"model": model, "optimizer": optimizer}), str(tmp_path / "two"), str(tmp_path / "bare")
    convert(one, two, to="dcp")
    hint = "12 names begin with 'optimizer.state.model.' in A and with 'optimizer.state.' in B: add --rename "
    assert hint + "optimizer.state.model.=optimizer.state." in run("diff", one, two).stderr
    assert run("diff", "--rename", "optimizer.state.model.=optimizer.state.", one, two).exit_code == 0
    saved(tmp_path / "bare", {**model.state_dict(), "optimizer": {"state": 1}, "extra": torch.ones(2)})
    assert "add --rename model.= and B before A" in run("diff", "--only", "*", bare, one).stderr


def test_only(tmp_path: Path) -> None:
    left, right = some(), some(1)
    one, two = saved(tmp_path / "one", left), saved(tmp_path / "two", right)
    report = compare(one, two, only=["*.b", "step"])
    assert [d.name for d in report.differences] == ["model.b"] and (report.tensors, report.values) == (1, 1)
    assert compare(one, two, only=["lr"]).same
    with pytest.raises(NamesError, match="modell"):
        compare(one, two, only=["modell.*", "step"])


def test_what_is_not_finite(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    left = {"same": torch.tensor([nan, inf, -inf, 0.0]), "nan": torch.tensor([1.0, nan]), "inf": torch.tensor([inf, 1.0])}
    right = {"same": torch.tensor([-nan, inf, -inf, -0.0]), "nan": torch.tensor([1.0, 1.0]), "inf": torch.tensor([-inf, 1.0])}
    report = compare(saved(tmp_path / "l", left), saved(tmp_path / "r", right), tolerances=[Tolerance(glob="*", absolute=9, relative=9)])
    assert {d.name: (d.elements, d.max_abs, d.first) for d in report.differences} == {"nan": (1, inf, (1,)), "inf": (1, inf, (0,))}


def test_both_parts_of_complex_numbers_count(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    left = {"c": torch.tensor([complex(nan, 1), complex(nan, 2), complex(1, inf)])}
    right = {"c": torch.tensor([complex(nan, 1), complex(nan, 3), complex(1, nan)])}
    report = compare(saved(tmp_path / "l", left), saved(tmp_path / "r", right))
    assert {d.name: (d.elements, d.first) for d in report.differences} == {"c": (2, (1,))}
    halves = np.array([[1, inf], [nan, 2]], np.float16).view(np.uint32)[:, 0]
    found = numbers(halves, DTYPES["complex32"])
    np.testing.assert_array_equal([found.real, found.imag], [[1, nan], [inf, 2]])


def test_a_difference_that_no_number_can_be(tmp_path: Path) -> None:
    left, right = ({"x": torch.tensor([v], dtype=torch.float64)} for v in (1.7e308, -1.7e308))
    report = compare(saved(tmp_path / "l", left), saved(tmp_path / "r", right), tolerances=[Tolerance(glob="*", relative=1.5)])
    assert [d.elements for d in report.differences] == [1]


def test_a_view_of_several_dtypes_is_not_compared(tmp_path: Path) -> None:
    """The lower half of the bits of 1.0 is that of 0.0."""
    left = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.ones(3)}
    one, two = saved(tmp_path / "l", left), saved(tmp_path / "r", {"m": torch.zeros(2, 3, dtype=torch.bfloat16)})
    with pytest.raises(UsageError, match="bfloat16 and float32"):
        compare(one, two, views=lambda shapes: {"m": stack([whole(n, s) for n, s in shapes.items()], 0)}, values=False)


def test_stored_parts_with_a_hole_are_equal_to_nothing(tmp_path: Path) -> None:
    """Shards of a tensor whose parts have as many elements as it, one of them twice and another one not at all."""
    for number, offset in enumerate((0, 0, 4)):
        said = json.dumps({"w": {"saved_offsets": [offset]}})
        save_file({"w": torch.ones(2)}, tmp_path / f"shard-{number}-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": said})
    with pytest.raises(CorruptError, match=r"2 stored chunks have \[0:2\] of tensor w"):
        compare(str(tmp_path), str(tmp_path))


def test_integers_are_exact(tmp_path: Path) -> None:
    big = (1 << 62) + 1
    left = {"i": torch.tensor([big, -5]), "u": torch.tensor([3], dtype=torch.uint8), "b": torch.tensor([True, False])}
    right = {"i": torch.tensor([big - 1, -5]), "u": torch.tensor([250], dtype=torch.uint8), "b": torch.tensor([True, True])}
    report = compare(saved(tmp_path / "l", left), saved(tmp_path / "r", right))
    assert {d.name: (d.elements, d.max_abs) for d in report.differences} == {"i": (1, 1.0), "u": (1, 247.0), "b": (1, 1.0)}


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {"float4_e2m1fn_x2", "complex32"}))
def test_numbers_are_those_of_torch(name: str) -> None:
    dtype = getattr(torch, name)
    count = 256 if dtype.itemsize == 1 else 512
    raw = np.random.default_rng(1).integers(0, 2 if name == "bool" else 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype.itemsize == 1 and name != "bool":
        raw = np.arange(256, dtype=np.uint8)
    tensor = torch.from_numpy(raw.copy()).view(dtype)
    wide = {True: torch.complex128, False: torch.float64}[dtype.is_complex] if dtype.is_floating_point or dtype.is_complex else None
    expected = (tensor.to(wide) if wide else tensor.to(torch.int64) if name == "bool" else tensor).numpy()
    found = numbers(raw.view({16: "V16"}.get(dtype.itemsize, f"<u{min(dtype.itemsize, 8)}")), DTYPES[name])
    np.testing.assert_array_equal(found, expected)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    spots=st.lists(st.integers(0, 1 << 20), max_size=4),
    window=st.sampled_from([8, 64, 4096]),
    codec=st.sampled_from([None, "planes-zstd"]),
)
def test_windows_find_what_torch_finds(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], spots: list[int], window: int, codec: str | None
) -> None:
    path = tmp_path_factory.mktemp("diff")
    left = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    right = left.clone()
    for spot in spots:
        right.view(-1)[spot % right.numel()] += 1 + spot % 3
    one = saved(path / "one", {"w": left, "t": right.T.contiguous() if len(shape) == 2 else right})
    two = saved(path / "two", {"w": right, "t": right.T.contiguous() if len(shape) == 2 else right}, codec=codec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "VALUE_BLOCK", window)
        report = compare(one, two)
    apart = (left - right).abs()
    if not apart.any():
        assert report.same
        return
    (found,) = report.differences
    first = tuple(int(i[0]) for i in torch.nonzero(apart, as_tuple=True)) if shape else ()
    assert (found.name, found.elements, found.max_abs, found.first) == ("w", int((apart > 0).sum()), apart.max().item(), first)


def test_other_naming_conventions(tmp_path: Path) -> None:
    """Hugging Face weights and the same in Megatron's names and layouts are equal, and one changed element is found."""
    source = str(FIXTURES / "hf/llama")
    views = translated_views(source, "llama", "megatron", {})
    import_checkpoint(source, str(tmp_path / "m"), views=views)
    report = compare(source, str(tmp_path / "m"), views=views, values=False)
    assert report.same and report.tensors > 10
    view = ckpt.open(str(tmp_path / "m"))
    state = {n: view[n].read() for n in view}
    name = next(n for n in state if "linear_qkv.weight" in n)
    state[name][5, 3] += 1
    report = compare(source, saved(tmp_path / "changed", state), views=views, values=False)
    assert [(d.name, d.elements, d.first) for d in report.differences] == [(name, 1, (5, 3))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_memory_is_bounded(dtype: torch.dtype, tmp_path: Path) -> None:
    one = saved(tmp_path / "one", {"w": torch.zeros(8192, 4096, dtype=dtype)})
    two = saved(tmp_path / "two", {"w": torch.ones(8192, 4096, dtype=dtype)})
    for other in (one, two):
        tracemalloc.start()
        try:
            assert compare(one, other, threads=1).same == (other == one)
            assert tracemalloc.get_traced_memory()[1] < 48 << 20
        finally:
            tracemalloc.stop()


def test_elements_of_a_box_of_nothing() -> None:
    found = comparison.differing(np.zeros(0, "<u4"), np.zeros(0, "<u4"), (DTYPES["float32"],) * 2, Tolerance(glob="*"), Box((0,), (0,)))
    assert found.elements == 0


# ------------------------------------------------------------------------------------------------------------ the command


def test_the_command(tmp_path: Path) -> None:
    left, right = some(), some()
    right["model"]["b"][2] += 1
    right["step"] = 4
    one, two = saved(tmp_path / "one", left), saved(tmp_path / "two", right)
    assert (run("diff", one, one).exit_code, run("diff", one, two).exit_code) == (0, 3)
    assert run("diff", one, one).stdout.startswith("same: compared 3 tensors (276 B) and 2 values")
    text = run("diff", one, two).stdout
    assert [line.split() for line in text.splitlines()[3:8]] == [
        ["TENSOR", "DIFFERENCE", "ELEMENTS", "MAX", "ABS", "MAX", "REL", "FIRST"],
        ["model.b", "values", "1", "1", *text.splitlines()[4].split()[4:5], "[2]"],
        [],
        ["VALUE", "A", "B"],
        ["step", "3", "4"],
    ]
    assert text.splitlines()[-1].startswith("2 differences: compared 3 tensors")
    assert run("diff", "-q", one, two).stdout.split() == ["model.b", "step"]
    document = json.loads(run("diff", "--json", one, two).stdout)
    assert (document["same"], document["tensors"], document["differences"][0]["first"]) == (False, 3, [2])
    assert run("diff", "--no-values", "--tolerance", "*.b=1.5", one, two).exit_code == 0
    assert run("diff", "--no-values", "--tolerance", "0,0.001", one, two).exit_code == 3
    assert run("diff", "--tolerance", "much", one, two).exit_code == 2
    assert run("diff", one, tmp_path / "none").exit_code == 10
    assert run("diff", "--only", "nothing", one, two).exit_code == 21
    assert run("diff", "--names", "llama", one, two).exit_code == 2


def test_infinite_differences_are_json(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one", {"x": torch.tensor(math.inf)}), saved(tmp_path / "two", {"x": torch.tensor(0.0)})
    assert json.loads(run("diff", "--json", one, two).stdout)["differences"][0]["max_abs"] == "inf"


def test_neither_diff_nor_semantic_load_torch() -> None:
    path = str(FIXTURES / "deepspeed/zero1")
    code = f"""
import sys
from ckpt.converters.comparison import compare
from ckpt.converters.semantic import check_semantic
from ckpt.formats.registry import open_catalog
assert compare({path!r}, {path!r}).same and not check_semantic(open_catalog({path!r})).problems
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_table_begins_with_what_differs_most(tmp_path: Path) -> None:
    names = ("slightly", "much", "shape", "dtype", "left", "same")
    left = {name: torch.ones(4) for name in names}
    right = {**left, "slightly": torch.ones(4) * 1.001, "much": torch.ones(4) * 3, "shape": torch.ones(5), "dtype": torch.ones(4).half()}
    right["right"] = right.pop("left")
    text = run("diff", saved(tmp_path / "one", left), saved(tmp_path / "two", right)).stdout
    rows = [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0] in (*names, "right")]
    assert [row[0] for row in rows] == ["left", "right", "shape", "dtype", "much", "slightly"]
    assert rows[0][1:] == ["only", "in", "A"] and rows[3][1:] == ["dtype", "float32", "≠", "float16"]


def test_values_are_compared_by_path_whatever_their_order(tmp_path: Path) -> None:
    """And type: what Python calls equal is not. Where paths part, all that follow are looked up."""
    left = {"a": 1, "b": True, "c": 0.0, "d": "x", "only": 1, "e": 5, "f": [1, 2], "g": 2.5, "h": None}
    right = {"a": 1.0, "b": 1, "c": -0.0, "d": "x", "e": 5, "g": 2.5, "f": [1, 3], "new": {"er": 2}, "h": None}
    report = compare(saved(tmp_path / "left", left), saved(tmp_path / "right", right))
    differ = [
        ("a", "1", "1.0"),
        ("b", "true", "1"),
        ("c", "0.0", "-0.0"),
        ("f", "[1,2]", "[1,3]"),
        ("new.er", None, "2"),
        ("only", "1", None),
    ]
    assert [(d.path, d.left, d.right) for d in report.value_differences] == differ
    assert report.values == len(left.keys() | right.keys())
    assert compare(str(tmp_path / "left"), str(tmp_path / "right"), only=["[dh]"]).same


def test_values_are_compared_inside_dicts_and_lists(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", {"c": {"lr": 0.1, "sizes": [1, 2, {"a": 3}], "gone": 1, "same": [1]}, "x": torch.ones(1)})
    two = saved(tmp_path / "two", {"c": {"lr": 0.1, "sizes": [1, 5, {"a": 4}, 6], "same": [1]}, "x": torch.ones(1)})
    text = run("diff", one, two).stdout
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("c.")}
    expected = {"c.gone": ["1", "nothing"], "c.sizes[1]": ["2", "5"], "c.sizes[2].a": ["3", "4"], "c.sizes[3]": ["nothing", "6"]}
    assert rows == expected
    document = json.loads(run("diff", "--json", one, two).stdout)
    changes = {c["path"]: [c["left"], c["right"]] for v in document["value_differences"] for c in v["changes"]}
    assert changes == {path: [None if side == "nothing" else side for side in sides] for path, sides in expected.items()}
    assert [v["path"] for v in document["value_differences"]] == ["c.gone", "c.sizes"]


# ------------------------------------------- What belongs to optimizers, also to those whose groups do not say which parameters are theirs.

WEIGHT, MOMENT = torch.randn(6, 5), torch.randn(6, 5)


@pytest.fixture(params=["param_groups", "groups"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    optimizer = {"state": {"model.w": {"exp_avg": MOMENT}}, request.param: [{"lr": 1.0, "wd_mult": 0.0}]}
    ckpt.save(str(tmp_path / "source"), {"model": {"w": WEIGHT}, "optimizer": optimizer, "step": 7})
    return str(tmp_path / "source")


def test_without_optimizer(source: str, tmp_path: Path) -> None:
    report = convert(source, str(tmp_path / "made"), to="native", optimizer=False)
    view = ckpt.open(str(tmp_path / "made"))
    assert list(view) == ["model.w"] and view.state().keys() == {"model", "step"}
    assert report.left_out == ("optimizer.state.model.w.exp_avg",)


def test_moments_keep_their_dtype(source: str, tmp_path: Path) -> None:
    convert(source, str(tmp_path / "made"), to="native", dtype="bfloat16")
    view = ckpt.open(str(tmp_path / "made"))
    assert torch.equal(view["model.w"].read(), WEIGHT.bfloat16())
    assert torch.equal(view["optimizer.state.model.w.exp_avg"].read(), MOMENT)


def test_the_model_is_the_only_part_with_tensors(source: str, tmp_path: Path) -> None:
    convert(source, str(tmp_path / "made"), to="hf")
    found = load_file(tmp_path / "made" / "model.safetensors")
    assert found.keys() == {"w"} and torch.equal(found["w"], WEIGHT)
