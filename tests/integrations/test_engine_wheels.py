"""The newest releases of the engines have the signatures that ``engine_signatures.toml`` says. Their wheels are read, not installed."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT
from tests.integrations import engine_stubs
from tests.integrations.engine_stubs import SIGNATURES

WHEELS = ROOT / ".trainers" / "wheels"


@cache
def newest(library: str) -> Path:
    """Its wheel, hundreds of megabytes; one that is there already is taken if pip finds no newer one."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*pip, "-d", str(WHEELS), library], capture_output=True, text=True, timeout=900, check=False)
    wheels = sorted(WHEELS.glob(f"{library.replace('-', '_')}-*.whl"), key=lambda path: path.stat().st_mtime)
    if done.returncode or not wheels:
        pytest.skip(f"pip cannot have {library}: {done.stderr.strip()[-200:]}")
    return wheels[-1]


def definition(tree: ast.AST, name: str) -> ast.AST:
    """A function or class by its dotted name."""
    for part in name.split("."):
        (tree,) = (node for node in getattr(tree, "body", ()) if getattr(node, "name", None) == part)
    return tree


def parameters(function: ast.AST) -> list[str]:
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    given = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return given[1:] if "classmethod" in map(ast.unparse, function.decorator_list) else given


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("library", ["vllm", "sglang", "verl"])
def test_the_newest_release_has_the_signatures(library: str) -> None:
    wrong = []
    with zipfile.ZipFile(newest(library)) as wheel:
        for file, functions in SIGNATURES[library]["functions"].items():
            tree = ast.parse(wheel.read(file))
            wrong += [f"{file}: {name}" for name, known in functions.items() if parameters(definition(tree, name)) != known]
            for kind in {name.partition(".")[0] for name in functions if "." in name}:
                body = definition(tree, kind).body  # type: ignore[attr-defined]
                abstract = [n for n in body if "abstractmethod" in map(ast.unparse, getattr(n, "decorator_list", ()))]
                wrong += [f"{file}: {kind}.{n.name} is new and abstract" for n in abstract if f"{kind}.{n.name}" not in functions]
        for file, texts in SIGNATURES[library].get("texts", {}).items():
            content = wheel.read(file).decode()
            wrong += [f"{file}: {text}" for text in ([texts] if isinstance(texts, str) else texts) if text not in content]
    assert wrong == [], newest(library).name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sglang_itself_puts_the_hook_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its registry of hooks, which needs nothing else of SGLang; what is hooked is a stub."""
    modules = engine_stubs.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    registry = modules["sglang.srt.plugins.hook_registry"]
    with zipfile.ZipFile(newest("sglang")) as wheel:
        exec(wheel.read("sglang/srt/plugins/hook_registry.py"), vars(registry))
    adapter = importlib.import_module("ckpt.integrations.sglang")
    try:
        adapter.register()
        registry.HookRegistry.apply_hooks()  # type: ignore[attr-defined]
        get = modules["sglang.srt.model_loader.loader"].get_model_loader  # type: ignore[attr-defined]
        config = engine_stubs.LoadConfig(model_loader_extra_config={"ckpt": {"url": "a"}})
        assert type(get(load_config=config, model_config=None)) is adapter.CkptLoader
        assert type(get(engine_stubs.LoadConfig(), None)) is engine_stubs.DefaultModelLoader
    finally:
        sys.modules.pop("ckpt.integrations.sglang", None)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_megatron_bridge_takes_the_strategy_of_its_context() -> None:
    """The guide's ``checkpointing_context={"save_strategy": CkptSave()}``; loads ask for the backend that the checkpoint names."""
    with zipfile.ZipFile(newest("megatron-bridge")) as wheel:
        source = wheel.read("megatron/bridge/training/checkpointing.py").decode()
    assert 'save_strategy = checkpointing_context["save_strategy"]' in source
    assert "load_strategy = get_default_load_sharded_strategy(" in source
