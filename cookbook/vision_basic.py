"""Supervised fine-tuning of a LoRA on images, in a few lines: a model learns to name colours of its own.

python cookbook/vision_basic.py [--model ms://… | hf://… | FOLDER] [--output FOLDER]
"""

import argparse
from pathlib import Path

from peft import LoraConfig
from PIL import Image

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import LazyDataset
from twinkle.model import TransformersModel

NAMES = {"red": "rosso", "green": "verde", "blue": "blu", "yellow": "giallo"}

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="hf://Qwen/Qwen2.5-VL-3B-Instruct", help="ms://…, hf://… or a folder")
parser.add_argument("--output", default="output/vision_basic")
args = parser.parse_args()

twinkle.initialize(seed=42)
pictures = Path(args.output) / "pictures"
pictures.mkdir(parents=True, exist_ok=True)
rows = []
for colour, name in NAMES.items():
    for size in (56, 84):
        Image.new("RGB", (size, 112 - size + 28), colour).save(pictures / f"{colour}{size}.png")
        messages = [{"role": "user", "content": "<image>Which colour?"}, {"role": "assistant", "content": name}]
        rows.append({"messages": messages, "images": [str(pictures / f"{colour}{size}.png")]})

dataset = LazyDataset(rows)  # pixels are made when a row is read, and not kept
dataset.set_template("vision", model_id=args.model)
dataset.encode()

model = TransformersModel("AutoModelForImageTextToText", model_id=args.model, mixed_precision="no")  # "bf16" on a GPU
model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))  # not the vision tower
model.set_optimizer("adamw", lr=5e-3)
model.set_template(dataset.template)
for epoch in range(6):
    for batch in DataLoader(dataset, batch_size=4, shuffle=True):
        loss = model.forward_backward(inputs=batch, micro_batch_size=2)  # pixels go with their rows
        model.clip_grad_and_step(max_grad_norm=1.0)
    print(f"{epoch} {float(loss):.4f}")

asked = {"messages": rows[0]["messages"][:1], "images": rows[0]["images"]}
print("answer:", model.generate([asked], max_new_tokens=8, do_sample=False)[0])
print("saved", model.save("last", args.output))
