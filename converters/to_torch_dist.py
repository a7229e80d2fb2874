"""Conversion into Megatron-Core's format ``torch_dist``, which loads with any parallelism: weights, and a distributed optimizer's state.

Tensors come under Megatron's names (``ckpt.formats.megatron.names``). (Sources: Megatron-LM core/dist_checkpointing,
core/optimizer/distrib_optimizer.py and training/checkpointing.py, versions 0.14 to 0.17.)
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from ckpt import tree
from ckpt.adapters.tensors import torch_dtype
from ckpt.catalog import Catalog
from ckpt.errors import UsageError
from ckpt.formats.megatron.catalog import METADATA_JSON, TRACKER
from ckpt.formats.megatron.keys import are_alike, are_listed, extra_states, is_known, place_of, spelled
from ckpt.formats.megatron.names import EMBEDDING, LAYER
from ckpt.formats.megatron.params import gated_layers
from ckpt.formats.megatron.torch_dist import COMMON, FORMAT_NAME
from ckpt.geometry import Box
from ckpt.io_backends.protocol import Backend
from ckpt.plan.views import View, stack

from .choosing import Choice, Chosen, Wanted, choose
from .dcp_files import METADATA, Stored, boxes_of, data_files, described, index_of, metadata, saved
from .megatron_common import Optimizer, common_node, optimizer_of
from .target import Layout, Planned, Target, publish_once

STATE = "optimizer.state."
STATES: Mapping[str, str] = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""What an optimizer's tensors are called here, and what in the form ``fully_reshardable``."""
RELEASE = "release"
"""What Megatron-LM calls a checkpoint without an iteration: a training begins with it."""
_CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
_ITERATION = re.compile(rf"iter_\d{{7,}}|{RELEASE}")


@dataclass(frozen=True, kw_only=True)
class ChosenParameters(Chosen):
    """Tensors by the keys that they are stored under. ``leading`` says how many of a tensor's first axes are layers and experts, ``gated``
    which have the rows of a gate and then those of an up projection, ``objects`` the names of what has to be there besides tensors.
    ``iteration`` is None if the source has none."""

    leading: Mapping[str, int]
    gated: frozenset[str]
    objects: tuple[str, ...]
    iteration: int | None


# -------------------------------------------------------------------------------------------------------------- choose


def choose_parameters(catalog: Catalog, choice: Choice) -> ChosenParameters:
    """The parameters of a model with Megatron's names, in the form in which Megatron-Core would have saved them, and the state of its
    optimizer, if the checkpoint has all that Megatron needs of it.

    Raises:
        UsageError: the names are not Megatron's, or it is not known how Megatron stores one of them; the others as :func:`choose`.
    """
    chosen = choose(catalog, choice)
    head = "model" if choice.root is None else choice.root
    weights = _weights(chosen, f"{head}.")
    optimizer = optimizer_of(chosen, head, weights)
    said = chosen.state if isinstance(chosen.state, dict) else {}
    arguments = said["args"] if isinstance(said.get("args"), dict) else {}
    stacked = not are_listed(arguments) and are_alike({n: (w.shape, w.dtype.name) for n, w in weights.items()})
    called = spelled(weights, local=arguments.get("transformer_impl") == "local")
    made = _Joined(stacked=stacked, url=catalog.url)
    gated = gated_layers({n: w.shape for n, w in weights.items()})
    made.add({called[n]: w for n, w in weights.items()}, "", gated)
    for kind, own in _states(optimizer, called).items():
        made.add(own, f"{STATE}{kind}.", gated)
    return ChosenParameters(
        catalog=catalog,
        tensors=made.tensors,
        state=common_node(chosen, optimizer, stacked=stacked),
        ranks={},
        leading=made.leading,
        gated=frozenset(made.gated),
        objects=tuple(extra_states(weights, stacked=stacked)),
        iteration=said["iteration"] if type(said.get("iteration")) is int else None,
    )


def _weights(chosen: Chosen, head: str) -> dict[str, Wanted]:
    """Parameters by Megatron's names. A tied output layer is no tensor of its own."""
    own = {n: w for n, w in chosen.tensors.items() if w.alias is None and w.rank is None}
    found = {n[len(head) :]: w for n, w in own.items() if n.startswith(head)} or {n: w for n, w in own.items() if not n.startswith(STATE)}
    if not any(n == EMBEDDING or LAYER.fullmatch(n) for n in found):
        hint = "give a translation (--names llama --spelling megatron), or the key that the model has (--root)"
        raise UsageError("the tensors do not have the names of Megatron-Core's parameters", where=chosen.catalog.url, hint=hint)
    odd = [] if chosen.catalog.format == FORMAT_NAME else sorted(n for n in found if not is_known(n))
    if odd:
        raise UsageError(f"nobody knows how Megatron-Core stores {odd[0]}", where=chosen.catalog.url, hint="leave it out: --exclude")
    return found


def _states(optimizer: Optimizer | None, called: Mapping[str, str]) -> dict[str, dict[str, Wanted]]:
    """An optimizer's tensors by the kind of state and by what Megatron calls the parameter."""
    if optimizer is None:
        return {}
    return {kind: {called[n]: own[key] for n, own in optimizer.states.items()} for key, kind in STATES.items()}


class _Joined:
    """Puts parameters together to the tensors that are stored."""

    def __init__(self, *, stacked: bool, url: str) -> None:
        self.stacked = stacked
        self.url = url
        self.tensors: dict[str, Wanted] = {}
        self.leading: dict[str, int] = {}
        self.gated: set[str] = set()

    def add(self, members: Mapping[str, Wanted], prefix: str, gated: frozenset[str]) -> None:
        """Tensors by the parameter's name; ``gated`` are names too."""
        by_key: dict[str, dict[tuple[int, ...], Wanted]] = {}
        for name, wanted in members.items():
            place = place_of(name, stacked=self.stacked)
            by_key.setdefault(prefix + place.key, {})[place.at] = wanted
            if name in gated:
                self.gated.add(prefix + place.key)
        for key, own in by_key.items():
            self.tensors[key] = self._joined(key, own)
            self.leading[key] = len(next(iter(own)))

    def _joined(self, key: str, members: Mapping[tuple[int, ...], Wanted]) -> Wanted:
        sizes = [max(numbers) + 1 for numbers in zip(*members, strict=True)]
        some = next(iter(members.values()))
        alike = all((w.dtype, w.shape) == (some.dtype, some.shape) for w in members.values())
        if len(members) != Box.whole(sizes).numel or not alike:
            what = "some are missing" if alike else "they differ in shape or dtype"
            raise UsageError(f"the parts of {key} cannot be one tensor: {what}", where=self.url, hint="convert all of them, or none")
        return Wanted(name=key, view=_stacked(members, sizes), dtype=some.dtype)


def _stacked(members: Mapping[tuple[int, ...], Wanted], sizes: Sequence[int], at: tuple[int, ...] = ()) -> View:
    """The members that lie below a place, along as many leading axes as are left."""
    if len(at) == len(sizes):
        return members[at].view
    return stack([_stacked(members, sizes, (*at, number)) for number in range(sizes[len(at)])], 0)


# ---------------------------------------------------------------------------------------------------------------- plan


def plan(chosen: Chosen, layout: Layout) -> Planned:
    """Data files, and what makes them a checkpoint: at last ``metadata.json``, and for a run the file that says which is the latest."""
    assert isinstance(chosen, ChosenParameters)
    folder = _folder(chosen, layout.url)
    boxes = {key: _boxes(wanted, chosen.leading[key], gated=key in chosen.gated) for key, wanted in chosen.tensors.items()}
    stored = [Stored(key, chosen.tensors[key], box, b"") for key, own in boxes.items() for box in own]
    stored += [Stored(name, None, None, saved([None])) for name in chosen.objects[:1]]
    files, places = data_files(stored, layout.shard_size, folder=folder)
    for name in chosen.objects[1:]:
        places[index_of(name, None)] = places[index_of(chosen.objects[0], None)]  # all are None, so the bytes are the same
    rows: dict[str, Any] = {key: described(w.shape, torch_dtype(w.dtype), boxes[key]) for key, w in chosen.tensors.items()}
    rows |= {name: BytesStorageMetadata() for name in chosen.objects}
    small = {COMMON: _common(chosen), METADATA: metadata(rows, places), METADATA_JSON: json.dumps(_CONFIG).encode()}

    def finish(backend: Backend) -> None:
        for name, data in small.items():
            publish_once(backend, folder + name, data)
        if folder:
            publish_once(backend, TRACKER, (RELEASE if chosen.iteration is None else str(chosen.iteration)).encode())

    return Planned(files=files, digest="crc32", finish=finish)


def _folder(chosen: ChosenParameters, url: str) -> str:
    """Where the files lie below ``url``: at it, if that is what Megatron-LM calls the directory of an iteration, and else in such a one."""
    if _ITERATION.fullmatch(url.rstrip("/").rpartition("/")[2]):
        return ""
    return f"{RELEASE}/" if chosen.iteration is None else f"iter_{chosen.iteration:07d}/"


def _boxes(wanted: Wanted, leading: int, *, gated: bool) -> list[Box]:
    """The stored boxes of a tensor: each layer and expert for itself, and gate and up apart, as loads ask for them."""
    inner = wanted.shape[leading:]
    cuts = (0, inner[0] // 2, inner[0]) if gated else (0, *inner[:1])
    rows = list(pairwise(cuts)) if inner else []
    found = []
    for at in product(*(range(n) for n in wanted.shape[:leading])):
        ones = (1,) * leading
        whole = [Box((*at, start, *(0 for _ in inner[1:])), (*ones, stop - start, *inner[1:])) for start, stop in rows] or [Box(at, ones)]
        found += [box for part in whole for box in boxes_of(part, wanted.dtype.itemsize)]
    return found


def _common(chosen: ChosenParameters) -> bytes:
    """The file of what is not sharded."""
    said = tree.decode(chosen.state, _refused)
    assert isinstance(said, dict)
    if "args" in said:
        said["args"] = Namespace(**said["args"])
    return saved(said)


def _refused(kind: str, payload: Any) -> object:
    raise AssertionError(f"{kind} in the common part")


TARGET = Target(name="torch_dist", choose=choose_parameters, plan=plan)
"""For ``ckpt.converters.target``."""
