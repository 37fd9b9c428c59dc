"""Patch ``fast_lora``: peft's LoRA layers without their intermediate tensors.

peft computes ``W x``, ``A x``, ``B A x``, its product with the scale and the sum one after the other; under autocast it widens
x first, for each layer anew. Core's linear layer with LoRA adds in place, and keeps x and ``A x``. The layers stay peft's own,
so switching, merging, saving and whatever asks for their type go on as before: only the method ``forward`` of each is set.
"""

from __future__ import annotations

import types
from collections.abc import Collection
from typing import Any

from peft.tuners.lora.layer import Linear as LoraLayer
from torch import Tensor, nn

from twinkle_core.contracts.patch import Patch
from twinkle_core.errors import PatchOrder
from twinkle_core.ops.chunks import is_plain
from twinkle_core.ops.lora_linear import lora_linear, one_type
from twinkle_transformers.tree import peft_layers


class FastLora(Patch):
    """Plain LoRA on linear layers computed by core, equal to peft's to rounding.

    What it can do is asked at each call: one active adapter, not merged, without a variant (DoRA, aLoRA, ...) or a bias of its
    own, over an ``nn.Linear`` that is frozen and whose forward nobody has changed. Dropout draws the numbers that it draws in
    peft. All else goes by peft's own forward. Adapters that are added while the patch is applied are reached too.
    """

    def __init__(self) -> None:
        self._patched: list[tuple[Any, Any]] = []  # (layer, its new forward)

    def apply(self, model: Any) -> None:
        adapters = getattr(model, "adapters", None)
        followers = getattr(adapters, "followers", None)
        if followers is not None and self.follow not in followers:
            followers.append(self.follow)
        self.follow(peft_layers(getattr(model, "module", model)))

    def follow(self, layers: Collection[Any]) -> None:
        """Set the forward of layers that have none set yet; those that are not peft's LoRA on linear layers are left alone.

        Args:
            layers: all of peft's layers in the model, after adapters have been added or removed.
        """
        live = set(layers)
        self._patched = [(layer, own) for layer, own in self._patched if layer in live]
        for layer in layers:
            if type(layer) is LoraLayer and "forward" not in vars(layer):
                layer.forward = types.MethodType(forward, layer)
                self._patched.append((layer, layer.forward))

    def undo(self, model: Any) -> None:
        for layer, own in self._patched:
            found = vars(layer).get("forward")
            if found is not own:
                raise PatchOrder(type(self).__name__, getattr(found, "__qualname__", repr(found)))
        followers = getattr(getattr(model, "adapters", None), "followers", None)
        if followers is not None and self.follow in followers:
            followers.remove(self.follow)
        while self._patched:
            del self._patched.pop()[0].forward


def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In place of the forward of one of peft's LoRA layers."""
    name = _adapter(self)
    if name is None or args or kwargs:
        return LoraLayer.forward(self, x, *args, **kwargs)  # type: ignore[no-any-return]
    base: Any = self.base_layer
    a, b, dropout = self.lora_A[name].weight, self.lora_B[name].weight, self.lora_dropout[name]
    if not one_type(x, base.weight, a, b):
        return LoraLayer.forward(self, x)  # type: ignore[no-any-return]
    dropped = None
    if type(dropout) is not nn.Identity and not (type(dropout) is nn.Dropout and (dropout.p == 0 or not dropout.training)):
        dropped = dropout(self._cast_input_dtype(x, a.dtype))
    return lora_linear(x, base.weight, base.bias, a, b, self.scaling[name], dropped=dropped)


def _adapter(layer: Any) -> str | None:
    """The one adapter that computes here, if core can do what it does."""
    active = layer.active_adapters
    if len(active) != 1 or layer.disable_adapters or layer.merged or active[0] not in layer.lora_A:
        return None
    name: str = active[0]
    base, parts = layer.base_layer, (layer.lora_A[name], layer.lora_B[name])
    if name in layer.lora_variant or parts[1].bias is not None or layer.fan_in_fan_out:
        return None
    plain = is_plain(base) and not base.weight.requires_grad and all(is_plain(part) for part in parts)
    return name if plain and not _watched(base, *parts) else None


def _watched(*modules: nn.Module) -> bool:
    """Whether hooks wait for these modules to be called, forward or backward."""
    everywhere = nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    return bool(everywhere) or any(m._backward_hooks or m._backward_pre_hooks for m in modules)
