"""Which model a checkpoint belongs to: names and shapes of all tensors, and of a base model a sample of its values (L2)."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from twinkle_core.contracts.adapters import BASE, AdapterStore
from twinkle_core.errors import CheckpointMismatch
from twinkle_core.log import get_logger
from twinkle_core.ops.sharded import whole
from twinkle_core.train.folder import STATE_FILE

if TYPE_CHECKING:
    from twinkle_core.train.checkpoint import TrainerState
    from twinkle_core.train.session import Session
    from twinkle_core.train.sessions import Sessions

#: numbers of a sample, whatever the size of the model
SIZE = 4096


def fingerprint(adapters: AdapterStore, name: str) -> str:
    """What model a checkpoint belongs to: a hash of names and shapes of the adapter's tensors and the base model's."""
    parts = [(name == BASE, adapters.outline(name))] + ([(True, adapters.outline(BASE))] if name != BASE else [])
    lines = [f"{base} {key} {list(t.shape)}" for base, state in parts for key, t in sorted(state.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def sample(adapters: AdapterStore) -> str:
    """Up to ``SIZE`` numbers of the base model, from all of its tensors alike, as text (fp32, base64).

    Reads that many numbers, not the model; waits for the device once. Of tensors that lie apart on ranks it reads the whole, so
    all ranks call it together.
    """
    outline = adapters.outline(BASE)
    keys = [key for key in sorted(outline) if outline[key].is_floating_point() and outline[key].numel()]
    order = {key: i for i, key in enumerate(keys[:: max(1, -(-len(keys) // SIZE))])}
    each = max(1, min(16, SIZE // max(1, len(order))))
    parts: dict[str, torch.Tensor] = {}
    for key, tensor in adapters.stream(BASE):
        if key in order:
            places = _places(order[key], tensor.numel(), each).to(tensor.device)
            parts[key] = whole(tensor.detach()).reshape(-1)[places].float()
    devices: dict[torch.device, list[torch.Tensor]] = {}
    for part in (parts[key] for key in order):
        devices.setdefault(part.device, []).append(part)
    numbers = [torch.cat(held).cpu() for held in devices.values()]
    raw = bytes(torch.cat(numbers).view(torch.uint8).tolist()) if numbers else b""
    return base64.b64encode(raw).decode()


def _numbers(text: str) -> torch.Tensor:
    raw = bytearray(base64.b64decode(text))
    return torch.frombuffer(raw, dtype=torch.float32) if raw else torch.zeros(0)


def _places(index: int, count: int, each: int) -> torch.Tensor:
    """Where the numbers of a tensor are taken: spread out, elsewhere in each tensor, and always the same."""
    digest = hashlib.sha256(f"{index} {count}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    return torch.tensor([(seed + k * (count // each + 1)) % count for k in range(min(each, count))])


def same(first: str, second: str) -> bool:
    """Whether two samples are of one model: equal numbers, or the one rounded to a type that the other was held in."""
    a, b = _numbers(first), _numbers(second)
    if a.shape != b.shape:
        return False
    forms = [[x, x.bfloat16().float(), x.half().float()] for x in (a, b)]
    equal = torch.zeros(len(a), dtype=torch.bool)
    for left, right in [(a, form) for form in forms[1]] + [(b, form) for form in forms[0]]:
        equal |= (left == right) | (left.isnan() & right.isnan())
    # one in bf16 and one in fp16: both are rounded, and differ by no more than that
    both = ((a == forms[0][1]) & (b == forms[1][2])) | ((a == forms[0][2]) & (b == forms[1][1]))
    near = (a - b).abs() <= 2.0**-8 * torch.maximum(a.abs(), b.abs()) + 2.0**-24
    return bool((equal | (both & near)).all())


def check(model: Sessions, session: Session, state: TrainerState, path: Path, *, strict: bool) -> None:
    """Whether an adapter meets the base model that it was trained on. Names and shapes can't tell: siblings have the same.

    Args:
        strict: raise CheckpointMismatch if not; else warn, since weights alone may be moved to a sibling on purpose.
    """
    saved = state.base_sample
    if session.name == BASE or saved is None or same(saved, sample(model.adapters)):
        return
    there, here = state.engine.get("model_id"), model.engine.describe().get("model_id")
    ids = f"it was trained on {there!r}, and this is {here!r}" if there != here else f"both are called {here!r}"
    why = f"the base model has other values than the one that the adapter was trained on ({ids})"
    if not strict:
        get_logger().warning("checkpoint '%s': %s", path, why)
        return
    way = "load that model (if its own weights were trained too, load these first), or take the adapter's weights alone"
    raise CheckpointMismatch(str(path / STATE_FILE), f"{why}; {way}: resume_only_model=True")
