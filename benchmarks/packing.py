"""What packing rows without padding saves, against padding them to the longest.

A Llama of SmolLM2's shape (576 wide, 9 heads, 3 of them for keys and values, 49,152 words) with fewer layers and random
weights, fp32; a LoRA adapter of rank 8 is trained. A batch of conversations of which the answers, the last half of each, have
labels; 40 % of the padded batch is tokens. Both ways take turns at one ``forward_backward``; the median of the ratios of
neighbours is the result.

    python benchmarks/packing.py                 # 3 turns, half a minute of CPU time, 1.5 GB
    python benchmarks/packing.py --longest 512 --layers 12 --turns 5     # some minutes, 4 GB
    python benchmarks/packing.py --threads 1     # where others use the machine: threads wait for one another

Exit status 1 if packing is not at least 2.2 times faster, or if a row's log-probabilities, the losses or the gradients (by
parameter, relative to its norm) differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from peft import LoraConfig
from transformers import LlamaConfig

from twinkle_core.processors.input import InputProcessor
from twinkle_transformers.model import TransformersModel

FILL = 0.4
#: shares of the longest row; their mean is FILL
SHARES = (1.0, 0.45, 0.4, 0.35, 0.3, 0.3, 0.25, 0.15)
BOUND, SAME = 2.2, 1e-5


def model(layers: int) -> TransformersModel:
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100000.0, tie_word_embeddings=True,
    )  # fmt: skip
    made = TransformersModel(config=config, mixed_precision="no")
    made.add_adapter_to_model("default", LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    made.set_optimizer("sgd", lr=0.0)
    return made


def batch(longest: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    rows = []
    for share in SHARES:
        ids = torch.randint(0, 49152, (round(share * longest),), generator=g).tolist()
        prompt = len(ids) // 2
        rows.append({"input_ids": ids, "labels": [*[-100] * (prompt - 1), *ids[prompt:], -100]})
    assert abs(sum(len(row["input_ids"]) for row in rows) / (len(rows) * longest) - FILL) < 0.005
    return rows


def logps(m: TransformersModel, rows: list[dict[str, Any]], free: bool) -> list[torch.Tensor]:
    """Log-probabilities of each row's tokens."""
    m.set_processor(InputProcessor(padding_free=free))
    found = m.forward_only(rows, return_logits=False).logps
    lengths = [len(row["input_ids"]) for row in rows]
    return list(found[0].split(lengths)) if free else [x[:n] for x, n in zip(found, lengths, strict=True)]


def gradients(m: TransformersModel, rows: list[dict[str, Any]], free: bool) -> tuple[float, dict[str, torch.Tensor]]:
    m.set_processor(InputProcessor(padding_free=free))
    loss = float(m.forward_backward(rows))
    found = {name: p.grad.clone() for name, p in m.module.named_parameters() if p.grad is not None}
    m.zero_grad(drop=True)
    return loss, found


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=3, help="of each way (default 3)")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest row (default 256)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (default 6; SmolLM2-135M has 30)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (default: its own choice)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    m, rows = model(options.layers), batch(options.longest)
    size = f"{len(rows)} rows, longest {options.longest} tokens, fill {FILL}; {options.layers} layers, fp32"
    print(f"{size}, {options.threads} threads", flush=True)

    values = max(float((a - b).abs().max()) for a, b in zip(logps(m, rows, True), logps(m, rows, False), strict=True))
    (loss, packed), (expected, padded) = gradients(m, rows, True), gradients(m, rows, False)
    worst = max(apart(packed[name], padded[name]) for name in padded)
    print("both ways computed once, and compared", flush=True)
    ratios, seconds = [], {True: [], False: []}
    for turn in range(options.turns):
        for free in (True, False) if turn % 2 else (False, True):
            m.set_processor(InputProcessor(padding_free=free))
            began = time.perf_counter()
            m.forward_backward(rows)
            seconds[free].append(time.perf_counter() - began)
            m.zero_grad(drop=True)
        ratios.append(seconds[False][-1] / seconds[True][-1])
        print(f"turn {turn + 1}: {seconds[False][-1]:.2f} s padded, {seconds[True][-1]:.2f} s padding-free", flush=True)
    speed = statistics.median(ratios)
    print(f"padded         median {statistics.median(seconds[False]):.2f} s")
    print(f"padding-free   median {statistics.median(seconds[True]):.2f} s")
    print(f"{speed:.2f} x (at least {BOUND}), range {min(ratios):.2f} to {max(ratios):.2f}")
    print(f"logps apart by {values:.1e}, losses by {abs(loss - expected):.1e}, gradients by {worst:.1e} (at most {SAME:g})")
    missed = [what for what, bad in (("speed", speed < BOUND), ("logps", not values <= SAME),
              ("loss", not abs(loss - expected) <= SAME), ("gradients", not worst <= SAME)) if bad]  # fmt: skip
    print("bounds missed: " + ", ".join(missed) if missed else "all bounds kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
