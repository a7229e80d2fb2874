"""Train a tiny language model with the Hugging Face Trainer, stop, and resume with the same command.

    python examples/hf_trainer.py runs/hf --stop-after 7     # saves every 5 steps, so the newest checkpoint is that of step 5
    python examples/hf_trainer.py runs/hf                    # resumes at step 6

Several ranks: torchrun --nproc-per-node 2 examples/hf_trainer.py runs/hf. Needs pip install 'ckpt-toolkit[transformers]'.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ckpt
from ckpt.integrations.transformers import use

SEQUENCES, LENGTH, VOCABULARY = 24, 16, 64


class StopAfter(TrainerCallback):
    """Ends training at a step, without a save."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= self.step


def train(run: str, *, epochs: int = 3, stop_after: int | None = None, save: ckpt.policies.SavePolicy | None = None) -> Trainer:
    torch.manual_seed(0)
    data = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=f"{run}/logs",
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=5,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in data])
    if stop_after is not None:
        trainer.add_callback(StopAfter(stop_after))
    use(trainer, run, save=save, keep=ckpt.policies.Latest(2))  # the line that does it
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory of the run")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop-after", type=int, help="end after this step, as if the job had been stopped")
    given = parser.parse_args()
    trainer = train(given.run, epochs=given.epochs, stop_after=given.stop_after)
    print(f"at step {trainer.state.global_step}; checkpoints of steps {[s.number for s in ckpt.list_steps(given.run) if s.committed]}")


if __name__ == "__main__":
    main()
