"""How a Megatron job divides a model among its ranks: what a conversion into one of its formats is asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.errors import UsageError

Argument = None | bool | int | float | str

_SAID_BY = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual",
    "num_virtual_stages_per_pipeline_rank": "virtual",
    "num_layers_per_virtual_pipeline_stage": "virtual",
    "expert_model_parallel_size": "expert",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronParallel:
    """Ranks of tensor, pipeline and expert parallelism, and how many virtual stages each pipeline rank has.

    ``arguments`` of the job, by their names in Megatron-LM's ``args``, go before what the source tells: ``transformer_impl``,
    ``make_vocab_size_divisible_by``, ``decoder_first_pipeline_num_layers`` and the like.

    Raises:
        UsageError: sizes that cannot be, or arguments that say the same.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    arguments: Mapping[str, Argument] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.virtual, self.expert) < 1:
            raise UsageError("a parallelism of less than 1 rank", hint="1 is none")
        if self.virtual > 1 and self.pipeline == 1:
            raise UsageError("virtual stages need a pipeline of several ranks", hint="--pp 2 --vpp 2")
        twice = sorted(self.arguments.keys() & _SAID_BY.keys())
        if twice:
            hint = f"MegatronParallel({_SAID_BY[twice[0]]}=…): --tp, --pp, --vpp, --ep"
            raise UsageError(f"the argument {twice[0]} is an option of its own", hint=hint)
