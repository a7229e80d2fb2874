"""``python -m tests.trainers``: jobs of other projects' trainers are saved, die and go on. ``expected.toml`` has what comes of it.

Each scenario trains without interruption, then once more until it is killed after a save, then goes on in new processes, and on other
numbers of ranks where it names them. Ends with 1 if an outcome is not that of the table, or if a package cannot be had.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.distributed.ranks import ROOT

from .environments import CACHE, UnavailableError, interpreter
from .lives import compared

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXPECTED = Path(__file__).parent / "expected.toml"
_PACKAGES = ("packages", "alone", "without")
"""Scenarios whose rows have the same share an environment."""
SECONDS = 900
"""How long one life of a scenario may take: all of its cases, on a machine that does other things too."""


_START = f"""
import sys, types
sys.modules["tests"] = types.ModuleType("tests")  # not that of a package, such as verl's
sys.modules["tests"].__path__ = [{str(ROOT / "tests")!r}]
from pathlib import Path
from tests.trainers import lives
lives.main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
"""


def live(python: Path, name: str, life: str, world: int, folder: Path, *, launched: bool) -> list[dict[str, Any]]:
    """What each rank of a life wrote: by case. A rank that wrote nothing died before its end, or hung. ``launched``: in
    the environment that torchrun gives, also if there is one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    if launched:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        common |= {"TORCHELASTIC_RUN_ID": "trainers", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    command = [str(python), "-c", _START, name, life, str(folder)]
    ranks = []
    with (folder / f"{life}-{world}.log").open("w") as log:
        for rank in range(world):
            environment = os.environ | common | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if launched else {})
            ranks.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True))
        for process in ranks:
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                break
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    files = [folder / f"{life}-{world}-{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def run(name: str, python: Path, world: int, others: list[int]) -> dict[str, tuple[str, str]]:
    """Outcome and remark for each case of a scenario."""
    folder = CACHE / "run" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    here = functools.partial(live, python, name.replace("-", "_"), folder=folder, launched=world > 1)
    lives = {life: here(life, world) for life in ("whole", "first", "again")}
    elsewhere = {number: here("elsewhere", number) for number in others}
    outcomes = {}
    for case in {case: None for ranks in lives.values() for results in ranks for case in results}:
        found = [_of_rank(lives, rank, case) for rank in range(world)]
        whole = lives["whole"][0].get(case, _DIED)
        found += [
            _named(compared(whole, results.get(case, _DIED)), f"{number} ranks") for number in elsewhere for results in elsewhere[number]
        ]
        outcomes[case] = next((outcome for outcome in found if outcome[0] != "resumes"), found[0])
    return outcomes


_DIED = {"outcome": "died", "text": "no result: see its log"}


def _of_rank(lives: dict[str, list[dict[str, Any]]], rank: int, case: str) -> tuple[str, str]:
    whole, first, again = (lives[life][rank].get(case, _DIED) for life in ("whole", "first", "again"))
    return compared(whole, first, again)


def _named(outcome: tuple[str, str], where: str) -> tuple[str, str]:
    return (outcome[0] if outcome[0] == "resumes" else f"{outcome[0]} on {where}", outcome[1])


def main() -> int:
    table = tomllib.loads(EXPECTED.read_text())
    parser = argparse.ArgumentParser(prog="python -m tests.trainers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=table, metavar="NAME", help=f"of {', '.join(table)}; may be given several times")
    given = parser.parse_args()
    wrong = 0
    for name in given.only or table:
        row = table[name]
        print(f"{name} {' '.join([*row.get('alone', ()), *row['packages']])}".rstrip(), flush=True)
        try:
            shared = next(other for other in table if [table[other].get(k) for k in _PACKAGES] == [row.get(k) for k in _PACKAGES])
            python = interpreter(shared, row["packages"], row.get("alone", ()), row.get("without", ()))
            found = run(name, python, row.get("ranks", 1), row.get("then", []))
        except UnavailableError as err:
            print(f"  NOT RUN: {err}")
            wrong += 1
            continue
        for case in row["cases"] | found:
            expected, (actual, text) = row["cases"].get(case, "nothing"), found.get(case, ("nothing", "it was not run"))
            wrong += actual != expected
            remark = f", EXPECTED {expected}: {' '.join(re.sub(r'[^!-~]+', ' ', text).split())[:400]}" if actual != expected else ""
            print(f"  {case}: {actual}{remark}", flush=True)
    print(f"{wrong} outcomes differ from {EXPECTED.relative_to(ROOT)}" if wrong else "all outcomes are those of the table")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
