"""What the processor can do is asked of torch."""

from __future__ import annotations

import torch

from twinkle_core import hardware


def test_bf16_hardware(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert not hardware.cpu_has_bf16()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert hardware.cpu_has_bf16()
