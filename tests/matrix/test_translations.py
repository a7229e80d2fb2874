"""Any small model through every translation: into the other convention as numpy puts it together, and back to the bytes that went in."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpt
from ckpt import convert
from ckpt.converters.comparison import compare
from ckpt.converters.importer import import_checkpoint
from ckpt.converters.mapping.convention import numbers_of_files, translated_views
from tests.matrix.cases import CASES
from tests.matrix.models import TRANSLATIONS, Arrays, Sizes, elsewhere, in_modules, shapes, sizes

STATE = "optimizer.state.model."
KINDS = {2: torch.bfloat16, 4: torch.float32}
SETTINGS = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_bits(s: Sizes, seed: int, width: int) -> Arrays:
    """Any bit patterns, NaNs among them."""
    random = np.random.default_rng(seed)
    return {n: random.integers(0, 1 << (8 * width), shape, dtype=f"u{width}") for n, shape in shapes(s).items()}


def tensor(array: np.ndarray) -> torch.Tensor:
    """The bits of an array as a tensor of the dtype that is as wide."""
    return torch.from_numpy(np.ascontiguousarray(array).view(f"i{array.itemsize}")).view(KINDS[array.itemsize])


def bits(found: torch.Tensor) -> np.ndarray:
    width = found.element_size()
    return found.contiguous().view({2: torch.int16, 4: torch.int32}[width]).numpy().view(f"u{width}")


def written(folder: Path, s: Sizes, held: Arrays) -> str:
    """Files as transformers writes them, in two parts, and what it keeps of the model's sizes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(s.config))
    names = list(held)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({n: tensor(held[n]) for n in part}, folder / f"model-{i + 1:05d}-of-00002.safetensors")
    return str(folder)


def assert_held(url: str, expected: Arrays, random: np.random.Generator) -> None:
    """Every tensor whole, and a box of it, are what numpy gives."""
    view = ckpt.open(url)
    assert sorted(view) == sorted(expected)
    for name, array in expected.items():
        assert np.array_equal(bits(view[name].read()), array), name
        box = tuple(slice(*sorted(random.integers(0, n + 1, 2).tolist()), int(random.integers(1, 4))) for n in array.shape)
        assert np.array_equal(bits(view[name][box]), array[box]), (name, box)


@SETTINGS
@given(s=sizes(), seed=st.integers(0, 99), width=st.sampled_from([2, 4]))
def test_there_and_back(tmp_path: Path, s: Sizes, seed: int, width: int) -> None:
    """Converted with padding, imported without a copy where there is none; back into files of the same bytes."""
    held = random_bits(s, seed, width)
    names, convention = TRANSLATIONS[s.kind]
    url = written(tmp_path / "files", s, held)
    numbers = {"padded_vocabulary": s.vocabulary + s.padding}
    made, back = tmp_path / "made", tmp_path / "back"
    for path in (made, back):
        shutil.rmtree(path, ignore_errors=True)
    views = translated_views(url, names, convention, numbers)
    if s.padding:
        convert(url, str(made), to="native", views=views)
    else:
        import_checkpoint(url, str(made), views=views)
    assert_held(str(made), elsewhere(replace(s, padding=0), held), np.random.default_rng(seed))  # padding is noted as such
    assert compare(url, str(made), views=views, values=False).same
    shutil.copy(tmp_path / "files/config.json", made)
    convert(str(made), str(back), to="hf", views=translated_views(str(made), names, "huggingface", numbers))
    found = {n: t for file in back.glob("*.safetensors") for n, t in load_file(file).items()}
    assert found.keys() == held.keys()
    assert all(np.array_equal(bits(found[n]), a) for n, a in held.items())


@SETTINGS
@given(s=sizes().filter(lambda s: s.kind in ("qwen2-moe", "qwen3-moe", "deepseek-v3")), seed=st.integers(0, 99))
def test_experts_of_modules(tmp_path: Path, s: Sizes, seed: int) -> None:
    """Experts one by one in files, stacked in modules."""
    held = random_bits(s, seed, 2)
    url, made = written(tmp_path / "files", s, held), tmp_path / "made"
    shutil.rmtree(made, ignore_errors=True)
    import_checkpoint(url, str(made), views=translated_views(url, "transformers-moe", "transformers", {}))
    assert_held(str(made), in_modules(s, held), np.random.default_rng(seed))
    again = tmp_path / "again"
    shutil.rmtree(again, ignore_errors=True)
    shutil.copy(tmp_path / "files/config.json", made)
    convert(str(made), str(again), to="native", views=translated_views(str(made), "transformers-moe", "huggingface", {}))
    assert_held(str(again), held, np.random.default_rng(seed))


@SETTINGS
@given(s=sizes(), seed=st.integers(0, 99))
def test_optimizer_states_go_the_same_way(tmp_path: Path, s: Sizes, seed: int) -> None:
    """Weights, a moment and a step of each parameter. The step of a fused parameter is that of the first that it is made of."""
    names, convention = TRANSLATIONS[s.kind]
    weights, moments = random_bits(s, seed, 2), random_bits(s, seed + 1, 4)
    url, made, back = (tmp_path / n for n in ("source", "made", "back"))
    for path in (url, made, back):
        shutil.rmtree(path, ignore_errors=True)
    state = {f"model.{n}": tensor(a) for n, a in weights.items()} | {f"{STATE}{n}.exp_avg": tensor(a) for n, a in moments.items()}
    state |= {f"{STATE}{n}.step": torch.tensor(float(seed)) for n in moments}
    ckpt.save(str(url), state)
    (url / "config.json").write_text(json.dumps(s.config))
    numbers = {"padded_vocabulary": s.vocabulary + s.padding}
    convert(str(url), str(made), to="native", views=translated_views(str(url), names, convention, numbers))
    expected = {f"model.{n}": a for n, a in elsewhere(replace(s, padding=0), weights).items()}
    expected |= {f"{STATE}{n}.exp_avg": a for n, a in elsewhere(replace(s, padding=0), moments).items()}
    view = ckpt.open(str(made))
    steps = {n: view[n].read() for n in view if n.endswith(".step")}
    assert {n.removesuffix("step") for n in steps} == {n.removesuffix("exp_avg") for n in expected if n.endswith(".exp_avg")}
    assert all(t == seed for t in steps.values())
    assert {n: bits(view[n].read()).tobytes() for n in view if n not in steps} == {n: a.tobytes() for n, a in expected.items()}
    (made / "config.json").write_text(json.dumps(s.config))
    convert(str(made), str(back), to="native", views=translated_views(str(made), names, "huggingface", numbers))
    assert compare(str(url), str(back), values=False).same


JOBS = {
    "tp2pp2vpp2/dp_reshardable": ("llama", "llama", 24, frozenset()),
    "tp2pp2vpp2ep2/legacy": ("mixtral", "mixtral", 8, frozenset()),
    "pp2vpp2ep2/dp_reshardable": ("qwen-moe", "qwen-moe", 8, frozenset({0})),
}
"""A form of a Megatron job → kind of model, translation, its width, and its layers without experts."""


@pytest.mark.parametrize("form", JOBS)
def test_files_of_megatron_to_transformers_and_back(form: str, megatron_files: Path, tmp_path: Path) -> None:
    """Weights, masters and moments of a whole job: Megatron's own are what numpy puts together of transformers' tensors."""
    kind, names, hidden, dense = JOBS[form]
    case = next(case for case in CASES if case.path == f"megatron/{form}")
    url, there, back = case.url(megatron_files), str(tmp_path / "there"), str(tmp_path / "back")
    convert(str(url), there, to="native", views=translated_views(str(url), names, "huggingface", {}))
    s = Sizes(
        kind=kind,
        layers=4,
        hidden=hidden,
        groups=2,
        queries=2,
        head=hidden // 4,
        ffn=12,
        experts=4,
        vocabulary=42,
        padding=0,
        tied=False,
        dense=dense,
    )
    view, holds = ckpt.open(there), case.holds(url, tmp_path)
    for head, tail in (("model.", ""), *((STATE, f".{key}") for key in ("master", "exp_avg", "exp_avg_sq"))):
        held = {n[len(head) : len(n) - len(tail)]: bits(view[n].read()) for n in view if n.startswith(head) and n.endswith(tail)}
        for name, array in elsewhere(s, held).items():
            assert np.array_equal(array, bits(holds[f"{head}{name}{tail}"])), (name, tail)
        assert len(elsewhere(s, held)) == sum(n.startswith(head) and n.endswith(tail) for n in holds)
    numbers = {**numbers_of_files(str(url)), "padded_vocabulary": 42}
    convert(there, back, to="native", views=translated_views(there, names, "megatron", numbers))
    assert compare(str(url), back, values=False).same
