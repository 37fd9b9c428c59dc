"""What Ray adds to a training step: the tiny model of the tests on Ray's workers, against the same without Ray.

A step is ``forward_backward`` and ``clip_grad_and_step`` of 8 rows of 32 tokens: two calls there and back, with the rows. With
one worker, the other side is the same model in this process; the two take turns step by step, so that whatever else the machine
does hits both alike. With two workers, each of which has half the rows, it is two processes of a gloo group that do the same
without Ray: half of their steps come before Ray's and half after. What Ray adds is the difference of the medians.

    python benchmarks/remote_overhead.py            # 2 x 200 steps with 1 worker and with 2: two minutes

Exit status 1 if Ray adds 15 ms or more, or a loss differs by more than 1e-5 of its size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch

import twinkle
from twinkle import DeviceGroup
from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing import ranks
from twinkle_core.testing.toys import random_rows
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import write_tiny_llama

BOUND, SAME, WARM = 15.0, 1e-5, 10


def rows() -> list[Any]:
    return random_rows([32] * 8, vocabulary=250, masked=0.0)


def ready(model_id: str, **where: Any) -> Any:
    model = TransformersModel(model_id=model_id, mixed_precision="no", **where)
    model.set_optimizer("adamw", lr=1e-4)
    return model


def step(model: Any, inputs: Any) -> tuple[float, float]:
    """(milliseconds, loss)"""
    began = time.perf_counter()
    loss = float(model.forward_backward(inputs=inputs))
    model.clip_grad_and_step()
    return (time.perf_counter() - began) * 1e3, loss


class WithoutRay:
    """Processes of a gloo group."""

    def steps(self, rank: int, world_size: int, model_id: str, count: int) -> list[tuple[float, float]]:
        """Each with its part of the rows."""
        torch.set_num_threads(1)
        model = ready(model_id, device_mesh=DeviceMesh.from_sizes(dp_size=world_size))
        size = len(rows()) // world_size
        found = [step(model, rows()[rank * size : (rank + 1) * size]) for _ in range(count + WARM)]
        return found[WARM:]


def one_worker(model_id: str, count: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Steps here and on a worker, by turns."""
    models = [ready(model_id), ready(model_id, remote_group="w1")]
    found: list[list[tuple[float, float]]] = [[], []]
    for i in range(count + WARM):
        for at in (0, 1) if i % 2 else (1, 0):
            found[at].append(step(models[at], rows()))
    return found[0][WARM:], found[1][WARM:]


def two_workers(model_id: str, count: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Steps of two processes without Ray, then Ray's, then without Ray again."""

    def without() -> list[tuple[float, float]]:
        """Milliseconds of the first process, and the mean of both losses: they have as many tokens."""
        both = ranks.run(WithoutRay, "steps", 2, {"model_id": model_id, "count": count // 2})
        return [(ms, (loss + other) / 2) for (ms, loss), (_, other) in zip(*both, strict=True)]

    before = without()
    model = ready(model_id, remote_group="w2", device_mesh=DeviceMesh.from_sizes(dp_size=2))
    there = [step(model, rows()) for _ in range(count + WARM)][WARM:]
    return before + without(), there


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200, help="steps of each (default 200)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as Ray's workers, which have one core each
    ray.init(num_cpus=3)  # a machine of two cores will do: the workers of one part of this wait while the other runs
    twinkle.initialize(mode="ray", groups=[DeviceGroup("w1", 1, device_type="CPU"), DeviceGroup("w2", 2, device_type="CPU")])
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        model_id = str(write_tiny_llama(Path(folder) / "llama"))
        for workers, measure in ((1, one_worker), (2, two_workers)):
            without, there = measure(model_id, options.steps)
            here, remote = (statistics.median(ms for ms, _ in side) for side in (without, there))
            apart = max(abs(a / b - 1) for (_, a), (_, b) in zip(without[: options.steps // 2], there, strict=False))
            print(f"{workers} worker(s): a step takes {here:.2f} ms without Ray, {remote:.2f} ms with it")
            print(f"    Ray adds {remote - here:.2f} ms (bound {BOUND:g}); losses differ by at most {apart:.1e}", flush=True)
            missed |= remote - here >= BOUND or apart > SAME
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
