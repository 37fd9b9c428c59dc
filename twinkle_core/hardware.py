"""What the processor can do (L0)."""

from __future__ import annotations

import platform


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware; without it bf16 is emulated, several times slower than fp32.

    On x86: AVX512-BF16 or AMX, as torch sees them. On Arm torch offers no flag of its own; oneDNN knows. Imports torch.
    """
    import torch

    if platform.machine().lower() in ("aarch64", "arm64"):
        probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
        return bool(probe and probe())
    flags = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, flag, lambda: False)() for flag in flags)
