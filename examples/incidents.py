"""What went wrong elsewhere, and the same scenario with ckpt: ``make incidents``, or ``python examples/incidents.py NAME…``.

Each function plays one public report on the CPU, with the released packages that are installed, then the same with ckpt. It returns the two
outcomes. A line that begins with "mended" says that the installed release of the other package no longer does what the report says.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt

Outcomes = tuple[str, str]


def refused(act: Callable[[], object]) -> str:
    """The head of the error that ckpt raises; an empty text if it raises none."""
    try:
        act()
    except ckpt.CkptError as err:
        return f"{type(err).__name__}: " + " ".join(line.strip() for line in str(err).splitlines()[:3])
    return ""


# ---------------------------------------------------------------------------------------------------- one process


def narrower_dtype(folder: Path) -> Outcomes:
    """pytorch/pytorch#187138: a load into a narrower dtype rounds the values without a word."""
    saved = {"w": torch.full((4,), 1 / 3)}
    state = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    dcp.save(saved, checkpoint_id=folder / "dcp")
    dcp.load(state, checkpoint_id=folder / "dcp")
    ckpt.save(folder / "ckpt", saved)
    lost = not torch.equal(state["w"].float(), saved["w"])
    return "rounded, no warning" if lost else "mended", refused(lambda: ckpt.load(folder / "ckpt", state))


def part_left_out(folder: Path) -> Outcomes:
    """pytorch/pytorch#148252: a state that lacks half of the checkpoint loads "successfully"."""
    saved = {"layer1": torch.ones(4), "layer2": torch.ones(4)}
    dcp.save(saved, checkpoint_id=folder / "dcp")
    with warnings.catch_warnings(record=True) as caught:
        dcp.load({"layer1": torch.zeros(4)}, checkpoint_id=folder / "dcp")
    ckpt.save(folder / "ckpt", saved)
    named = any("layer2" in str(warning.message) for warning in caught)
    return "mended" if named else "layer2 ignored, no warning", refused(lambda: ckpt.load(folder / "ckpt", {"layer1": torch.zeros(4)}))


def values_not_there_yet(folder: Path) -> Outcomes:
    """pytorch/pytorch#126881: values that an object creates later are saved, and not loaded."""
    saved = {"loader": {"epoch": 3, "shards": {"a": 7}}}
    dcp.save(saved, checkpoint_id=folder / "dcp")
    state: dict[str, Any] = {"loader": {"epoch": 0}}
    dcp.load(state, checkpoint_id=folder / "dcp")
    ckpt.save(folder / "ckpt", saved)
    other: dict[str, Any] = {"loader": {"epoch": 0}}
    outcome = refused(lambda: ckpt.load(folder / "ckpt", other)) or ("all loaded" if other == saved else "")
    return "mended" if state == saved else "shards lost, no warning", outcome


def moments_by_position(folder: Path) -> Outcomes:
    """pytorch/pytorch#1489: an optimizer whose parameters come in another order gets the moments of other parameters."""

    def job(*order: str) -> dict[str, Any]:
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("a", "b")})
        optimizer = torch.optim.Adam([model[name].weight for name in order])
        (model["a"].weight.sum() + 2 * model["b"].weight.sum()).backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def moments(state: dict[str, Any]) -> list[torch.Tensor]:
        return [state["optimizer"].state[state["model"][name].weight]["exp_avg"] for name in ("a", "b")]

    saved, state, ours = job("a", "b"), job("b", "a"), job("b", "a")
    torch.save(saved["optimizer"].state_dict(), folder / "optimizer.pt")
    state["optimizer"].load_state_dict(torch.load(folder / "optimizer.pt"))
    ckpt.save(folder / "ckpt", saved)
    ckpt.load(folder / "ckpt", ours)
    swapped = torch.equal(moments(state)[0], moments(saved)[1]) and not torch.equal(moments(state)[0], moments(saved)[0])
    right = all(map(torch.equal, moments(ours), moments(saved)))
    return "moments of a and b swapped, no warning" if swapped else "mended", "each has its moments" if right else ""


def damaged_weights(folder: Path) -> Outcomes:
    """vllm-project/vllm#53537: a flipped byte of a safetensors file is served as weights."""
    weights = {"w": torch.ones(1000)}
    save_file(weights, folder / "model.safetensors")
    ckpt.save(folder / "ckpt", weights)
    for file in (folder / "model.safetensors", *(folder / "ckpt" / "data").iterdir()):
        data = bytearray(file.read_bytes())
        data[-1000] ^= 0xFF
        file.write_bytes(data)
    try:
        loaded = load_file(folder / "model.safetensors")
    except Exception as err:  # noqa: BLE001  any error would be an answer
        return f"mended: {err}", ""
    wrong = not torch.equal(loaded["w"], weights["w"])
    return "loaded, wrong values" if wrong else "mended", refused(lambda: ckpt.load(folder / "ckpt", {"w": torch.zeros(1000)}))


def slice_of_a_tensor(folder: Path) -> Outcomes:
    """pytorch/pytorch#40157: a slice of a tensor is saved with the whole tensor."""
    part = torch.zeros(1_000_000)[:1000]
    torch.save(part, folder / "part.pt")
    ckpt.save(folder / "ckpt", {"part": part})
    size = (folder / "part.pt").stat().st_size
    ours = sum(path.stat().st_size for path in (folder / "ckpt").rglob("*") if path.is_file())
    return (
        f"{size:,} bytes" if size > 1_000_000 else f"mended: {size:,} bytes",
        f"the slice alone: {ours:,} bytes" if ours < 100_000 else "",
    )


def changed_rate(folder: Path) -> Outcomes:
    """pytorch/pytorch#156846: a job that resumes with another learning rate gets the saved one. ckpt does not help: the rate is state."""

    def job(rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW([("w", torch.nn.Parameter(torch.ones(4)))], lr=rate)

    def outcome(optimizer: torch.optim.Optimizer) -> str:
        return "the saved rate, no warning" if optimizer.param_groups[0]["lr"] == 1e-3 else "mended"

    saved, state, ours = job(1e-3), job(1e-4), job(1e-4)
    torch.save(saved.state_dict(), folder / "optimizer.pt")
    state.load_state_dict(torch.load(folder / "optimizer.pt"))
    ckpt.save(folder / "ckpt", {"optimizer": saved})
    ckpt.load(folder / "ckpt", {"optimizer": ours})
    return outcome(state), outcome(ours)


# ----------------------------------------------------------------------------------------------------- two ranks


def on_two_ranks(work: Callable[[Path], None], folder: Path) -> None:
    """Run ``work(folder)`` on two ranks; a rank may die or raise."""
    with tempfile.TemporaryDirectory() as store:
        context = mp.get_context("spawn")
        ranks = [context.Process(target=_rank, args=(rank, f"file://{store}/store", work, folder)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


def _rank(rank: int, store: str, work: Callable[[Path], None], folder: Path) -> None:
    warnings.simplefilter("ignore")
    os.dup2(os.open(f"{store.removeprefix('file://')}-{rank}.log", os.O_CREAT | os.O_WRONLY), 2)  # what a rank says whose peer is gone
    dist.init_process_group("gloo", store, rank=rank, world_size=2)
    work(folder)


def rows(value: float) -> dict[str, Any]:
    return {"w": DTensor.from_local(torch.full((4,), value), init_device_mesh("cpu", (2,)), [Shard(0)])}


def save_and_die(folder: Path) -> None:
    """Both ranks save; in the second save, rank 1 is killed before it writes."""

    def killed(*_: object) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    dcp.save(rows(1.0), checkpoint_id=folder / "dcp")
    ckpt.save(folder / "ckpt", rows(1.0))
    write_data = FileSystemWriter.write_data
    FileSystemWriter.write_data = lambda *args: (killed(), write_data(*args))[1]  # type: ignore[method-assign, assignment, return-value]
    if folder.name == "dcp":
        dcp.save(rows(2.0), checkpoint_id=folder / "dcp")
    killed()
    ckpt.save(folder / "ckpt", rows(2.0), job=ckpt.Job(timeout=20))


def overwritten(folder: Path) -> Outcomes:
    """pytorch/pytorch#191398: a save over a checkpoint, one rank of which dies, leaves half of the old one and half of the new one."""
    outcomes = []
    for name, load in (("dcp", lambda path, state: dcp.load(state, checkpoint_id=path)), ("ckpt", ckpt.load)):
        (folder / name).mkdir()
        on_two_ranks(save_and_die, folder / name)
        state = {"w": torch.zeros(8)}
        load(folder / name / name, state)
        outcomes.append(f"loaded {sorted(set(state['w'].tolist()))}")
    return f"{outcomes[0]} (the save warns that it overwrites)" if "1.0, 2.0" in outcomes[0] else f"mended: {outcomes[0]}", outcomes[1]


def save_own(folder: Path) -> None:
    state = {"buffer": torch.full((4,), float(dist.get_rank()))}
    dcp.save(state, checkpoint_id=folder / "dcp")
    outcome = refused(lambda: ckpt.save(folder / "ckpt", state))
    if dist.get_rank() == 0:
        (folder / "outcome").write_text(outcome)


def load_own(folder: Path) -> None:
    state = {"buffer": torch.zeros(4)}
    dcp.load(state, checkpoint_id=folder / "dcp")
    (folder / f"rank-{dist.get_rank()}").write_text(str(state["buffer"].unique().tolist()))


def own_tensors(folder: Path) -> Outcomes:
    """pytorch/pytorch#120356: of the tensors that ranks have under one name, one is kept."""
    on_two_ranks(save_own, folder)
    on_two_ranks(load_own, folder)
    loaded = [(folder / f"rank-{rank}").read_text() for rank in range(2)]
    lost = "both ranks get those of one, no warning" if loaded[0] == loaded[1] else f"mended: {loaded}"
    return lost, (folder / "outcome").read_text()


def save_strided(folder: Path) -> None:
    """Each rank has its rows of the gate and its rows of the up projection, as tensor parallelism cuts a fused weight."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    own = torch.arange(8.0).view(2, 2, 2)[:, rank].flatten()
    state = {"gate_up": DTensor.from_local(own, mesh, [_StridedShard(0, split_factor=2)])}
    try:
        dcp.save(state, checkpoint_id=folder / "dcp")
        outcome = "mended"
    except CheckpointException as err:
        outcome = "the save fails: overlapping chunks" if "overlapping chunks" in str(err) else f"the save fails: {err}"
    ckpt.save(folder / "ckpt", state)
    if rank == 0:
        (folder / "outcome").write_text(outcome)


def fused_projection(folder: Path) -> Outcomes:
    """huggingface/transformers#48802: a rank's rows of a fused weight are not contiguous, so DCP cannot save them."""
    on_two_ranks(save_strided, folder)
    state = {"gate_up": torch.zeros(8)}
    ckpt.load(folder / "ckpt", state)
    return (folder / "outcome").read_text(), "saved, each row in its place" if torch.equal(state["gate_up"], torch.arange(8.0)) else ""


INCIDENTS = (
    narrower_dtype,
    part_left_out,
    values_not_there_yet,
    moments_by_position,
    damaged_weights,
    slice_of_a_tensor,
    changed_rate,
    overwritten,
    own_tensors,
    fused_projection,
)


def main(names: list[str]) -> int:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")
    print(f"torch {version('torch')}, safetensors {version('safetensors')}, ckpt {ckpt.__version__}\n")
    failed = False
    for incident in INCIDENTS:
        if names and incident.__name__ not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            elsewhere, ours = incident(Path(folder))
        print(f"{incident.__doc__}\n  elsewhere: {elsewhere}\n  ckpt:      {ours}\n", flush=True)
        failed |= not ours
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
