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
    (  # the generators of CPUs do not go on alike on ranks that draw different numbers of elements, those of GPUs do
        r"(\"replicated\": torch\.rand\(tensor_size), device=self\.rank\)",
        r"\1, generator=torch.Generator().manual_seed(4 * specs.index(save_spec) + specs.index(load_spec)))",
    ),
    (r"device=(?:self\.rank|dist\.get_rank\(\))", 'device="cpu"'),
)


ARE_DIRECTORIES: Ports = (
    (r"os\.path\.isfile\(", "os.path.exists("),
    (r"\.is_file\(\)", ".exists()"),
    (r"default_root_dir=\"memory:", 'logger=False, default_root_dir="memory:'),  # tensorboardX makes a directory "memory:"
    (r"patch\(\"torch\.save\"", 'patch("ckpt.integrations.lightning.save_state"'),  # how often something is saved
)


ARE_STEPS: Ports = (
    (r"(?<!best_model_checkpoint = os\.path\.join\(tmp_dir, )\"checkpoint-(\d+)\"", r'"step-%08d" % \1'),
    (r"f\"checkpoint-\{([^}]*)\}\"", r'f"step-{\1:08d}"'),
    (r"(?<=f\")\{PREFIX_CHECKPOINT_DIR\}-\{(num_steps|trainer\.state\.best_global_step)\}", r"step-{\1:08d}"),
    (r"self\.check_saved_checkpoints\(", "tests.peers.inside_transformers.check_saved("),
    (r"self\.check_best_model_has_been_loaded\(", "tests.peers.inside_transformers.check_best("),
    (r"AutoTokenizer\.from_pretrained\((?:MODEL_ID|\"bert-base-uncased\")\)", "tests.peers.inside_transformers.tokenizer()"),
    (r"AutoModelForCausalLM\.from_pretrained\(MODEL_ID\)", "tests.peers.inside_transformers.llama()"),
    (r"get_dataset\(PATH_SAMPLE_TEXT, tokenizer, 100\)", "tests.peers.inside_transformers.texts(tokenizer)"),
    (
        r"TrainerState\.load_from_json\(os\.path\.join\((\w+), \"trainer_state\.json\"\)\)",
        r"tests.peers.inside_transformers.trainer_state(\1)",
    ),
    (r"= get_last_checkpoint\(", "= tests.peers.inside_transformers.last_step("),
    (r"= safetensors\.torch\.load_file\(", "= tests.peers.inside_transformers.weights("),
    (r"self\.convert_to_sharded_checkpoint\(checkpoint\)", ""),  # cuts a file of the checkpoint in two
    (r"SAFE_WEIGHTS_NAME\)", '"checkpoint.json")'),
    (r"No valid checkpoint found in output directory", "no valid checkpoint found in"),
)
"""A trainer's checkpoints are steps of its output_dir, and their files are ckpt's; models and tokenizers of the hub are tiny local ones."""


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
    "transformers": Suite(
        source=fetch.transformers,
        files=["tests/trainer/test_trainer_checkpointing.py"],
        inside="tests.peers.inside_transformers",
        mode="use",
        ports=ARE_STEPS,
        environment={"HF_HUB_OFFLINE": "1"},
        arguments=("-k", "CheckpointSave or ResumeTraining or AutoBatchSize or CheckpointRotation or InterruptedTraining or BestModel"),
        beside=["tests/trainer"],
    ),
    "accelerate": Suite(
        source=fetch.accelerate,
        files=["test_state_checkpointing.py"],
        inside="tests.peers.inside_accelerate",
        mode="save_state",
        packages=("parameterized",),
        environment={"CKPT_RUN_LOG": "off"},
    ),
}
