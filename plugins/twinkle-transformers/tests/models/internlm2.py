"""A model that transformers does not have, as its repository brings it: the layout of InternLM2.5 in code of its own.

``tok_embeddings`` for the ids, ``output`` for the logits, ``attention.wqkv`` for queries, keys and values as one matrix: for
each group of heads its queries, then the key, then the value. ``feed_forward`` is ``w2(silu(w1 x) * w3 x)``. Copied into a
folder beside a config with an ``auto_map``, it is loaded with ``trust_remote_code=True``.
"""

import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class InternLM2Config(PretrainedConfig):
    model_type = "internlm2"

    def __init__(
        self,
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=1000000.0,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        **kwargs,
    ):
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads, self.rope_theta, self.rms_norm_eps = num_key_value_heads, rope_theta, rms_norm_eps
        self.initializer_range = initializer_range
        super().__init__(**{"tie_word_embeddings": False, **kwargs})


class InternLM2RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotated(x, positions, theta):
    """``x`` [B, H, T, D] turned by its positions [B, T]; halves of D are pairs."""
    half = x.shape[-1] // 2
    speed = theta ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * speed
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


class InternLM2Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.groups, self.heads = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        self.width, self.theta = config.hidden_size // config.num_attention_heads, config.rope_theta
        self.wqkv = nn.Linear(config.hidden_size, self.groups * (self.heads + 2) * self.width, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, sees, positions):
        count, length, size = x.shape
        fused = self.wqkv(x).view(count, length, self.groups, self.heads + 2, self.width)
        query = fused[..., : self.heads, :].flatten(2, 3).transpose(1, 2)
        key, value = (fused[..., i, :].transpose(1, 2).repeat_interleave(self.heads, 1) for i in (-2, -1))
        query, key = rotated(query, positions, self.theta), rotated(key, positions, self.theta)
        found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=sees)
        return self.wo(found.transpose(1, 2).reshape(count, length, size))


class InternLM2MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class InternLM2DecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention, self.feed_forward = InternLM2Attention(config), InternLM2MLP(config)
        self.attention_norm = InternLM2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = InternLM2RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, sees, positions):
        x = x + self.attention(self.attention_norm(x), sees, positions)
        return x + self.feed_forward(self.ffn_norm(x))


class InternLM2PreTrainedModel(PreTrainedModel):
    config_class = InternLM2Config
    base_model_prefix = "model"
    _supports_sdpa = True
    _no_split_modules = ["InternLM2DecoderLayer"]


class InternLM2Model(InternLM2PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(InternLM2DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = InternLM2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self):
        return self.tok_embeddings

    def set_input_embeddings(self, value):
        self.tok_embeddings = value

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None):
        length = input_ids.shape[1]
        places = torch.arange(length, device=input_ids.device)
        sees = (places[:, None] >= places[None, :])[None, None]
        if attention_mask is not None:
            sees = sees & ((attention_mask[:, None, None, :] == 1) | torch.eye(length, dtype=torch.bool, device=places.device))
        positions = places[None].expand_as(input_ids) if position_ids is None else position_ids
        x = self.tok_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, sees, positions)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class InternLM2ForCausalLM(InternLM2PreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = InternLM2Model(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.output

    def set_output_embeddings(self, value):
        self.output = value

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, labels=None):
        hidden = self.model(input_ids, attention_mask, position_ids).last_hidden_state
        return CausalLMOutputWithPast(logits=self.output(hidden))
