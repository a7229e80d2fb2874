"""The model of ``megatron.py`` with its experts on other ranks, which gives it an optimizer more: two ranks, then two stages of these."""

from __future__ import annotations

from . import megatron

megatron.CUT.update({2: ["--ep", "2"], 4: ["--ep", "2", "--pp", "2"]})
CASES = {"model": megatron.Model, "model-by-backend": megatron.ModelByBackend}
