"""Conversions that repair what is known to be written wrong: states of optimizers that Megatron-Core 0.15 to 0.19 displaced. No torch.

Invariant: a repaired checkpoint is one whose every master, cast, is its weight; what is not wrong is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckpt.converters.compare.semantic import misfit_masters
from ckpt.converters.select.selection import OutputSet
from ckpt.errors import FormatError, UsageError
from ckpt.formats.megatron.flat import NAMES, Buckets, likely_buckets
from ckpt.formats.megatron.names import EMBEDDING
from ckpt.formats.megatron.repair import RepairedTensor, repaired_catalog, repaired_states
from ckpt.formats.megatron.training import CONTENT, MARK, STATE, MegatronCatalog
from ckpt.plan import tree
from ckpt.settings import __version__

HINT = "say how the job put parameters into buckets: --job ddp_bucket_size=N, --job data_parallel_size=N, or another of its arguments"


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairReport:
    """What a repair did. Without need nothing is changed, and ``reason`` says why not.

    ``bucket_size`` (None: one bucket), ``data_parallel`` and ``divisor`` are the buckets that it found the elements with; ``masters`` were
    compared with their weights.
    """

    needed: bool
    reason: str
    masters: int = 0
    bucket_size: int | None = None
    data_parallel: int | None = None
    divisor: int | None = None
    tensors: tuple[RepairedTensor, ...] = ()
    """Those of the conversion that were mended or filled."""

    @property
    def mended(self) -> int:
        return sum(t.mended for t in self.tensors)

    @property
    def filled(self) -> int:
        return sum(t.filled for t in self.tensors)


def repaired(chosen: OutputSet, job: Mapping[str, int], *, threads: int | None = None) -> tuple[OutputSet, RepairReport]:
    """The same choice of a repaired checkpoint. All masters are read and compared with the weights, before and after.

    Args:
        job: arguments of Megatron that the checkpoint does not have, or has wrong: ``formats.megatron.job.NAMES``.
    """
    unknown = sorted(set(job) - set(NAMES))
    if unknown:
        raise UsageError(f"--job {unknown[0]}: no argument that a repair needs", hint=f"one of {', '.join(NAMES)}")
    catalog = chosen.catalog
    if not isinstance(catalog, MegatronCatalog) or catalog.suspect is None:
        return chosen, RepairReport(needed=False, reason=f"no defect is known in such a checkpoint ({catalog.format})")
    taken = chosen.taken
    if not any(name.startswith(STATE) for name in taken):
        raise UsageError(
            "--repair is for states of optimizers, and none is converted", hint="leave out --repair, or take the optimizer too"
        )
    masters, problems = misfit_masters(catalog, threads=threads, first=True)
    if not masters:
        raise FormatError("no master can be compared with its weight, so nobody knows whether states are displaced", where=catalog.url)
    if not problems:
        return chosen, RepairReport(needed=False, reason="every master is its weight", masters=masters)
    arguments = {**catalog.arguments, **job}
    tried = likely_buckets(arguments)
    for buckets in tried:
        result = _mended(catalog, buckets, arguments, threads)
        if result is not None:
            mended, tensors = result
            mending = RepairReport(
                needed=True,
                reason="states were displaced by the padding of buckets (Megatron-LM pull request 5077)",
                masters=masters,
                bucket_size=buckets.size,
                data_parallel=buckets.ranks,
                divisor=buckets.divisor,
                tensors=tuple(t for t in tensors if t.tensor in taken),
            )
            return replace(chosen, catalog=mended, state=_marked(chosen.state)), mending
    attempts = " or ".join(
        f"{'one bucket' if b.size is None else f'buckets of {b.size:,}'} and data-parallel size {b.ranks}" for b in tried
    )
    what = f"{problems[0].tensor} is not its weight, and would not be with {attempts} either"
    raise UsageError(f"the optimizer's state cannot be repaired: {what}", where=catalog.url, hint=_hint(catalog, arguments))


def _hint(catalog: MegatronCatalog, arguments: Mapping[str, object]) -> str:
    """What to say of the job: the arguments that nobody said, and what the files let one think of its pipeline."""
    unknown = [name for name in NAMES if arguments.get(name) is None]
    advice = f"; nothing says {', '.join(unknown)}" if unknown else ""
    states = [entry for name, entry in catalog.tensors.items() if name.startswith(STATE)]
    writers = {catalog.files[row].rank for entry in states for row in entry.grid.files}
    embedding = catalog.tensors.get(f"{STATE}{EMBEDDING}.master")
    tensor = 1 if embedding is None else len({int(o) for o in embedding.grid.all_boxes()[0][:, 0]})
    stages, rest = divmod(len(writers), tensor)
    if stages > 1 and not rest and arguments.get("pipeline_model_parallel_size") in (None, 1):
        advice += f". {len(writers)} ranks wrote the state, so it may be that --job pipeline_model_parallel_size={stages} is missing"
    return HINT + advice


def _marked(state: tree.Node) -> tree.Node:
    """The state, where it says in which form Megatron-Core wrote the optimizer's: from now on it is ours, and nobody need suspect it."""
    return {**state, MARK: __version__} if isinstance(state, dict) and CONTENT in state else state


def _mended(
    catalog: MegatronCatalog, buckets: Buckets, arguments: Mapping[str, object], threads: int | None
) -> tuple[MegatronCatalog, tuple[RepairedTensor, ...]] | None:
    """The catalog repaired for such buckets; None if masters would not be weights."""
    try:
        states = repaired_states(
            catalog, bucket_size=buckets.size, data_parallel=buckets.ranks, divisor=buckets.divisor, arguments=arguments
        )
    except UsageError:
        return None
    mended, tensors = repaired_catalog(catalog, states)
    _, problems = misfit_masters(mended, threads=threads, first=True)
    return None if problems else (mended, tensors)
