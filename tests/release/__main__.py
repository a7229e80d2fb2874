"""``make release-check``: whether what would be published installs and works, in clean environments.

1. The commit is exported, and sdist and wheel are built from it, each within its limits of size and contents.
2. For each Python at hand and each set of dependencies an environment is made, used and removed. Without torch, the command lists,
   inspects and verifies a checkpoint. With torch: ``pip check``, the first minutes of a user (``smoke.py``) and a slice of the tests with
   the installed package, all with ``-W error``.
3. A table says which combinations passed. It is kept for the commit in ``build/release``, so that the same command continues where it was
   stopped: what has passed is not tried again.

Packages come from pip's index.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LARGEST_WHEEL = 1_500_000
"""Bytes."""
SETS: dict[str, tuple[str, ...]] = {
    "oldest": ("-c", "constraints/oldest.txt"),
    "pinned": ("-c", "constraints/dev.txt"),
    "newest": (),
}
SLICE = ("tests/golden", "tests/conformance", "tests/test_dtypes.py", "tests/test_tree.py", "tests/distributed/test_dtensors.py")
"""Tests that need nothing of the checkout beside themselves."""
STRICT = ("-W", "error", "-W", "ignore::UserWarning:torch", "-W", "ignore::DeprecationWarning:torch")
"""torch itself warns where numpy is older or newer than the one that it was built with."""


class CheckFailed(Exception):
    """Something that would be published is not right."""


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that has to succeed."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise CheckFailed(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def pythons(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and path of those of ``names`` that run here and can make environments."""
    for name in names:
        path = shutil.which(name)
        if path is not None and subprocess.run([path, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0:
            yield name, path


def build(work: Path) -> tuple[Path, Path]:
    """The exported sources, and the wheel that is built from them."""
    source, dist = work / "source", work / "dist"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    tools = environment(work / "tools", sys.executable)
    run(tools, "-m", "pip", "install", "-q", "build", "twine", cwd=work)
    run(tools, "-m", "build", "--outdir", dist, cwd=source)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    run(tools, "-m", "twine", "check", "--strict", wheel, sdist, cwd=work)
    shutil.rmtree(work / "tools")
    if wheel.stat().st_size > LARGEST_WHEEL:
        raise CheckFailed(f"the wheel has {wheel.stat().st_size:,} bytes, at most {LARGEST_WHEEL:,} are allowed")
    with tarfile.open(sdist) as files:
        names = [name.partition("/")[2] for name in files.getnames()]
    if tests := [name for name in names if name.startswith("tests/")]:
        raise CheckFailed(f"the sdist has {len(tests)} files of tests, which run in a checkout only: {tests[0]}")
    if missing := {"LICENSE", "SECURITY.md", "CHANGELOG.md", "README.md"} - set(names):
        raise CheckFailed(f"the sdist lacks {', '.join(sorted(missing))}")
    print(f"built {wheel.name} ({wheel.stat().st_size:,} bytes) and {sdist.name} ({sdist.stat().st_size:,} bytes)", flush=True)
    return source, wheel


def environment(folder: Path, python: str) -> Path:
    """The interpreter of a new virtual environment."""
    run(python, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def install(own: Path, dependencies: str, source: Path, *packages: str) -> None:
    """Wheels only: what an old release would build for hours, or cannot build, has no wheel for this Python."""
    options = ("-q", "--disable-pip-version-check", "--only-binary", ":all:", *SETS[dependencies])
    run(own, "-m", "pip", "install", *options, *packages, cwd=source)


def check_without_torch(own: Path, wheel: Path, source: Path, dependencies: str, folder: Path) -> None:
    """The command needs no torch to look at checkpoints."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        listed = archive.read(name).decode().splitlines()
    needed = [line.partition(": ")[2] for line in listed if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    install(own, dependencies, source, *(need for need in needed if not need.startswith("torch")))
    run(own, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=folder)
    command, golden = own.parent / "ckpt", source / "tests" / "golden" / "v1"
    for words in (("--version",), ("ls", golden), ("inspect", golden), ("verify", golden)):
        run(own, *STRICT, command, *words, cwd=folder)
    refused = subprocess.run([command, "convert", "--to", "torch", golden, folder / "never"], capture_output=True, text=True)
    if refused.returncode != 2 or "needs PyTorch" not in refused.stderr:
        raise CheckFailed(f"`ckpt convert` without torch ends with {refused.returncode}:\n{refused.stderr}")


def check_with_torch(own: Path, wheel: Path, source: Path, dependencies: str, folder: Path) -> None:
    """A user's first minutes, and tests that import the installed package: only they are copied."""
    install(own, dependencies, source, f"{wheel}[test]")
    run(own, "-m", "pip", "check", cwd=folder)
    run(own, *STRICT, source / "tests" / "release" / "smoke.py", source / "README.md", cwd=folder)
    shutil.copytree(source / "tests", folder / "tests")
    shutil.copy(source / "pyproject.toml", folder)
    run(own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SLICE, cwd=folder)


def check(work: Path, python: str, wheel: Path, source: Path, dependencies: str, *, torch: bool) -> tuple[str, str]:
    """What became of one combination: ``passed`` or ``failed``, and the versions it had."""
    folder = Path(tempfile.mkdtemp(prefix="cell-", dir=work))
    try:
        own = environment(folder / "environment", python)
        check_without_torch(own, wheel, source, dependencies, folder)
        if torch:
            check_with_torch(own, wheel, source, dependencies, folder)
        found = json.loads(run(own, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check", cwd=folder))
        versions = {package["name"]: package["version"] for package in found}
        return "passed", ", ".join(f"{name} {versions[name]}" for name in ("torch", "numpy", "pyarrow", "click") if name in versions)
    except CheckFailed as err:
        print(f"error: {err}", file=sys.stderr, flush=True)
        return "failed", str(err).strip().rpartition("\n")[2]
    finally:
        shutil.rmtree(folder)


def main() -> int:
    """Run the checks that were chosen; 1 if one fails."""
    parser = argparse.ArgumentParser("python -m tests.release", description="Check what would be published, in clean environments.")
    known = [f"python3.{minor}" for minor in range(10, 15)]
    parser.add_argument("--python", action="append", help="an interpreter; repeatable (default: each python3.N from 3.10 that runs here)")
    parser.add_argument("--set", action="append", choices=SETS, dest="sets", help="dependencies; repeatable (default: all)")
    parser.add_argument("--without-torch", action="store_true", help="only what needs no torch: minutes instead of an hour")
    chosen = parser.parse_args()
    usable = dict(pythons(chosen.python or known))
    if lacking := [name for name in chosen.python or () if name not in usable] or ([] if usable else known):
        parser.error(f"cannot run, or make environments: {', '.join(lacking)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was made is removed
    commit = run("git", "rev-parse", "--short=12", "HEAD", cwd=ROOT).strip()
    kept = ROOT / "build" / "release" / f"{commit}.json"
    rows: dict[str, list[str]] = json.loads(kept.read_text()) if kept.exists() else {}
    with tempfile.TemporaryDirectory(prefix="ckpt-release-") as folder:
        work = Path(folder)
        try:
            source, wheel = build(work)
        except CheckFailed as err:
            print(f"error: {err}", file=sys.stderr)
            return 1
        for python in usable.values():
            for dependencies in chosen.sets or SETS:
                key = f"{Path(python).name} × {dependencies}{'' if not chosen.without_torch else ', without torch'}"
                if rows.get(key, [""])[0] == "passed":
                    continue
                began = time.monotonic()
                result, versions = check(work, python, wheel, source, dependencies, torch=not chosen.without_torch)
                rows[key] = [result, f"{time.monotonic() - began:.0f}", versions]
                print(f"{key}: {result}", flush=True)
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    print(f"\n| python × dependencies, {commit} | result | seconds | versions |\n|---|---|---|---|")
    for key, row in rows.items():
        print(f"| {key} | {' | '.join(row)} |")
    return int(any(row[0] != "passed" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
