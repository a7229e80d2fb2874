"""What the adapters for engines import of vLLM, SGLang, verl and torchft, with the signatures that ``engine_signatures.toml`` has.

The libraries themselves need a GPU, or much that tests do not.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SIGNATURES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "engine_signatures.toml").read_text())
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
    registered: ClassVar[dict[str, tuple[str, str | None]]] = {}

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: str, class_name: str | None = None) -> None:
        if name in cls.registered:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls.registered[name] = (module_path_or_cls, class_name)


class BaseModelLoader(ABC):
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None: ...

    @abstractmethod
    def load_weights(self, model: Any, model_config: Any) -> None: ...


LOADERS: dict[str, type] = {}


def register_model_loader(load_format: str) -> Callable[[type], type]:
    def wrapper(cls: type) -> type:
        assert issubclass(cls, BaseModelLoader) and load_format not in LOADERS
        LOADERS[load_format] = cls
        return cls

    return wrapper


def get_tp_group() -> Any:
    return SimpleNamespace(cpu_group=None)


@dataclass
class LoadConfig:
    """SGLang's."""

    load_format: Any = "auto"
    model_loader_extra_config: Any = field(default_factory=dict)
    draft_model_idx: int | None = None


class DefaultModelLoader:
    """SGLang's: what it does around the weights is left out."""

    def __init__(self, load_config: LoadConfig) -> None:
        unexpected = set(load_config.model_loader_extra_config) - {"enable_multithread_load", "num_threads"}
        if unexpected:
            raise ValueError(f"Unexpected extra config keys: {unexpected}")
        self.load_config = load_config

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        model = model_config.built()
        self.load_weights_and_postprocess(model, self._get_all_weights(model_config, model), device_config)
        return model

    def download_model(self, model_config: Any) -> None: ...

    def _get_all_weights(self, model_config: Any, model: Any) -> Any:
        return iter(())

    def _get_weights_iterator(
        self, source: Any, *, resolved_source: Any = None, startup_prefetch_started: bool = False, startup_prefetch_active: bool = False
    ) -> Any:
        raise RuntimeError("Cannot find any model weights")

    @classmethod
    def _filter_mtp_weights(cls, weights_iterator: Any, prefix: str, draft_model_idx: int) -> Any:
        for name, tensor in weights_iterator:
            match = re.match(r"model\.mtp\.layers\.(\d+)\.", name)
            if match is None or int(match.group(1)) == draft_model_idx:
                yield prefix + (name if match is None else name.replace(match.group(), "model.mtp.layers.0.")), tensor

    @staticmethod
    def load_weights_and_postprocess(model: Any, weights: Any, target_device: Any) -> None: ...

    @staticmethod
    def load_weights_only(model: Any, weights: Any, target_device: Any) -> None:
        model.load_weights(weights)

    @staticmethod
    def postprocess_weights(model: Any, target_device: Any) -> None:
        model.processed = True


def post_load_weights(model: Any) -> None:
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def get_model_loader(load_config: Any, model_config: Any = None) -> Any:
    return DefaultModelLoader(load_config)


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    hooks: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AROUND, *, source: Any = None) -> None:
        assert target not in cls.hooks
        cls.hooks[target] = hook


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
        "vllm.distributed.parallel_state": (get_tp_group,),
        "vllm.model_executor.model_loader": (register_model_loader,),
        "vllm.model_executor.model_loader.base_loader": (BaseModelLoader,),
        "sglang.srt.distributed.parallel_state": (get_tp_group,),
        "sglang.srt.model_loader.loader": (DefaultModelLoader, get_model_loader, post_load_weights),
        "sglang.srt.configs.load_config": (LoadConfig,),
        "sglang.srt.plugins.hook_registry": (HookRegistry, HookType),
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
        vars(made[name]).update({each.__name__: each for each in classes})
    for name, module in made.items():  # ``from package import module``
        package, _, last = name.rpartition(".")
        if package:
            setattr(made[package], last, module)
    for registered in (WeightTransferEngineFactory.registered, LOADERS, HookRegistry.hooks):
        registered.clear()
    return made
