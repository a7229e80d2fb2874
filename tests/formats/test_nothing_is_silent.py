"""Whatever the files of a checkpoint hold is in what ckpt reads of them, or is told: tensors by the bytes that are read, values one by one.

The oracle opens files with torch, zipfile and DCP's own metadata; what may be missing is listed here, each with a reason.
"""

from __future__ import annotations

import io
import pickle
import re
import types
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.formats.registry import open_catalog
from tests.formats.megatron_files import unpacked
from tests.formats.reading import FIXTURES

Interval = tuple[int, int]

NOT_READ = {
    r".*\b(rng_state|rerun_state_machine)\b.*": "said by the notes of every Megatron checkpoint",
    r".*_extra_state.*": "the same",
    r"(.*\.)?param_groups\.\d+\.params\..*": "numbers of parameters, which are named instead",
    r"(.*\.)?(buckets_coalesced|numel_unpadded|param_state_sharding_type|per_bucket_numel.*)": "how Megatron's buffers are laid out",
    r"(.*\.)?(param_shapes|frozen_param_shapes|shared_params|buffer_names)\b.*": "names and shapes of DeepSpeed's parameters",
    r"(.*\.)?(param_slice_mappings|partition_count|group_paddings|param_alignment_paddings|zero_stage)\b.*": "where DeepSpeed's parts lie",
    r"optim_states:(ds_config|ds_version).*": "the file of the model has the same",
    r"(optim_states|universal):(.*\.)?ds_version": "the same",
    r"universal:optimizer_state\.pt:optimizer_state_dict\..*(exp_avg|exp_avg_sq|fp32_flat_groups).*": "the first rank's parts of what files have whole",
    r"universal:.*\.(cat_dim|vocab_tensor|param_slice_mappings)\b.*": "how slices were put together",
}
"""Keys that lead to what need not be there."""
SAID_OTHERWISE = ("step", "common_step", "loss_scaler", "params")
"""Values that are there in another form: a step is a tensor of one number, whatever it was."""


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
        return f"universal:{path.name}:"
    return "optim_states:" if path.name.endswith("optim_states.pt") else ""


def read_ranges(folder: Path) -> dict[str, list[Interval]]:
    """The bytes that ckpt reads for all tensors, and compares with them, by file."""
    catalog = open_catalog(str(folder))
    extents = [e for t in catalog.tensors.values() if t.alias is None for e in catalog.extents(t, range(len(t.grid)))]
    extents += [replica.extent for replica in getattr(catalog, "replicas", list)()]
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
    """Tensors of which bytes that are not zero are never read."""
    read, lost = read_ranges(folder), []
    for path in torch_files(folder):
        data = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            by_key = {i.filename.rpartition("/")[2]: i for i in archive.infolist() if "/data/" in i.filename}
        keys = {key: name for name, key in storages(path)}
        for key, info in by_key.items():
            name = label(folder, path) + keys.get(key, f"storage {key}")
            start = info.header_offset + 30 + int.from_bytes(data[info.header_offset + 26 : info.header_offset + 28], "little")
            start += int.from_bytes(data[info.header_offset + 28 : info.header_offset + 30], "little")
            gaps = uncovered((start, start + info.file_size), read.get(str(path), []))
            if not may_be_missing(name) and any(data[low:high].strip(b"\0") for low, high in gaps) and not is_scalar(info):
                lost.append(f"{path.name}: {name}")
    return lost


def is_scalar(info: zipfile.ZipInfo) -> bool:
    """One number: it may have become a value, which ``lost_values`` looks for."""
    return info.file_size <= 8


def storages(path: Path) -> Iterator[tuple[str, str]]:
    """The keys that lead to each tensor, and that of its storage."""
    held: dict[int, str] = {}

    class Keys(Reader):
        def persistent_load(self, saved: Any) -> Any:
            found = super().persistent_load(saved)
            held[found._untyped_storage.data_ptr() if hasattr(found, "_untyped_storage") else found.data_ptr()] = saved[2]
            return found

    whole = torch.load(path, weights_only=False, pickle_module=PICKLE)
    names = {i.filename.rpartition("/")[2]: i for i in zipfile.ZipFile(path).infolist() if "/data/" in i.filename}
    contents = {key: zipfile.ZipFile(path).read(i) for key, i in names.items()}
    for name, tensor in leaves(whole):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            raw = bytes(tensor.untyped_storage())
            for key in [k for k, data in contents.items() if data == raw]:
                yield name, key


def values_of(value: Any) -> set[tuple[str, str]]:
    """Every value with the last key that leads to it."""
    found = set()
    for path, leaf in leaves(value):
        plain = leaf.read().item() if hasattr(leaf, "read") and leaf.shape == () else leaf
        plain = plain.item() if isinstance(plain, torch.Tensor) and plain.numel() == 1 else plain
        found.add((path.rpartition(".")[2], repr(float(plain) if isinstance(plain, (int, float)) else plain)))
    return found


def lost_values(folder: Path) -> list[str]:
    view = ckpt.open(str(folder))
    known, lost = values_of(view.state()), []
    known |= {(name.rpartition(".")[2], repr(float(view[name].read()))) for name in view if view[name].shape == ()}
    for path in torch_files(folder):
        for name, leaf in leaves(torch.load(path, weights_only=False, pickle_module=PICKLE)):
            said = label(folder, path) + name
            if isinstance(leaf, torch.Tensor) and leaf.numel() != 1 or may_be_missing(said) or leaf is None:
                continue
            ((key, text),) = values_of({name.rpartition(".")[2]: leaf})
            if (key, text) not in known and ("step", text) not in (known if key == "common_step" else ()):
                lost.append(f"{path.name}: {said} = {text[:60]}")
    return lost


MEGATRON = [
    *(f"dp2/{form}" for form in ("legacy", "dp_reshardable", "dp_zero_gather_scatter", "fully_reshardable")),
    *("tp2pp2vpp2/legacy", "tp2ep2/legacy", "tp2ep2/dp_reshardable", "tp2pp2vpp2ep2/legacy", "common_state/dp_reshardable"),
    *(f"plain_{kind}/{form}" for kind in ("bf16", "fp16", "fp32") for form in ("legacy", "plain")),
    *("latent_tp2/legacy", "core15_dp2/fully_sharded_model_space"),
]
DEEPSPEED = ["zero1", "zero3", "pipeline", "experts", "round_robin", "zero1/global_step3_universal", "zero3/global_step3_universal"]
OTHERS = ["fsdp/fsdp1_full_orig0", "fsdp/fsdp1_local_orig0", *(f"deepspeed/{name}" for name in DEEPSPEED)]


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("megatron"))


def one_checkpoint(folder: Path) -> Path:
    """The directory of the checkpoint itself, below one that names it."""
    for tracker, name in (("latest", None), ("latest_checkpointed_iteration.txt", "iter_{:07d}")):
        if (folder / tracker).exists():
            text = (folder / tracker).read_text().strip()
            return folder / (text if name is None else name.format(int(text)))
    return folder


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron(name: str, megatron: Path) -> None:
    folder = one_checkpoint(megatron / name)
    assert lost_bytes(folder) == []
    assert lost_values(folder) == []


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    folder = one_checkpoint(FIXTURES / name)
    assert lost_bytes(folder) == []
    assert lost_values(folder) == []
