"""Two tenants of a model on two tensor ranks: torchrun --nproc-per-node 2 cookbook/multilora_megatron.py [folder of a model]

Without a folder it trains on a tiny Llama with random weights, on CPUs too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import gettempdir

from peft import LoraConfig

from twinkle import DeviceMesh
from twinkle.model import MultiLoraMegatronModel
from twinkle_megatron.testing import write_tiny

RANK = int(os.environ.get("RANK", "0"))
TENANTS = {
    "alice": LoraConfig(r=8, lora_alpha=16),
    "bob": LoraConfig(r=4, lora_alpha=8, target_modules=["o_proj", "down_proj"]),
}


def main() -> None:
    own = Path(gettempdir()) / f"twinkle-tiny-llama-{RANK}"
    folder = sys.argv[1] if len(sys.argv) > 1 else write_tiny(own)
    mesh = DeviceMesh.from_sizes(tp_size=2, sequence_parallel=True)
    model = MultiLoraMegatronModel(folder, device_mesh=mesh, mixed_precision="no", max_loras=2, max_r=8)
    rows = {}
    for place, (name, config) in enumerate(TENANTS.items()):
        model.multi_lora.acquire_lora(name, config)
        model.set_optimizer("default", lr=1e-2, adapter_name=name)
        first = 1 + 100 * place
        rows[name] = [{"input_ids": [*range(i, i + 8)], "labels": [*range(i + 1, i + 9)]} for i in range(first, first + 4)]
    for step in range(20):
        losses = model.forward_backward_many(rows)  # in turns; or forward_backward of each
        for name in TENANTS:
            model.clip_grad_and_step(adapter_name=name)
        if RANK == 0 and step % 5 == 4:
            print(f"step {step + 1}: " + ", ".join(f"{name} loss {float(loss):.3f}" for name, loss in losses.items()))
    for name in TENANTS:
        saved = model.save(name, Path(gettempdir()) / "twinkle-output", adapter_name=name)
        if RANK == 0:
            print(f"{name}'s PEFT adapter is in {saved}")


if __name__ == "__main__":
    main()
