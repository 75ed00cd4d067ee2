"""DeepSpeed, imported once: forked ranks have it, and what it imports late (torch's compiler, seconds), from here."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed")
pytest.importorskip("deepspeed.runtime.zero.muon.muon_optimizer")

from moetrain.engine.deepspeed import takes_fp16

#: DeepSpeed refuses fp16 on CPUs without units for it
FP16 = takes_fp16()
