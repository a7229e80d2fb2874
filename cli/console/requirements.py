"""What a command needs that an installation may lack."""

from __future__ import annotations

from importlib.util import find_spec

from ckpt.errors import UsageError


def require_torch(command: str) -> None:
    """Check that PyTorch is installed, before the command begins anything."""
    if find_spec("torch") is None:
        raise UsageError(f"{command} needs PyTorch, which is not installed", hint="pip install torch")
