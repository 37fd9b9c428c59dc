"""Each family in and out: the logits that transformers has, weights bit for bit; what would be wrong is refused by name."""

from __future__ import annotations

import importlib
import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from twinkle_core.errors import BadLayout, ModelNotLoaded, UnsupportedFamily
from twinkle_core.testing.ranks import run
from twinkle_megatron.cpu.runtime import RUNTIME
from twinkle_megatron.testing import SIZES, built, steps, windows, write_tiny

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
KNOWN = [
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen3", {}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_5", {}),
    ("qwen3_5", {"tie_word_embeddings": True}),
    ("qwen3_5_moe", {}),
    ("glm4", {}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"rope_parameters": DEEPSEEK_YARN}),
]


@pytest.fixture(scope="module")
def families():
    """A module that can be imported once something stands in for what is missing."""
    RUNTIME.install()
    return importlib.import_module("twinkle_megatron.families")


def logits_of(model, rows):
    with torch.no_grad():
        return [model(torch.tensor([row["input_ids"]])).logits[0] for row in rows]


def transformers_of(folder):
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()


def assert_near(found, expected):
    for row, logits in zip(found, expected, strict=True):
        torch.testing.assert_close(row[: len(logits)], logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "changes"), KNOWN, ids=[f"{f}-{'-'.join(c) or 'plain'}" for f, c in KNOWN])
def test_a_family_computes_what_transformers_does_and_is_written_as_it_was_read(tmp_path, families, family, changes):
    folder = write_tiny(tmp_path / "model", family, **changes)
    model = built(str(folder), {})
    rows = [*windows(1)[0], {"input_ids": list(range(1, 101)), "labels": list(range(1, 101))}]
    assert_near(model.forward_only(rows).logits, logits_of(transformers_of(folder), rows))
    model.save("whole", tmp_path)
    plain, written = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "whole"))
    assert written.keys() == plain.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in plain.items())
    model.set_optimizer("default", lr=1e-2)
    steps(model, windows(2))
    model.save("trained", tmp_path)
    trained = transformers_of(tmp_path / "trained")
    assert_near(model.forward_only(rows).logits, logits_of(trained, rows))
    untouched = [key for key in plain if families.stays(trained.config, key)]
    after = load_file(tmp_path / "trained" / "model.safetensors")
    assert [key for key in plain if torch.equal(after[key], plain[key]) and "e_score" not in key] == untouched
    model.load("whole", tmp_path)
    assert_near(model.forward_only(rows).logits, logits_of(transformers_of(folder), rows))


def test_a_model_without_an_output_layer_is_read_and_written_so(tmp_path):
    """As Qwen3-Embedding is: its tensors have no 'model.' before their names."""
    folder = write_tiny(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    file = folder / "model.safetensors"
    save_file({key.removeprefix("model."): t for key, t in load_file(file).items()}, file, metadata={"format": "pt"})
    model, rows = built(str(folder), {}), windows(1)[0]
    assert_near(model.forward_only(rows).logits, logits_of(transformers_of(folder), rows))
    model.save("whole", tmp_path)
    plain, written = load_file(file), load_file(tmp_path / "whole" / "model.safetensors")
    assert written.keys() == plain.keys() and all(torch.equal(written[key], plain[key]) for key in plain)
    model.load("whole", tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("Gemma2", {}, "'gemma2': mcore-bridge doesn't know"),
        ("Glm", {}, "'glm': mcore-bridge doesn't know"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "sliding_window=8"),
        ("Mistral", {"sliding_window": 4096}, "sliding_window=4096"),
        ("Qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ("Qwen2_5_VL", {}, "models that see"),
        ("InternVL", {}, "models that see"),
        ("Qwen3_5Text", {}, "'qwen3_5_text': mcore-bridge doesn't know"),
        ("Qwen3_5", {}, "vision tower"),
        ("Llama", {"hidden_act": "gelu"}, r"hidden_act='gelu'(.|\n)*TransformersModel"),
        ("Qwen3", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh'"),
        ("Llama", {"attention_bias": True}, "attention_bias=True"),
        ("Llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("Llama", {"rope_parameters": HALF}, r"partial_rotary_factor=0\.5"),
        ("Qwen3Moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ("Qwen3Moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("DeepseekV3", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("DeepseekV3", {"rope_interleave": False}, "rope_interleave=False"),
        ("DeepseekV4", {"num_hidden_layers": 4}, "'deepseek_v4': Megatron-Core refuses it"),
    ],
)
def test_a_family_that_would_be_wrong_is_refused_by_name(kind, settings, words):
    from twinkle_megatron.model import MegatronModel

    with pytest.raises(UnsupportedFamily, match=words):
        MegatronModel(config=getattr(transformers, f"{kind}Config")(**settings))


def test_a_family_of_remote_code_is_told(tmp_path):
    """InternLM 2.5, GLM-4 of the first kind: transformers has no code for them, and none from the folder is run."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "internlm2", "hidden_size": 8}))
    with pytest.raises(ModelNotLoaded, match="internlm2"):
        built(str(tmp_path), {})


def test_a_tensor_without_a_place_is_named(tmp_path):
    """Biases that mcore-bridge does not read: without them the model would compute something else, in silence."""
    folder = write_tiny(tmp_path / "model")
    file, bias = folder / "model.safetensors", "model.layers.0.self_attn.o_proj.bias"
    save_file({**load_file(file), bias: torch.ones(32)}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedFamily, match=r"self_attn\.o_proj\.bias' has no place"):
        built(str(folder), {})


def test_a_family_that_nobody_compared_is_said_so(families, caplog):
    with caplog.at_level(logging.WARNING), RUNTIME.active():
        families.convert("it", transformers.Qwen2MoeConfig(pad_token_id=None))
    assert "'qwen2_moe'" in caplog.text


def test_recurrent_layers_are_not_split_over_the_sequence(tmp_path):
    folder = write_tiny(tmp_path / "model", "qwen3_5")
    with pytest.raises(BadLayout, match="cp_size = 2"):
        built(str(folder), {"cp_size": 2})


def test_packed_rows_do_not_leak_through_recurrent_layers(tmp_path):
    model, rows = built(str(write_tiny(tmp_path / "model", "qwen3_5")), {}), windows(1)[0]
    apart = [model.forward_only([row]).logits[0] for row in rows]
    model.set_processor("input", padding_free=True)
    packed = model.forward_only(rows).logits
    packed = packed if packed.dim() == 2 else packed.reshape(-1, packed.shape[-1])
    torch.testing.assert_close(packed[: sum(map(len, apart))], torch.cat(apart), rtol=0, atol=1e-5)


class Family:
    """Run in processes of its own."""

    def train(self, rank, world_size, folder, layouts):
        found = []
        for sizes in layouts:
            model = built(folder, sizes)
            model.set_optimizer("default", lr=2e-3)
            found.append(steps(model, windows(3)))
            del model
        return found

    def experts(self, rank, world_size, folder, home, layouts):
        """A layout without expert ranks, then one with them."""
        for i, sizes in enumerate(layouts):
            model = built(folder, sizes)
            model.save(f"whole{i}", home)
            del model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("qwen3_5", [{"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}, {"pp_size": 2}, {"dp_size": 2}]),
        ("qwen3_5_moe", [{"tp_size": 2, "sequence_parallel": True, "ep_size": 2}, {"dp_size": 2, "ep_size": 2}]),
        ("deepseek_v3", [{"tp_size": 2, "sequence_parallel": True, "ep_size": 2}, {"pp_size": 2}]),
        ("mistral", [{"tp_size": 2}]),
    ],
)
def test_two_processes_train_a_family_as_one_does(tmp_path, family, layouts):
    folder = str(write_tiny(tmp_path / "model", family))
    (alone,) = run(Family, "train", 1, {"folder": folder, "layouts": [{}]}, timeout=200)[0]
    for rank in run(Family, "train", 2, {"folder": folder, "layouts": layouts}, timeout=400):
        for sizes, found in zip(layouts, rank, strict=True):
            for what in ("losses", "norms"):
                assert found[what] == pytest.approx(alone[what], rel=2e-5), (sizes, what)


@pytest.mark.slow
def test_experts_are_written_whole_after_a_layout_without_expert_ranks(moe, tmp_path):
    """mcore-bridge keeps the group of ranks that it writes experts over, of the first layout of a process."""
    layouts = [{"dp_size": 2}, {"dp_size": 2, "ep_size": 2}]
    run(Family, "experts", 2, {"folder": moe, "home": str(tmp_path), "layouts": layouts}, timeout=200)
    first, second = (load_file(tmp_path / f"whole{i}" / "model.safetensors") for i in range(2))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert SIZES["num_hidden_layers"] * 4 * 3 == sum(".experts." in key for key in first)
