"""Tokens shared by the ranks of ``tp`` between layers (``sequence_parallel``): residuals and norms see a part of the rows.

What lies between two residuals (attention, a feed-forward) is a region: it gets whole rows, gathered as it is entered, and each
rank keeps its own tokens of what it gives. Where a region is made of layers that are cut and nothing else, the sum over ranks
that its end needs anyhow is spread over the tokens, so nothing more is sent than without; any other region computes as it does
without, and its result is cut.

Source of the method: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from twinkle_core.errors import BadLayout, NotComputed
from twinkle_core.types import IGNORE_INDEX, InputFeature, ModelOutput
from twinkle_transformers.sequence import BY_TOKEN, padded

#: the axis of tokens of hidden states ``[B, T, D]``
_TOKENS = Shard(1)
_WAY = "where sequence_parallel shares tokens; leave it off"


class TokenParts:
    """A model between whose layers each rank of ``tp`` has a part of the tokens.

    Args:
        owner: who is constructed, for error texts.
        module: its layers in ``styles`` are cut already, but for their way of computing; is changed in place.
        mesh: torch's, of the ranks.
        plan: how layers and parameters are cut, by full names.
        plain: styles of layers that compute with their own part of the weights alone: ``colwise`` and ``rowwise``, and what
            needs no forward of its own.

    Raises:
        BadLayout: it isn't known where its layers begin and end.
    """

    def __init__(self, owner: str, module: Any, mesh: Any, plan: Mapping[str, str], plain: frozenset[str]) -> None:
        self.mesh, self.size = mesh, int(mesh.size())
        self._shared = False
        self._blocks = _blocks(owner, module, plan)
        names = {m: name for name, m in module.named_modules()}
        #: cut layers of regions that are made of them alone
        self.linear: dict[torch.nn.Module, str] = {}
        self._regions: set[torch.nn.Module] = set()
        for block in self._blocks:
            for child in block.children():
                if not any(True for _ in child.parameters()) or "norm" in type(child).__name__.lower():
                    continue
                own = {m: plan.get(names[m]) for m in child.modules() if m._parameters}
                cut = {m: style for m, style in own.items() if style in ("colwise", "rowwise")}
                ends = sum(style == "rowwise" for style in own.values())
                alone = ends == 1 and set(own.values()) <= plain and all(isinstance(m, torch.nn.Linear) for m in cut)
                if alone:
                    self.linear.update(cut)
                self._regions.add(child)
                self._enclose(child, alone)
        _wrap(self._blocks[0], lambda x: self._laid(x, Replicate(), _TOKENS), None)
        _wrap(self._blocks[-1], None, lambda x: self._laid(x, _TOKENS, Replicate()))
        for m, style in self.linear.items():
            self.compute(m, style)

    # ------------------------------------------------------------------------------------------------ layers

    def _laid(self, x: torch.Tensor, have: Any, want: Any, partial: bool = False) -> torch.Tensor:
        """This rank's part of ``x`` laid otherwise. ``partial``: gradients that come back are parts of a sum."""
        if not self._shared:
            return x
        laid = DTensor.from_local(x, self.mesh, [have], run_check=False).redistribute(placements=[want])
        return laid.to_local(grad_placements=[Partial()] if partial else None)

    def _enclose(self, region: torch.nn.Module, alone: bool) -> None:
        end = None if alone else lambda x: self._laid(x, Replicate(), _TOKENS)
        _wrap(region, lambda x: self._laid(x, _TOKENS, Replicate(), partial=alone), end)

    def compute(self, layer: Any, style: str) -> None:
        """How a cut layer of a region computes: with its own part of the weights. One that is cut by rows ends with a sum over
        ranks, each of which keeps its tokens of it."""
        if style == "colwise":
            ALL_PARALLEL_STYLES["local_params"].install_forward(layer, self.mesh)
            return
        own = layer.forward

        def rows(x: torch.Tensor) -> torch.Tensor:
            bias = layer._parameters.get("bias")
            layer._parameters["bias"] = None  # added once, after the sum
            try:
                with ALL_PARALLEL_STYLES["local_params"].context_around_forward(layer, self.mesh):
                    part = own(x)
            finally:
                layer._parameters["bias"] = bias
            summed = DTensor.from_local(part, self.mesh, [Partial()], run_check=False)
            y = summed.redistribute(placements=[_TOKENS if self._shared else Replicate()]).to_local()
            return y if bias is None else y + (bias.to_local() if isinstance(bias, DTensor) else bias)

        layer.forward = rows

    def partial(self) -> Iterator[torch.nn.Parameter]:
        """Parameters of which each rank has a gradient from its own tokens alone."""
        for block in self._blocks:
            yield from block.parameters(recurse=False)
            for child in block.children():
                if child not in self._regions:
                    yield from child.parameters()
        for layer, style in self.linear.items():
            bias = layer._parameters.get("bias")
            if style == "rowwise" and bias is not None:
                yield bias

    # ------------------------------------------------------------------------------------------------ a forward

    @contextlib.contextmanager
    def sharing(self) -> Iterator[None]:
        """Inside, a forward, and the backward that may run parts of it again, share tokens. Outside (generating, asking a
        model what it is like) each rank has them all."""
        before, self._shared = self._shared, True
        try:
            yield
        finally:
            self._shared = before

    def pad(self, name: str, batch: InputFeature) -> InputFeature:
        """A batch whose tokens can be shared evenly.

        Raises:
            NotComputed: the batch holds more than texts.
        """
        ids: Any = batch.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            raise NotComputed(name, "outputs", f"without input_ids: only texts can be shared; {_WAY}")
        length = ids.shape[1]
        extra = -length % self.size
        if not extra:
            return batch
        found: dict[str, Any] = dict(batch)
        for key, value in batch.items():
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length:
                found[key] = padded(value, extra, IGNORE_INDEX if key == "labels" else 0)
        if found.get("seq_lens") is not None:
            found["seq_lens"] = [*found["seq_lens"], extra]
        if found.get("attention_mask") is None and found.get("position_ids") is None:
            found["attention_mask"] = padded(torch.ones_like(ids), extra, 0)
        return found  # type: ignore[return-value]

    def trim(self, output: ModelOutput, length: int) -> ModelOutput:
        """Outputs of the batch as it was before ``pad``."""
        for key in (*BY_TOKEN, "hidden"):
            if isinstance(value := output.get(key), torch.Tensor) and value.shape[1] > length:
                output[key] = value[:, :length]
        return output


def _blocks(owner: str, module: Any, plan: Mapping[str, str]) -> list[torch.nn.Module]:
    """The layers between which tokens are shared: the elements of the one list that all cut layers are in."""
    modules = dict(module.named_modules())
    lists: set[str] = set()
    for name in plan:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is not None and at + 1 < len(parts):
            lists.add(".".join(parts[:at]))
    if len(lists) != 1:
        kind = type(module).__name__
        raise BadLayout(owner, f"sequence_parallel: the layers of {kind} are not one list ({sorted(lists)}); leave it off")
    return list(modules[lists.pop()].children())


def _wrap(
    module: Any, begin: Callable[[torch.Tensor], torch.Tensor] | None, end: Callable[[torch.Tensor], torch.Tensor] | None
) -> None:
    """Change the first argument of a module's forward, and the first value of what it gives."""
    own = module.forward
    first = next(iter(inspect.signature(own).parameters))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if begin is not None and args:
            args = (begin(args[0]), *args[1:])
        elif begin is not None:
            kwargs[first] = begin(kwargs[first])
        result = own(*args, **kwargs)
        if end is None:
            return result
        return (end(result[0]), *result[1:]) if isinstance(result, tuple) else end(result)

    module.forward = forward
