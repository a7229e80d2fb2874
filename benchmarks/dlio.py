"""DLIO's checkpoint workload with torch.save, DCP and ckpt: ``make dlio DLIO=/path/to/dlio_benchmark``.

DLIO (github.com/argonne-lcf/dlio_benchmark, tried at e1919d7) makes the state of a transformer under ZeRO-3 and asks a plug-in to write and
to read it ten times each. Its option ``fsync`` does not reach its plug-in; ``TorchSave`` here calls fsync, as DCP and ckpt do. Files leave
the page cache before they are read. The table has, of the slowest rank, seconds (median and worst of ten), and of all ranks CPU seconds and
bytes written by one save.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = {"num_layers": 8, "transformer.hidden_size": 512, "transformer.ffn_hidden_size": 2048, "transformer.vocab_size": 16000}
RANKS, TIMES = 2, 10
CONTESTANTS = ("TorchSave", "Dcp", "Ckpt")


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _written() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])


def _drop(folder: str) -> None:
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if "dlio_benchmark" in sys.modules:  # the plug-ins, which DLIO imports
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    import ckpt

    class TorchSave(PyTorchCheckpointing):
        """DLIO's own, with the fsync that its configuration asks for."""

        @classmethod
        def get_instance(cls) -> Any:
            cls.instance = getattr(cls, "instance", None) or cls()
            return cls.instance

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[dict[str, Any]] = []

        def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:  # noqa: FBT001  DLIO's
            super().save_state(suffix, state, fsync=True)

        def _measure(self, kind: str, act: Callable[[], None]) -> None:
            self.comm.barrier()
            cpu, written, began = _cpu(), _written(), time.perf_counter()
            act()
            seconds = time.perf_counter() - began
            self.rows.append({"kind": kind, "seconds": seconds, "cpu": _cpu() - cpu, "bytes": _written() - written})
            Path(os.environ["DLIO_ROWS"], f"{self.comm.rank}.json").write_text(json.dumps(self.rows))

        def save_checkpoint(self, epoch: int, step_number: int) -> None:
            self._measure("write", lambda: self.write(epoch, step_number))

        def load_checkpoint(self, epoch: int, step_number: int) -> None:
            _drop(self.args.checkpoint_folder)
            self._measure("read", lambda: self.read(epoch, step_number))

        def write(self, epoch: int, step: int) -> None:
            super().save_checkpoint(epoch, step)

        def read(self, epoch: int, step: int) -> None:
            super().load_checkpoint(epoch, step)

    class Dcp(TorchSave):
        """The same tensors as parts of larger ones."""

        def __init__(self) -> None:
            super().__init__()
            rank, count = self.comm.rank, self.comm.size
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29655")
            dist.init_process_group("gloo")
            mesh = init_device_mesh("cpu", (count,))

            def part(value: Any) -> Any:
                if isinstance(value, dict):
                    return {key: part(item) for key, item in value.items()}
                shape = torch.Size((value.numel() * count,))
                return DTensor.from_local(value, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))

            self.state = {"model": part(self.layer_state or {}), "optimizer": part(self.optimization_state or {})}

        def url(self, epoch: int, step: int) -> str:
            return f"{self.args.checkpoint_folder}/epoch-{epoch}-step-{step}"

        def write(self, epoch: int, step: int) -> None:
            dcp.save(self.state, checkpoint_id=self.url(epoch, step))

        def read(self, epoch: int, step: int) -> None:
            dcp.load(self.state, checkpoint_id=self.url(epoch, step))

    class Ckpt(Dcp):
        def write(self, epoch: int, step: int) -> None:
            ckpt.save(self.url(epoch, step), self.state)

        def read(self, epoch: int, step: int) -> None:
            ckpt.load(self.url(epoch, step), self.state)


def run(contestant: str, folder: Path) -> dict[str, Any]:
    """Medians, worst and sums of ten writes and ten reads."""
    rows = folder / "rows"
    rows.mkdir()
    options: dict[str, Any] = {
        "checkpoint.checkpoint_mechanism_classname": f"benchmarks.dlio.{contestant}",
        "checkpoint.checkpoint_folder": folder / "data",
        "checkpoint.time_between_checkpoints": 0,
        "checkpoint.num_checkpoints_write": TIMES,
        "checkpoint.num_checkpoints_read": TIMES,
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
        turns = list(zip(*[[row for row in rank if row["kind"] == kind] for rank in ranks], strict=True))
        slowest = sorted(max(row["seconds"] for row in turn) for turn in turns)
        figures[kind] = (statistics.median(slowest), slowest[-1], statistics.median(sum(row["cpu"] for row in turn) for turn in turns))
    figures["bytes"] = statistics.median(
        sum(row["bytes"] for row in turn) for turn in [t for t in zip(*ranks, strict=True) if t[0]["kind"] == "write"]
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the storage to measure")
    folder = parser.parse_args().folder
    print("| plug-in | write s, median / worst | CPU s | read s, median / worst | CPU s | MB written |\n|---|---|---|---|---|---|")
    for contestant in CONTESTANTS:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            got = run(contestant, Path(place))
            shutil.rmtree(Path(place) / "data")
        cells = [contestant]
        for kind in ("write", "read"):
            median, worst, cpu = got[kind]
            cells += [f"{median:.2f} / {worst:.2f}", f"{cpu:.2f}"]
        print(f"| {' | '.join([*cells, format(got['bytes'] / 1e6, '.0f')])} |", flush=True)


if __name__ == "__main__":
    main()
