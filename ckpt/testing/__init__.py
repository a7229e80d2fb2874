"""Proof that a job resumes exactly: it runs uninterrupted and resumed, and what it does is compared (docs/guides/prove-a-resume.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.needs import late_names

if TYPE_CHECKING:
    from .comparison import Difference as Difference
    from .comparison import ResumeReport as ResumeReport
    from .proof import assert_resumes as assert_resumes
    from .proof import prove as prove
    from .witness import observe as observe

_WHERE = {"assert_resumes": ".proof", "prove": ".proof", "observe": ".witness", "ResumeReport": ".comparison", "Difference": ".comparison"}
"""Public name → the module that has it."""

__all__ = list(_WHERE)

if not TYPE_CHECKING:  # a checker would take every name for Any
    __getattr__ = late_names(__name__, _WHERE)
