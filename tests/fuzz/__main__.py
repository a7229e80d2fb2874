"""Reads mutated checkpoints in processes of their own and reports what is neither right nor an error of ours: see README.md."""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .mutations import MARKER, mutated
from .seeds import KINDS, Files, seeds

MEMORY = 2 << 30
"""Bytes of address space that a case may take beyond what the process has."""
SECONDS = 30
"""A case of a few kilobytes may take this long on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    kind: str
    """``read``, ``refused``, or what makes it a finding."""
    detail: str = ""

    @property
    def right(self) -> bool:
        return self.kind in ("read", "refused")


def make(kind: str, seed: int, case: int) -> Files:
    """The files of one case: the same for the same numbers."""
    rng = random.Random(f"{kind} {seed} {case}")
    return mutated(kind, rng.choice(seeds(kind)), rng)


def run(files: Files, keep: Path | None = None) -> Outcome:
    """Read the checkpoint in a child process."""
    with tempfile.TemporaryDirectory(prefix="ckpt-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as temporary:
        root = keep or Path(temporary)
        for path, data in files.items():
            (root / "c" / path).parent.mkdir(parents=True, exist_ok=True)
            (root / "c" / path).write_bytes(data)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _child(root, writer)
        os.close(writer)
        outcome = _wait(pid, reader)
        if (root / MARKER).exists():
            return Outcome(kind="code ran")
        return outcome


def _wait(pid: int, reader: int) -> Outcome:
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return Outcome(kind="hang" if number == signal.SIGALRM else "crash", detail=signal.Signals(number).name)
    kind, _, detail = text.partition("\n")
    return Outcome(kind=kind or "crash", detail=detail)


def _child(root: Path, writer: int) -> None:
    """Everything that reads a checkpoint; ends the process."""
    os.chdir(root)
    faulthandler.disable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    try:
        _silence()
        text = _use(str(root / "c"))
    except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
        text = f"wrong exception\n{traceback.format_exc(limit=-6)}"
    os.write(writer, text[:60_000].encode(errors="replace"))
    os._exit(0)


def _silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _use(url: str) -> str:
    from click.testing import CliRunner

    import ckpt
    from ckpt.cli.main import cli
    from ckpt.engine.verify import verify
    from ckpt.errors import CkptError

    refusal: CkptError | None = None
    try:
        files = os.listdir(url)
        view = ckpt.open(f"{url}/{files[0]}" if len(files) == 1 and files[0].endswith(".pt") else url)
        for tensor in view.tensors():
            tensor.read()
        view.state()
        for rank, nodes in view._catalog.ranks.items():
            for path in nodes:
                view.per_rank(path, rank)
    except CkptError as err:
        refusal = err
    if refusal is not None and not refusal.hint:
        return f"no hint\n{refusal!r}"
    try:
        whole = verify(url, threads=1).ok
    except CkptError:
        whole = False
    if refusal is not None and whole and "this torch knows no device" not in refusal.message:
        return f"verify finds nothing\n{refusal!r}"
    for args in (["inspect", url], ["inspect", "--state", "--json", url], ["ls", url]):
        result = CliRunner().invoke(cli, args)
        if result.exit_code == 1:
            return f"wrong exception\nckpt {args[0]}: {result.output[-3000:]}"
    return "read\n" if refusal is None else f"refused\n{refusal!r}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these kinds of checkpoints")
    parser.add_argument("--seconds", type=float, help="stop after this long")
    parser.add_argument("--cases", type=int, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--case", type=int, help="only the case of this number")
    parser.add_argument("--keep", type=Path, help="with --case: a directory in which its files stay")
    options = parser.parse_args()
    import torch

    warnings.simplefilter("ignore")
    import ckpt.engine.verify  # noqa: F401 - warm: the children are forks of this process

    torch.set_num_threads(1)
    kinds = options.kind or KINDS
    counts: Counter[tuple[str, str]] = Counter()
    began, wrong = time.monotonic(), 0
    numbers = range(options.cases or (1 << 40)) if options.case is None else [options.case]
    for case in numbers:
        if options.seconds is not None and time.monotonic() - began > options.seconds:
            break
        for kind in kinds:
            outcome = run(make(kind, options.seed, case), options.keep)
            counts[kind, outcome.kind] += 1
            if not outcome.right:
                wrong += 1
                print(f"{outcome.kind}: --kind {kind} --seed {options.seed} --case {case}\n  {outcome.detail}", flush=True)
    for (kind, what), count in sorted(counts.items()):
        print(f"{kind:12} {what:22} {count}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
