"""DLIO's checkpoint workload with torch.save, DCP, torch_checkpointing and ckpt: ``make dlio DLIO=/path/to/dlio_benchmark``.

DLIO (github.com/argonne-lcf/dlio_benchmark, tried at e1919d7) makes the state of a transformer under ZeRO-3 and asks a plug-in to write and
to read it. Its option ``fsync`` does not reach its plug-in; here all files are synced. They leave the page cache before they are read. Of
eleven turns the first counts requests (files opened, listed, renamed, made, removed); the others count for the rest: seconds of the slowest
rank (p50 and p99 of ten), and of all ranks CPU seconds and bytes that one save writes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .measure import cpu_seconds, transferred
from .places import Place, machine
from .replay import COUNTER

MODEL = {"num_layers": 8, "transformer.hidden_size": 512, "transformer.ffn_hidden_size": 2048, "transformer.vocab_size": 16000}
RANKS, TIMES = 2, 10
CONTESTANTS = ("TorchSave", "Dcp", "Ckpt", "TorchCheckpointing")

if "dlio_benchmark" in sys.modules:  # the plug-ins, which DLIO imports
    import torch
    import torch.distributed as dist
    from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    from .contestants import CONTESTANTS as KNOWN
    from .contestants import Job
    from .states import State

    class TorchSave(PyTorchCheckpointing):
        """DLIO's own, with the fsync that its configuration asks for."""

        @classmethod
        def get_instance(cls) -> Any:
            cls.instance = getattr(cls, "instance", None) or cls()
            return cls.instance

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[dict[str, Any]] = []
            sys.addaudithook(COUNTER.audit)

        def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:  # noqa: FBT001  DLIO's
            super().save_state(suffix, state, fsync=True)

        def _measure(self, kind: str, act: Callable[[], None]) -> None:
            first = all(row["kind"] != kind for row in self.rows)
            self.comm.barrier()
            if first:
                COUNTER.begin(self.args.checkpoint_folder)
            cpu, written, began = cpu_seconds(), transferred()[1], time.perf_counter()
            act()
            row = {"kind": kind, "seconds": time.perf_counter() - began, "cpu": cpu_seconds() - cpu, "bytes": transferred()[1] - written}
            COUNTER.directory = None
            self.rows.append(row | {"requests": len(COUNTER.touched) if first else 0})
            Path(os.environ["DLIO_ROWS"], f"{self.comm.rank}.json").write_text(json.dumps(self.rows))

        def save_checkpoint(self, epoch: int, step_number: int) -> None:
            self._measure("write", lambda: self.write(epoch, step_number))

        def load_checkpoint(self, epoch: int, step_number: int) -> None:
            Place("").cool(self.args.checkpoint_folder)
            self._measure("read", lambda: self.read(epoch, step_number))

        def write(self, epoch: int, step: int) -> None:
            super().save_checkpoint(epoch, step)

        def read(self, epoch: int, step: int) -> None:
            super().load_checkpoint(epoch, step)

    class Dcp(TorchSave):
        """The same tensors as parts of larger ones."""

        contestant = "dcp"

        def __init__(self) -> None:
            super().__init__()
            rank, count = self.comm.rank, self.comm.size
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29655")
            dist.init_process_group("gloo")
            mesh = init_device_mesh("cpu", (count,))
            local: dict[str, Any] = {}

            def part(value: Any, path: str) -> Any:
                if isinstance(value, dict):
                    return {key: part(item, f"{path}.{key}") for key, item in value.items()}
                local[path] = value
                shape = torch.Size((value.numel() * count,))
                return DTensor.from_local(value, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))

            tree = {"model": part(self.layer_state or {}, "model"), "optimizer": part(self.optimization_state or {}, "optimizer")}
            state = State(tree=tree, local=local, replicated=False, total=0, start=0, digests={})
            self.job = Job(state=state, group=dist.group.WORLD, rank=rank, ranks=count)

        def url(self, epoch: int, step: int) -> str:
            return f"{self.args.checkpoint_folder}/epoch-{epoch}-step-{step}"

        def write(self, epoch: int, step: int) -> None:
            KNOWN[self.contestant].save(self.job, self.url(epoch, step))

        def read(self, epoch: int, step: int) -> None:
            KNOWN[self.contestant].load(self.job, self.url(epoch, step))

    class TorchCheckpointing(Dcp):
        contestant = "torch_checkpointing"

    class Ckpt(Dcp):
        contestant = "ckpt"


def run(contestant: str, folder: Path) -> dict[str, Any]:
    """Percentiles, medians and counts of ten writes and ten reads."""
    rows = folder / "rows"
    rows.mkdir()
    options: dict[str, Any] = {
        "checkpoint.checkpoint_mechanism_classname": f"benchmarks.dlio.{contestant}",
        "checkpoint.checkpoint_folder": folder / "data",
        "checkpoint.time_between_checkpoints": 0,
        "checkpoint.num_checkpoints_write": 1 + TIMES,
        "checkpoint.num_checkpoints_read": 1 + TIMES,
    }
    changed = [f"++workload.{'model.' if name in MODEL else ''}{name}={value}" for name, value in (MODEL | options).items()]
    command = [f"{sys.prefix}/bin/mpiexec", "-n", str(RANKS), sys.executable, "-m", "dlio_benchmark.main", "workload=llama_8b_zero3"]
    environment = os.environ | {"DLIO_ROWS": str(rows), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *changed, f"hydra.run.dir={folder}/log"], env=environment, capture_output=True, text=True)
    if done.returncode or len(list(rows.iterdir())) != RANKS:
        raise SystemExit(f"{contestant}: DLIO ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    ranks = [json.loads(path.read_text()) for path in sorted(rows.iterdir())]
    figures: dict[str, Any] = {}
    for kind in ("write", "read"):
        counted, *turns = zip(*[[row for row in rank if row["kind"] == kind] for rank in ranks], strict=True)
        slowest = np.percentile([max(row["seconds"] for row in turn) for turn in turns], (50, 99))
        figures[kind] = [
            " / ".join(f"{seconds:.2f}" for seconds in slowest),
            f"{statistics.median(sum(row['cpu'] for row in turn) for turn in turns):.2f}",
            str(sum(row["requests"] for row in counted)),
        ]
        figures.setdefault("bytes", statistics.median(sum(row["bytes"] for row in turn) for turn in turns))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the storage to measure")
    folder = parser.parse_args().folder
    print(f"{machine()}, {Place(str(folder)).filesystem}")
    print("| plug-in | write s, p50 / p99 | CPU s | requests | read s, p50 / p99 | CPU s | requests | MB written |\n|" + "---|" * 8)
    for contestant in CONTESTANTS if find_spec("torch_checkpointing") else CONTESTANTS[:-1]:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            got = run(contestant, Path(place))
        print(f"| {' | '.join([contestant, *got['write'], *got['read'], format(got['bytes'] / 1e6, '.0f')])} |", flush=True)


if __name__ == "__main__":
    main()
