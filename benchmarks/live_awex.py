"""The planner of awex 0.9.0 on the metadata of ``live_plan``: ``python -m benchmarks.live_awex --peers DIR``.

``pip install --no-deps --target DIR awex==0.9.0`` is enough: of the package only the planner and its metadata are imported. Making the
metadata of all ranks, which awex gathers before it plans, is not counted.
"""

from __future__ import annotations

import gc
import math
import pickle
import sys
import time
import types
from pathlib import Path
from typing import Any

import click
import torch

from .live_plan import Job

RANK = 5
JOB = Job()


@click.command()
@click.option("--peers", required=True, type=click.Path(exists=True, file_okay=False, resolve_path=True), help="Where awex is installed.")
def main(*, peers: str) -> None:
    """Plan one receiver's share, as awex does for each of its ranks."""
    weights, planner, sharding = _planner(Path(peers, "awex"))
    training, inference = [], []
    for name, shape, cells in _source():
        training.append(_meta(weights, sharding, name, shape, cells, JOB.source))
        inference.append(_meta(weights, sharding, name, shape, _target(name, shape), JOB.target))
    packed = pickle.dumps((inference, training))
    gc.collect()
    gc.freeze()
    began = time.process_time()
    inference, training = pickle.loads(packed)
    read = time.process_time() - began
    builder = planner.TransferPlanBuilder(infer_world_size=JOB.target, train_world_size=JOB.source)
    began = time.process_time()
    plan = builder.build_local_transfer_plan(inference, training, RANK)
    seconds = time.process_time() - began
    count = sum(map(len, plan.operations.values()))
    nbytes = sum(2 * math.prod(op.overlap_shape) for ops in plan.operations.values() for op in ops)
    click.echo(f"awex: {len(training)} tensors, metadata of {len(packed) / 1e6:.0f} MB read in {read:.2f} CPU s")
    click.echo(f"planned in {seconds:.2f} CPU s: {count} operations, {nbytes / 1e9:.2f} GB, from {len(plan.operations)} ranks")


Cells = dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]
"""Offset and shape of a part → the ranks that have it, counted from 0."""


def _source() -> Any:
    known: dict[Any, Cells] = {}
    for stage, tensors in enumerate(JOB.source_tensors()):
        for tensor in tensors:
            key = id(tensor.layout), tensor.shape
            if key not in known:
                known[key] = _cells(tensor.layout, tensor.shape, range(16 * stage, 16 * stage + 16), 0)
            yield tensor.name, tensor.shape, known[key]


_known: dict[Any, Cells] = {}


def _target(name: str, shape: tuple[int, ...]) -> Cells:
    expert = int(name.split(".")[3]) * 64 // 384 if ".experts." in name else None
    ranks = JOB.receivers if expert is None else range(JOB.source + 2 * expert, JOB.source + 2 * expert + 2)
    key = name.rpartition(".")[2], expert
    if key not in _known:
        layout = JOB.target_layout(name, ranks[0])
        assert layout is not None
        _known[key] = _cells(layout, shape, ranks, JOB.source)
    return _known[key]


def _cells(layout: Any, shape: tuple[int, ...], ranks: range, first: int) -> Cells:
    cells: Cells = {}
    for rank in ranks:
        if layout.coordinate(rank) is not None:
            for piece in layout.pieces(shape, rank):
                cells.setdefault((piece.box.offset, piece.box.shape), []).append(rank - first)
    return cells


def _meta(weights: Any, sharding: Any, name: str, shape: tuple[int, ...], cells: Cells, world: int) -> Any:
    kind = sharding.TP_SHARDING if len(cells) > 1 else sharding.NO_SHARDING
    replicas = []
    for ranks in zip(*cells.values(), strict=True):
        shards = [
            weights.ParameterShardMeta(
                tp_rank=n,
                attn_tp_rank=n,
                pp_rank=0,
                ep_rank=0,
                ep_tp_rank=0,
                global_rank=rank,
                world_size=world,
                engine_rank=0,
                name=name,
                shape=size,
                numel=math.prod(size),
                dtype=torch.bfloat16,
                global_offset=offset,
                sharding_type=kind,
                num_shards=len(cells),
            )
            for n, (rank, (offset, size)) in enumerate(zip(ranks, cells, strict=True))
        ]
        replicas.append(weights.ParameterReplicaMeta(shards=shards))
    shards = [shard for replica in replicas for shard in replica.shards]
    return weights.ParameterMeta(
        name=name, global_numel=math.prod(shape), global_shape=shape, dtype=torch.bfloat16, shards=shards, replicas=replicas
    )


def _planner(root: Path) -> tuple[Any, Any, Any]:
    """The modules that the planner needs; the packages around them would import Megatron, vLLM and SGLang."""
    sys.path.insert(0, str(root.parent))
    for name in ("", ".meta", ".sharding", ".transfer", ".util", ".converter"):
        package = sys.modules[f"awex{name}"] = types.ModuleType(f"awex{name}")
        package.__path__ = [str(root / name.replace(".", ""))]
    import awex.meta.weight_meta as weights

    resolver = sys.modules["awex.meta.meta_resolver"] = types.ModuleType("awex.meta.meta_resolver")
    for name in ("ParameterMeta", "ParameterReplicaMeta", "ParameterShardMeta"):
        setattr(resolver, name, getattr(weights, name))
    import awex.transfer.transfer_plan as planner
    from awex.sharding.param_sharding import ShardingType

    return weights, planner, ShardingType


if __name__ == "__main__":
    main()
