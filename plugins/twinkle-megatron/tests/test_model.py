"""What is refused, and how: before anything is made, with the way out."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinkle_core.errors import (
    BadArgument,
    BadInputs,
    BadLaunch,
    BadLayout,
    BadMesh,
    BadScheduler,
    ModelNotLoaded,
    NeedsLibrary,
    NoModel,
    OnlyOwn,
    UnknownOption,
    WrongArgument,
)
from twinkle_core.mesh import DeviceMesh
from twinkle_megatron import model as module
from twinkle_megatron.cpu import runtime
from twinkle_megatron.model import MegatronModel
from twinkle_megatron.testing import built, windows


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp_size": 3}, "tp_size = 3 must divide the model's num_attention_heads = 4; 4 / 3 = 1.333"),
        ({"tp_size": 4}, "num_query_groups = 2"),
        ({"pp_size": 3}, "num_layers = 4"),
        ({"pp_size": 2, "vpp_size": 3}, "pp_size × vpp_size = 6"),
        ({"vpp_size": 2}, "pp_size is 1"),
        ({"sequence_parallel": True}, "tp_size is 1"),
        ({"dp_size": 2, "ep_size": 2}, "this model has none"),
        ({"fsdp_size": 2}, "no fsdp_size"),
    ],
)
def test_layouts_that_cannot_be_are_refused_with_the_arithmetic(llama, sizes, words):
    with pytest.raises(BadLayout, match=words):
        built(llama, sizes)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp_size": 3, "ep_size": 3}, "num_moe_experts = 4"),
        ({"tp_size": 2}, "sequence_parallel=True"),
        ({"tp_size": 2, "sequence_parallel": True}, "a copy of all experts"),
    ],
)
def test_layouts_of_experts_that_train_wrongly_are_refused(moe, sizes, words):
    with pytest.raises(BadLayout, match=words):
        built(moe, sizes)


def test_a_mesh_of_more_processes_than_there_are_is_refused(llama):
    with pytest.raises(BadMesh, match="2 rank"):
        built(llama, {"dp_size": 2})


def test_a_rank_that_is_another_in_the_process_group_is_refused(llama, monkeypatch):
    built(llama, {})  # Megatron is there
    from twinkle_megatron.parallel import connect

    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(torch.distributed, name, lambda *group, value=value: value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(BadLaunch, match="is rank 1 of torch's process group, and rank 0 by RANK"):
        connect(torch.device("cpu"), 2)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"recompute_granularty": "full"}, WrongArgument, "recompute_granularity"),
        ({"tensor_model_parallel_size": 2}, BadArgument, "tp_size"),
        ({"bf16": True}, BadArgument, "mixed_precision"),
        ({"moe_aux_loss_coeff": 0.1}, BadArgument, "weight(.|\n)*TransformersModel"),
        ({"moe_z_loss_coeff": 0.1}, BadArgument, "weight(.|\n)*TransformersModel"),
        ({"num_layers": 2}, BadArgument, r"the model's own config says it"),
        ({"normalization": "LayerNorm"}, BadArgument, r"the model's own config says it"),
        ({"mtp_num_layers": 1}, BadArgument, r"the model's own config says it"),
        ({"recompute_granularity": "ful"}, BadArgument, r"recompute_granularity='ful'(.|\n)*\"full\"or \"selective\""),
        ({"fp8": "hybrid"}, BadArgument, "GPU"),
        ({"fp8": "hybird"}, UnknownOption, "hybrid"),
        ({"on_nonfinite": "stop"}, UnknownOption, "raise"),
    ],
)
def test_settings_that_have_no_effect_are_refused(llama, options, error, words):
    with pytest.raises(error, match=words):
        built(llama, {}, **options)


def test_fp8_needs_a_gpu_transformer_engine_and_bf16(llama, monkeypatch):
    built(llama, {})
    for there in (False, True):
        monkeypatch.setattr(runtime.RUNTIME, "has_te", there)
        with pytest.raises(BadArgument, match="GPU"):
            module._check_fp8("hybrid", "bf16")
    monkeypatch.setattr(runtime.RUNTIME, "installed", False)
    monkeypatch.setattr(runtime.RUNTIME, "has_te", False)
    with pytest.raises(NeedsLibrary, match=r"pip install 'transformer-engine\[pytorch\]'"):
        module._check_fp8("hybrid", "bf16")
    monkeypatch.setattr(runtime.RUNTIME, "has_te", True)
    with pytest.raises(BadArgument, match="'bf16' with fp8"):
        module._check_fp8("hybrid", "fp16")
    module._check_fp8("e4m3", "bf16")


def test_a_model_needs_a_folder_or_a_config():
    with pytest.raises(NoModel):
        MegatronModel()


def test_optimizers_and_schedulers_are_megatrons(llama):
    model = built(llama, {})
    for other in ("adamw", torch.optim.AdamW):
        with pytest.raises(OnlyOwn, match=r"set_optimizer\('default'"):
            model.set_optimizer(other)
    for own in ("default", "MegatronDistributedOptimizer"):
        model.set_optimizer(own, lr=1e-3)
        assert model.sessions[""].optimizer.param_groups[0]["lr"] == 1e-3
    with pytest.raises(WrongArgument, match="adam_beta1"):
        model.set_optimizer("default", adam_beta_1=0.5)
    with pytest.raises(OnlyOwn, match="set_lr_scheduler"):
        model.set_lr_scheduler("cosine_warmup", num_training_steps=3)
    model.set_lr_scheduler("OptimizerParamScheduler", lr_decay_steps=4, lr_warmup_steps=2, lr_decay_style="linear")
    rates = []
    for rows in windows(5):
        rates.append(model.sessions[""].optimizer.param_groups[0]["lr"])
        model.forward_backward(rows)
        model.clip_grad_and_step()
    assert rates == pytest.approx([0, 5e-4, 1e-3, 5e-4, 0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr_decay_style": "cosin"}, "Did you mean 'cosine'"),
        ({"lr_decay_style": "WSD"}, "wsd_decay_steps"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 2, "lr_wsd_decay_style": "sqrt"}, "minus_sqrt"),
        ({"lr_warmup_steps": 4}, "lr_warmup_steps=4 must be below lr_decay_steps=4"),
        ({"min_lr": 1.0}, r"min_lr=1\.0 must be from 0 to max_lr=0\.001"),
        ({"init_lr": 1.0}, r"init_lr=1\.0 must be at most"),
        ({"end_wd": 0.5}, "wd_incr_style='linear'"),
        ({"end_wd": 0.5, "wd_incr_style": "linear"}, "wd_incr_steps"),
        ({"wd_incr_style": "liner"}, "Did you mean 'linear'"),
        ({"lr_decay_steps": 0}, "lr_decay_steps=0 must be at least 1"),
    ],
)
def test_a_schedule_that_cannot_be_is_told_when_it_is_set(llama, given, words):
    """Megatron says nothing, or stops in the middle of training."""
    model = built(llama, {})
    model.set_optimizer("default", lr=1e-3, weight_decay=0.1)
    with pytest.raises(BadScheduler, match=words):
        model.set_lr_scheduler("default", **{"lr_decay_steps": 4, **given})
    assert model.sessions[""].scheduler is None


def test_files_that_are_cut_short_or_lack_a_tensor_are_told(llama, tmp_path):
    for name in ("cut", "less"):
        shutil.copytree(llama, tmp_path / name)
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    with pytest.raises(ModelNotLoaded, match="cut"):
        built(str(tmp_path / "cut"), {})
    file = tmp_path / "less" / "model.safetensors"
    state = load_file(file)
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ModelNotLoaded, match=r"up_proj\.weight(.|\n)*not in its files"):
        built(str(tmp_path / "less"), {})


def test_ids_beyond_the_vocabulary_are_refused_before_a_table_is_read(llama):
    model = built(llama, {})
    with pytest.raises(BadInputs, match="250"):
        model.forward_only([{"input_ids": [1, 250]}])


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("megatron.core", "'twinkle-megatron[mcore]'"),
        ("mcore_bridge", "'twinkle-megatron[mcore]'"),
        ("PIL", "pillow"),
        ("datasets", "datasets"),
        ("modelscope", "modelscope"),
    ],
)
def test_the_library_that_is_missing_is_named(monkeypatch, missing, line):
    monkeypatch.setattr(runtime, "_is_there", lambda library: library != missing)
    with pytest.raises(NeedsLibrary, match=rf"'{missing}'(.|\n)*pip install '?{re.escape(line)}"):
        runtime.Runtime().install()


def test_torch_is_what_it_was_outside(llama):
    """The stand-ins for CUDA hold while Megatron computes, and no longer."""
    before = (torch.cuda.current_device, torch.cuda.Stream, torch.cuda.device_count())
    model = built(llama, {})
    model.forward_only(windows(1)[0])
    assert (torch.cuda.current_device, torch.cuda.Stream, torch.cuda.device_count()) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert "triton" not in sys.modules


def test_importing_the_model_imports_no_megatron():
    code = "import sys, twinkle_megatron.model as m; assert not any(n.startswith(('megatron', 'mcore')) for n in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_one_line_says_that_there_is_no_gpu():
    code = "from twinkle_megatron.cpu.runtime import RUNTIME; RUNTIME.install(); RUNTIME.install()"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=200, capture_output=True, text=True)
    assert (done.stdout + done.stderr).count("runs on the CPU over gloo") == 1


def test_the_mesh_says_where_it_computes(llama):
    with pytest.raises(BadArgument, match="'cpu'"):
        MegatronModel(llama, device_mesh=DeviceMesh.from_sizes(device_type="cuda"))
    assert module.PRECISIONS == ("no", "fp16", "bf16")


def test_what_was_imported_without_the_stand_ins_is_told():
    code = (
        "import importlib.util, sys; spec = importlib.util.find_spec('megatron.core')\n"
        "sys.modules['megatron.core'] = importlib.util.module_from_spec(spec)\n"
        "from twinkle_megatron.cpu.runtime import RUNTIME\n"
        "RUNTIME.install()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=200, capture_output=True, text=True)
    assert done.returncode == 1
    assert "LoadedTooEarly" in done.stderr and "megatron.core" in done.stderr
