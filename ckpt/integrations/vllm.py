"""vLLM takes weights from any checkpoint, and from a ``ckpt.live.Source``: each worker the parts that it keeps, straight into its memory.

vLLM finds this module by its plug-in group ``vllm.general_plugins``. ``--load-format ckpt`` loads a checkpoint at the start;
``--weight-transfer-config '{"backend": "ckpt"}'`` takes versions of a running trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ckpt.errors import UsageError
from ckpt.live.sink import take_step
from ckpt.needs import warn_if_untried
from ckpt.net.group import Job

from .engines import EngineCheckpoint, EngineSink


@dataclass
class CkptInitInfo(WeightTransferInitInfo):
    """What ``init_weight_transfer_engine`` is given: ``address`` of the source; the others as for :class:`EngineSink`."""

    address: str
    checkpoint: str | None = None
    only: Sequence[str] | None = None
    rename: Mapping[str, str] | None = None
    names: str | None = None
    convention: str | None = None
    numbers: Mapping[str, int] | None = None
    stage: Sequence[str] = ()
    optional: Sequence[str] = ()
    timeout: float | None = None


@dataclass
class CkptUpdateInfo(WeightTransferUpdateInfo):
    """What ``update_weights`` is given: the step to wait for; None: the newest version. ``progress``: show a bar on the first rank."""

    step: int | None = None
    timeout: float | None = None
    progress: bool = False


class CkptWeightTransferEngine(WeightTransferEngine[CkptInitInfo, CkptUpdateInfo]):
    """The backend ``"ckpt"``. The secret comes from ``CKPT_LIVE_SECRET``: requests do not carry it."""

    init_info_cls = CkptInitInfo
    update_info_cls = CkptUpdateInfo
    supports_draft_weight_update = False
    sink: EngineSink | None = None

    def init_transfer_engine(self, init_info: CkptInitInfo) -> None:
        """Connect. The model's ``load_weights`` is recorded now if there is a checkpoint, else with the first version."""
        self.shutdown()
        options = {field.name: getattr(init_info, field.name) for field in fields(init_info) if field.name not in ("address", "timeout")}
        self.sink = EngineSink(init_info.address, self.model.load_weights, self.model, **options, job=Job(timeout=init_info.timeout))

    def start_weight_update(self) -> None:
        """Nothing to prepare: parameters are filled in place."""

    def receive_weights(self, update_info: CkptUpdateInfo) -> None:
        if self.sink is None:
            raise UsageError("update_weights before init_weight_transfer_engine", hint="give it the address of a ckpt.live.Source first")
        take_step(self.sink, update_info.step, update_info.timeout, progress=update_info.progress)

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        if self.sink is not None:
            self.sink.close()
            self.sink = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Not the way of this backend."""
        raise UsageError("the trainer of this backend sends nothing", hint="publish with ckpt.live.Source; engines take what they need")


class CkptModelLoader(BaseModelLoader):
    """``--load-format ckpt``. ``--model-loader-extra-config`` has the ``url`` of the checkpoint, by default the model's directory, and what
    :class:`EngineCheckpoint` takes. Ranks of one tensor-parallel group load together."""

    def _checkpoint(self, model_config: Any) -> EngineCheckpoint:
        options = dict(self.load_config.model_loader_extra_config or {})
        return EngineCheckpoint(options.pop("url", model_config.model), options)

    def download_model(self, model_config: Any) -> None:
        """Nothing is copied: look whether the checkpoint is there."""
        self._checkpoint(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        self._checkpoint(model_config).fill(model, parallel_state.get_tp_group().cpu_group)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        """Whole tensors, for ``reload_weights``."""
        return iter(self._checkpoint(model_config))


@cache
def register() -> None:
    """The plug-in of vLLM, which calls it in each of its processes, in some of them several times."""
    warn_if_untried("vllm", "0.33")
    WeightTransferEngineFactory.register_engine("ckpt", __name__, "CkptWeightTransferEngine")
    register_model_loader("ckpt")(CkptModelLoader)
