"""``python -m tests.peers [suite ...]``: run other projects' tests on ckpt and compare with ``expected.toml``.

Every test that the table does not name has to pass. For the others it has the outcome and the reason. Ends with 1 if a test came out
otherwise, or a suite could not be had; ``--write`` prints the lines that the table lacks, ``--mode off`` runs the tests without ckpt.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.distributed.ranks import ROOT

from .fetch import CACHE, UnavailableError, packages
from .suites import SUITES, Suite

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXPECTED = Path(__file__).parent / "expected.toml"


def run_suite(name: str, suite: Suite, mode: str, only: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Outcome and first words of each test, by file, class and name. Each file is a process of its own."""
    folder = CACHE / "run" / (name if mode == suite.mode else f"{name}-{mode}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    paths = suite.prepare(folder)
    site = packages(*suite.packages) if suite.packages else CACHE
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]),
        "PEERS_MODE": mode,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **suite.environment,
    }
    found: dict[str, tuple[str, str]] = {}
    for path in paths:
        where = str(path.relative_to(folder))
        if only and not any(part in where for part in only):
            continue
        report = path.with_suffix(".xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--timeout=150",
            f"--junitxml={report}",
            *suite.arguments,
        ]
        with path.with_suffix(".log").open("w") as log:
            process = subprocess.Popen([*command, where], cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
            try:
                process.wait(suite.seconds)
            except subprocess.TimeoutExpired:
                found[where] = ("timeout", f"not done after {suite.seconds:.0f} s")
            finally:
                kill(process)
        found |= outcomes(report, where)
        print(f"  {where}: {dict(Counter(outcome for test, (outcome, _) in found.items() if test.startswith(where)))}", flush=True)
    return found


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a run with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcomes(report: Path, where: str) -> dict[str, tuple[str, str]]:
    if not report.exists():
        return {where: ("error", "the file could not be run: see its log")}
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        problem = next((c for c in case if c.tag in ("failure", "error", "skipped")), None)
        outcome = {"failure": "failed", "error": "error", "skipped": "skipped"}[problem.tag] if problem is not None else "passed"
        message = (problem.get("message") or "") if problem is not None else ""
        kind = (case.get("classname") or "").rpartition(".")[2]
        found[f"{where}::{kind}::{case.get('name')}"] = (outcome, " ".join(message.split())[:300])
    return found


def differences(found: dict[str, tuple[str, str]], table: dict[str, Any], *, whole: bool) -> list[str]:
    """What came out otherwise than the table says."""
    expected = {test: row["outcome"] for test, row in table.get("tests", {}).items()}
    problems = [
        f"{test}: {outcome}, expected {expected.get(test, 'passed')}: {message}"
        for test, (outcome, message) in found.items()
        if outcome != expected.get(test, "passed")
    ]
    if whole:
        problems += [f"{test}: expected {outcome}, but it was not run" for test, outcome in expected.items() if test not in found]
        if table.get("count") != len(found):
            problems.append(f"{len(found)} tests were run, the table says {table.get('count')}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; all by default")
    parser.add_argument("--mode", help="what is replaced, instead of the suite's own mode: off runs the tests without ckpt")
    parser.add_argument("--only", action="append", default=[], help="only test files whose name contains this; may be given several times")
    parser.add_argument("--write", action="store_true", help="print lines for expected.toml")
    given = parser.parse_args()
    if unknown := [name for name in given.suites if name not in SUITES]:
        parser.error(f"there is no suite {unknown[0]}; there are {', '.join(SUITES)}")
    table = tomllib.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    failed = False
    for name in given.suites or SUITES:
        print(f"{name}:", flush=True)
        try:
            found = run_suite(name, SUITES[name], given.mode or SUITES[name].mode, given.only)
        except UnavailableError as err:
            print(f"  not run, its tests cannot be had here: {err}")
            failed = True
            continue
        counts = Counter(outcome for outcome, _ in found.values())
        apart = [test for test, row in table.get(name, {}).get("tests", {}).items() if test in found and "apart" in row]
        can_run = len(found) - counts["skipped"] - len(apart)
        print(f"  {counts['passed']} of {can_run} that ckpt can run passed; {dict(counts)}")
        problems = differences(found, table.get(name, {}), whole=not given.only and given.mode is None)
        for problem in problems:
            print(f"  DIFFERENT {problem}")
        failed |= bool(problems)
        if given.write:
            for test, (outcome, message) in found.items():
                if outcome != "passed":
                    print(f'"{test}" = {{ outcome = "{outcome}", reason = "" }}  # {message}')
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
