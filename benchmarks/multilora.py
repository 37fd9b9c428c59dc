"""What it saves that tenants share passes, against PEFT's adapters taking turns on padded batches.

A Llama of SmolLM2's shape with 8 layers, fp32, LoRA (r=8) on all linear layers, AdamW, clipping. Each tenant's step is a
batch of its own. PEFT: ``set_adapter``, forward with transformers' loss, backward, clip, step, tenant after tenant. twinkle:
``forward_backward_many`` and each tenant's ``clip_grad_and_step``; for one tenant, ``TransformersModel``. Both update with
torch's fused AdamW, which ``MultiLoraTransformersModel`` chooses by itself and PEFT's users must ask for. The two take turns
in one process; the median of the ratios of neighbours is the result, of CPU time, which other processes stretch least. Memory
is the peak of a step over what is resident between steps.

How much can be saved depends on the processor: on how much faster a matmul of many rows is than one of few, and on what oneDNN
gains over the kernels that PyTorch takes (``twinkle_core.ops.matmul``; ``--torch-kernels`` measures without it). So beside each
result stands the ceiling, the speedup of a pass that is nothing but the base model's own matmuls.

    python benchmarks/multilora.py                      # all cases, 5 turns each: half an hour on one core
    python benchmarks/multilora.py --turns 3 --case 16x1x32 --case one

Exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from twinkle_core.ops.matmul import kernel, linear, times
from twinkle_multilora.engine import CHUNK
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_transformers.model import TransformersModel

WORDS, LR, MAX_NORM = 49152, 1e-4, 1.0
#: most memory of a shared step, relative to a step of taking turns at an equal number of tokens; milliseconds of a switch
MEMORY, SWITCH = 1.5, 1.0
Row = dict[str, list[int]]


@dataclass(frozen=True)
class Case:
    """Tenants, rows of each, tokens of the longest row; share of real tokens, share of masked ones; the least speedup."""

    tenants: int
    rows: int
    tokens: int
    least: float
    fill: float = 1.0
    masked: float = 0.0


CASES = {
    "16x1x32": Case(16, 1, 32, 2.4),
    "8x1x64": Case(8, 1, 64, 1.6),
    "16x1x64": Case(16, 1, 64, 1.6),
    "sft": Case(4, 4, 192, 1.7, fill=0.65, masked=0.6),
    "sparse": Case(4, 4, 192, 3.0, fill=0.4, masked=0.85),
    "4x4x128": Case(4, 4, 128, 0.97),
    "one": Case(1, 4, 128, 1.1),
}


def config() -> LlamaConfig:
    """SmolLM2-135M's shape, with 8 of its 30 layers."""
    return LlamaConfig(
        vocab_size=WORDS, hidden_size=576, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip


def lora() -> LoraConfig:
    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def rows_of(case: Case) -> list[list[Row]]:
    """Each tenant's rows: the first is the longest, the others make up the fill; the first part of each is masked."""
    draw = torch.Generator().manual_seed(0)
    rest = (case.fill * case.rows - 1) / max(case.rows - 1, 1)
    found = []
    for _ in range(case.tenants):
        rows = []
        for number in range(case.rows):
            length = case.tokens if number == 0 or case.fill == 1 else max(4, round(case.tokens * rest))
            ids = torch.randint(0, WORDS, (length + 1,), generator=draw).tolist()
            hidden = round(case.masked * length)
            rows.append({"input_ids": ids[:-1], "labels": [-100] * hidden + ids[1 + hidden :]})
        found.append(rows)
    return found


def padded(rows: list[Row]) -> dict[str, torch.Tensor]:
    """As a collator for transformers pads; labels are aligned, which ``shift_labels`` says."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (longest - len(values))

    ids = torch.tensor([pad(row["input_ids"], 0) for row in rows])
    labels = torch.tensor([pad(row["labels"], -100) for row in rows])
    mask = torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "shift_labels": labels}


def peft_step(case: Case, data: list[list[Row]]) -> tuple[Callable[[], list[float]], Callable[[int], None]]:
    """A step of all tenants, one after the other; and the switch to one."""
    torch.manual_seed(0)
    names = [f"t{i}" for i in range(case.tenants)]
    model = get_peft_model(LlamaForCausalLM(config()), lora(), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, lora())
    model.train()
    own = {name: [p for key, p in model.named_parameters() if f".{name}." in key] for name in names}
    for parameters in own.values():
        for parameter in parameters:
            parameter.requires_grad_(True)
    optimizers = {name: torch.optim.AdamW(own[name], lr=LR, weight_decay=0.01, fused=True) for name in names}

    def step() -> list[float]:
        losses = []
        for name, rows in zip(names, data, strict=True):
            if case.tenants > 1:
                model.set_adapter(name)
            loss = model(**padded(rows), use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(own[name], MAX_NORM)
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses.append(loss.item())
        return losses

    return step, lambda i: model.set_adapter(names[i % len(names)])


def twinkle_step(case: Case, data: list[list[Row]]) -> tuple[Callable[[], list[float]], Callable[[int], None]]:
    torch.manual_seed(0)
    names = [f"t{i}" for i in range(case.tenants)]
    options: dict[str, Any] = {"config": config(), "mixed_precision": "no"}
    model: Any
    if case.tenants == 1:
        model = TransformersModel(LlamaForCausalLM, **options)
    else:
        model = MultiLoraTransformersModel(LlamaForCausalLM, **options, max_loras=case.tenants, max_r=8)
        print(f"    {model.engine.sharing}")
    for name in names:
        model.add_adapter_to_model(name, lora())
        model.set_optimizer("adamw", lr=LR, weight_decay=0.01, fused=True, adapter_name=name)

    def step() -> list[float]:
        if case.tenants == 1:
            losses = [model.forward_backward(data[0])]
        else:
            losses = list(model.forward_backward_many(dict(zip(names, data, strict=True))).values())
        for name in names:
            model.clip_grad_and_step(MAX_NORM, adapter_name=name)
        return [float(loss) for loss in losses]

    def switch(i: int) -> None:
        with model.adapters.activate(names[i % len(names)]):
            pass

    return step, switch


def matmuls(data: list[list[Row]], turns: int) -> float:
    """CPU seconds of the base model's matmuls over all tokens at once, there and back; the head's over labelled ones alone."""
    sizes, rows = config(), [row for tenant in data for row in tenant]
    wide, inner, few = sizes.hidden_size, sizes.intermediate_size, sizes.hidden_size * sizes.num_key_value_heads
    few //= sizes.num_attention_heads
    body = [(wide, wide)] * 2 + [(few, wide)] * 2 + [(inner, wide)] * 2 + [(wide, inner)]
    tokens = sum(len(row["input_ids"]) for row in rows)
    labelled = sum(label != -100 for row in rows for label in row["labels"])
    total = 0.0
    for (out, into), count, layers in [(shape, tokens, sizes.num_hidden_layers) for shape in body] + [
        ((WORDS, wide), labelled, 1)
    ]:
        weight, x, g = torch.randn(out, into), torch.randn(count, into), torch.randn(min(count, CHUNK), out)
        g = g if out == WORDS else torch.randn(count, out)
        spent = []
        for _ in range(turns + 1):
            began = time.process_time()
            for part in torch.split(x, CHUNK) if out == WORDS else [x]:
                linear(part, weight)
                times(g[: len(part)], weight)
            spent.append(time.process_time() - began)
        total += min(spent) * layers
    return total


def resident(field: str) -> int:
    """Bytes, as Linux counts them for this process."""
    text = Path("/proc/self/status").read_text("utf-8")
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(field))


def peak(step: Callable[[], object]) -> int:
    """Bytes held at most in a step, beyond those before it."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", "utf-8")  # forget the old peak
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def switching(switch: Callable[[int], None]) -> float:
    """Milliseconds of a switch, the median of many."""
    times = []
    for i in range(200):
        began = time.perf_counter()
        switch(i)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def measure(name: str, case: Case, turns: int) -> Iterator[str]:
    """Prints one case; what it misses."""
    data = rows_of(case)
    print(
        f"{name}: {case.tenants} tenant(s) x {case.rows} row(s) x {case.tokens} tokens, fill {case.fill}, masked {case.masked}"
    )
    (theirs, their_switch), (ours, our_switch) = peft_step(case, data), twinkle_step(case, data)
    apart = max(abs(a - b) / abs(a) for a, b in zip(theirs(), ours(), strict=True))
    memory = {"peft": peak(theirs), "twinkle": peak(ours)}
    cpu, wall, ceilings = [], [], []
    least = matmuls(data, turns)
    for turn in range(turns):
        spent: dict[str, tuple[float, float]] = {}
        for who, step in [("peft", theirs), ("twinkle", ours)][:: 1 if turn % 2 else -1]:
            began = time.process_time(), time.perf_counter()
            step()
            spent[who] = time.process_time() - began[0], time.perf_counter() - began[1]
        cpu.append(spent["peft"][0] / spent["twinkle"][0])
        wall.append(spent["peft"][1] / spent["twinkle"][1])
        ceilings.append(spent["peft"][0] / least)
    speed, more = statistics.median(cpu), memory["twinkle"] / memory["peft"]
    spread = f"range {min(cpu):.2f} to {max(cpu):.2f}; wall {statistics.median(wall):.2f} x"
    print(f"    {speed:.2f} x (at least {case.least:g}; ceiling here {statistics.median(ceilings):.2f}), {spread}")
    print(f"    peak {memory['twinkle'] / 2**20:.0f} of {memory['peft'] / 2**20:.0f} MiB: {more:.2f}")
    print(f"    first losses apart by {apart:.1e}", flush=True)
    if speed < case.least:
        yield f"speed of {name}"
    if not apart < 1e-5:
        yield f"losses of {name}"
    if case.tenants > 1:
        times = switching(their_switch), switching(our_switch)
        print(f"    a switch: {times[0]:.3f} ms there, {times[1]:.4f} ms here (at most {SWITCH:g})")
        if times[1] > SWITCH:
            yield f"switching of {name}"


def equal_tokens(turns: int) -> Iterator[str]:
    """Memory at an equal number of tokens: 8 tenants of 64 in one pass, against one adapter's batch of 512."""
    shared, alone = Case(8, 1, 64, 0), Case(1, 8, 64, 0)
    ours, theirs = twinkle_step(shared, rows_of(shared))[0], peft_step(alone, rows_of(alone))[0]
    ours(), theirs()
    more = statistics.median(peak(ours) / peak(theirs) for _ in range(min(turns, 3)))
    print(f"memory: a pass of 8 tenants x 64 tokens takes {more:.2f} of PEFT's with 1 x 512 (at most {MEMORY:g})")
    if more > MEMORY:
        yield "memory"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=5, help="of each side in each case (default 5)")
    parser.add_argument("--case", action="append", choices=[*CASES, "memory"], help="only this one; may be repeated")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1)")
    parser.add_argument("--torch-kernels", action="store_true", help="without oneDNN; the bounds are not meant for it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.torch_kernels:
        torch.backends.mkldnn.set_flags(False)
    by = f"matmuls by {kernel()}"
    print(f"{config().num_hidden_layers} layers, {options.threads} thread(s), torch {torch.__version__}, {by}")
    missed: list[str] = []
    for name, case in CASES.items():
        if options.case is None or name in options.case:
            missed += measure(name, case, options.turns)
            gc.collect()
    if options.case is None or "memory" in options.case:
        missed += equal_tokens(options.turns)
    print("bounds missed: " + ", ".join(missed) if missed else "all bounds kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
