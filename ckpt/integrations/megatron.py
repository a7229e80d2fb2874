"""Megatron-Core's distributed checkpoints, stored by ckpt.

>>> import ckpt.integrations.megatron  # the backend ("ckpt", 1)
>>> dist_checkpointing.save(sharded_state_dict, folder, ("ckpt", 1))  # doctest: +SKIP
>>> state = dist_checkpointing.load(sharded_state_dict, folder)  # doctest: +SKIP

Megatron keeps its part: it checks the state, writes ``common.pt`` and, last, ``metadata.json``, from which a load knows the backend.
Tensors and sharded objects are an ordinary checkpoint in the same folder, without pickles. :func:`ckpt.save` and :func:`ckpt.load` take
a sharded state dict, too; this module is not needed for that, but for :func:`plain`.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import base
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from ckpt import api, settings
from ckpt.errors import NamesError, UsageError
from ckpt.needs import warn_if_untried
from ckpt.net.group import Job, group_of
from ckpt.state.sharded import plain, stored_name

__all__ = ["CkptLoad", "CkptSave", "plain"]

_BACKEND, _VERSION = "ckpt", 1


class CkptSave(base.AsyncSaveShardedStrategy):
    """``checkpointing_context={"save_strategy": CkptSave()}`` is how Megatron-LM and Bridge take it.

    Args:
        options: as for :func:`ckpt.save`: ``codec``, ``job``, …
    """

    can_handle_sharded_objects = True

    def __init__(self, **options: Any) -> None:
        super().__init__(_BACKEND, _VERSION)
        self.options = options

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        api.save(checkpoint_dir, _listed(nested_values(sharded_state_dict)), **self.options)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        """The state may change when this returns. Threads of this process save; what Megatron schedules, in another one, waits for them.
        Errors are raised where Megatron finalizes, as it waits for all ranks before that."""
        try:
            handle = api.save_async(checkpoint_dir, _listed(nested_values(sharded_state_dict)), capture="eager", **self.options)
        except Exception as err:  # noqa: BLE001
            (failed := Future[None]()).set_exception(err)
            return AsyncRequest(None, (), [failed.result])
        saving, name = tempfile.mkstemp(prefix="ckpt-saving-")
        os.close(saving)

        def note_end() -> None:
            handle.durable.error()
            os.unlink(name)

        threading.Thread(target=note_end, name="ckpt-megatron", daemon=True).start()
        return AsyncRequest(_wait_while_saving, (name, os.getpid()), [handle.result])


def _wait_while_saving(name: str, pid: int) -> None:
    with suppress(ProcessLookupError):
        while os.path.exists(name):
            os.kill(pid, 0)
            time.sleep(0.02)


class CkptLoad(base.LoadShardedStrategy):
    """Loads what :class:`CkptSave` has saved, on any number of ranks. ``dist_checkpointing.load`` chooses it by itself.

    Args:
        options: as for :func:`ckpt.load`: ``cast``, ``read``, ``job``, …
    """

    can_handle_sharded_objects = True

    def __init__(self, **options: Any) -> None:
        self.options = options

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != _BACKEND:
            raise UsageError(f"the checkpoint is of Megatron's backend {loaded_backend!r}", hint="load it without a strategy of ckpt")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != _VERSION:
            raise UsageError(f"the checkpoint is of version {loaded_version} of the backend 'ckpt'", hint="load it with a newer ckpt")

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Fill the tensors, and give the state with these and with the objects in their places. Megatron itself says what to do about names
        that only the checkpoint has.

        Raises:
            NamesError: the checkpoint lacks something; nothing was changed. Other errors of :func:`ckpt.load`.
        """
        values, url = list(nested_values(sharded_state_dict)), os.fspath(checkpoint_dir)
        job = Job.of(self.options.get("job"))
        group = group_of(job)
        with group.fails_together("names", url):
            names = {each.key if isinstance(each, ShardedTensor) else stored_name(each) for each in values}
            seconds = settings.timeout(job.timeout)
        call = group.call("names", url, seconds)
        if missing := call.map_reduce(
            "names",
            lambda: {"lacking": sorted(names - api.open(url).state().keys())},
            lambda rows: sorted({name for row in rows.values() for name in row["lacking"]}),
        ):
            hint = "objects keep the parallel sizes of their save: --no-load-rng leaves out generators, --no-load-optim optimizers"
            raise NamesError(f"it lacks names of the state ({len(missing)}): {', '.join(missing[:5])}", where=url, hint=hint)
        with group.fails_together("load", url):
            for each in (value for value in values if isinstance(value, ShardedTensor) and value.data is None):
                each.init_data("cpu")
        api.load(url, _listed(values), strict=False, **self.options)
        return plain(sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Every tensor, whole and without data."""
        return {k: v for k, v in self.load_sharded_metadata(checkpoint_dir).items() if isinstance(v, ShardedTensor)}

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Every tensor and object, without data."""
        return {
            key: ShardedObject.empty_from_unique_key(key)
            if "/shard_" in key
            else ShardedTensor.from_rank_offsets(key, torch.empty(value.shape, dtype=value.dtype, device="meta")).without_data()
            for key, value in api.open(checkpoint_dir).state().items()
        }


def _listed(values: Iterable[Any]) -> dict[str, Any]:  # where they lie says nothing: each says itself what it is
    return {str(number): value for number, value in enumerate(values)}


warn_if_untried("megatron-core", "0.16.1")
base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, _BACKEND, _VERSION, CkptSave())
base.register_default_strategy(base.StrategyAction.LOAD_SHARDED, _BACKEND, _VERSION, CkptLoad())
