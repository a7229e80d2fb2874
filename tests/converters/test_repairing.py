"""Repairs of what Megatron-Core 0.16.1 wrote displaced: every element is the one that was meant, or what is said to be put in its place.

The truth is what Megatron wrote of the same state in its other format, read by torch.load, and taken apart by Megatron's own word on
where its buffers have which parameter. No code is shared with the reader or the repair.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ckpt
from ckpt import ConvertReport, convert
from ckpt.cli.main import cli
from ckpt.converters import conversion
from ckpt.converters.comparison import compare
from ckpt.converters.importer import import_checkpoint
from ckpt.converters.mapping.convention import numbers_of_files, translated_views
from ckpt.converters.selection import OutputTensor
from ckpt.converters.semantic import check_semantic
from ckpt.converters.targets.megatron_optimizer import STATES, optimizer_of
from ckpt.dtypes import dtype
from ckpt.engine.verify import verify
from ckpt.errors import ConflictError, UsageError
from ckpt.formats.megatron.stored_buffers import Buckets, likely_buckets
from ckpt.formats.megatron.training import MegatronCatalog
from ckpt.formats.registry import open_catalog
from ckpt.plan.views import whole
from tests.cli.running import run
from tests.formats.megatron_files import ARCHIVES, STATE, displaced, global_name, joined, load, unpacked

KEYS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
LAYERS, ROWS = 4, 42
JOBS: dict[str, dict[str, int]] = {
    "dp3": {"data_parallel_size": 3},
    "ep3": {"data_parallel_size": 6},
    "pp2tied": {},
    "tp2ep2": {},
}
PARALLEL: dict[str, dict[str, int]] = {"dp3": {}, "ep3": {"ep": 3}, "pp2tied": {"pp": 2}, "tp2ep2": {"tp": 2, "ep": 2}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return displaced(tmp_path_factory.mktemp("displaced"))


Expected = dict[str, tuple[np.ndarray, np.ndarray]]
"""By ``<parameter>.<key>``: the elements, and which of them are lost."""


def expected_states(folder: Path, *, pp: int = 1, ep: int = 1, tp: int = 1) -> Expected:
    found: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
    for said in sorted(folder.glob("buffers/*.json")):
        ranks = [int(n) for n in said.stem.removeprefix("mp_rank_").split("_")]
        stage, owner = ranks[1] if pp > 1 else 0, ranks[-1] if ep > 1 else 0
        (path,) = folder.glob(f"legacy/*/{said.stem}")
        model, optimizer = load(path / "model_optim_rng.pt")["model"], load(path / "distrib_optim.pt")
        experts = len({n.split(".")[6] for n in model if "local_experts" in n})
        for buffer in json.loads(said.read_text()):
            state = optimizer[buffer["expert"]] if isinstance(optimizer, list) else optimizer
            for name, (key, array, lost) in _in_buffer(buffer, state, model, copies=0 < stage == pp - 1) if state is not None else ():
                whole = global_name(name, stage * (LAYERS // pp), owner * experts)
                found.setdefault(f"{whole}.{key}", {})[ranks[0] if tp > 1 else 0] = array, lost
    return {n: tuple(joined(n.rpartition(".")[0], [p[r][i] for r in sorted(p)]) for i in (0, 1)) for n, p in found.items()}


def _in_buffer(buffer: Any, state: Any, model: Any, *, copies: bool) -> Any:
    """What a rank must have of each parameter. Megatron wrote ``compact[start:end]`` of each, where ``start`` counts padding and
    ``compact`` has none; the output layer of the last stage, a copy, it did not write."""
    (truth,) = (v for k, v in state[0].items())
    pads = np.cumsum([0, *(padded - used for padded, used in buffer["buckets"])])
    written = np.zeros(truth["param"].numel(), bool)
    own = {n: p for n, p in buffer["params"].items() if not (copies and n == "output_layer.weight")}
    for start, end, _ in own.values():
        written[start:end] = True
    for name, (start, end, bucket) in own.items():
        at = slice(start - pads[bucket], end - pads[bucket])
        for key, ours in KEYS.items():
            instead = model[name].float().flatten().numpy() if key == "param" else 0
            array = np.where(written[at], truth[key].numpy()[at], instead).astype(np.float32)
            yield name, (ours, array.reshape(model[name].shape), ~written[at].reshape(model[name].shape))


def states_of(path: Path) -> dict[str, np.ndarray]:
    state = torch.load(path, weights_only=True)["optimizer"]["state"]
    return {f"{name}.{key}": t.numpy() for name, own in state.items() for key, t in own.items() if key != "step"}


def spelled(expected: Expected) -> Expected:
    """With the names of norms, and without padding of the vocabulary, as the result has them."""
    shown = {n: (a[:ROWS], lost[:ROWS]) if "embedding." in n or "output" in n else (a, lost) for n, (a, lost) in expected.items()}
    if any("router" in n for n in shown):
        return shown
    return {n.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"): a for n, a in shown.items()}


def repaired(files: Path, layout: str, target: Path, to: str = "torch") -> ConvertReport:
    return convert(str(files / layout / "fully_reshardable"), str(target), to=to, repair=True, job=JOBS[layout])


@pytest.mark.parametrize("layout", JOBS)
def test_every_element_is_the_one_that_was_meant(files: Path, tmp_path: Path, layout: str) -> None:
    report = repaired(files, layout, tmp_path / "o.pt").repair
    expected, found = spelled(expected_states(files / layout, **PARALLEL[layout])), states_of(tmp_path / "o.pt")
    assert found.keys() == expected.keys()
    for name, (array, _) in expected.items():
        assert np.array_equal(found[name].view(np.uint32), array.view(np.uint32)), name
    assert report is not None and report.needed
    told = {t.tensor.removeprefix("optimizer.state.model."): t.filled for t in report.tensors if t.filled}
    whole = expected_states(files / layout, **PARALLEL[layout])  # the report counts padding of the vocabulary too
    lost = {n: int(lost.sum()) for n, (_, lost) in whole.items() if lost.any()}
    assert sum(told.values()) == sum(lost.values()) == report.filled > 400
    assert {n.rpartition(".")[2] for n in told} == {"master", "exp_avg", "exp_avg_sq"}


def test_what_was_repaired_is_not_suspected_again(files: Path, tmp_path: Path) -> None:
    """Neither in Megatron's own form nor after a detour; the same, cut for ranks, is what a native copy has."""
    for to in ("native", "torch_dist", "megatron"):
        repaired(files, "ep3", tmp_path / to, to)
    convert(str(tmp_path / "native"), str(tmp_path / "again"), to="torch_dist")
    for name in ("torch_dist", "again", "megatron"):
        found = open_catalog(str(tmp_path / name))
        assert isinstance(found, MegatronCatalog) and found.suspect is None
        report = compare(str(tmp_path / "native"), str(tmp_path / name), values=False)
        assert not report.differences and report.tensors > 100, name
    convert(str(files / "ep3/fully_reshardable"), str(tmp_path / "as_it_was"), to="torch_dist")
    found = open_catalog(str(tmp_path / "as_it_was"))
    assert isinstance(found, MegatronCatalog) and found.suspect is not None


def test_a_checkpoint_that_fits_again(files: Path, tmp_path: Path) -> None:
    """All tools see the same; what was not displaced is bit for bit as it was."""
    assert len(check_semantic(open_catalog(str(files / "ep3/fully_reshardable"))).problems) > 20
    report = repaired(files, "ep3", tmp_path / "native", "native").repair
    assert verify(str(tmp_path / "native")).ok
    assert not check_semantic(open_catalog(str(tmp_path / "native"))).problems
    assert report is not None and (report.bucket_size, report.data_parallel, report.divisor) == (2000, 6, 128)
    convert(str(files / "ep3/fully_reshardable"), str(tmp_path / "wrong.pt"), to="torch")
    repaired(files, "ep3", tmp_path / "right.pt")
    wrong, right = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in ("wrong", "right"))
    assert {s["step"].item() for s in right["optimizer"]["state"].values()} == {3.0}
    assert all(torch.equal(right["model"][n], t) for n, t in wrong["model"].items())
    changed = {
        f"optimizer.state.model.{n}.{k}"
        for n, s in wrong["optimizer"]["state"].items()
        for k in s
        if not torch.equal(s[k], right["optimizer"]["state"][n][k])
    }
    assert changed == {t.tensor for t in report.tensors}


def test_nothing_to_repair(tmp_path: Path) -> None:
    """Sound checkpoints of the form that may be displaced, of other forms, and of other formats: the same files, byte for byte."""
    files = unpacked(tmp_path)
    sources = ["pp2tied/fully_reshardable", "dp2/legacy", "dp2/dp_reshardable", str(ARCHIVES.parent / "hf" / "llama")]
    for number, source in enumerate(sources):
        plain, mended = tmp_path / f"{number}.pt", tmp_path / f"{number}-mended.pt"
        convert(str(files / source), str(plain), to="torch")
        report = convert(str(files / source), str(mended), to="torch", repair=True).repair
        assert report is not None and (report.needed, report.tensors, report.mended, report.filled) == (False, (), 0, 0)
        assert plain.read_bytes() == mended.read_bytes()


# ------------------------------------------------------------------------------------------------- what is not known


def test_what_the_job_does_not_say_is_asked_for(files: Path, tmp_path: Path) -> None:
    source, made = str(files / "dp3/fully_reshardable"), str(tmp_path / "made")
    with pytest.raises(UsageError, match="buckets of 3,000 and data-parallel size 1 either") as caught:
        convert(source, made, to="native", repair=True)
    assert "--job data_parallel_size=N" in caught.value.hint and "--job ddp_bucket_size=N" in caught.value.hint
    for job, words in (({"ddp_bucket_size": 1 << 20, "data_parallel_size": 3}, "cannot be repaired"), ({"ranks": 3}, "no argument")):
        with pytest.raises(UsageError, match=words):
            convert(source, made, to="native", repair=True, job=job)
    for options in ({"optimizer": False, "repair": True}, {"to": "hf", "repair": True}, {"job": {"data_parallel_size": 3}}):
        with pytest.raises(UsageError, match="repair"):
            convert(source, made, **{"to": "native", **options})
    assert not Path(made).exists()


@pytest.mark.parametrize("layout", JOBS)
def test_a_repair_that_would_lose_most_is_none(files: Path, tmp_path: Path, layout: str) -> None:
    """With so much padding nearly every element would be lost, and what is filled in is right by itself."""
    source, made = str(files / layout / "fully_reshardable"), str(tmp_path / "made")
    for job in ({"ddp_pad_buckets_for_high_nccl_busbw": 1}, {"ddp_bucket_size": 1, "data_parallel_size": 100_000}):
        with pytest.raises(UsageError, match="cannot be repaired"):
            convert(source, made, to="native", repair=True, job={**JOBS[layout], **job})
    assert not Path(made).exists()


def test_the_buckets_of_a_job() -> None:
    assert likely_buckets({"data_parallel_size": 6, "context_parallel_size": 2, "ddp_bucket_size": 5}) == [Buckets(5, 12, 128)]
    default = {"data_parallel_size": 48, "context_parallel_size": 2, "overlap_grad_reduce": True, "ddp_bucket_size": None}
    assert likely_buckets(default) == [Buckets(96_000_000, 96, 128), Buckets(48_000_000, 96, 128)]
    assert likely_buckets({}) == [Buckets(40_000_000, 1, 128), Buckets(None, 1, 128)]
    wide = {"overlap_grad_reduce": 0, "ddp_pad_buckets_for_high_nccl_busbw": True, "num_distributed_optimizer_instances": 2}
    assert likely_buckets({**wide, "data_parallel_size": 6}) == [Buckets(None, 3, 65536)]
    with pytest.raises(UsageError, match="a number of buckets"):
        likely_buckets({"ddp_num_buckets": 4})


def test_a_repair_that_was_interrupted(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on as what it was; the same conversion without a repair is another one."""

    def killed(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion.Conversion, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            repaired(files, "dp3", tmp_path / "c", "native")
    with pytest.raises(ConflictError, match="another conversion"):
        convert(str(files / "dp3/fully_reshardable"), str(tmp_path / "c"), to="native")
    assert repaired(files, "dp3", tmp_path / "c", "native").finished
    assert not check_semantic(open_catalog(str(tmp_path / "c"))).problems


# ------------------------------------------------------------------------------------------------------- the command


def test_what_it_says(files: Path, tmp_path: Path) -> None:
    source, made = str(files / "dp3/fully_reshardable"), str(tmp_path / "made")
    found = run("verify", "--semantic", source)
    assert found.exit_code == 22 and "remedy: ckpt convert --repair SRC DST" in found.stdout
    assert "ckpt convert --repair" in json.loads(run("verify", "--semantic", "--json", source).stdout)["semantic"]["remedy"]
    assert "ckpt convert --repair" in run("inspect", source).stdout
    command = ("convert", "--repair", "--job", "data_parallel_size=3", "--to", "native", source, made)
    found = run(*command, "--dry-run")
    assert "repaired: 63 tensors, 31,080 elements would be repaired, 3,120 lost ones would be filled" in found.stdout
    assert "and 53 more: --json lists all" in found.stdout and not Path(made).exists()
    said = json.loads(run(*command, "--json").stdout)["repair"]
    assert (said["needed"], said["mended"], said["filled"], len(said["tensors"])) == (True, 31_080, 3_120, 63)
    qkv = next(t for t in said["tensors"] if t["tensor"].endswith("layers.0.self_attention.linear_qkv.weight.master"))
    assert (qkv["mended"], qkv["filled"]) == (48 * 24 - 40, 40)
    again = run("convert", "--repair", "--to", "torch", made, str(tmp_path / "o.pt"))
    assert "nothing to repair: no defect is known in such a checkpoint (ckpt 1)" in again.stdout
    assert run("convert", "--repair", "--job", "x", "--to", "native", source, made).exit_code == 2
    assert json.loads(run("convert", "--to", "torch", made, str(tmp_path / "p.pt"), "--json").stdout)["repair"] is None


# ------------------------------------------------------------------------------------------------------------------------------------------
# Which states of optimizers Megatron can be given: all tensors of all parameters, of their shapes, and one step for a group.


def wanted(name: str, shape: tuple[int, ...]) -> OutputTensor:
    return OutputTensor(name=name, view=whole(name, shape), dtype=dtype("float32"))


PARAMETERS = {"a": wanted("model.a", (4, 2)), "b": wanted("model.b", (3,)), "mlp.router.expert_bias": wanted("model.bias", (2,))}
GROUP = {"wd_mult": 1.0}


def states(**other: tuple[int, ...]) -> dict[str, OutputTensor]:
    names = {f"optimizer.state.model.{n}.{key}": other.get(n, PARAMETERS[n].shape) for n in ("a", "b") for key in STATES.values()}
    return {name: wanted(name, shape) for name, shape in names.items()}


def node(steps: dict[str, Any], *groups: list[str]) -> dict[str, Any]:
    said = {"": {"$tensors": "optimizer.state"}, **{f"model.{n}": {"step": step} for n, step in steps.items()}}
    return {"optimizer": {"state": said, "param_groups": {"$param_groups": [{"params": p, "options": GROUP} for p in groups]}}}


@pytest.mark.parametrize("step", [7, 7.0, {"$inline": ["float32", [], "AADgQA=="]}])
def test_what_is_whole_is_taken(step: Any) -> None:
    found = optimizer_of(states(), PARAMETERS, node({"a": step, "b": 7}, ["model.a", "model.b"], []), root="model", fits=lambda g: True)
    assert found is not None and list(found.groups) == [{**GROUP, "step": 7}] * 2 and type(found.groups[0]["step"]) is int
    assert {(key, n): w.name for key, own in found.states.items() for n, w in own.items()} == {
        (key, n): f"optimizer.state.model.{n}.{called}" for key, called in STATES.items() for n in "ab"
    }


@pytest.mark.parametrize(
    ("tensors", "state"),
    [
        ({n: w for n, w in states().items() if n != "optimizer.state.model.b.master"}, node({"a": 7, "b": 7}, ["model.a", "model.b"])),
        (states(a=(8,)), node({"a": 7, "b": 7}, ["model.a", "model.b"])),
        (states(), node({"a": 7, "b": 8}, ["model.a", "model.b"])),
        (states(), node({"a": 7, "b": 8}, ["model.a"], ["model.b"], [])),
        (states(), node({}, ["model.a", "model.b"])),
        (states(), node({"a": 7, "b": 7})),
        (states(), {}),
    ],
    ids=["tensor missing", "flat", "two steps in a group", "which step", "no step", "no group", "nothing"],
)
def test_what_is_not_is_left_out(tensors: dict[str, OutputTensor], state: dict[str, Any]) -> None:
    assert optimizer_of(tensors, PARAMETERS, state, root="model", fits=lambda g: True) is None


def test_groups_that_do_not_fit() -> None:
    assert optimizer_of(states(), PARAMETERS, node({"a": 7}, ["model.a"]), root="model", fits=lambda g: "lr_mult" in g) is None


# ------------------------------------------------------------------------------------------------------------------------------------------
# Numbers that a Megatron checkpoint's own arguments tell, and padding. tests/matrix has its tensors under other names, and back.


def test_arguments_tell_numbers(megatron_files):
    for form in ("legacy", "dp_reshardable"):
        numbers = numbers_of_files(str(megatron_files / "dp2" / form))
        assert (numbers["heads"], numbers["query_groups"], numbers["head_size"]) == (4, 2, 6)
        assert (numbers["vocabulary"], numbers["padded_vocabulary"], numbers["layers"]) == (42, 48, 4)


# --------------------------------------------------------------------------------------------------------------- padding

LLAMA = Path(__file__).parents[1] / "fixtures" / "hf" / "llama"


@pytest.mark.parametrize("way", ["import", "native"])
def test_a_vocabulary_is_padded_with_zeros(tmp_path, way):
    """Also where nothing is written: 250 rows become the 256 that a job on two tensor-parallel ranks has."""
    command = ["import"] if way == "import" else ["convert", "--to", "native"]
    options = ["--names", "llama", "--convention", "megatron", "--set", "padded_vocabulary=256"]
    found = CliRunner().invoke(cli, [*command, *options, str(LLAMA), str(tmp_path / "made")])
    assert found.exit_code == 0, found.output
    stored = {k: t for path in LLAMA.glob("*.safetensors") for k, t in load_file(path).items()}
    module = torch.nn.Module()
    module.output_layer = torch.nn.Linear(64, 256, bias=False, dtype=torch.bfloat16)
    ckpt.load(str(tmp_path / "made"), module.state_dict(), only="output_layer.weight")
    assert torch.equal(module.output_layer.weight[:250], stored["lm_head.weight"])
    assert not module.output_layer.weight[250:].any()
    entry = open_catalog(str(tmp_path / "made")).tensors["embedding.word_embeddings.weight"]
    assert (entry.shape, entry.logical) == ((256, 64), (250, 64))
    back = ckpt.open(str(tmp_path / "made"))["embedding.word_embeddings.weight"].read()
    assert torch.equal(back, stored["model.embed_tokens.weight"])
    other = torch.ones(384, 64, dtype=torch.bfloat16)  # what a job with more ranks pads to
    layout = ckpt.Layout({"tp": 1}, rules=[("*", ckpt.Padded(0, 250))])
    ckpt.load(str(tmp_path / "made"), {"output_layer.weight": other}, only="output_layer.weight", layout=layout)
    assert torch.equal(other[:250], stored["lm_head.weight"]) and not other[250:].any()


def test_a_load_pads_where_the_layout_says_so(tmp_path):
    """Nothing has to be asked for at the import."""
    import_checkpoint(str(LLAMA), str(tmp_path / "made"), views=translated_views(str(LLAMA), "llama", "megatron", {}))
    weight = torch.ones(256, 64, dtype=torch.bfloat16)
    layout = ckpt.Layout({"tp": 1}, rules=[("*", ckpt.Padded(0, 250))])
    ckpt.load(str(tmp_path / "made"), {"output_layer.weight": weight}, only="output_layer.weight", layout=layout)
    stored = {k: t for path in LLAMA.glob("*.safetensors") for k, t in load_file(path).items()}
    assert torch.equal(weight[:250], stored["lm_head.weight"]) and not weight[250:].any()


@pytest.mark.parametrize("way", ["import", "native"])
def test_padding_that_is_only_renamed_stays_padding(megatron_files, tmp_path, way):
    rules = 'left = "megatron"\nright = "mine"\nkeeps_others = true\n'
    (tmp_path / "mine.toml").write_text(rules + '[[term]]\nleft = "embedding.word_embeddings.weight"\nright = "emb"\n')
    url, made = str(megatron_files / "dp2" / "legacy"), str(tmp_path / "made")
    views = translated_views(url, str(tmp_path / "mine.toml"), "mine", {})
    if way == "import":
        import_checkpoint(url, made, views=views)
    else:
        convert(url, made, to="native", views=views)
    for name in ("model.emb", f"{STATE}emb.exp_avg", "model.output_layer.weight"):
        assert (open_catalog(made).tensors[name].shape, open_catalog(made).tensors[name].logical) == ((48, 24), (42, 24))


def test_a_converted_checkpoint_tells_numbers_too(megatron_files, tmp_path):
    url = str(megatron_files / "tp2ep2" / "legacy")
    convert(url, str(tmp_path / "native"), to="native")
    assert numbers_of_files(str(tmp_path / "native")) == numbers_of_files(url)
    assert numbers_of_files(url)["experts"] == 4
