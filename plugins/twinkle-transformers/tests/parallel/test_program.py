"""The program that the documentation shows, word for word but for its ids, on four processes and on one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from twinkle_core.testing.toys import random_rows
from twinkle_transformers.testing import write_tiny_llama

PROGRAM = """
import json, sys
import torch
from peft import LoraConfig
import twinkle
twinkle.initialize(seed=3)
folder, out, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

from twinkle.model import TransformersModel
from twinkle import DeviceMesh
from twinkle.dataloader import DataLoader
mesh = DeviceMesh.from_sizes(**sizes)
dataloader = DataLoader(json.load(open(folder + "/rows.json")), batch_size=5, device_mesh=mesh)
model = TransformersModel(model_id=folder, device_mesh=mesh, remote_group='actor', mixed_precision="no")
model.add_adapter_to_model('default', LoraConfig(r=4, target_modules='all-linear'))
model.set_optimizer('adamw', lr=1e-2, adapter_name='default')
for data in dataloader:
    model.forward_backward(inputs=data, adapter_name='default')
    model.clip_grad_and_step(adapter_name='default', gradient_accumulation_steps=16)
model.flush()
model.save('last', out, save_optimizer=True)
print(model.get_train_configs())
"""


def run(tmp_path, out, sizes, processes):
    head = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*(head if processes > 1 else [sys.executable]), str(tmp_path / "program.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [*command, str(tmp_path), str(tmp_path / out), json.dumps(sizes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, text
    return text, load_file(tmp_path / out / "last" / "adapter_model.safetensors")


@pytest.mark.slow
def test_the_documented_program_on_four_processes(tmp_path):
    write_tiny_llama(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    rows = random_rows([3 + (7 * i) % 11 for i in range(5 * 20 + 3)], vocabulary=250)  # a window and a bit; a short last batch
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    text, four = run(tmp_path, "four", {"dp_size": 2, "fsdp_size": 2}, 4)
    assert "fully_shard over 2" in text
    _, one = run(tmp_path, "one", {}, 1)
    assert one.keys() == four.keys()
    moved = torch.stack([one[k].norm() for k in one if "lora_B" in k]).norm()
    apart = torch.stack([(one[k] - four[k]).norm() for k in one]).norm()
    assert moved > 0.1 and apart / moved < 1e-3
