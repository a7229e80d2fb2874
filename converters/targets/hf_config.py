"""What lies beside exported weights: ``config.json``, and tokenizer and other small files. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckpt.converters.mapping.model_numbers import of_config
from ckpt.converters.pipeline.target import parent_and_name
from ckpt.errors import NotFoundError, UsageError
from ckpt.io_backends.registry import open_backend
from ckpt.settings import limits
from ckpt.text.json_reader import parse_json
from ckpt.text.urls import url_text

from .hf import CONFIG, small_files


class ModelConfig(Protocol):
    """What ``model.config`` of transformers is."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """``files`` by name; ``numbers`` of the model that they tell, for translations."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)


def read_configuration(given: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig | None) -> Configuration:
    """From a configuration of transformers, the content of ``config.json``, its path or URL, or that of a directory that has it."""
    if given is None:
        return Configuration()
    if isinstance(given, os.PathLike):
        given = url_text(given)
    if not isinstance(given, str):
        try:
            files = {CONFIG: json.dumps(_content(given), indent=2, sort_keys=True).encode() + b"\n"}
        except (ValueError, TypeError) as err:
            raise UsageError(f"this configuration cannot be written as JSON: {err}", hint="config=model.config, or plain values") from err
    elif given.endswith(".json"):
        root, name = parent_and_name(given)
        files = {CONFIG: open_backend(root).read_whole(name, limits.SIDE_FILE)}
    else:
        files = small_files(open_backend(given))
        if CONFIG not in files:
            raise NotFoundError(f"there is no {CONFIG}", where=given, hint="give the directory of a model, or the file")
    try:
        return Configuration(files=files, numbers=dict(of_config(parse_json(files[CONFIG]))))
    except (ValueError, AttributeError, TypeError) as err:
        raise UsageError(f"this is no configuration of a model: {err}", where=given if isinstance(given, str) else None) from err


def _content(given: Mapping[str, Any] | ModelConfig) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    if not hasattr(given, "to_dict"):
        raise UsageError(f"a configuration is a mapping, a path or model.config, not {type(given).__name__}", hint="config=model.config")
    return dict(given.to_dict())
