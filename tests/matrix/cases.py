"""Every checkpoint below tests/fixtures with what it is and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.formats.reading import FIXTURES
from tests.matrix import oracles
from tests.matrix.oracles import Tensors


@dataclass(frozen=True, kw_only=True)
class Case:
    """``path`` below tests/fixtures, or below the unpacked Megatron checkpoints if it begins with ``megatron/``. ``replicas``: at least as
    many tensors are compared between ranks. ``step_values``: steps of the optimizer are values of the state and no tensors."""

    path: str
    format: str
    holds: Callable[[Path, Path], Tensors]
    """From the checkpoint, and a directory for files, to every tensor."""
    masters: int = 0
    moments: int = 0
    replicas: int = 0
    step_values: bool = False

    def url(self, megatron: Path) -> Path:
        return megatron / self.path.removeprefix("megatron/") if self.path.startswith("megatron/") else FIXTURES / self.path


def plain(oracle: Callable[[Path], Tensors]) -> Callable[[Path, Path], Tensors]:
    return lambda path, _: oracle(path)


def memory(name: str) -> Callable[[Path, Path], Tensors]:
    return lambda _, folder: oracles.of_ranks_memory(name, folder)


SIZES: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "tp2pp2vpp2": {"tp": 2, "pp": 2, "vpp": 2, "dp": 1},
    "tp2ep2": {"tp": 2, "ep": 2, "dp": 2},
    "model_space_tp2": {"tp": 2, "dp": 2},
    "moe_singleton": {"dp": 2},
    "pp2tied": {"pp": 2, "dp": 2, "bucket": 100_000, "tied": True},
}
PARAMETERS = {
    "dp2": 27,
    "tp2pp2vpp2": 27,
    "tp2ep2": 55,
    "model_space_tp2": 27,
    "moe_singleton": 55,
    "pp2tied": 26,
    "tp2pp2vpp2ep2": 55,
    "pp2vpp2ep2": 48,
    "core15_dp2": 15,
    "latent_tp2": 25,
    "plain_bf16": 15,
    "plain_fp16": 15,
    "plain_fp32": 15,
}


SCALE = {"grad_scaler.scale": torch.tensor([8.0])}
"""Of a job in half precision: what it began with."""


def megatron(layout: str, form: str, replicas: int = 0) -> Case:
    """Every form of one job holds what its ranks said that they hold, or what is in the files of ranks, taken apart by hand."""
    count = PARAMETERS[layout]
    kind = "Megatron torch" if form == "legacy" else "Megatron torch_dist"
    masters = 0 if layout == "plain_fp32" else count
    numbers = {"masters": masters, "moments": 2 * count, "step_values": True, "replicas": replicas}

    def holds(path: Path, _: Path) -> Tensors:
        if (told := path.parent / "memory").exists():
            half = layout == "plain_fp16"
            return oracles.of_megatron_memory(told, torch.float16 if half else torch.bfloat16) | (SCALE if half else {})
        return oracles.of_megatron(path.parent / "legacy", **SIZES[layout])

    return Case(path=f"megatron/{layout}/{form}", format=kind, holds=holds, **numbers)  # type: ignore[arg-type]


ZERO = {"masters": 7, "moments": 14}
CASES = [
    Case(path="hf/llama", format="safetensors", holds=plain(oracles.of_safetensors)),
    Case(path="hf/mixtral", format="safetensors", holds=plain(oracles.of_safetensors)),
    Case(path="fsdp/fsdp1_full_orig0", format="torch.save archive", holds=plain(oracles.of_archive)),
    Case(path="fsdp/fsdp1_local_orig0", format="torch.save files of ranks", holds=plain(oracles.of_flat_parameter)),
    *(
        Case(path=f"fsdp/{n}", format="torch.distributed.checkpoint", holds=plain(oracles.of_dcp), moments=14)
        for n in ("fsdp1_sharded_orig0", "fsdp1_sharded_orig1", "fsdp2_ws2")
    ),
    Case(path="deepspeed/zero1", format="DeepSpeed ZeRO-1", holds=plain(oracles.of_zero), **ZERO),
    Case(path="deepspeed/zero3", format="DeepSpeed ZeRO-3", holds=plain(oracles.of_zero), **ZERO),
    Case(path="deepspeed/round_robin", format="DeepSpeed ZeRO-2", holds=plain(oracles.of_zero), **ZERO),
    Case(path="deepspeed/pipeline", format="DeepSpeed ZeRO-1", holds=memory("pipeline"), masters=17, moments=34),
    Case(path="deepspeed/experts", format="DeepSpeed ZeRO-2", holds=memory("experts"), masters=24, moments=48),
    *(
        Case(
            path=f"deepspeed/{n}/global_step3_universal",
            format=f"DeepSpeed ZeRO-{n[-1]} universal",
            holds=plain(oracles.of_universal),
            **ZERO,
        )
        for n in ("zero1", "zero3")
    ),
    *(
        Case(path=f"deepspeed/{n}_fp32.bin", format="torch.save archive", holds=plain(oracles.of_archive))
        for n in ("zero1", "zero3", "round_robin")
    ),
    megatron("dp2", "legacy"),
    megatron("dp2", "dp_reshardable"),
    megatron("dp2", "dp_zero_gather_scatter"),
    megatron("tp2pp2vpp2", "legacy", replicas=20),
    megatron("tp2pp2vpp2", "dp_reshardable", replicas=20),
    megatron("tp2ep2", "legacy", replicas=20),
    megatron("tp2ep2", "dp_reshardable", replicas=20),
    megatron("tp2ep2", "dp_zero_gather_scatter", replicas=20),
    megatron("model_space_tp2", "legacy", replicas=20),
    megatron("model_space_tp2", "fully_sharded_model_space"),
    megatron("moe_singleton", "legacy"),
    megatron("pp2tied", "legacy", replicas=1),
    megatron("pp2tied", "dp_reshardable", replicas=1),
    megatron("pp2tied", "fully_reshardable"),
    megatron("tp2pp2vpp2ep2", "legacy", replicas=60),
    megatron("tp2pp2vpp2ep2", "dp_reshardable", replicas=30),
    megatron("pp2vpp2ep2", "dp_reshardable"),
    megatron("core15_dp2", "legacy"),
    megatron("core15_dp2", "dp_zero_gather_scatter"),
    megatron("core15_dp2", "fully_sharded_model_space"),
    megatron("latent_tp2", "legacy", replicas=9),
    megatron("latent_tp2", "dp_reshardable"),
    megatron("latent_tp2", "dp_zero_gather_scatter"),
    megatron("plain_bf16", "legacy", replicas=5),
    megatron("plain_bf16", "plain"),
    megatron("plain_fp16", "legacy", replicas=5),
    megatron("plain_fp16", "plain"),
    megatron("plain_fp32", "legacy", replicas=5),
    megatron("plain_fp32", "plain"),
    Case(
        path="megatron/common_state/dp_reshardable",
        format="Megatron torch_dist",
        holds=plain(oracles.of_buckets),
        masters=15,
        moments=30,
        step_values=True,
    ),
]
"""All that the fixtures hold but for those that a defect of Megatron-Core made wrong, which tests/formats/test_megatron.py repairs."""

OTHER_FORMS = ("dp_reshardable", "dp_zero_gather_scatter", "fully_reshardable", "plain")
OTHER_VERSIONS = ("core15_dp2", "plain_fp32")
ONE_OF_EACH = [
    case
    for case in CASES
    if "common_state" in case.path or not (case.path.endswith(OTHER_FORMS) or any(name in case.path for name in OTHER_VERSIONS))
]
"""One form of each job: what is done with a checkpoint once its tensors are found does not depend on the form."""
