"""Averages of checkpoints: bit-equal to numpy in one process, resumable, and refused by name where they make no sense."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpt
from ckpt import settings as limits
from ckpt.converters import buffered, merge
from ckpt.converters.mapping.convention import translated_views
from ckpt.converters.merge import SCHEDULES, WeightedSum, checked_weights, last_steps, schedule_weights
from ckpt.errors import MismatchError, NamesError, NotFoundError, ShapeError, UsageError
from ckpt.formats.journal import ConversionJournal
from ckpt.plan.layout.geometry import Box
from tests.distributed.ranks import Lost, Ranks

WEIGHTS = (0.5, 0.3, 0.2)
KINDS = {"half": torch.float16, "brain": torch.bfloat16, "single": torch.float32, "double": torch.float64}


def model(seed: int, shape: tuple[int, ...] = (50, 7)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    floats = {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(kind) for name, kind in KINDS.items()}
    return {**floats, "scalar": torch.randn((), generator=generator), "empty": torch.zeros(0, 3), "table": torch.arange(5)}


def saved(tmp_path: Path, count: int = 3, **options: Any) -> list[str]:
    urls = [str(tmp_path / f"step-{i}") for i in range(count)]
    for i, url in enumerate(urls):
        ckpt.save(url, {"model": model(i), "step": 10 * i, "name": f"run {i}"}, **options)
    return urls


def average(tensors: list[torch.Tensor], weights: tuple[float, ...]) -> torch.Tensor:
    """The oracle, in numpy: one product and one sum after another, in float32; in float64 for float64."""
    wide: Any = np.float64 if tensors[0].dtype == torch.float64 else np.float32
    acc = wide(weights[0]) * tensors[0].to(torch.float64).numpy().astype(wide)
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        acc = acc + wide(weight) * tensor.to(torch.float64).numpy().astype(wide)
    return torch.from_numpy(np.asarray(acc)).to(tensors[0].dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check(url: str, tensors: list[dict[str, torch.Tensor]], weights: tuple[float, ...] = WEIGHTS, prefix: str = "model.") -> None:
    view = ckpt.open(url)
    assert {t.name for t in view.tensors()} == {prefix + name for name in tensors[0]}
    for name, first in tensors[0].items():
        expected = average([t[name] for t in tensors], weights) if first.is_floating_point() else first
        got = view[prefix + name].read()
        assert (got.dtype, got.shape, bits(got)) == (first.dtype, first.shape, bits(expected)), name


# -------------------------------------------------------------------------------------------------------- bit for bit


def test_three_checkpoints_bit_for_bit(tmp_path: Path) -> None:
    urls = saved(tmp_path)
    report = ckpt.merge(tmp_path / "out", urls, weights=WEIGHTS)
    check(str(tmp_path / "out"), [model(i) for i in range(3)])
    assert (report.averaged, report.compared, report.copied, report.written.finished) == (6, 1, 0, True)
    assert (report.sources, report.weights, report.values_from) == (tuple(urls), WEIGHTS, urls[0])
    state = {"model": model(7), "step": -1, "name": ""}
    ckpt.load(tmp_path / "out", state)
    assert (state["step"], state["name"]) == (0, "run 0")
    assert ckpt.verify(tmp_path / "out").ok


def test_the_order_of_the_arguments_is_that_of_the_sum(tmp_path: Path) -> None:
    """Also where the values, and so the first catalog, are another one's: float32 sums depend on the order."""
    urls = saved(tmp_path)
    ckpt.merge(tmp_path / "out", urls, weights=WEIGHTS, values_from=2)
    check(str(tmp_path / "out"), [model(i) for i in range(3)])
    assert ckpt.open(tmp_path / "out").state()["step"] == 20
    big = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]
    assert average(big, (1, 1, 1)) != average(big[::-1], (1, 1, 1))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weights=st.lists(st.floats(-2, 2), min_size=2, max_size=5),
    rows=st.integers(1, 60),
    chunk=st.sampled_from([1000, 1 << 26]),
    memory=st.sampled_from([2000, 9000, 1 << 30]),
    codec=st.sampled_from([None, "zstd"]),
)
def test_windows_memory_and_chunks_change_no_bit(
    tmp_path_factory: pytest.TempPathFactory, weights: list[float], rows: int, chunk: int, memory: int, codec: str | None
) -> None:
    """Small chunks, windows and memory for operands, so that tensors are cut in many ways."""
    folder = tmp_path_factory.mktemp("property")
    tensors = [model(i, (rows, 11)) for i in range(len(weights))]
    with pytest.MonkeyPatch.context() as patch:
        for i, own in enumerate(tensors):
            patch.setattr(limits, "CHUNK", chunk if i else 1 << 26)
            ckpt.save(folder / str(i), {"model": own}, **({"codec": codec} if codec else {}))
        patch.setattr(limits, "LEAST_MEMORY", 1)
        patch.setattr(buffered, "LEAST", 1000)
        ckpt.merge(folder / "out", [folder / str(i) for i in range(len(weights))], weights=weights, any_sum=True, memory=memory)
    check(str(folder / "out"), tensors, tuple(weights))


def test_formats_and_layouts_mix(tmp_path: Path) -> None:
    """Ours, safetensors and DCP in; safetensors, torch and DCP out."""
    tensors = [{k: v for k, v in model(i).items() if k != "double"} for i in range(3)]
    ckpt.save(tmp_path / "ours", {"model": tensors[0], "step": 4})
    save_file(tensors[1], tmp_path / "other.safetensors")
    ckpt.save(tmp_path / "third", {"model": tensors[2]})
    ckpt.convert(tmp_path / "third", tmp_path / "dcp", to="dcp")
    sources = [tmp_path / "ours", tmp_path / "other.safetensors", tmp_path / "dcp"]
    ckpt.merge(tmp_path / "hf", sources, weights=WEIGHTS, to="hf")
    made = load_file(tmp_path / "hf" / "model.safetensors")
    assert made.keys() == tensors[0].keys()
    assert all(bits(made[n]) == bits(average([t[n] for t in tensors], WEIGHTS)) for n in made if n != "table")
    pair = [tmp_path / "ours", tmp_path / "dcp"]
    ckpt.merge(tmp_path / "one.pt", pair, to="torch")
    nested = torch.load(tmp_path / "one.pt", weights_only=True)
    assert bits(nested["model"]["half"]) == bits(average([tensors[0]["half"], tensors[2]["half"]], (0.5, 0.5)))
    ckpt.merge(tmp_path / "dcp-out", pair, to="dcp")
    check(str(tmp_path / "dcp-out"), [tensors[0], tensors[2]], (0.5, 0.5))


def test_a_dtype_for_the_result(tmp_path: Path) -> None:
    a, b = torch.randn(30), torch.randn(30).bfloat16()
    ckpt.save(tmp_path / "a", {"w": a})
    ckpt.save(tmp_path / "b", {"w": b})
    with pytest.raises(ShapeError, match="w has the dtype bfloat16, and float32 in"):
        ckpt.merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    ckpt.merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], dtype="float16")
    assert torch.equal(ckpt.open(tmp_path / "out")["w"].read(), (a * 0.5 + b.float() * 0.5).half())


def test_tied_weights_stay_tied_only_if_they_are_in_all(tmp_path: Path) -> None:
    tied, untied = torch.nn.Module(), torch.nn.Module()
    for module in (tied, untied):
        module.a, module.b = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    tied.b.weight = tied.a.weight
    for name, module in (("tied", tied), ("untied", untied)):
        ckpt.save(tmp_path / name, {"model": module})
    for first, second in (("tied", "untied"), ("untied", "tied"), ("tied", "tied")):
        out = tmp_path / f"{first}-{second}"
        ckpt.merge(out, [tmp_path / first, tmp_path / second])
        for key in ("a.weight", "b.weight"):
            pair = [(tied if n == "tied" else untied).state_dict()[key] for n in (first, second)]
            assert torch.equal(ckpt.open(out)[f"model.{key}"].read(), pair[0] * 0.5 + pair[1] * 0.5)


# ----------------------------------------------------------------------------------------------- values and optimizers


def trained(seed: int, steps: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * (seed + 1))
    for _ in range(steps):
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    return net, optimizer


def test_optimizers_are_left_out_or_averaged(tmp_path: Path) -> None:
    """Moments are averaged; steps and options are values, and come from one checkpoint."""
    pairs = [trained(0, 3), trained(1, 5)]
    for i, (net, optimizer) in enumerate(pairs):
        ckpt.save(tmp_path / str(i), {"model": net, "optim": optimizer})
    sources = [tmp_path / "0", tmp_path / "1"]
    without = ckpt.merge(tmp_path / "without", sources)
    assert {t.name for t in ckpt.open(tmp_path / "without").tensors()} == {"model.weight", "model.bias"}
    assert without.written.left_out
    ckpt.merge(tmp_path / "with", sources, optimizer=True, values_from=1)
    net, optimizer = trained(2, 1)
    ckpt.load(tmp_path / "with", {"model": net, "optim": optimizer})
    states = [o.state[n.weight] for n, o in pairs]
    mine = optimizer.state[net.weight]
    assert torch.equal(mine["exp_avg"], states[0]["exp_avg"] * 0.5 + states[1]["exp_avg"] * 0.5)
    assert (mine["step"].item(), optimizer.param_groups[0]["lr"]) == (5, 0.2)


def test_tensors_that_are_copied(tmp_path: Path) -> None:
    for i in range(2):
        ckpt.save(tmp_path / str(i), {"w": torch.full((3,), float(i)), "seen": torch.tensor(i), "table": torch.tensor([float(i)])})
    sources = [tmp_path / "0", tmp_path / "1"]
    report = ckpt.merge(tmp_path / "out", sources, copy=["seen", "tab*"], values_from=1)
    view = ckpt.open(tmp_path / "out")
    assert [view[n].read().flatten().tolist() for n in ("w", "seen", "table")] == [[0.5] * 3, [1], [1.0]]
    assert report.copied == 2
    with pytest.raises(NamesError, match="no tensor matches 'nothing'"):
        ckpt.merge(tmp_path / "other", sources, copy=["nothing"])


# ------------------------------------------------------------------------------------------------------------- weights


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 60))
def test_a_schedule_keeps_of_each_update_what_the_decay_says(schedule: str, count: int) -> None:
    """The sum of c_j theta_j, with theta_j the sum of the first j updates, has update i times d(i / n)."""
    weights = np.array(schedule_weights(schedule, count))
    decay = {"linear": lambda t: 1 - t, "cosine": lambda t: (1 + np.cos(np.pi * t)) / 2, "sqrt": lambda t: 1 - np.sqrt(t)}[schedule]
    shares = [weights[i:].sum() for i in range(count)]
    np.testing.assert_allclose(shares, [decay(i / count) for i in range(count)], atol=1e-12)
    assert abs(weights.sum() - 1) < 1e-12 and (weights > 0).all()


@pytest.mark.parametrize("count", [3, 5, 7, 49])
def test_equal_weights_are_equal(count: int) -> None:
    assert checked_weights(None, None, count, any_sum=False) == schedule_weights("linear", count) == (1 / count,) * count


def test_the_newest_steps_of_a_run(tmp_path: Path) -> None:
    urls = saved(tmp_path, 4)
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-9" / "data").mkdir()
    (tmp_path / "step-9" / "data" / "x-00000.safetensors").write_bytes(b"")  # a save that did not finish
    assert last_steps(tmp_path, 3) == tuple(urls[1:])
    with pytest.raises(NotFoundError, match="there are 4 committed checkpoints, not the 5 of --last"):
        last_steps(tmp_path, 5)
    with pytest.raises(UsageError, match="sources is one URL"):
        ckpt.merge(tmp_path / "out", urls[0])  # type: ignore[arg-type]  # not each of its letters
    ckpt.merge(tmp_path / "out", last_steps(tmp_path, 3), schedule="sqrt")
    check(str(tmp_path / "out"), [model(i) for i in (1, 2, 3)], schedule_weights("sqrt", 3))
    with pytest.raises(UsageError, match=r"step-1 comes after .*step-3, and is not newer"):
        ckpt.merge(tmp_path / "other", [urls[3], urls[1]], schedule="cosine")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": (0.5, 0.3, 0.1)}, "the weights sum to 0.9, not to 1"),
        ({"weights": (0.5, 0.5)}, "2 weights for 3 checkpoints"),
        ({"weights": (float("nan"), 0.5, 0.5)}, "finite"),
        ({"weights": WEIGHTS, "schedule": "sqrt"}, "a schedule gives the weights itself"),
        ({"schedule": "sqare"}, "no schedule 'sqare'"),
        ({"values_from": 3}, "values_from=3, of 3"),
        ({"to": "megatron"}, "."),
        ({"memory": 1000}, "too few"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    urls = saved(tmp_path)
    with pytest.raises(UsageError, match=message):
        ckpt.merge(tmp_path / "out", urls, **options)
    assert not (tmp_path / "out").exists()


def test_targets_that_would_write_what_is_stored_are_refused(tmp_path: Path) -> None:
    """They make tensors of their own from views, and would silently write the first checkpoint."""
    sources = [str(Path(__file__).parent.parent / "fixtures" / "hf" / "llama")] * 2
    views = translated_views(sources[0], "llama", "megatron", {})
    for to in ("megatron", "torch_dist"):
        with pytest.raises(UsageError, match="takes stored tensors only"):
            ckpt.merge(tmp_path / "out", sources, to=to, views=views)


# ---------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("to", ["native", "hf"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_element_that_is_not_finite_is_named(tmp_path: Path, to: str, value: float) -> None:
    tensors = [model(i) for i in range(2)]
    tensors[1]["brain"][41, 5] = value
    for i, own in enumerate(tensors):
        ckpt.save(tmp_path / str(i), {"model": own})
    with pytest.raises(MismatchError, match=rf"brain\[41, 5\] is {value}.*{tmp_path / '1'}"):
        ckpt.merge(tmp_path / "out", [tmp_path / "0", tmp_path / "1"], to=to, shard_size=500)
    assert not (tmp_path / "out").exists()
    ckpt.merge(tmp_path / "out", [tmp_path / "0", tmp_path / "1"], allow_nan=True)
    check(str(tmp_path / "out"), tensors, (0.5, 0.5))


def test_an_average_that_is_too_large_for_its_dtype(tmp_path: Path) -> None:
    for i in range(2):
        ckpt.save(tmp_path / str(i), {"w": torch.tensor([1.0, 60000.0], dtype=torch.float16)})
    sources = [tmp_path / "0", tmp_path / "1"]
    with pytest.raises(MismatchError, match=r"w\[1\] of the average is inf: too large for float16"):
        ckpt.merge(tmp_path / "out", sources, weights=(1, 1), any_sum=True)
    ckpt.merge(tmp_path / "out", sources)
    # 65510 is above the largest float16, 65504, and rounds to it
    ckpt.merge(tmp_path / "top", sources, weights=(65510 / 60000, 0), any_sum=True)
    assert ckpt.open(tmp_path / "top")["w"].read()[1] == 65504


def test_tensors_that_are_not_averaged_must_be_the_same(tmp_path: Path) -> None:
    for i in range(2):
        ckpt.save(tmp_path / str(i), {"w": torch.ones(2), "table": torch.tensor([[4, 5], [6, 7 + i]])})
    with pytest.raises(MismatchError, match=r"table\[1, 1\] is 7 in .*0 and 8 in .*1, and int64 tensors are not averaged"):
        ckpt.merge(tmp_path / "out", [tmp_path / "0", tmp_path / "1"])
    assert not (tmp_path / "out").exists()


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "base", {"a": torch.ones(2), "b": torch.ones(3, 2)})
    for name, state, error, message in (
        ("less", {"a": torch.ones(2)}, NamesError, "less does not have b"),
        ("more", {"a": torch.ones(2), "b": torch.ones(3, 2), "c": torch.ones(1)}, NamesError, "base does not have c"),
        ("shape", {"a": torch.ones(2), "b": torch.ones(2, 3)}, ShapeError, r"b has the shape \[2, 3\], and \[3, 2\] in"),
    ):
        ckpt.save(tmp_path / name, state)
        with pytest.raises(error, match=message):
            ckpt.merge(tmp_path / "out", [tmp_path / "base", tmp_path / name])
        assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="at least two"):
        ckpt.merge(tmp_path / "out", [tmp_path / "base"])


def test_damage_in_any_source_is_found(tmp_path: Path) -> None:
    urls = saved(tmp_path)
    (file,) = (tmp_path / "step-2" / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ckpt.errors.CorruptError):
        ckpt.merge(tmp_path / "out", urls)
    assert not (tmp_path / "out" / "checkpoint.json").exists()


# ------------------------------------------------------------------------------------------------------------ resuming


def die_after_two_files(out: str, urls: list[str]) -> None:
    done = ConversionJournal.done

    def dies(self: ConversionJournal, number: int) -> None:
        done(self, number)
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    ConversionJournal.done = dies  # the process ends with it
    ckpt.merge(out, urls, weights=WEIGHTS, shard_size=300)


def test_a_killed_merge_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    urls = saved(tmp_path)
    out = str(tmp_path / "out")
    (lost,) = ranks.run(1, die_after_two_files, out, urls, process_group=False, allow_death=True)
    assert isinstance(lost, Lost) and lost.exitcode == -signal.SIGKILL
    with pytest.raises(ckpt.errors.ConflictError, match="another conversion was begun"):
        ckpt.merge(out, urls, weights=(0.2, 0.3, 0.5), shard_size=300)
    report = ckpt.merge(out, urls, weights=WEIGHTS, shard_size=300)
    assert 0 < report.written.written_files <= len(report.written.files) - 3
    check(out, [model(i) for i in range(3)])


def test_several_processes_share_the_files(tmp_path: Path) -> None:
    urls = saved(tmp_path)
    reports = [ckpt.merge(tmp_path / "out", urls, weights=WEIGHTS, shard_size=300, part=(i, 3)) for i in range(3)]
    assert [r.written.finished for r in reports] == [False, False, True]
    assert all(r.written.written_files for r in reports)
    check(str(tmp_path / "out"), [model(i) for i in range(3)])


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    urls = saved(tmp_path)
    report = ckpt.merge(tmp_path / "out", urls, dry_run=True)
    assert (report.written.finished, report.averaged) == (False, 6) and report.written.written_bytes > 0
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------- The formula of an average: bit-equal to torch, step by step, wherever its blocks end.

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def computed(operands: list[torch.Tensor], dtype: torch.dtype, *, allow_nan: bool = False) -> torch.Tensor:
    out = torch.empty(operands[0].shape, dtype=dtype)
    formula = WeightedSum(weights=WEIGHTS, sources=("a", "b", "c"), allow_nan=allow_nan)
    formula.compute("w", Box((0,) * out.ndim, tuple(out.shape)), operands, out)
    return out


def in_torch(operands: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float64 if torch.float64 in {dtype, *(x.dtype for x in operands)} else torch.float32
    acc = operands[0].to(wide) * WEIGHTS[0]
    for x, weight in zip(operands[1:], WEIGHTS[1:], strict=True):
        acc = acc + x.to(wide) * weight
    return acc.to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(("stored", "dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_bits_are_those_of_torch(stored: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    count = merge._BLOCK + merge._CAST + 77
    operands = [torch.randn(count, dtype=torch.float64).mul_(10.0 ** (i - 4)).to(stored) for i in range(3)]
    operands[1][:1000] *= 1e-36 if stored != torch.float16 else 1e-3  # subnormal numbers
    assert torch.equal(raw(computed(operands, dtype)), raw(in_torch(operands, dtype)))


def test_mixed_dtypes_and_small_floats() -> None:
    torch.manual_seed(2)
    mixed = [torch.randn(3, 5).to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
    assert torch.equal(raw(computed(mixed, torch.float32)), raw(in_torch(mixed, torch.float32)))
    eight = [torch.randn(3, 5).to(torch.float8_e4m3fn) for _ in range(3)]
    assert torch.equal(raw(computed(eight, torch.float8_e4m3fn)), raw(in_torch(eight, torch.float8_e4m3fn)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_named_in_every_block(dtype: torch.dtype, value: float) -> None:
    operands = [torch.ones(merge._BLOCK + 10, dtype=dtype) for _ in range(3)]
    operands[1][merge._BLOCK + 9] = value
    with pytest.raises(MismatchError, match=rf"w\[{merge._BLOCK + 9}\] is {value!s}") as raised:
        computed(operands, dtype)
    assert raised.value.where == "b"
    assert torch.equal(raw(computed(operands, dtype, allow_nan=True)), raw(in_torch(operands, dtype)))


def test_the_largest_numbers_are_finite() -> None:
    for dtype in DTYPES:
        largest = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
        assert torch.equal(computed([largest, largest, -largest], dtype), in_torch([largest, largest, -largest], dtype))
