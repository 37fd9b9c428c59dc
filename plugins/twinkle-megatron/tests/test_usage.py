"""The documented example of Megatron models as it stands, with a small model and rows to read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
from peft import LoraConfig
from twinkle.model import MegatronModel
from twinkle import DeviceMesh
from twinkle.dataloader import DataLoader
rows = [{{'input_ids': [i % 9 + 1] * 8, 'labels': [i % 9 + 1] * 8, 'length': 8}} for i in range(128)]
mesh = DeviceMesh.from_sizes({sizes})
dataloader = DataLoader(rows, batch_size=4, device_mesh=mesh)
model = MegatronModel(model_id={folder!r}, device_mesh=mesh, remote_group='actor')
model.add_adapter_to_model('default', LoraConfig(r=8, target_modules='all-linear'))
model.set_optimizer('default', adapter_name='default', lr=5e-2)
losses, norms = [], []
for data in dataloader:
    losses.append(float(model.forward_backward(inputs=data, adapter_name='default')))
    norms.append(model.clip_grad_and_step(adapter_name='default', gradient_accumulation_steps=16))
steps = [i for i, norm in enumerate(norms) if norm is not None]
os.write(1, f'done {{len(losses)}} {{steps}} {{sum(losses[16:]) < sum(losses[:16]) - 1}}\\n'.encode())  # in one piece
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "sizes"),
    [(2, "dp_size=2"), (2, "tp_size=2"), (2, "pp_size=2"), (4, "dp_size=2, tp_size=2"),
     (4, "tp_size=2, pp_size=2")],
)  # fmt: skip
def test_the_documented_example_runs(llama, tmp_path, count, sizes):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(sizes=sizes, folder=llama))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), str(program)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("done 32 [15, 31] True") == count
