"""What the suite does not ask: folders of adapters, packing, refusals, and torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twinkle_core.errors import BadAdapter, CheckpointMismatch, CheckpointNotFound, NotComputed, UnknownOption
from twinkle_core.mesh import DeviceMesh
from twinkle_core.processors.input import InputProcessor
from twinkle_core.testing.toys import random_rows
from twinkle_toy_backend.model import ToyModel

ROWS = random_rows([5, 3, 8, 2], vocabulary=64)


def trained(name="a"):
    model = ToyModel()
    if name:
        model.add_adapter_to_model(name, 3)
    model.set_optimizer("adamw", lr=1e-2)
    for _ in range(3):
        model.forward_backward(ROWS)
        model.clip_grad_and_step()
    return model


def test_an_adapter_is_made_from_the_folder_of_a_saved_one(tmp_path):
    first, second = trained(), ToyModel()
    second.add_adapter_to_model("b", first.save("c", tmp_path))
    logits = [model.forward_only(ROWS).logits for model in (first, second, ToyModel())]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


def test_what_is_no_adapter_is_refused_and_leaves_nothing(tmp_path):
    model = ToyModel()
    for config in (0, -1, 2.0, True, None, {}):
        with pytest.raises(BadAdapter):
            model.add_adapter_to_model("a", config)
    with pytest.raises(CheckpointNotFound):
        model.add_adapter_to_model("a", tmp_path / "nowhere")
    with pytest.raises(CheckpointMismatch):
        model.add_adapter_to_model("a", trained("").save("whole", tmp_path))
    assert model.adapters.names() == []


def test_the_readme_runs():
    text = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope = {}
    exec(code, scope)
    assert scope["model"].sessions["mine"].cur_step == 10


def test_packed_rows_do_not_see_one_another():
    padded, packed = ToyModel(), ToyModel()
    packed.set_processor(InputProcessor(padding_free=True))
    losses = [float(model.forward_backward(ROWS)) for model in (padded, packed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_what_it_can_not_do_is_refused_by_name():
    model = ToyModel()
    with pytest.raises(UnknownOption, match="embedding"):
        model.forward_backward(ROWS, task="embedding")
    model.set_loss("mse")  # of a value head
    with pytest.raises(NotComputed, match="values"):
        model.forward_backward(ROWS)
    with pytest.raises(UnknownOption, match="tp 2"):
        ToyModel(device_mesh=DeviceMesh.from_sizes(world_size=2, tp_size=2))


SCRIPT = """
import os, sys
from twinkle_core.data.sampler import share
from twinkle_core.testing.toys import random_rows
from twinkle.model import ToyModel
model = ToyModel()
model.set_optimizer("sgd", lr=0.1)
mesh = model.engine.mesh
model.forward_backward(share(random_rows([5, 3, 8], vocabulary=64), mesh.data_rank, mesh.data_world_size))
print(f"norm {model.clip_grad_and_step():.5f}")
sys.stdout.flush()
os._exit(0)  # threads of torch's now and then abort a process while its interpreter ends
"""


@pytest.mark.slow
def test_torchrun(tmp_path):
    """Both ranks print the gradient norm of one process. The model opens the process group itself."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, err
    assert re.findall(r"norm \d+\.\d{5}", out) == [alone.stdout.strip()] * 2  # two processes may write one line
