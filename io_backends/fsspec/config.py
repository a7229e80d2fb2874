"""fsspec's own configuration: ``FSSPEC_*`` variables as they are now, and the files that fsspec has read when it was imported.

A variable that was set after fsspec was imported counts here too, and one that cannot be understood is an error: fsspec warns and goes on.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ckpt.errors import UsageError
from ckpt.text.json_reader import parse_json


def fsspec_config(*protocols: str) -> dict[str, Any]:
    """The options that are configured for file systems of these protocols; a later one wins, as in fsspec."""
    if not _is_configured():
        return {}
    from fsspec.config import conf, set_conf_env  # late: it is slow to import

    options: dict[str, Any] = {}
    for protocol in protocols:
        name = f"FSSPEC_{protocol.upper()}"
        mine = {k: v for k, v in os.environ.items() if k == name or k.startswith(f"{name}_")}
        if name in mine:
            _check_object(name, mine[name])
        of_protocol = {protocol: dict(conf.get(protocol, {}))}
        set_conf_env(of_protocol, mine)
        options |= of_protocol[protocol]
    return options


def _is_configured() -> bool:
    """Whether there may be something to read. fsspec takes a while to import, and most programs have nothing there."""
    if "fsspec" in sys.modules or any(name.startswith("FSSPEC_") for name in os.environ):
        return True
    return os.path.isdir(os.path.join(os.path.expanduser("~"), ".config/fsspec"))


def _check_object(name: str, text: str) -> None:
    try:
        is_object = isinstance(parse_json(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise UsageError("it has to be a JSON object with the options of a file system", where=name, hint=f"or set {name}_<OPTION>=value")
