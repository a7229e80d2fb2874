"""Exports of one process: configuration beside the weights, storage without shared files, options that cannot be."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

import ckpt
from ckpt import convert, export
from ckpt import open as ckpt_open
from ckpt.converters.export_plan import WritePlanner
from ckpt.converters.lora import merge
from ckpt.converters.mapping.convention import translated_views
from ckpt.converters.transaction import Destination, ExportTransaction
from ckpt.errors import CkptError, ConflictError, NamesError, NotFoundError, StorageError, UsageError
from ckpt.formats.journal import IntentJournal
from ckpt.io_backends import open_backend
from ckpt.io_backends import posix_writer as posix_shared
from ckpt.io_backends.posix_writer import PosixSharedObject
from tests.formats.reading import FIXTURES
from tests.memory.conftest import _daemon, daemon

__all__ = ["_daemon", "daemon"]


def model() -> torch.nn.Module:
    torch.manual_seed(2)
    made = torch.nn.Sequential(torch.nn.Linear(9, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 9, bias=False))
    made.register_buffer("mask", torch.tensor([True, False]))
    made.register_buffer("scale", torch.tensor(3.5))
    return made


def same(found: dict[str, torch.Tensor]) -> bool:
    wanted = model().state_dict()
    return found.keys() == wanted.keys() and all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in wanted.items())


def test_a_module_or_a_state(tmp_path: Path) -> None:
    reports = [export(str(tmp_path / n), s) for n, s in {"a": model(), "b": {"net": model(), "step": 3}, "c": model().state_dict()}.items()]
    assert all(same(load_file(tmp_path / n / "model.safetensors")) for n in "abc")
    assert {r.tensors for r in reports} == {7} and {r.left_out for r in reports} == {()}
    left = export(str(tmp_path / "d"), {"net": model(), "other": model()}, root="other", exclude=["mask"]).left_out
    assert left == ("net.0.bias", *(f"net.{n}" for n in sorted(model().state_dict()) if n != "0.bias"), "other.mask")


class Configured:
    """What a configuration of transformers has of it."""

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "llama", "num_attention_heads": 4, "vocab_size": 250}


def test_what_is_at_hand_in_a_training_script(tmp_path: Path) -> None:
    """``model.config``, a dtype of torch, one glob."""
    weights = {"a": torch.arange(3.0), "b": torch.ones(2)}
    config: Any = Configured()
    export(str(tmp_path / "out"), weights, config=config, dtype=torch.bfloat16, only="a")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config.to_dict()
    written = load_file(str(tmp_path / "out" / "model.safetensors"))
    assert set(written) == {"a"} and torch.equal(written["a"], weights["a"].bfloat16())
    path = tmp_path / "other"
    wrong: Any = 5
    with pytest.raises(UsageError, match="a URL is a str, not"):
        export(wrong, weights)
    with pytest.raises(UsageError, match="an export takes a module, or a state that contains it, not int"):
        export(path, wrong)
    with pytest.raises(UsageError, match="a configuration is a mapping"):
        export(path, weights, config=wrong)
    with pytest.raises(UsageError, match="cannot be written as JSON: Object of type dtype"):
        export(path, weights, config={"dtype": torch.bfloat16})
    assert not path.exists()


def test_the_configuration_comes_too(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "x"}')
    (source / "tokenizer.json").write_text("{}")
    (source / "training_args.json").write_text("{}")
    for name, config in {"a": str(source), "b": str(source / "config.json"), "c": {"model_type": "x"}}.items():
        export(str(tmp_path / name), model(), config=config)
        assert json.loads((tmp_path / name / "config.json").read_text()) == {"model_type": "x"}
        assert (tmp_path / name / "tokenizer.json").exists() == (name == "a")
        assert same(load_file(tmp_path / name / "model.safetensors"))
    with pytest.raises(NotFoundError):
        export(str(tmp_path / "d"), model(), config=str(tmp_path / "nowhere"))
    export(str(tmp_path / "a"), model(), config={"model_type": "y"}, overwrite=True)
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == {"model_type": "y"}


def test_the_configuration_names_the_dtype_of_the_weights(tmp_path: Path) -> None:
    """``from_pretrained`` loads into the dtype that it names."""
    state = {"w": torch.rand(4, 4), "steps": torch.arange(3)}
    ckpt.save(tmp_path / "step-1", {"model": state})
    for given, written in (
        (
            {"dtype": "float32", "text_config": {"torch_dtype": "float16"}},
            {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}},
        ),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}),
        ({"model_type": "x"}, {"model_type": "x"}),
        ({"dtype": "float16", "quantization_config": {}}, {"dtype": "float16", "quantization_config": {}}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(given))
        export(str(tmp_path / "live"), state, config=given, dtype="bfloat16", overwrite=True)
        ckpt.convert(tmp_path / "step-1", tmp_path / "file", to="hf", dtype="bf16", config=tmp_path / "config.json")
        ckpt.convert(tmp_path / "live", tmp_path / "again", to="hf", dtype="float32")
        found = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("live", "file", "again")]
        wide = json.loads(json.dumps(written).replace("bfloat16", "float32")) if "quantization_config" not in given else given
        assert found == [written, written, wide]
        for name in ("file", "again"):
            shutil.rmtree(tmp_path / name)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("scheme", ["memory:/", "local://"])
def test_storage_without_shared_files(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}{tmp_path}"
    export(f"{url}/out", model(), shard_size=1000, config={})
    export(f"{url}/one.safetensors", model())
    backend = open_backend(f"{url}/out")
    shards = [n for n in backend.list_dir() if n.endswith(".safetensors")]
    assert len(shards) > 1 and {*backend.list_dir()} - {*shards} == {"config.json", "model.safetensors.index.json"}
    assert same({k: t for n in shards for k, t in load(backend.read(n)).items()})
    assert same(load(open_backend(url).read("one.safetensors")))
    assert open_backend(url).list_dir() == ["one.safetensors", "out/"]
    with pytest.raises(UsageError, match="cannot be replaced"):
        export(f"{url}/one.safetensors", model(), overwrite=True)
    assert same(load(open_backend(url).read("one.safetensors")))


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("scheme", ["", "memory:/"])
def test_what_fails_last_leaves_nothing(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{scheme}{tmp_path}/out"

    def put(self: Destination, path: str, data: bytes) -> None:
        really(self, path, data)
        raise StorageError("full")

    really = Destination.put
    with monkeypatch.context() as patch:
        patch.setattr(Destination, "put", put)
        with pytest.raises(StorageError, match="full"):
            export(url, model(), shard_size=1000, config={})
    assert open_backend(url).list_dir() == []
    export(url, model(), shard_size=1000, config={})
    assert "config.json" in open_backend(url).list_dir()


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        *(("", n) for n in ("model-00002-of-00005.safetensors", "config.json", "model.safetensors.index.json")),
        ("memory:/", "config.json"),
        ("memory:/", "model.safetensors.index.json"),
    ],
)
def test_what_somebody_else_writes_meanwhile_stays(tmp_path: Path, scheme: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url, begin = f"{scheme}{tmp_path}/out", IntentJournal.begin

    def begun(self: IntentJournal, data: bytes) -> None:
        begin(self, data)
        open_backend(url).put_if(name, b"of another", expected=None)

    with monkeypatch.context() as patch:
        patch.setattr(IntentJournal, "begin", begun)
        with pytest.raises(ConflictError):
            export(url, model(), shard_size=1000, config={})
    assert {e.path: open_backend(url).read(e.path) for e in open_backend(url).list_prefix()} == {name: b"of another"}


@pytest.mark.parametrize("record", ["[]", "{", '{"format": "ckpt-export", "files": ["../a"]}', '{"format": "ckpt-export", "files": [1]}'])
def test_a_record_that_is_none_of_an_export(tmp_path: Path, record: str) -> None:
    (tmp_path / "a").write_text("of another")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "convert.json").write_text(record)
    with pytest.raises(ConflictError, match="was begun here"):
        export(str(tmp_path / "out"), model(), overwrite=True)
    assert (tmp_path / "a").exists() and (tmp_path / "out" / "convert.json").read_text() == record


def killed() -> None:
    raise KeyboardInterrupt


def inside(monkeypatch: pytest.MonkeyPatch, where: type, name: str, act: Callable[[], object]) -> None:
    """Act once, right before a method does its work."""
    method, acts = getattr(where, name), [act]

    def first(self: Any, *given: Any, **named: Any) -> Any:
        if acts:
            acts.pop()()
        return method(self, *given, **named)

    monkeypatch.setattr(where, name, first)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("where", "name"), [(ExportTransaction, "commit"), (IntentJournal, "is_alone")])
def test_two_at_once(tmp_path: Path, where: type, name: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out, other = str(tmp_path / "out"), {"weight": torch.arange(7)}
    if overwrite:
        export(out, other, shard_size=10)
    inside(monkeypatch, where, name, lambda: export(out, model(), config={"a": 1}, overwrite=overwrite))
    with pytest.raises((ConflictError, StorageError), match="removed"):
        export(out, other, shard_size=10, config={"b": 1}, overwrite=overwrite)
    assert same(load_file(tmp_path / "out" / "model.safetensors"))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"a": 1}


def test_what_comes_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch, ExportTransaction, "commit", lambda: (tmp_path / "out" / "config.json").write_text("mine"))
    with pytest.raises(ConflictError, match=r"there already: config\.json"):
        export(str(tmp_path / "out"), model(), config={})
    assert {p.name: p.read_text() for p in (tmp_path / "out").iterdir()} == {"config.json": "mine"}


def test_who_is_refused_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an export was killed while it would replace another one: both may have the same names."""
    out = tmp_path / "out"
    export(str(out), model(), shard_size=1000, config={})
    with monkeypatch.context() as patch:
        patch.setattr(PosixSharedObject, "complete", lambda *given, **named: killed())
        patch.setattr(ExportTransaction, "discard", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            export(str(out), {"weight": torch.ones(3)}, overwrite=True)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    assert "convert.json" in before
    with pytest.raises(ConflictError, match="there already"):
        export(str(out), model(), shard_size=1000)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    export(str(out), model(), overwrite=True)
    assert same(load_file(out / "model.safetensors")) and {p.name for p in out.iterdir()} == {"model.safetensors", "config.json"}


@pytest.mark.parametrize("name", ["weights.safetensors", "model.fp16.safetensors", "pytorch.safetensors.index.json"])
def test_weights_that_would_stay_are_not_mixed_with_new_ones(tmp_path: Path, name: str) -> None:
    export(str(tmp_path / "weights.safetensors"), {"weight": torch.ones(3)})
    (tmp_path / "weights.safetensors").rename(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with pytest.raises(ConflictError, match=f"no export: {name}"):
        export(str(tmp_path), model(), overwrite=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {name: before}


def test_bytes_that_are_lost_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: PosixSharedObject, offset: int, parts: Any) -> None:
        if offset == 0:
            super(PosixSharedObject, self).write(offset, parts)

    monkeypatch.setattr(PosixSharedObject, "write", forgets)
    with pytest.raises(StorageError, match="all processes together wrote 4096"):
        export(str(tmp_path / "a.safetensors"), model())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [{"names": ["llama"]}, {"convention": None}, {"numbers": ["num_layers"]}, {"numbers": {"num_layers": "2"}}],
)
def test_translations_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ckpt.Translation(**{"names": "llama", "convention": "megatron", **options})


@pytest.mark.parametrize("translation", [None, "llama"])
def test_another_name_takes_a_translation(translation: Any) -> None:
    with pytest.raises(UsageError, match=r"translation= is a ckpt\.Translation"):
        ckpt.translated(LLAMA, translation)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (UsageError, {"dtype": "int8"}),
        (UsageError, {"shard_size": "many"}),
        (UsageError, {"memory": 1000}),
        (UsageError, {"root": "nowhere"}),
        (UsageError, {"translation": "nobody"}),
        (UsageError, {"translation": ckpt.Translation(names="nobody", convention="huggingface")}),
        (NamesError, {"only": "nothing.*"}),
        (NamesError, {"translation": ckpt.Translation(names="llama", convention="megatron")}),
        (UsageError, {"root": b"model"}),
        (UsageError, {"since": 3}),
        (UsageError, {"config": {"num_attention_heads": "many", "hidden_size": 3}}),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, error: type[CkptError], options: dict[str, Any]) -> None:
    with pytest.raises(error):
        export(str(tmp_path / "out"), model(), **options)
    assert list(tmp_path.rglob("*")) == []


def test_a_conversion_that_did_not_finish_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "convert.json").write_text('{"format": "ckpt-convert", "version": 1, "id": "0", "digest": "0"}')
    with pytest.raises(ConflictError, match="a conversion was begun here"):
        export(str(tmp_path), model(), overwrite=True)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("way", ["ranges", "parts"])
def test_tensors_that_are_lost_on_the_way_are_missed(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "parts":
        monkeypatch.setattr(posix_shared, "COHERENT", frozenset())
        moves = WritePlanner.moves
        monkeypatch.setattr(WritePlanner, "moves", lambda self, f, segment: list(moves(self, f, segment))[:-1])
    else:
        pieces = WritePlanner.direct_pieces
        monkeypatch.setattr(WritePlanner, "direct_pieces", lambda *args: list(pieces(*args))[:-1])
    with pytest.raises(StorageError, match="bytes were planned, but all ranks together wrote 0"):
        export(str(tmp_path / "a.safetensors"), model())
    assert list(tmp_path.iterdir()) == []


def test_filling_of_a_padded_vocabulary_is_zeros(tmp_path: Path) -> None:
    """Into Megatron's names, as ``ckpt convert`` writes it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=50
    )
    llama = transformers.LlamaForCausalLM(config)
    llama.save_pretrained(tmp_path / "hf")
    numbers = {"padded_vocabulary": 64}
    convert(
        str(tmp_path / "hf"),
        str(tmp_path / "converted.safetensors"),
        to="hf",
        views=translated_views(str(tmp_path / "hf"), "llama", "megatron", numbers),
    )
    translation = ckpt.Translation(names="llama", convention="megatron", numbers=numbers)
    config_json = str(tmp_path / "hf" / "config.json")
    export(str(tmp_path / "a.safetensors"), llama, translation=translation, config=config_json)
    assert load_file(tmp_path / "a.safetensors")["embedding.word_embeddings.weight"][50:].abs().sum() == 0
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "converted.safetensors").read_bytes()


def test_a_model_of_peft_is_refused_and_its_remedies_work(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def base() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))

    model = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    for state in (model, {"model": model}, model.base_model):
        with pytest.raises(UsageError, match=r"(?s)adapters of PEFT.*ckpt lora merge"):
            export(str(tmp_path / "made"), state)
    assert not (tmp_path / "made").exists()
    export(str(tmp_path / "named"), {"model": model.state_dict()})
    assert set(ckpt_open(str(tmp_path / "named"))) == set(model.state_dict())
    model.save_pretrained(tmp_path / "adapter")
    export(str(tmp_path / "base"), base())
    merge(str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    merged, unloaded = ckpt_open(str(tmp_path / "merged")), model.merge_and_unload()
    assert all(torch.equal(merged[name].read(), tensor) for name, tensor in unloaded.state_dict().items())
    export(str(tmp_path / "unloaded"), unloaded)


# ------------------------------------------------------------------------------------------------------------------------------------------
# Exports of Megatron checkpoints carry a ``config.json`` where all of its numbers are known, and say what is missing where not.

LLAMA = FIXTURES / "hf/llama"
COMPLETE = {"rotary_percent": 1.0, "use_rope_scaling": False}
"""What Megatron-LM's own script says of every job, and no configuration of transformers does."""


def megatron(root: Path, **arguments: Any) -> str:
    """The fixture as a checkpoint of a Megatron job with these arguments."""
    views = translated_views(str(LLAMA), "llama", "megatron", {})
    parallel = ckpt.MegatronParallel(arguments=arguments)
    ckpt.convert(str(LLAMA), str(root / "megatron"), to="megatron", views=views, parallel=parallel)
    return str(root / "megatron")


def export_megatron(source: str, root: Path) -> tuple[ckpt.ConvertReport, dict[str, Any] | None]:
    views = translated_views(source, "llama", "huggingface", {})
    report = ckpt.convert(source, str(root / "export"), to="hf", views=views)
    made = root / "export" / "config.json"
    return report, json.loads(made.read_text()) if made.exists() else None


def test_the_model_computes_what_it_computed(tmp_path: Path) -> None:
    """transformers → Megatron → transformers: the file that was never copied says the same, and the logits are the same bits."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    report, config = export_megatron(megatron(tmp_path, **COMPLETE), tmp_path)
    assert report.notes == ("config.json: made of the source's arguments",)
    original = json.loads((LLAMA / "config.json").read_text())
    assert config is not None
    given = {"bos_token_id", "eos_token_id", "rope_theta", "torch_dtype"}  # tokens nobody knows; two words of older versions
    assert {k: v for k, v in config.items() if k not in given} == {k: original[k] for k in config.keys() - given}
    assert (config["rope_theta"], config["torch_dtype"], config["eos_token_id"]) == (10000.0, original["dtype"], None)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        one, two = (transformers.AutoModelForCausalLM.from_pretrained(p)(tokens).logits for p in (LLAMA, tmp_path / "export"))
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "do not say rotary_percent"),
        ({**COMPLETE, "norm_epsilon": None}, "do not say norm_epsilon"),
        ({**COMPLETE, "use_rope_scaling": True}, "cannot express use_rope_scaling=True"),
        ({**COMPLETE, "rotary_percent": 0.5}, "cannot express rotary_percent=0.5"),
        ({**COMPLETE, "window_size": [127, 0]}, r"cannot express window_size=\[127, 0\]"),
    ],
)
def test_what_is_not_known_is_said_and_not_invented(arguments: dict[str, Any], reason: str, tmp_path: Path) -> None:
    report, config = export_megatron(megatron(tmp_path, **arguments), tmp_path)
    (note,) = report.notes
    assert config is None
    assert re.search(reason, note), note


def test_arguments_that_do_not_fit_the_tensors(tmp_path: Path) -> None:
    report, config = export_megatron(megatron(tmp_path, **COMPLETE, ffn_hidden_size=97), tmp_path)
    assert config is None and report.notes == ("config.json is not written: the source's arguments do not fit the shapes of the tensors",)


def test_names_of_megatron_get_no_configuration(tmp_path: Path) -> None:
    source = megatron(tmp_path, **COMPLETE)
    report = ckpt.convert(source, str(tmp_path / "export"), to="hf")
    assert report.notes == ("config.json is not written: the tensors are not those of LlamaForCausalLM",)


def test_a_given_configuration_and_one_beside_the_source_come_first(tmp_path: Path) -> None:
    source = megatron(tmp_path, **COMPLETE)
    views = translated_views(source, "llama", "huggingface", {})
    assert ckpt.convert(source, str(tmp_path / "given"), to="hf", views=views, config=str(LLAMA)).notes == ()
    assert ckpt.convert(str(LLAMA), str(tmp_path / "copied"), to="hf").notes == ()
    for made in ("given", "copied"):
        assert (tmp_path / made / "config.json").read_bytes() == (LLAMA / "config.json").read_bytes()
