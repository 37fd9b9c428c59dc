"""From names, folders and configs to a model; what can't be loaded is told at once."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaForSequenceClassification

from twinkle_core.errors import (
    BadArgument,
    BadGeneration,
    BadLaunch,
    CheckpointDamaged,
    Fp8Unavailable,
    ManyProcesses,
    ModelNotLoaded,
    NoModel,
    NoTrainableParameters,
    ReservedArgument,
    TwinkleError,
    UnknownModelClass,
    UnknownOption,
    WrongArgument,
    WrongType,
)
from twinkle_core.mesh import DeviceMesh
from twinkle_transformers.load import set_checkpointing
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import ToyL, ToyLConfig, tiny_config, write_tiny_llama


def model(*args, **kwargs):
    return TransformersModel(*args, **{"mixed_precision": "no", **kwargs})


def test_class_name_and_default_load_the_same(tiny, ids):
    made = [
        model(model_id=tiny),
        model(AutoModelForCausalLM, tiny),
        model("AutoModelForCausalLM", str(tiny)),
        model(LlamaForCausalLM, model_id=tiny),
        model(model_cls="LlamaForCausalLM", model_id=tiny),
        model(None, tiny),
    ]
    reference = AutoModelForCausalLM.from_pretrained(tiny)(input_ids=ids).logits
    for m in made:
        assert type(m.module) is LlamaForCausalLM
        assert torch.equal(m.module(input_ids=ids).logits, reference)


def test_config_alone_gives_random_weights():
    for m in (
        model(config=tiny_config()),
        model(LlamaForCausalLM, config=tiny_config()),
        model("LlamaForCausalLM", config=tiny_config(num_hidden_layers=1), num_hidden_layers=2),
        model(LlamaForCausalLM, vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    ):
        assert m.module.config.num_hidden_layers == 2
        assert m.module.config.hidden_size == 32
    assert model(ToyL, config=ToyLConfig(3.0)).module.lin.weight.item() == 3.0


def test_single_values_of_the_config_reach_it(tiny):
    m = model(model_id=tiny, attention_dropout=0.25, attn_implementation="eager")
    assert m.module.config.attention_dropout == 0.25
    assert m.module.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"mixed_precison": "no"}, "mixed_precision"),
        ({"gradient_checkpoint": True}, "gradient_checkpointing"),
        ({"devicemesh": None}, "device_mesh"),
        ({"attn_implementatoin": "sdpa"}, "attn_implementation"),
        ({"attention_droput": 0.1}, "attention_dropout"),
    ],
)
def test_misspelt_keyword_is_told_with_the_right_one(tiny, given, meant):
    for source in ({"model_id": tiny}, {"config": tiny_config()}):
        with pytest.raises(WrongArgument, match=f"Did you mean '{meant}'"):
            TransformersModel(**source, **given)


def test_unknown_values(tiny):
    with pytest.raises(UnknownModelClass, match="Did you mean 'AutoModelForCausalLM'"):
        model("AutoModelForCasualLM", tiny)
    with pytest.raises(UnknownModelClass, match="model_id="):
        model(str(tiny))
    with pytest.raises(UnknownOption, match="bf16"):
        TransformersModel(model_id=tiny, mixed_precision="bf61")
    with pytest.raises(UnknownOption, match="native_fsdp"):
        model(model_id=tiny, strategy="native_fdsp")
    with pytest.raises(UnknownOption, match="skip"):
        model(model_id=tiny, on_nonfinite="ignore")
    with pytest.raises(WrongArgument, match="init_scale"):
        TransformersModel(model_id=tiny, mixed_precision="fp16", grad_scaler_config={"init_scal": 2.0})
    with pytest.raises(NoModel, match="model_id"):
        model()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("modl_id", "model_id"),
        ("model", "model_id"),
        ("modelid", "model_id"),
        ("confg", "config"),
        ("devicemesh", "device_mesh"),
    ],
)
def test_a_misspelt_model_is_told_with_the_right_word(tiny, given, meant):
    with pytest.raises(WrongArgument, match=f"has no parameter '{given}'. Did you mean '{meant}'"):
        model(**{given: tiny})
    with pytest.raises(WrongArgument, match=f"has no parameter '{given}'. Did you mean '{meant}'"):
        model(LlamaForCausalLM, **{given: tiny})


def test_without_a_model_words_that_name_none_are_shown():
    with pytest.raises(NoModel, match=r"model_id=(.|\n)*num_hidden_layers=\.\.\., dtype=\.\.\., names no model"):
        model(num_hidden_layers=2, dtype="auto")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gradient_checkpointing", "yes"),
        ("ddp_config", 5),
        ("fsdp_config", [1]),
        ("grad_scaler_config", 5),
        ("config", 5),
        ("device_mesh", 5),
        ("memory_efficient_init", "no"),
        ("model_id", 5),
    ],
)
def test_values_of_a_wrong_type_are_told(tiny, name, value):
    with pytest.raises(WrongType, match=rf"TransformersModel: {name}={re.escape(repr(value))} is a"):
        model(**{"model_id": tiny, name: value})


def test_fp8_names_what_it_needs(tiny):
    with pytest.raises(Fp8Unavailable, match=r"H100.*transformer-engine"):
        TransformersModel(model_id=tiny, mixed_precision="fp8")


def test_missing_path_is_told_at_once_without_a_hub(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a network connection was tried")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(TwinkleError, match="no-such-folder"):
        model(model_id=tmp_path / "no-such-folder")
    with pytest.raises(TwinkleError, match="no-such-folder"):
        model(model_id="./no-such-folder/at/all")


@pytest.mark.parametrize("hub", ["hf", "ms"])
def test_hub_id_without_network_says_so_and_the_way_out(hub):
    with pytest.raises(TwinkleError, match=r"(?s)someone/some-model.*local"):
        model(model_id=f"{hub}://someone/some-model")


def test_folder_that_is_no_model(tmp_path):
    with pytest.raises(ModelNotLoaded, match=str(tmp_path)):
        model(model_id=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelNotLoaded, match=r"safetensors"):
        model(model_id=tmp_path)


def test_a_mesh_of_another_number_of_processes_is_refused(tiny, monkeypatch):
    with pytest.raises(ManyProcesses, match=r"has 4 rank\(s\), and 1 process is running(?s:.*)torchrun --nproc-per-node 4"):
        model(model_id=tiny, device_mesh=DeviceMesh.from_sizes(dp_size=2, fsdp_size=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # another test's group may be there
    with pytest.raises(ManyProcesses, match="2 processes are running"):
        model(model_id=tiny, device_mesh=DeviceMesh.from_sizes(world_size=1))


def test_a_rank_that_is_another_in_the_process_group_is_refused(tiny, monkeypatch):
    """A group made by hand says nothing to the mesh: all processes would train the first one's rows."""
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(torch.distributed, name, lambda *group, value=value: value)
    with pytest.raises(BadLaunch, match="is rank 1 of torch's process group, and rank 0 by RANK"):
        model(model_id=tiny, device_mesh=DeviceMesh.from_sizes(dp_size=2).at(0))


def test_accepted_without_effect_in_one_process(tiny):
    m = model(
        model_id=tiny,
        device_mesh=DeviceMesh.from_sizes(device_type="cpu"),
        strategy="native_fsdp",
        ddp_config={"bucket_cap_mb": 1},
        fsdp_config={"reshard_after_forward": True},
        memory_efficient_init=True,
    )
    assert m.module.device.type == "cpu"
    assert "native_fsdp" in m.get_train_configs()


def test_device_that_is_not_there(tiny):
    kind = "cuda" if not torch.cuda.is_available() else "xpu"
    with pytest.raises(TwinkleError, match=kind):
        model(model_id=tiny, device_mesh=DeviceMesh.from_sizes(device_type=kind))


@pytest.mark.parametrize(("has_bf16", "lines"), [(False, 1), (True, 0)])
def test_one_line_about_slow_bf16(tiny, monkeypatch, caplog, has_bf16, lines):
    monkeypatch.setattr("twinkle_core.hardware.cpu_has_bf16", lambda: has_bf16)
    model(model_id=tiny, mixed_precision="no", device_mesh=DeviceMesh.from_sizes(device_type="cpu"))
    assert not caplog.records
    TransformersModel(model_id=tiny, device_mesh=DeviceMesh.from_sizes(device_type="cpu"))
    said = [r for r in caplog.records if "mixed_precision='no'" in r.getMessage() and "\n" not in r.getMessage()]
    assert len(said) == lines


def test_checkpointing_only_when_asked(tiny):
    def on(m):
        return any(getattr(x, "gradient_checkpointing", False) for x in m.module.modules())

    assert not on(model(model_id=tiny))
    assert not on(model(model_id=tiny, gradient_checkpointing=False))
    assert on(model(model_id=tiny, gradient_checkpointing=True))


def test_a_tied_weight_is_counted_once(tiny, untied):
    for folder, count in ((tiny, 27_040), (untied, 27_040 + 264 * 32)):
        built = model(model_id=folder)
        assert built.adapters.size() == (count, "in the base model") == (built.module.num_parameters(), "in the base model")
        built.add_adapter_to_model("a", LoraConfig(r=2, target_modules="all-linear"))
        assert built.adapters.size()[0] == count


def test_two_models_of_one_process_differ_in_everything(tiny, untied):
    one = TransformersModel(model_id=tiny, mixed_precision="bf16")
    two = TransformersModel(LlamaForSequenceClassification, untied, mixed_precision="fp16", num_labels=3)
    three = model(ToyL, config=ToyLConfig())
    assert [m.engine.precision.mixed for m in (one, two, three)] == ["bf16", "fp16", "no"]
    assert (one.engine.scaler is None, two.engine.scaler is None) == (True, False)


def write_gguf(path, hidden=32, layers=2, vocabulary=40):
    """The smallest llama that a GGUF reader takes."""
    import gguf
    import numpy as np

    writer, random = gguf.GGUFWriter(str(path), "llama"), np.random.default_rng(0)
    for add, value in (
        (writer.add_context_length, 64), (writer.add_embedding_length, hidden), (writer.add_block_count, layers),
        (writer.add_feed_forward_length, 64), (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 10000.0), (writer.add_vocab_size, vocabulary),
    ):  # fmt: skip
        add(value)
    shapes = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,), "output.weight": (vocabulary, hidden)}
    for i in range(layers):
        for name, shape in (
            ("attn_norm", (hidden,)), ("ffn_norm", (hidden,)), ("attn_q", (hidden, hidden)), ("attn_k", (hidden // 2, hidden)),
            ("attn_v", (hidden // 2, hidden)), ("attn_output", (hidden, hidden)), ("ffn_gate", (64, hidden)),
            ("ffn_up", (64, hidden)), ("ffn_down", (hidden, 64)),
        ):  # fmt: skip
            shapes[f"blk.{i}.{name}.weight"] = shape
    for name, shape in shapes.items():
        writer.add_tensor(name, random.normal(0, 0.2, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file_is_read_by_its_path_or_by_its_name(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for m in (model(model_id=tmp_path / "tiny.gguf"), model(model_id=tmp_path, gguf_file="tiny.gguf")):
        assert all(torch.equal(v, m.module.state_dict()[k]) for k, v in reference.state_dict().items())


def test_ready_made_optimizer_has_fp32_weights_too(tiny, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(tmp_path)
    for ready in (True, False):
        m = TransformersModel(model_id=tmp_path)
        assert {p.dtype for p in m.module.parameters()} == {torch.bfloat16}
        m.set_optimizer(torch.optim.AdamW(m.module.parameters()) if ready else "adamw")
        assert {p.dtype for p in m.module.parameters()} == {torch.float32}
        m.forward_backward([{"input_ids": [5, 6], "labels": [6, 7]}])
        m.clip_grad_and_step()


@pytest.mark.filterwarnings("error")
def test_switching_checkpointing_asks_transformers_by_its_present_names(llama):
    flags = lambda: {m.gradient_checkpointing for m in llama.modules() if hasattr(m, "gradient_checkpointing")}  # noqa: E731
    for wanted, expected in ((True, True), (None, False), (True, True), (False, False)):
        set_checkpointing(llama, wanted)
        assert flags() == {expected}


def changed(tmp_path, change, **sizes):
    """A tiny Llama's folder whose tensors ``change`` has changed."""
    folder = write_tiny_llama(tmp_path / "changed", **sizes)
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_file_that_is_cut_short_is_told(tmp_path):
    folder = write_tiny_llama(tmp_path / "cut")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ModelNotLoaded, match=r"cut' could not be loaded: .*incomplete"):
        TransformersModel(model_id=folder)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_whose_files_are_not_what_was_saved_is_told(tmp_path, sharded):
    """So that nothing damaged is written anew with hashes that fit it."""
    folder = Path(TransformersModel(config=tiny_config()).save("saved", tmp_path, sharded=sharded))
    TransformersModel(model_id=folder)
    file = next(folder.rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=file.name):
        TransformersModel(model_id=folder)
    (folder / "trainer_state.json").write_text('{"log_history": [], "global_step": 3}')  # as transformers' Trainer writes it
    TransformersModel(model_id=folder)


def _lose(state):
    del state["model.layers.1.mlp.up_proj.weight"]


def _rename(state):
    for key in [k for k in state if ".layers.1." in k]:
        state[key.replace(".layers.1.", ".layers.7.")] = state.pop(key)


def _add(state):
    for key in [k for k in state if ".layers.1." in k]:
        state[key.replace(".layers.1.", ".layers.7.")] = state[key].clone()


@pytest.mark.parametrize(
    ("change", "sizes", "text"),
    [
        (_lose, {}, r"lack 1 weight\(s\) .*random numbers: model.layers.1.mlp.up_proj.weight"),
        (_rename, {}, r"lack 9 weight\(s\).*; its files hold 9 weight\(s\)"),
        (_add, {}, r"hold 9 weight\(s\) .*no place for: model.layers.7.input_layernorm.weight"),
        (lambda s: s.pop("lm_head.weight"), {"tie_word_embeddings": False}, "lack 1 .*: lm_head.weight"),
    ],
)
def test_weights_that_are_not_in_the_files_are_no_random_numbers(tmp_path, change, sizes, text):
    with pytest.raises(ModelNotLoaded, match=text):
        TransformersModel(model_id=changed(tmp_path, change, **sizes))


def test_a_new_head_and_layers_left_out_on_purpose_are_told(tiny, caplog):
    TransformersModel(model_id=tiny)
    assert not caplog.records
    TransformersModel("AutoModelForSequenceClassification", model_id=tiny)
    assert "LlamaForSequenceClassification: 1 weight(s) are new, with random numbers: score.weight" in caplog.text
    caplog.clear()
    TransformersModel(model_id=tiny, num_hidden_layers=1)
    assert "9 weight(s) are in its files, and not used: model.layers.1.input_layernorm.weight" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_tokens": 5}, WrongArgument, "no parameter 'max_tokens'. Did you mean 'max_new_tokens'"),
        ({"max_new_tokens": 0}, BadArgument, "max_new_tokens=0"),
        ({"return_dict_in_generate": True}, BadArgument, "texts are given back"),
        ({"num_return_sequences": 2}, BadArgument, "each row gets one text"),
        ({"input_ids": [1]}, ReservedArgument, "input_ids"),
        ({"do_sample": True, "temperature": -1.0}, BadGeneration, "generate.*temperature=-1.0.*strictly positive"),
    ],
)
def test_options_of_generate_that_give_no_text_are_told(tiny, options, error, text):
    model = TransformersModel(model_id=tiny, mixed_precision="no")
    model.set_template("chat", model_id=tiny)
    row = {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(error, match=text):
        model.generate([row, row], **options)
    model.module.generation_config.do_sample, model.module.generation_config.num_return_sequences = True, 2
    assert len(model.generate([row, row], max_new_tokens=2)) == 2


def test_an_adapter_that_is_not_trained_is_told_before_a_forward(tiny):
    model = TransformersModel(model_id=tiny, mixed_precision="no")
    model.add_adapter_to_model("a", LoraConfig(target_modules=["q_proj"], inference_mode=True))
    with pytest.raises(NoTrainableParameters, match="adapter 'a' has no trainable parameter"):
        model.forward_backward({"input_ids": [3, 4], "labels": [4, 5]})
