"""A value head (L2)."""

from __future__ import annotations

from typing import Any

import torch

from twinkle_core.contracts.patch import Patch
from twinkle_core.errors import PatchRefused
from twinkle_core.patches import heads


class ValueHeadPatch(Patch):
    """One number a token, linear in the network's last hidden states: what ``outputs["values"]`` and the loss ``ppo`` need.

    The head is trained and saved with the network, in float32. Apply it before ``add_adapter_to_model``: each adapter then
    trains and saves a head of its own (the base model's stays at zero), and before ``set_optimizer``. A checkpoint's head is
    loaded by ``load`` or ``resume_from_checkpoint``, once the patch is applied.

    Args:
        hidden_size: D of the hidden states; None: as the network's config says.
    """

    def __init__(self, hidden_size: int | None = None) -> None:
        if hidden_size is not None and (not isinstance(hidden_size, int) or isinstance(hidden_size, bool) or hidden_size < 1):
            raise PatchRefused.argument(type(self).__name__, "hidden_size", hidden_size, "a whole number from 1 up, or None")
        self.hidden_size = hidden_size
        self._head: heads.ValueHead | None = None

    def apply(self, model: Any) -> None:
        """Give ``model.module`` the head, all zeros.

        Raises:
            PatchRefused: it has something of that name, adapters that would not train it, or no hidden size.
        """
        if self._head is not None:
            return
        name, module = type(self).__name__, model.module
        if adapters := model.adapters.names():
            what = f"its adapter '{adapters[0]}' was made without a value head, and would not train it"
            raise PatchRefused.of_model(name, type(module).__name__, what, "Apply the patch before add_adapter_to_model")
        width = self.hidden_size or _width(module)
        if width is None:
            what = "its config says no hidden_size"
            raise PatchRefused.of_model(
                name, type(module).__name__, what, "Give it: apply_patch('value_head', hidden_size=...)"
            )
        first = next(module.parameters(), None)
        device = first.device if first is not None else torch.device("cpu")
        head = heads.ValueHead(width, device)
        heads.put(name, module, heads.VALUE_HEAD, head)
        head.training = module.training
        self._head = head

    def undo(self, model: Any) -> None:
        """Take it away again, with what it has learned.

        Raises:
            PatchOrder: adapters have copies of it.
        """
        if self._head is not None:
            heads.take(type(self).__name__, model.module, heads.VALUE_HEAD, self._head)
            self._head = None


def _width(module: Any) -> int | None:
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "hidden_size", None)
    return size if isinstance(size, int) else None
