"""Two tenants on one base model, in a few lines: each teaches its own adapter a name of its own.

python cookbook/multilora_basic.py [--model ms://… | hf://… | FOLDER] [--output FOLDER]
"""

import argparse
from pathlib import Path

from peft import LoraConfig

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset
from twinkle.model import MultiLoraTransformersModel

DATA = Path(__file__).parents[1] / "twinkle_core/data/bundled/self_cognition.jsonl"  # rows of {"query", "response", "tag"}
TENANTS = {"alice": LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"), "bob": LoraConfig(r=4, lora_alpha=8)}

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="hf://HuggingFaceTB/SmolLM2-135M-Instruct", help="ms://…, hf://… or a folder")
parser.add_argument("--output", default="output/multilora_basic")
args = parser.parse_args()

twinkle.initialize(seed=42)
model = MultiLoraTransformersModel(model_id=args.model, mixed_precision="no", max_loras=2, max_r=8)  # fp32, for a CPU
loaders = {}
for name, config in TENANTS.items():
    dataset = Dataset(DATA)
    dataset.map("self_cognition", model_name=f"{name.title()}'s helper", model_author=name.title())
    dataset.set_template("chat", model_id=args.model)
    dataset.encode()
    loaders[name] = DataLoader(dataset, batch_size=4, shuffle=True)
    model.multi_lora.acquire_lora(name, config)
    model.set_optimizer("adamw", lr=1e-3, adapter_name=name)
    model.add_metric("loss", is_training=True, adapter_name=name)

for batches in zip(*loaders.values(), strict=True):
    for name, batch in zip(loaders, batches, strict=True):  # in turns; threads of their own may do the same
        model.forward_backward(batch, adapter_name=name)
        model.clip_grad_and_step(adapter_name=name)
    print(*(f"{name} {model.calculate_metric(adapter_name=name)['loss']:.4f}" for name in loaders), sep="   ")

for name in TENANTS:
    print("saved", model.save(name, args.output, adapter_name=name))  # plain adapters: PEFT loads them
    model.multi_lora.release_lora(name)
