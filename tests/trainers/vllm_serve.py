"""vLLM serves a training checkpoint on CPUs: what its server says of a prompt is what transformers says of the same weights.

The server is a process of its own, given the URL on its command line; it finds ckpt by its plug-in group.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed import checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import ckpt
from tests.ports import free_ports
from tests.s3 import moto

from .lives import Job

SIZE, LENGTH, ASKED = 260, 32, 8
"""Tokens: that there are, of a prompt, and of one that is continued."""
CONFIG = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"head_dim": 64, "vocab_size": SIZE, "max_position_embeddings": 128}  # vLLM's kernels for CPUs take no smaller head
SECONDS = 400
SERVER = "vllm.entrypoints.openai.api_server"  # what `vllm serve` starts; that command asks for a distribution named vllm


class Served(Job):
    """A trained model. ``digests``: what it says, or once it was loaded what a server says; log-probabilities are compared when they come,
    with those that the uninterrupted life leaves beside the checkpoints."""

    def __init__(self, seed: int, kind: str) -> None:
        self.folder, self.kind = Path("model").absolute(), kind
        torch.manual_seed(seed)
        self.model = LlamaForCausalLM(LlamaConfig(**CONFIG, architectures=["LlamaForCausalLM"]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.prompts = torch.randint(3, SIZE, (4, LENGTH), generator=torch.Generator().manual_seed(3))
        for _ in range(20):
            self.model(self.prompts, labels=self.prompts).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.served: dict[str, str] = {}

    def train(self, begin: int, end: int) -> None:
        """It is."""

    def save(self, url: str) -> None:
        if self.kind == "dcp":
            dcp.save({"model": self.model.state_dict()}, checkpoint_id=url, no_dist=True)
        else:
            ckpt.save(url, {"model": self.model, "optimizer": self.optimizer, "step": 20})

    def load(self, url: str) -> None:
        expected = json.loads(Path("logprobs.json").read_text())
        with elsewhere(url, self.kind) as (moved, environment), server(self.folder, moved, environment) as ask:
            rows = ask(self.prompts[0].tolist(), max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
            actual = [next(iter(row.values()))["logprob"] for row in rows[1:]]
            more = ask(self.prompts[0, :ASKED].tolist(), max_tokens=LENGTH - ASKED)["token_ids"]
        close = len(actual) == LENGTH - 1 and all(math.isclose(*pair, abs_tol=1e-4) for pair in zip(actual, expected, strict=True))
        self.served = {"logprobs": "close" if close else str(actual), "tokens": str(more)}

    def digests(self) -> dict[str, str]:
        if self.served:
            return self.served
        self.folder.mkdir(exist_ok=True)
        self.model.config.save_pretrained(self.folder)
        words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(SIZE)}, unk_token="t0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t2").save_pretrained(self.folder)
        with torch.no_grad():
            logprobs = self.model(self.prompts[:1]).logits[0].log_softmax(-1)
            more = self.model.generate(self.prompts[:1, :ASKED], max_new_tokens=LENGTH - ASKED, do_sample=False)[0, ASKED:]
        of_prompt = logprobs[:-1].gather(1, self.prompts[0, 1:, None])[:, 0]
        Path("logprobs.json").write_text(json.dumps(of_prompt.tolist()))
        return {"logprobs": "close", "tokens": str(more.tolist())}


@contextmanager
def elsewhere(url: str, kind: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The checkpoint's URL, and what the environment of the server needs for it; ``s3``: it is copied into a bucket."""
    if kind != "s3":
        yield url, {}
        return
    with moto.serve() as (endpoint, _):
        keys = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= keys
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=30).close()
        ckpt.copy(url, moved := "s3://bucket/step")
        yield moved, keys


@contextmanager
def server(folder: Path, url: str, environment: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """A function that asks a server for a completion."""
    (port,) = free_ports(1)
    options = {"url": url, "only": ["model.*", "lm_head.*"], "rename": {"model.*": "*"}}
    command = [sys.executable, "-m", SERVER, "--model", str(folder), "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--load-format", "ckpt", "--model-loader-extra-config", json.dumps(options), "--max-model-len", "64", "--max-num-seqs", "2"]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    process = subprocess.Popen(command, env=os.environ | own | environment)

    def ask(prompt: list[int], **more: Any) -> Any:
        body = {"model": str(folder), "prompt": prompt, "temperature": 0, "return_token_ids": True, **more}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"][0]

    try:
        end = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
                break
            except urllib.error.URLError:
                if process.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(1)
        yield ask
    finally:
        process.terminate()
        process.wait(60)


def case(kind: str) -> Callable[[int], Job]:
    return lambda seed: Served(seed, kind)


CASES = {kind: case(kind) for kind in ("native", "dcp", "s3")}
