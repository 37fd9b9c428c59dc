"""DPO of a LoRA, in a few lines: a small model learns to prefer a plain answer. The base model is the reference.

python cookbook/dpo_basic.py [--model ms://… | hf://… | FOLDER] [--output FOLDER]
"""

import argparse
from pathlib import Path

from peft import LoraConfig

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset
from twinkle.model import TransformersModel

DATA = Path(__file__).parent / "data/preference.jsonl"  # rows of {"prompt", "chosen", "rejected"}

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="hf://HuggingFaceTB/SmolLM2-135M-Instruct", help="ms://…, hf://… or a folder")
parser.add_argument("--output", default="output/dpo_basic")
args = parser.parse_args()

twinkle.initialize(seed=42)
dataset = Dataset(DATA)
dataset.map("preference")  # to {"positive": {"messages": […]}, "negative": {"messages": […]}}
dataset.set_template("chat", model_id=args.model, train_on="last")  # labels on the answers alone
dataset.encode()
dataloader = DataLoader(dataset, batch_size=4, shuffle=True)  # pairs; a batch has their rows: chosen, rejected, chosen, …

model = TransformersModel(model_id=args.model, mixed_precision="no")  # fp32, for a CPU; "bf16" on a GPU
model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
model.set_loss("dpo", beta=0.1)
model.set_optimizer("adamw", lr=5e-4)
model.add_metric("loss", is_training=True)
model.add_metric("dpo", is_training=True)
for _ in range(2):
    for batch in dataloader:
        reference = model.forward_only(inputs=batch, disable_lora=True, return_logits=False)
        model.forward_backward(inputs=batch, ref_logps=reference.logps)
        model.clip_grad_and_step(max_grad_norm=1.0)
        numbers = model.calculate_metric(is_training=True)
        print(f"{numbers['loss']:.4f}  margin {numbers['reward_margin']:.4f}  accuracy {numbers['reward_accuracy']:.2f}")
print("saved", model.save("last", args.output))
