"""What a training step costs in twinkle, against the same step written by hand with PyTorch, transformers and PEFT.

Both train a LoRA (r=8, all linear layers) on a model of SmolLM2's shape with 8 layers, in fp32 on the CPU, on the same batches
of 4 x 128 tokens, with AdamW, gradient norm and clipping. twinkle also keeps the metrics loss, accuracy and train. The two take
turns step by step in one process, so that whatever else the machine does hits both alike; each step of twinkle is divided by
the plain step beside it, and the median of these ratios is the result.

    python benchmarks/step_overhead.py            # 2 x 50 steps, a few minutes
    python benchmarks/step_overhead.py --quick    # 2 x 10 steps

Exit status 1 if the median ratio is over 1.03, or one of the first 10 losses differs by more than 1e-6 of its size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from twinkle_transformers.model import TransformersModel

BOUND, SAME = 1.03, 1e-6
ROWS, TOKENS, LR, MAX_NORM = 4, 128, 1e-4, 1.0


def config() -> LlamaConfig:
    """SmolLM2-135M's shape, with 8 of its 30 layers."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


def lora() -> LoraConfig:
    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def batches(count: int) -> list[torch.Tensor]:
    """Token ids ``[ROWS, TOKENS + 1]``: one more than a row has, so that both sides see all targets."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 49152, (ROWS, TOKENS + 1), generator=generator) for _ in range(count)]


def plain_loop() -> Callable[[torch.Tensor], float]:
    """The loop as PEFT's and transformers' own guides write it."""
    torch.manual_seed(0)
    model = get_peft_model(LlamaForCausalLM(config()), lora())
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LR, weight_decay=0.01)

    def step(ids: torch.Tensor) -> float:
        inputs = {"input_ids": ids[:, :-1], "attention_mask": torch.ones_like(ids[:, :-1]), "use_cache": False}
        # shift_labels: aligned already, so transformers doesn't shift; one target for each of the T positions
        loss = model(**inputs, labels=ids[:, :-1], shift_labels=ids[:, 1:].contiguous()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # type: ignore[no-any-return]

    return step


def twinkle_loop() -> tuple[Callable[[torch.Tensor], float], TransformersModel]:
    """The same in twinkle, from rows as a data loader gives them, with metrics on."""
    torch.manual_seed(0)
    model = TransformersModel(LlamaForCausalLM, config=config(), mixed_precision="no")
    model.add_adapter_to_model("default", lora())
    model.set_optimizer("adamw", lr=LR, weight_decay=0.01)
    for metric in ("loss", "accuracy", "train"):
        model.add_metric(metric, is_training=True)

    def step(ids: torch.Tensor) -> float:
        rows: list[Any] = [{"input_ids": row[:-1].tolist(), "labels": row[1:].tolist()} for row in ids]
        loss = model.forward_backward(inputs=rows)
        model.clip_grad_and_step(MAX_NORM)
        return float(loss)

    return step, model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=50, help="steps of each loop (default 50)")
    parser.add_argument("--quick", action="store_true", help="10 steps of each loop")
    parser.add_argument("--threads", type=int, default=None, help="torch's threads (default: torch's own choice)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    steps = 10 if options.quick else options.steps
    plain = plain_loop()
    ours, model = twinkle_loop()
    data = batches(steps)
    times: dict[str, list[float]] = {"plain": [], "twinkle": []}
    work: dict[str, list[float]] = {"plain": [], "twinkle": []}  # CPU seconds, which other processes do not stretch
    losses: dict[str, list[float]] = {"plain": [], "twinkle": []}
    threads = torch.get_num_threads()
    print(f"LlamaForCausalLM, {config().num_hidden_layers} layers, LoRA r=8, {ROWS} x {TOKENS} tokens, {threads} threads")
    print(f"{'step':>4}  {'plain s':>8}  {'twinkle s':>9}  {'ratio':>6}  {'plain loss':>11}  {'twinkle loss':>12}")
    for i, ids in enumerate(data):
        turns = [("plain", plain), ("twinkle", ours)]
        for name, step in turns if i % 2 == 0 else turns[::-1]:
            began, used = time.perf_counter(), time.process_time()
            losses[name].append(step(ids))
            times[name].append(time.perf_counter() - began)
            work[name].append(time.process_time() - used)
        a, b, was, is_ = (values[-1] for values in (*times.values(), *losses.values()))
        print(f"{i + 1:>4}  {a:>8.3f}  {b:>9.3f}  {b / a:>6.3f}  {was:>11.7f}  {is_:>12.7f}", flush=True)
    warm = slice(2, None)  # the first steps allocate
    ratios = [[b / a for a, b in zip(t["plain"][warm], t["twinkle"][warm], strict=True)] for t in (times, work)]
    ratio, of_work = map(statistics.median, ratios)
    apart = max(abs(a - b) / abs(a) for a, b in zip(losses["plain"][:10], losses["twinkle"][:10], strict=True))
    medians = {name: statistics.median(values[warm]) for name, values in times.items()}
    print(f"\nmetrics: {model.calculate_metric(is_training=True)}")
    print(f"median step: plain {medians['plain']:.3f} s, twinkle {medians['twinkle']:.3f} s")
    print(f"median ratio twinkle / plain: {ratio:.3f}   (bound {BOUND}); of CPU time: {of_work:.3f}")
    print(f"largest relative difference of the first 10 losses: {apart:.1e}   (bound {SAME:g})")
    broken = [text for text, bad in (("ratio", ratio > BOUND), ("losses", not apart <= SAME)) if bad]
    print("bounds broken: " + ", ".join(broken) if broken else "all bounds kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
