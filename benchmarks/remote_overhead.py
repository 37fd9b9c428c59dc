"""What Ray adds to a training step: the tiny model of the tests on one worker, against the same model in this process.

A step is ``forward_backward`` and ``clip_grad_and_step`` of 8 rows of 32 tokens: two calls there and back, with the rows. The
two take turns step by step, so that whatever else the machine does hits both alike; the median of the differences is what Ray
adds. With ``--workers 2`` each worker has half the rows, and the sums over a process group are in the difference too.

    python benchmarks/remote_overhead.py            # 2 x 200 steps, a minute

Exit status 1 if the median difference is 15 ms or more, or a loss differs by more than 1e-5 of its size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import twinkle
from twinkle import DeviceGroup
from twinkle_core.testing.toys import random_rows
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import write_tiny_llama

BOUND, SAME = 15.0, 1e-5


def step(model: Any, rows: Any) -> tuple[float, float]:
    """(milliseconds, loss)"""
    began = time.perf_counter()
    loss = float(model.forward_backward(inputs=rows))
    model.clip_grad_and_step()
    return (time.perf_counter() - began) * 1e3, loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200, help="steps of each (default 200)")
    parser.add_argument("--workers", type=int, default=1, help="of the remote model (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as Ray's workers, which have one core each
    twinkle.initialize(mode="ray", groups=[DeviceGroup("actor", options.workers, device_type="CPU")])
    with tempfile.TemporaryDirectory() as folder:
        model_id = write_tiny_llama(Path(folder) / "llama")
        models = {
            "here": TransformersModel(model_id=model_id, mixed_precision="no"),
            "ray": TransformersModel(model_id=model_id, mixed_precision="no", remote_group="actor"),
        }
    for model in models.values():
        model.set_optimizer("adamw", lr=1e-4)
    rows = random_rows([32] * 8, vocabulary=250)
    for model in models.values():
        for _ in range(10):
            step(model, rows)
    times: dict[str, list[float]] = {name: [] for name in models}
    apart = 0.0
    for i in range(options.steps):
        losses = {}
        for name in list(models) if i % 2 else reversed(list(models)):
            spent, losses[name] = step(models[name], rows)
            times[name].append(spent)
        apart = max(apart, abs(losses["ray"] / losses["here"] - 1))
    added = statistics.median(there - here for here, there in zip(times["here"], times["ray"], strict=True))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"a step: {medians['here']:.2f} ms here, {medians['ray']:.2f} ms on {options.workers} worker(s) of Ray")
    print(f"Ray adds {added:.2f} ms (bound {BOUND:g}); losses differ by at most {apart:.1e}")
    return int(added >= BOUND or apart > SAME)


if __name__ == "__main__":
    sys.exit(main())
