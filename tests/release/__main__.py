"""``make release-check``: whether what would be published installs and works, in clean environments.

1. The commit is exported, and sdist and wheel are built from it, each within its limits of size and contents.
2. Without torch, on each Python at hand: the command lists, inspects and verifies a checkpoint.
3. With torch, for each set of dependencies: ``pip check``, README's first example with ``-W error``, and the type marker.

Packages come from pip's index. The set ``oldest`` needs a Python for which its versions have wheels (3.10 or 3.11).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LARGEST_WHEEL = 1_500_000
"""Bytes."""
SETS: dict[str, tuple[str, ...]] = {
    "pinned": ("-c", "constraints/dev.txt"),
    "newest": (),
    "oldest": ("-c", "constraints/oldest.txt"),
}
EXAMPLE = """
import torch
model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"wq": torch.nn.Linear(128, 128)})])})
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
"""
"""What README's first example saves."""


class CheckFailed(Exception):
    """Something that would be published is not right."""


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that has to succeed."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise CheckFailed(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def pythons(names: Sequence[str]) -> Iterator[str]:
    """Those of ``names`` that run here and can make environments."""
    for name in names:
        path = shutil.which(name)
        if path is not None and subprocess.run([path, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0:
            yield path


def build(work: Path) -> tuple[Path, Path, Path]:
    """The exported sources, and the wheel and the sdist that are built from them."""
    source, dist = work / "source", work / "dist"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    tools = environment(work, sys.executable, "tools", "build", "twine")
    run(tools, "-m", "build", "--outdir", dist, cwd=source)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    run(tools, "-m", "twine", "check", "--strict", wheel, sdist, cwd=work)
    if wheel.stat().st_size > LARGEST_WHEEL:
        raise CheckFailed(f"the wheel has {wheel.stat().st_size:,} bytes, at most {LARGEST_WHEEL:,} are allowed")
    with tarfile.open(sdist) as files:
        if tests := [name for name in files.getnames() if re.match(r"[^/]+/tests/", name)]:
            raise CheckFailed(f"the sdist has {len(tests)} files of tests, which run in a checkout only: {tests[0]}")
    return source, wheel, sdist


def environment(work: Path, python: str, name: str, *packages: str | Path, cwd: Path | None = None) -> Path:
    """The interpreter of a new virtual environment with these packages, which pip finds consistent."""
    run(python, "-m", "venv", work / name, cwd=work)
    own = work / name / "bin" / "python"
    if packages:
        run(own, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages, cwd=cwd or work)
    return own


def check_without_torch(work: Path, python: str, wheel: Path, source: Path) -> None:
    """The command needs no torch to look at checkpoints."""
    own = environment(work, python, f"bare{len(list(work.iterdir()))}")
    listed = run(own, "-c", f"import zipfile; print(zipfile.ZipFile({str(wheel)!r}).read({metadata_name(wheel)!r}).decode())", cwd=work)
    needed = [line.partition(": ")[2] for line in listed.splitlines() if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    run(own, "-m", "pip", "install", "-q", *(n for n in needed if not n.startswith("torch")), cwd=work)
    run(own, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=work)
    command, golden = own.parent / "ckpt", source / "tests" / "golden" / "v1"
    for words in (("--version",), ("ls", golden), ("inspect", golden), ("verify", golden)):
        run(command, *words, cwd=work)
    refused = subprocess.run([command, "convert", "--to", "torch", golden, work / "never"], capture_output=True, text=True)
    if refused.returncode != 2 or "needs PyTorch" not in refused.stderr:
        raise CheckFailed(f"`ckpt convert` without torch ends with {refused.returncode}:\n{refused.stderr}")


def metadata_name(wheel: Path) -> str:
    name, version, *_ = wheel.name.split("-")
    return f"{name}-{version}.dist-info/METADATA"


def check_with_torch(work: Path, python: str, wheel: Path, source: Path, dependencies: str) -> None:
    """A user's first minutes, with warnings as errors."""
    own = environment(work, python, f"full-{dependencies}", *SETS[dependencies], wheel, cwd=source)
    run(own, "-m", "pip", "check", cwd=work)
    block = re.search(r"```python\n(.*?)```", (source / "README.md").read_text(), re.DOTALL)
    assert block is not None
    folder = work / f"example-{dependencies}"
    folder.mkdir()
    (folder / "example.py").write_text(EXAMPLE + block[1] + "\nassert handle.result().url.endswith('step-00000200')\n")
    # torch itself warns where numpy is older or newer than the one it was built with
    run(own, "-W", "error", "-W", "ignore::UserWarning:torch", "-W", "ignore::DeprecationWarning:torch", "example.py", cwd=folder)
    run(own.parent / "ckpt", "verify", "runs/a/step-00000200", cwd=folder)
    versions = run(own, "-c", "import torch, numpy, pyarrow; print(torch.__version__, numpy.__version__, pyarrow.__version__)", cwd=work)
    print(f"  torch, numpy, pyarrow: {versions.strip()}")


def main() -> int:
    """Run the checks that were chosen; 1 if one fails."""
    parser = argparse.ArgumentParser("python -m tests.release", description="Check what would be published, in clean environments.")
    known = [f"python3.{minor}" for minor in range(10, 15)]
    parser.add_argument("--python", action="append", help="an interpreter; repeatable (default: each python3.N from 3.10 that runs here)")
    parser.add_argument("--set", action="append", choices=SETS, dest="sets", help="dependencies; repeatable (default: pinned, newest)")
    parser.add_argument("--torch-on", metavar="PYTHON", default=sys.executable, help="the interpreter of the checks with torch")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckpt-release-") as folder:
        work = Path(folder)
        try:
            source, wheel, sdist = build(work)
            print(f"built {wheel.name} ({wheel.stat().st_size:,} bytes) and {sdist.name} ({sdist.stat().st_size:,} bytes)", flush=True)
            for python in pythons(chosen.python or known):
                check_without_torch(work, python, wheel, source)
                print(f"without torch on {python}: ok", flush=True)
            for dependencies in chosen.sets or ("pinned", "newest"):
                check_with_torch(work, chosen.torch_on, wheel, source, dependencies)
                print(f"with torch on {chosen.torch_on}, {dependencies} dependencies: ok", flush=True)
        except CheckFailed as err:
            print(f"error: {err}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
