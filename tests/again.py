"""What failed in the run before, once more, one test at a time and nothing beside it: ``python -m tests.again``.

Thousands of tests start real processes, servers and hosts, six at a time. A machine that stands still for seconds can break one of them,
and nothing is learnt from that. So up to ``MOST`` tests that failed may show that they pass on a quiet machine; what fails twice fails.
Tests that passed only now are printed, because such a test or what it tests may have a race.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

MOST = 5
FAILED = Path(__file__).parent.parent / ".pytest_cache" / "v" / "cache" / "lastfailed"


def main(options: list[str]) -> int:
    names = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not 1 <= len(names) <= MOST:
        print(f"{len(names)} tests failed; only 1 to {MOST} are tried again")
        return 1
    print("again, one at a time:", *names, sep="\n  ")
    code = pytest.main(["-q", "-p", "no:xdist", *options, *names])
    if code == 0:
        print("passed only when nothing ran beside them:", *names, sep="\n  ")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
