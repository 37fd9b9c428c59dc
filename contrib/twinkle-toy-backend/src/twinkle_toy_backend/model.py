"""ToyModel: a language model of two layers with all verbs of twinkle. The verbs are core's; here is what they work on."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from twinkle_core.mesh import DeviceMesh
from twinkle_core.runtime.dispatch import remote_class
from twinkle_core.train.verbs import SessionModel
from twinkle_core.types import InputFeature
from twinkle_toy_backend.adapters import LowRank, ToyAdapters
from twinkle_toy_backend.engine import ToyEngine


class Layer(nn.Module):
    """Self-attention with one head, then an MLP, each added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = LowRank(width, 3 * width)
        self.up, self.down = LowRank(width, 2 * width), LowRank(2 * width, width)

    def forward(self, x: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attend(self.norms[0](x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class ToyLM(nn.Module):
    """Token ids ``[B, T]`` to hidden states ``[B, T, D]``; ``output_layer`` makes logits of them."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Layer(width), Layer(width)])
        self.norm = nn.LayerNorm(width)
        self.output_layer = nn.Linear(width, vocabulary)

    def forward(self, inputs: InputFeature) -> torch.Tensor:
        ids = inputs["input_ids"]
        past = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        # rows that are packed into one sequence start at position 0 each; a token sees those of its own row alone
        row = (inputs["position_ids"] == 0).cumsum(1)
        sees = past & (row[:, :, None] == row[:, None, :])
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, sees)
        return self.norm(x)  # type: ignore[no-any-return]


@remote_class(execute="all")
class ToyModel(SessionModel):
    """A language model of two layers, with random weights, and the state of its training.

    Args:
        vocabulary: token ids are 0 … vocabulary - 1.
        width: of the hidden states.
        device_mesh: default what torchrun's environment says, one process without it. Only data ranks (``dp_size``).
        seed: of the weights; the same on all ranks.

    Raises:
        UnknownOption: a mesh with other dimensions than ``dp``.
    """

    def __init__(self, vocabulary: int = 64, width: int = 32, *, device_mesh: DeviceMesh | None = None, seed: int = 0) -> None:
        with torch.random.fork_rng():  # weights by the seed alone, and the caller's random state as it was
            torch.manual_seed(seed)
            module = ToyLM(vocabulary, width)
        super().__init__(ToyEngine(module, mesh=device_mesh), ToyAdapters(module))
