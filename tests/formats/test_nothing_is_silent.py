"""Whatever the files of a checkpoint hold is in what ckpt reads of them, or is told: tensors by the bytes that are read, values one by one.

The oracle opens files with torch, zipfile and DCP's own metadata; what may be missing is listed here, each with a reason.
"""

from __future__ import annotations

import math
import pickle
import re
import shutil
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.view import StoredTensor
from ckpt.errors import CorruptError, FormatError
from ckpt.formats.external import ExternalCatalog
from ckpt.formats.registry import open_catalog
from tests.formats.reading import FIXTURES
from tests.formats.test_deepspeed import SOME, Job

Interval = tuple[int, int]

NOT_READ = {
    r".*\b(rng_state|rerun_state_machine)\b.*": "said by the notes of every Megatron checkpoint",
    r".*_extra_state.*": "the same",
    r"(.*[.:])?param_groups\.\d+\.params\..*": "numbers of parameters, which are named instead",
    r"(.*[.:])?(buckets_coalesced|numel_unpadded|param_state_sharding_type)": "how Megatron's buffers are laid out",
    r"(.*[.:])?(param_shapes|frozen_param_shapes|shared_params|buffer_names)\b.*": "names and shapes of DeepSpeed's parameters",
    r"(.*[.:])?(param_slice_mappings|partition_count|group_paddings|param_alignment_paddings|zero_stage)\b.*": "where its parts lie",
    r"(optim_states|universal):(.*\.)?(ds_config|ds_version)\b.*": "the file of the model has the same",
    r"universal:zero/optimizer_state\.pt:.*(exp_avg|exp_avg_sq|fp32_flat_groups).*": "parts of what other files have whole",
    r"universal:.*:(cat_dim|vocab_tensor)": "how slices were put together",
    r"universal:(frozen|buf)/fp32\.pt:param": "what is not trained: the model's file has it in its own dtype",
    r"pipeline:optim_states:.*": "a tied parameter, of which the first stage has the states too",
}
"""Keys that lead to what need not be there, and why."""


class Stub:
    """Stands for an object of any class."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.__dict__.update(options)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("megatron", "deepspeed"):
            return Stub
        return super().find_class(module, name)


PICKLE = types.ModuleType("stubs")
PICKLE.__dict__.update({k: v for k, v in vars(pickle).items() if not k.startswith("__")})
PICKLE.Unpickler = Reader  # type: ignore[attr-defined]
PICKLE.load = lambda file, **options: Reader(file, **options).load()  # type: ignore[attr-defined]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Mapping, list, tuple)):
        for key, below in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(below, f"{path}.{key}" if path else str(key))
    elif hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, type)):
        yield from leaves(vars(value), path)
    else:
        yield path, value


def may_be_missing(path: str) -> bool:
    return any(re.fullmatch(pattern, path) for pattern in NOT_READ)


def torch_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in (".pt", ".bin") and zipfile.is_zipfile(p) and "memory" not in p.parts)


def label(folder: Path, path: Path) -> str:
    """What kind of file it is, as ``NOT_READ`` says it."""
    if "zero" in path.relative_to(folder).parts:
        return f"universal:{path.parent.name}/{path.name}:"
    last_stage = "pipeline:" if path.match("pipeline/*/*mp_rank_01_optim_states.pt") else ""
    return f"{last_stage}optim_states:" if path.name.endswith("optim_states.pt") else ""


def read_ranges(folder: Path) -> dict[str, list[Interval]]:
    """The bytes that ckpt reads for all tensors, and compares with them, by file."""
    catalog = open_catalog(str(folder))
    assert isinstance(catalog, ExternalCatalog)
    extents = catalog.extents_of([(t, n) for t in catalog.tensors.values() if t.alias is None for n in range(len(t.grid))])
    extents += [replica.extent for replica in catalog.replicas()]
    found: dict[str, list[Interval]] = {}
    for e in extents:
        found.setdefault(f"{catalog.backend.url.removeprefix('file://')}/{e.path}", []).append((e.offset, e.offset + e.length))
    return found


def uncovered(whole: Interval, read: list[Interval]) -> list[Interval]:
    at, found = whole[0], []
    for low, high in sorted(read):
        if low > at and at < whole[1]:
            found.append((at, min(low, whole[1])))
        at = max(at, high)
    return found + ([(at, whole[1])] if at < whole[1] else [])


def lost_bytes(folder: Path) -> list[str]:
    """Tensors of which bytes that are not zero are never read, nor equal bytes of another."""
    read, lost = read_ranges(folder), []
    unread: dict[Path, list[bytes]] = {}
    whole = set()
    for path in torch_files(folder):
        data = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            records = [i for i in archive.infolist() if "/data/" in i.filename]
        for info in records:
            start = info.header_offset + 30 + sum(int.from_bytes(data[info.header_offset + at :][:2], "little") for at in (26, 28))
            content = data[start : start + info.file_size]
            gaps = uncovered((start, start + info.file_size), read.get(str(path), []))
            if not gaps:
                whole.add(content)
            elif any(data[low:high].strip(b"\0") for low, high in gaps) and info.file_size > NUMBER:
                unread.setdefault(path, []).append(content)
    for path, contents in unread.items():
        gone = [content for content in contents if content not in whole]
        names = [label(folder, path) + name for name in (tensors_in(path, gone) if gone else ())]
        lost += [f"{path.name}: {name}" for name in names if not may_be_missing(name)]
    return lost


NUMBER = 8
"""Bytes of one number at most: it may have become a value, which ``lost_values`` looks for."""


def tensors_in(path: Path, storages: list[bytes]) -> Iterator[str]:
    """The keys that lead to the tensors in these storages."""
    for name, tensor in leaves(loaded(path)):
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            if raw.numpy().tobytes() in storages:
                yield name


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False, pickle_module=PICKLE)


def values_of(value: Any) -> set[tuple[str, str]]:
    """Every value with the last key that leads to it."""
    return {(path.rpartition(".")[2], as_text(leaf)) for path, leaf in leaves(value)}


def as_text(leaf: Any) -> str:
    """A value, whether it stands in a tensor of one number or by itself."""
    if isinstance(leaf, StoredTensor):
        leaf = leaf.read() if math.prod(leaf.shape) == 1 else None
    plain = leaf.item() if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 else leaf
    return repr(float(plain) if isinstance(plain, (int, float)) else plain)


def lost_values(folder: Path) -> list[str]:
    view = ckpt.open(str(folder))
    known, lost = values_of(view.state()), []
    known |= {(name.rpartition(".")[2], as_text(view[name].read().reshape(()))) for name in view if math.prod(view[name].shape) == 1}
    for path in torch_files(folder):
        for name, leaf in leaves(loaded(path)):
            said = label(folder, path) + name
            if (isinstance(leaf, torch.Tensor) and leaf.numel() != 1) or leaf is None or may_be_missing(said):
                continue
            key = {"common_step": "step", "": path.stem}.get(last := name.rpartition(".")[2], last)
            if (key, as_text(leaf)) not in known:
                lost.append(f"{path.name}: {said} = {str(leaf)[:60]}")
    return lost


MEGATRON = [
    *("dp2/legacy", "latent_tp2/legacy", "latent_tp2/dp_zero_gather_scatter"),
    *("plain_fp16/legacy", "plain_fp16/plain"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain_bf16/legacy", "plain_fp32/plain")),
]
DEEPSPEED = ["zero1", "zero3", "pipeline", "experts", "round_robin", "zero1/global_step3_universal", "zero3/global_step3_universal"]
OTHERS = ["fsdp/fsdp1_full_orig0", *(f"deepspeed/{name}" for name in DEEPSPEED)]


def one_checkpoint(folder: Path) -> Path:
    """The directory of the checkpoint itself, below one that names it."""
    for tracker, name in (("latest", None), ("latest_checkpointed_iteration.txt", "iter_{:07d}")):
        if (folder / tracker).exists():
            text = (folder / tracker).read_text().strip()
            return folder / (text if name is None else name.format(int(text)))
    return folder


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron(name: str, megatron_files: Path) -> None:
    folder = one_checkpoint(megatron_files / name)
    assert lost_bytes(folder) == []
    assert lost_values(folder) == []


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    folder = one_checkpoint(FIXTURES / name)
    assert lost_bytes(folder) == []
    assert lost_values(folder) == []


# ---------------------------------------------------------------------------------------------------- what nobody knows


def changed(path: Path, change: Callable[[Any], object]) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def notes_of(folder: Path) -> str:
    catalog = open_catalog(str(folder))
    assert isinstance(catalog, ExternalCatalog)
    return " ".join(catalog.notes)


def test_more_in_an_optimizer_of_megatron(megatron_files: Path, tmp_path: Path) -> None:
    """States of other optimizers are states; other entries are told."""
    folder = one_checkpoint(Path(shutil.copytree(megatron_files / "plain_bf16/legacy", tmp_path / "c")))

    def more(state: Any) -> None:
        own = state["optimizer"]["optimizer"]
        state["optimizer"]["my_extra"], own["my_other"], state["my_value"] = {"a": 7}, torch.ones(3), {"seen": 12}
        for n in own["state"]:
            own["state"][n] |= {"momentum_buffer": own["state"][n]["exp_avg"] + 1, "mu": torch.tensor(n + 0.5), "count": n}

    for path in folder.rglob("model_optim_rng.pt"):
        changed(path, more)
    view, said = ckpt.open(str(folder)), notes_of(folder)
    assert "optimizer.my_extra" in said and "optimizer.optimizer.my_other" in said
    assert view.state()["my_value"] == {"seen": 12}
    head = "optimizer.state.model.embedding.word_embeddings.weight"
    assert torch.equal(view[f"{head}.momentum_buffer"].read(), view[f"{head}.exp_avg"].read() + 1)
    assert view[f"{head}.mu"].read() == 0.5
    assert view.state()["optimizer"]["state"]["model.embedding.word_embeddings.weight"]["count"] == 0


def test_states_that_fit_no_parameter_of_megatron(megatron_files: Path, tmp_path: Path) -> None:
    for number, state_of in enumerate(({"row": torch.ones(3)}, None)):
        folder = one_checkpoint(Path(shutil.copytree(megatron_files / "plain_bf16/legacy", tmp_path / str(number))))

        def more(state: Any, more: Any = state_of) -> None:
            states = state["optimizer"]["optimizer"]["state"]
            states[0 if more else 99] = states[0] | (more or {})

        for path in folder.rglob("model_optim_rng.pt"):
            changed(path, more)
        with pytest.raises(FormatError, match="row of embedding" if state_of else "a state 99 of no parameter"):
            open_catalog(str(folder))


@pytest.mark.parametrize("form", ["latent_tp2/dp_zero_gather_scatter", "plain_bf16/plain", "plain_fp16/plain"])
def test_more_in_the_common_part_of_megatron(form: str, megatron_files: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(megatron_files / form, tmp_path / "c"))
    if (folder / "common.pt").exists():
        changed(folder / "common.pt", lambda state: state["optimizer"].update(my_extra=torch.ones(2)))
        assert "optimizer.my_extra is not known" in notes_of(folder)


def test_ranks_with_other_steps_of_megatron(megatron_files: Path, tmp_path: Path) -> None:
    folder = one_checkpoint(Path(shutil.copytree(megatron_files / "plain_bf16/legacy", tmp_path / "c")))
    path = folder / "mp_rank_01" / "model_optim_rng.pt"
    changed(path, lambda state: state["optimizer"]["optimizer"]["state"][0].update(step=torch.tensor(4.0)))
    with pytest.raises(CorruptError, match=r"step of .* is 3\.0 on one rank and 4\.0 on another"):
        open_catalog(str(folder))


def test_more_in_an_optimizer_of_deepspeed(tmp_path: Path) -> None:
    Job(zero=1, ranks=2, shapes=SOME, slices=False).write(tmp_path)

    def more(state: Any) -> None:
        state["beside"], zero = 1, state["optimizer_state_dict"]
        zero["my_extra"], base = 7, zero["base_optimizer_state"]
        base["my_other"] = {"a": 8}
        for own in base["state"].values():
            own["momentum_buffer"] = own["exp_avg"] + 1

    for path in tmp_path.glob("*optim_states.pt"):
        changed(path, more)
    view = ckpt.open(str(tmp_path))
    others = view.state()["zero_optimizer"]
    assert (others["my_extra"], others["base_optimizer_state"]) == (7, {"my_other": {"a": 8}})
    name = next(n for n in view if n.endswith(".momentum_buffer"))
    assert torch.equal(view[name].read(), view[name.replace("momentum_buffer", "exp_avg")].read() + 1)
    assert "'beside' of" in notes_of(tmp_path)
