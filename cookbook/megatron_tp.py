"""One model over two tensor ranks: torchrun --nproc-per-node 2 cookbook/megatron_tp.py [folder of a model]

Without a folder it trains a tiny Llama with random weights, on CPUs too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import gettempdir

from peft import LoraConfig

from twinkle import DeviceMesh
from twinkle.model import MegatronModel
from twinkle_megatron.testing import write_tiny

RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    own = Path(gettempdir()) / f"twinkle-tiny-llama-{RANK}"
    folder = sys.argv[1] if len(sys.argv) > 1 else write_tiny(own)
    mesh = DeviceMesh.from_sizes(tp_size=2, sequence_parallel=True)
    model = MegatronModel(model_id=folder, device_mesh=mesh, mixed_precision="no")
    model.add_adapter_to_model("default", LoraConfig(r=4, lora_alpha=8))
    model.set_optimizer("default", lr=1e-2)
    model.set_lr_scheduler("default", lr_warmup_steps=2, lr_decay_steps=20)
    rows = [{"input_ids": [*range(i, i + 8)], "labels": [*range(i + 1, i + 9)]} for i in range(1, 5)]
    for step in range(20):
        loss = model.forward_backward(rows, micro_batch_size=2)
        norm = model.clip_grad_and_step()
        if RANK == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {float(loss):.3f}, gradient norm {norm:.3f}")
    saved = model.save("megatron", Path(gettempdir()) / "twinkle-output")
    if RANK == 0:
        print(f"a PEFT adapter is in {saved}")


if __name__ == "__main__":
    main()
