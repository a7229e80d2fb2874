"""Which part of which parameter each rank of a Megatron job has, under which name: layers and experts count from 0 on each. Pure.

How tensor parallelism cuts a parameter is said by ``ckpt.formats.megatron.names`` and ``params``, from which checkpoints are read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple, NoReturn

from ckpt.converters.selection import OutputTensor
from ckpt.converters.target import MegatronParallel
from ckpt.dtypes import DType
from ckpt.errors import FormatError, UsageError
from ckpt.formats.megatron.names import (
    EMBEDDING,
    LAYER,
    ORDERS,
    OUTPUT,
    VOCABULARY,
    cut_of,
    expert_of,
    gated_layers,
    local_names_of,
    local_shape,
    order_key,
    tensor_parallel_axis,
)
from ckpt.formats.megatron.parallel_layout import layers_of_chunks
from ckpt.plan.layout.geometry import Box
from ckpt.plan.views import LogicalTensor, concat, padded, part, stack, transpose

_OUTSIDE = -1
"""The number of no layer, and of no expert."""


class ModelRank(NamedTuple):
    """A rank of each kind of parallelism."""

    tensor: int
    pipeline: int
    expert: int


class RankParam(NamedTuple):
    """A parameter of a rank: ``view`` has its elements in order, ``shape`` is its own, which may be another of as many. ``source`` is the
    whole parameter it is a part of; of several experts, the first one's."""

    name: str
    source: str
    view: LogicalTensor
    dtype: DType
    shape: tuple[int, ...]
    of_expert: bool = False


def check_names(names: Iterable[str], head: str, where: str) -> None:
    """Raise UsageError for a name of which Megatron's GPTModel has no parameter, or none whose place and division are known.

    ``head`` stands before all of them.
    """
    for name in names:
        try:
            tensor_parallel_axis(name)
            order_key(name, ORDERS[0])
        except KeyError:
            message = f"{head + name!r} is no parameter of Megatron's GPTModel whose pipeline stage and sharding are known"
            hint = "give it Megatron's names (--names llama --convention megatron), or leave it out (--exclude)"
            raise UsageError(message, where=where, hint=hint) from None


class Ranks:
    """The ranks that ``parallel`` says, of a model with these parameters by their names in the whole model, which are known."""

    def __init__(self, model: Mapping[str, OutputTensor], parallel: MegatronParallel, arguments: Mapping[str, Any], where: str) -> None:
        self.model = model
        self.parallel = parallel
        self.arguments = arguments
        self.where = where
        self.local_names = local_names_of(arguments)
        self.tied = OUTPUT not in model
        self.gated = gated_layers({n: w.shape for n, w in model.items()})
        self.padded_rows: int = arguments["padded_vocab_size"]
        given = arguments.get("expert_tensor_parallel_size")
        if given not in (None, 1, self.parallel.tensor):
            self._refuse(f"experts on {given} tensor-parallel ranks, and all else on {self.parallel.tensor}", "1, or as many as --tp")
        self.expert_tensor = self.parallel.tensor if given is None else int(given)
        self._by_layer: dict[int, list[str]] = {}
        self._number: dict[str, int] = {}
        for name in sorted(model, key=lambda n: order_key(n, self.local_names.order)):
            match = LAYER.fullmatch(name)
            layer = _OUTSIDE if match is None else int(match[2])
            expert = None if match is None else expert_of(match[3])
            self._by_layer.setdefault(layer, []).append(name)
            self._number[name] = _OUTSIDE if expert is None else expert.number
        self.layers = self._count("layer", set(self._by_layer))
        self.experts = max(
            (self._count(f"layer {layer}: expert", {self._number[name] for name in self._by_layer[layer]}) for layer in range(self.layers)),
            default=0,
        )
        if self.experts % parallel.expert or self.experts < parallel.expert > 1:
            hint = "a --ep that divides them" if self.experts else "leave out --ep"
            self._refuse(f"{self.experts} experts cannot be divided among {parallel.expert} ranks", hint)
        self.counts = self._counts()

    def _refuse(self, what: str, hint: str) -> NoReturn:
        raise UsageError(what, where=self.where, hint=hint)

    # ---- what the model is

    def _count(self, what: str, numbers: set[int]) -> int:
        indices = numbers - {_OUTSIDE}
        missing = sorted(set(range(len(indices))) - indices)
        if missing:
            self._refuse(f"{what} {missing[0]} is missing: the numbers go to {max(indices)}", "convert all of them")
        return len(indices)

    def _counts(self) -> list[int]:
        """Layers of each chunk, in the pipeline's order."""
        stages, chunks = self.parallel.pipeline, self.parallel.virtual
        try:
            return layers_of_chunks(self.arguments, self.layers, stages, chunks)
        except FormatError:
            self._refuse(
                f"{self.layers} layers cannot be divided among {stages} pipeline stages with {chunks} chunks each",
                "say how: --arg decoder_first_pipeline_num_layers=… or --arg pipeline_model_parallel_layout=…",
            )

    # ---- what a rank has

    @property
    def _own(self) -> int:
        """Experts of a rank, in each layer that has any."""
        return self.experts // self.parallel.expert

    def all(self) -> Iterator[ModelRank]:
        """All ranks of which there are files."""
        p = self.parallel
        for stage in range(p.pipeline):
            for owner in range(p.expert):
                for rank in range(p.tensor):
                    yield ModelRank(rank, stage, owner)

    def chunks(self, at: ModelRank) -> list[list[RankParam]]:
        """The parameters of a rank, for each of its chunks, in the model's order. Those that have no tensor are left out."""
        return [list(self._chunk(at, number)) for number in range(self.parallel.virtual)]

    def over(self, tensors: Mapping[str, OutputTensor]) -> Ranks:
        """The same ranks, of other tensors of the same parameters, such as an optimizer's."""
        other = copy(self)
        other.model = tensors
        return other

    @property
    def experts_apart(self) -> bool:
        """Whether the gradients of experts are reduced over other ranks than all else."""
        return self.experts > 0 and self.parallel.expert > 1

    def owns_dense(self, at: ModelRank) -> bool:
        """Whether it is the first of the ranks that have the same parameters, those of experts aside: the neighbours of a rank are those of
        tensor parallelism, then those of expert parallelism (``order`` of Megatron's ``initialize_model_parallel``)."""
        return at.expert == at.tensor // self.expert_tensor % self.parallel.expert

    def owns_experts(self, at: ModelRank) -> bool:
        """Whether it is the first of the ranks that have the same experts."""
        first = at.expert * self.expert_tensor
        return any((first + i) % self.parallel.tensor == at.tensor for i in range(self.expert_tensor))

    def is_shared(self, part: RankParam) -> bool:
        """Whether the first and the last stage have it both."""
        return self.tied and self.parallel.pipeline > 1 and part.source == EMBEDDING

    def _chunk(self, at: ModelRank, number: int) -> Iterator[RankParam]:
        place, last = number * self.parallel.pipeline + at.pipeline, len(self.counts) - 1
        first = sum(self.counts[:place])
        outside = self._by_layer.get(_OUTSIDE, [])
        if place == 0:
            yield from (self._parameter(n, n, at, first) for n in outside if n.startswith("embedding."))
        for layer in range(first, first + self.counts[place]):
            joined: dict[str, list[RankParam]] = {}
            own = self._own
            for name in self._by_layer[layer]:
                expert = self._number[name]
                if name not in self.model or (expert != _OUTSIDE and expert // own != at.expert):
                    continue
                parameter = self._parameter(name, name, at, first)
                if expert == _OUTSIDE or self.local_names.experts != "transposed":
                    yield parameter
                    continue
                which = f"{parameter.name[: parameter.name.index('local_experts.')]}weight{1 if '.linear_fc1.' in name else 2}"
                joined.setdefault(which, []).append(parameter)
                if len(joined[which]) == own:
                    yield self._transposed(which, joined[which])
        if place == last:
            yield from (self._parameter(n, n, at, first) for n in outside if not n.startswith("embedding."))
            if self.tied and place:
                yield self._parameter(OUTPUT, EMBEDDING, at, first)

    def _parameter(self, name: str, source: str, at: ModelRank, first: int) -> RankParam:
        """``source`` is the parameter whose elements it has."""
        expert = self._number.get(name, _OUTSIDE) != _OUTSIDE
        rank, ranks = (at.tensor % self.expert_tensor, self.expert_tensor) if expert else (at.tensor, self.parallel.tensor)
        wanted = self.model[source]
        view = self._with_rows(wanted.view) if name in VOCABULARY else wanted.view
        cut_latent = not self.local_names.fused
        local = local_shape(name, view.shape, ranks, cut_latent=cut_latent)
        gated = name in self.gated
        if local is None or (gated and local[0] % 2):
            self._refuse(f"{name} {list(view.shape)} cannot be divided among {ranks} tensor-parallel ranks", "a --tp that divides it")
        cut = cut_of(name, local, rank, ranks, gated=gated, cut_latent=cut_latent)
        blocks = [part(view, Box(b.offset, b.shape)) for b in cut.blocks]
        called = self.local_names.name(name, first_layer=first, first_expert=at.expert * self._own)
        return RankParam(called, source, blocks[0] if len(blocks) == 1 else concat(blocks, 0), wanted.dtype, local, expert)

    def _with_rows(self, view: LogicalTensor) -> LogicalTensor:
        """The view with as many rows as the job pads the vocabulary to: what padding is stored stays, the rest is zeros."""
        rows = self.padded_rows
        if rows >= view.shape[0]:
            return padded(view, 0, rows)
        return part(view, Box((0,) * len(view.shape), (rows, *view.shape[1:])))

    def _transposed(self, name: str, experts: list[RankParam]) -> RankParam:
        """One parameter of a layer of all local experts, as GroupedMLP has it."""
        if any(len(e.shape) != 2 for e in experts):
            self._refuse("GroupedMLP has no biases", "--arg moe_grouped_gemm=false")
        view = stack([transpose(e.view, (1, 0)) for e in experts], 0)
        count, rows, columns = view.shape
        shape = (rows, count * columns) if name.endswith("1") else (count * rows, columns)
        return RankParam(name, experts[0].source, view, experts[0].dtype, shape, of_expert=True)
