"""What the adapters for engines import of vLLM 0.28, verl 0.9.1 and torchft 0.2.0, with the signatures of these versions.

The libraries themselves need a GPU, or much that tests do not.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

REAL = importlib.util.find_spec("torchft") is not None
"""Whether torchft is installed: then it is used."""

I = TypeVar("I")  # noqa: E741
U = TypeVar("U")
T = TypeVar("T")


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


class WeightTransferEngine(ABC, Generic[I, U]):
    init_info_cls: type[I]
    update_info_cls: type[U]
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.model_config = vllm_config.model_config

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: I) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: U) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


class WeightTransferEngineFactory:
    registered: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_engine(cls, name: str, module: str, class_name: str) -> None:
        cls.registered[name] = (module, class_name)


class CheckpointEngine(ABC):
    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class CheckpointEngineRegistry:
    registered: ClassVar[dict[str, type]] = {}

    @staticmethod
    def register(backend: str) -> Callable[[type], type]:
        def wrapper(cls: type) -> type:
            CheckpointEngineRegistry.registered[backend] = cls
            return cls

        return wrapper


class CheckpointTransport(ABC, Generic[T]):
    @abstractmethod
    def metadata(self) -> str: ...

    @abstractmethod
    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: Any) -> None: ...

    def disallow_checkpoint(self) -> None: ...

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: Any) -> T: ...

    def shutdown(self, wait: bool = True) -> None: ...


def modules() -> dict[str, ModuleType]:
    """Modules for ``sys.modules``, packages included; none in the place of an installed torchft."""
    contents = {
        "vllm.distributed.weight_transfer.base": (WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo),
        "vllm.distributed.weight_transfer.factory": (WeightTransferEngineFactory,),
        "verl.checkpoint_engine.base": (CheckpointEngine, CheckpointEngineRegistry),
        "torchft.checkpointing.transport": (CheckpointTransport,),
    }
    if REAL:
        del contents["torchft.checkpointing.transport"]
    made: dict[str, ModuleType] = {}
    for name, classes in contents.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:n]), ModuleType(".".join(parts[:n])))
        vars(made[name]).update({cls.__name__: cls for cls in classes})
    return made
