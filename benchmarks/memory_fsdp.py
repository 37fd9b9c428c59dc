"""Peak memory of each process that trains one model, by how the weights lie over the processes.

A Llama of 40 million weights in fp32 on the CPU (0.16 GB of weights; with gradients and AdamW's state 0.64 GB) is read from a
folder, trained for two steps of 2 x 64 tokens a process, and saved with its optimizer: in shards, then as plain files.
Resident memory at its peak, less what the process has once its libraries are imported: while the model is built, while it is
trained, and while it is saved.

    python benchmarks/memory_fsdp.py            # 1, 2 and 4 processes: some minutes
    python benchmarks/memory_fsdp.py --quick    # 1 and 2 processes
    python benchmarks/memory_fsdp.py --write    # all, and the table of docs/parallel.md

Exit status 1 if two processes with weights that lie apart do not each need less than three quarters of what one needs, or if,
saving in shards, they need nearly what the first one needs for plain files.
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
    "`dp_size=2`": (2, {"dp_size": 2}, {}),
    "`fsdp_size=2`": (2, {"fsdp_size": 2}, {}),
    "`fsdp_size=2`, `memory_efficient_init`": (2, {"fsdp_size": 2}, {"memory_efficient_init": True}),
    "`tp_size=2`": (2, {"tp_size": 2}, {}),
    "`fsdp_size=4`": (4, {"fsdp_size": 4}, {}),
    "`fsdp_size=4`, `memory_efficient_init`": (4, {"fsdp_size": 4}, {"memory_efficient_init": True}),
    "`dp_size=2, fsdp_size=2`": (4, {"dp_size": 2, "fsdp_size": 2}, {}),
    "`fsdp_size=2, tp_size=2`": (4, {"fsdp_size": 2, "tp_size": 2}, {}),
}
COLUMNS = [
    "building: first rank",
    "building: others",
    "training, each rank",
    "saving shards, each rank",
    "saving plain files: first rank",
    "saving plain files: others",
]
PAGE = Path(__file__).parents[1] / "docs/parallel.md"


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
        hidden_size=640,
        intermediate_size=1728,
        num_hidden_layers=7,
        num_attention_heads=10,
        num_key_value_heads=10,
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
        found = [built, peak()]
        for sharded in (True, False):
            forget()
            model.save(f"saved{sharded}", folder, save_optimizer=True, sharded=sharded)
            found.append(peak())
        return [number - before for number in found]


def row(parts: list[list[float]]) -> list[str]:
    """One line of the table, of what each rank measured."""
    others = [max(part[i] for part in parts[1:]) for i in range(4)] if parts[1:] else None
    built, _, _, plain = parts[0]
    most = [max(part[i] for part in parts) for i in range(4)]
    numbers = [built, others and others[0], most[1], most[2], plain, others and others[3]]
    return ["" if number is None else f"{number:.0f}" for number in numbers]


def write(lines: list[str]) -> None:
    """Put the table into the page, in the place of the one that is there."""
    page = PAGE.read_text("utf-8").splitlines()
    first = next(i for i, line in enumerate(page) if line.startswith("| mesh | building"))
    last = next(i for i in range(first, len(page)) if not page[i].startswith("|"))
    PAGE.write_text("\n".join([*page[:first], *lines, *page[last:]]) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 and 2 processes")
    parser.add_argument("--write", action="store_true", help="put the table into docs/parallel.md")
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of the processes to come: what is freed is given back at once
    found: dict[str, list[list[float]]] = {}
    measure = importlib.import_module("memory_fsdp").Measure  # under a name by which other processes find it
    lines = [f"| mesh | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    print("\n".join(lines), "  (MB)")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config()).save_pretrained(folder)
        for name, (world_size, sizes, options) in LAYOUTS.items():
            if args.quick and world_size > 2:
                continue
            given = {"folder": folder, "sizes": sizes, "options": options}
            found[name] = ranks.run(measure, "train", world_size, given, timeout=600)
            lines.append(f"| {name} | {' | '.join(row(found[name]))} |")
            print(lines[-1], flush=True)
    if args.write and not args.quick:
        write(lines)
    one, two = found["one process"][0], found["`fsdp_size=2`"]
    spared = all(part[1] < 0.75 * one[1] for part in two)
    apart = all(part[2] < 0.9 * two[0][3] for part in two)  # two buffers of a file come on top of a rank's own parts
    return 0 if spared and apart else 1


if __name__ == "__main__":
    sys.exit(main())
