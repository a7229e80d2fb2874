"""Whether what a caller gives as ``save=`` and ``keep=`` are policies of that side; if not, what was probably meant."""

from __future__ import annotations

from ckpt.errors import UsageError

from .keep import KeepPolicy
from .save import SavePolicy


def check_arguments(**given: object) -> None:
    """Raise UsageError unless each argument is a policy of its side: ``save`` and ``every`` of when to save, others of what to keep."""
    for name, value in given.items():
        saves = name in ("save", "every")
        if isinstance(value, SavePolicy if saves else KeepPolicy):
            continue
        wanted = "when to save" if saves else "what to keep"
        if isinstance(value, SavePolicy | KeepPolicy):
            other = "what to keep" if saves else "when to save"
            meant = f"keep={value!r}, and {name}=EverySteps(500)" if saves else f"save={value!r}"
            raise UsageError(f"{name}= says {wanted}, but {value!r} is a policy of {other}", hint=meant)
        number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        call = "EverySteps" if saves else "Latest"
        meant = f"{name}={call}({value if number else 500 if saves else 3})"
        raise UsageError(f"{name}= is a policy of {wanted}, not {value!r}", hint=f"{meant}; docs/policies.md has the others")
