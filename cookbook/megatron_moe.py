"""Experts over two ranks: torchrun --nproc-per-node 2 cookbook/megatron_moe.py [folder of a model]

Without a folder it trains a tiny Qwen3-MoE with random weights, on CPUs too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import gettempdir

from twinkle import DeviceMesh
from twinkle.model import MegatronModel
from twinkle_megatron.testing import write_tiny

RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    own = Path(gettempdir()) / f"twinkle-tiny-moe-{RANK}"
    folder = sys.argv[1] if len(sys.argv) > 1 else write_tiny(own, "qwen3_moe")
    mesh = DeviceMesh.from_sizes(dp_size=2, ep_size=2)
    model = MegatronModel(model_id=folder, device_mesh=mesh, mixed_precision="no")
    model.set_optimizer("default", lr=3e-3)
    rows = [{"input_ids": [*range(i, i + 8)], "labels": [*range(i + 1, i + 9)]} for i in range(1, 9)]
    mine = rows[mesh.data_rank :: mesh.data_world_size]
    for step in range(20):
        loss = model.forward_backward(mine, micro_batch_size=2)
        norm = model.clip_grad_and_step()
        if RANK == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {float(loss):.3f}, gradient norm {norm:.3f}")


if __name__ == "__main__":
    main()
