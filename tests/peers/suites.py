"""The suites: which files of other projects' tests run, under which replacement, and what is changed in them to run on CPUs.

Each file is copied to ``.peers/run/<suite>`` with one line in front that loads the replacement, also in the processes that the tests start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import fetch

Ports = Sequence[tuple[str, str]]
"""Patterns and what takes their place, for each file."""

TO_CPU: Ports = (
    (r"\.cuda\((?:[^()]|\([^()]*\))*\)", ""),
    (r"cuda:(?:\d|\{[^}]*\})", "cpu"),
    (r"(device=|device_type=|init_device_mesh\(\s*)\"cuda\"", r'\1"cpu"'),
    (r"cpu:gloo,cuda:nccl", "gloo"),
    (r"\"losses\": loss_bytes,", '"losses": loss_bytes.getvalue(),'),  # what the error of an io.BytesIO in a state says
    (r"state_dict\[\"losses\"\]\.seek\(0\)", ""),
    (r"torch\.load\(state_dict\[\"losses\"\]\)", 'torch.load(BytesIO(state_dict["losses"]))'),
    (r"device=(?:self\.rank|dist\.get_rank\(\))", 'device="cpu"'),
)


ARE_DIRECTORIES: Ports = (
    (r"os\.path\.isfile\(", "os.path.exists("),
    (r"\.is_file\(\)", ".exists()"),
    (r"patch\(\"torch\.save\"", 'patch("ckpt.integrations.lightning.save_state"'),  # how often something is saved
)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """``inside`` is the module that replaces; ``mode`` is what it is told to do; ``ports`` change the files."""

    source: Callable[[], Path]
    files: Sequence[str]
    inside: str
    mode: str
    ports: Ports = ()
    packages: Sequence[str] = ()
    arguments: Sequence[str] = ()
    beside: Sequence[str] = ()
    """Folders of the source that the files import from, copied whole."""
    seconds: float = 900
    environment: dict[str, str] = field(default_factory=dict)

    def prepare(self, folder: Path) -> list[Path]:
        """Copy the files, with their first line, and what they import."""
        source = self.source()
        copied = []
        for name in self.beside:
            for path in (source / name).rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    (folder / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                    (folder / path.relative_to(source)).write_bytes(path.read_bytes())
        for name in self.files:
            text = (source / name).read_text()
            for pattern, new in self.ports:
                text = re.sub(pattern, new, text)
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            future = "from __future__ import annotations\n"
            text = text.replace(future, "")
            path.write_text(f"{future}import {self.inside}  # noqa\n{text}")
            copied.append(path)
        return copied


WITH_STORAGE = [
    "test_compatibility.py",
    "test_dedup_tensors.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_file_system_checkpoint.py",
    "test_file_system_checkpoint_cpu.py",
    "test_fsdp_model_state.py",
    "test_fsdp_optim_state.py",
    "test_fsdp_tp_checkpoint_conversion.py",
    "test_fsspec.py",
    "test_hsdp_checkpoint.py",
    "test_planner.py",
    "test_save_load_api.py",
    "test_tp_checkpoint.py",
    "test_utils.py",
    "e2e/test_e2e_save_and_load.py",
    "e2e/test_fine_tuning.py",
]
OF_DCP_ALONE = ("test_compatibility.py", "test_dedup_tensors.py", "test_planner.py", "test_utils.py")
THROUGH_US = [name for name in WITH_STORAGE if name not in OF_DCP_ALONE and "save_and_load" not in name]


def _dcp(mode: str, files: Sequence[str]) -> Suite:
    return Suite(
        source=fetch.pytorch,
        files=files,
        inside="tests.peers.inside_dcp",
        mode=mode,
        ports=TO_CPU,
        packages=("expecttest",),
    )


SUITES = {
    "dcp-storage": _dcp("storage", WITH_STORAGE),
    "dcp-native": _dcp("native", THROUGH_US),
    "dcp-reader": _dcp("reader", [name for name in THROUGH_US if "fs" not in name]),
    "lightning": Suite(
        source=fetch.lightning,
        files=[
            "tests_pytorch/checkpointing/test_checkpoint_callback_frequency.py",
            "tests_pytorch/checkpointing/test_model_checkpoint.py",
            "tests_pytorch/checkpointing/test_trainer_checkpoint.py",
            "tests_pytorch/plugins/test_async_checkpoint.py",
            "tests_pytorch/plugins/test_checkpoint_io_plugin.py",
            "tests_pytorch/trainer/connectors/test_checkpoint_connector.py",
        ],
        inside="tests.peers.inside_lightning",
        mode="CkptIO",
        ports=ARE_DIRECTORIES,
        packages=("cloudpickle", "jsonargparse", "tensorboardX", "protobuf"),
        beside=["tests_pytorch"],
    ),
}
