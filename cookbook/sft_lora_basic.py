"""Supervised fine-tuning of a LoRA, in a few lines: a small model learns its name.

python cookbook/sft_lora_basic.py [--model ms://… | hf://… | FOLDER] [--output FOLDER]
"""

import argparse
from pathlib import Path

from peft import LoraConfig

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset
from twinkle.model import TransformersModel

DATA = Path(__file__).parents[1] / "twinkle_core/data/bundled/self_cognition.jsonl"  # rows of {"query", "response", "tag"}

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="hf://HuggingFaceTB/SmolLM2-135M-Instruct", help="ms://…, hf://… or a folder")
parser.add_argument("--output", default="output/sft_lora_basic")
args = parser.parse_args()

twinkle.initialize(seed=42)
dataset = Dataset(DATA)
dataset.map("self_cognition", model_name="Twinkle", model_author="the Twinkle team")  # to {"messages": […]}
dataset.set_template("chat", model_id=args.model)
dataset.encode()
dataloader = DataLoader(dataset, batch_size=2, shuffle=True)

model = TransformersModel(model_id=args.model, mixed_precision="no")  # fp32, for a CPU; "bf16" on a GPU
model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
model.set_optimizer("adamw", lr=1e-3)
# A warm-up of N steps begins at lr 0. It pays in long runs (5 % of the steps, say); of these 24 it would waste the first.
model.set_lr_scheduler("cosine_warmup", num_warmup_steps=0, num_training_steps=len(dataloader) // 2)
model.add_metric("loss", is_training=True)
for batch in dataloader:
    model.forward_backward(inputs=batch)
    norm = model.clip_grad_and_step(max_grad_norm=1.0, gradient_accumulation_steps=2)
    if norm is not None:  # a window of two batches has closed
        print(f"{model.calculate_metric(is_training=True)['loss']:.4f}")
model.flush()  # a short window at the end, if there is one
print("saved", model.save("last", args.output))
