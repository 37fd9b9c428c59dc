"""Peak memory of each process that trains one model, by how the weights lie over the processes.

A Llama of 79 million weights in fp32 on the CPU (0.3 GB of weights; with gradients and AdamW's state 1.3 GB) is read from a
folder and trained for two steps of 2 x 64 tokens a process. Resident memory at its peak, less what the process has once its
libraries are imported: while the model is built, and while it is trained.

    python benchmarks/memory_fsdp.py            # 1, 2 and 4 processes: some minutes
    python benchmarks/memory_fsdp.py --quick    # 1 and 2 processes

Exit status 1 if two processes with weights that lie apart do not each need less than three quarters of what one needs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing import ranks
from twinkle_core.testing.toys import random_rows
from twinkle_transformers.model import TransformersModel

#: name -> (processes, sizes of the mesh, further arguments)
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "dp 2": (2, {"dp_size": 2}, {}),
    "fsdp 2": (2, {"fsdp_size": 2}, {}),
    "fsdp 2, memory_efficient_init": (2, {"fsdp_size": 2}, {"memory_efficient_init": True}),
    "tp 2": (2, {"tp_size": 2}, {}),
    "fsdp 4": (4, {"fsdp_size": 4}, {}),
    "fsdp 4, memory_efficient_init": (4, {"fsdp_size": 4}, {"memory_efficient_init": True}),
    "dp 2 x fsdp 2": (4, {"dp_size": 2, "fsdp_size": 2}, {}),
}


def peak() -> float:
    """MB of resident memory at its peak since ``forget``."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def forget() -> None:
    """Begin a new peak (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=10,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )


class Measure:
    """Called in a process of its own."""

    def train(self, rank: int, world_size: int, folder: str, sizes: dict[str, int], options: dict[str, Any]) -> list[float]:
        forget()
        before = peak()
        mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
        model = TransformersModel(model_id=folder, mixed_precision="no", device_mesh=mesh, **options)
        built = peak()
        forget()
        model.set_optimizer("adamw", lr=1e-4)
        for _ in range(2):
            model.forward_backward(random_rows([64, 64], vocabulary=8000))
            model.clip_grad_and_step()
        return [built - before, peak() - before]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 and 2 processes")
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of the processes to come: what is freed is given back at once
    found: dict[str, float] = {}
    measure = importlib.import_module("memory_fsdp").Measure  # under a name by which other processes find it
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config()).save_pretrained(folder)
        print(f"{'layout':32} {'built: first rank':>18} {'others':>8} {'trained: first rank':>20} {'others':>8}   (MB)")
        for name, (world_size, sizes, options) in LAYOUTS.items():
            if args.quick and world_size > 2:
                continue
            given = {"folder": folder, "sizes": sizes, "options": options}
            parts = ranks.run(measure, "train", world_size, given, timeout=600)
            others = [max(part[i] for part in parts[1:]) if parts[1:] else 0.0 for i in (0, 1)]
            found[name] = max(parts[0][1], others[1])
            print(f"{name:32} {parts[0][0]:18.0f} {others[0]:8.0f} {parts[0][1]:20.0f} {others[1]:8.0f}", flush=True)
    return 0 if found["fsdp 2"] < 0.75 * found["one process"] else 1


if __name__ == "__main__":
    sys.exit(main())
