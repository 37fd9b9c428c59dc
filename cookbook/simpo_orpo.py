"""Preferences without a reference: SimPO, ORPO or CPO, whichever is asked for. One forward a batch, and no second model.

python cookbook/simpo_orpo.py [--loss simpo | orpo | cpo] [--model ms://… | hf://… | FOLDER] [--output FOLDER]
"""

import argparse
from pathlib import Path

from peft import LoraConfig

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset
from twinkle.model import TransformersModel

DATA = Path(__file__).parent / "data/preference.jsonl"  # rows of {"prompt", "chosen", "rejected"}
SETTINGS = {
    "simpo": {"beta": 2.0, "gamma": 1.0},  # rewards are means over tokens; the better one is to be ahead by gamma
    "orpo": {"beta": 0.1},  # supervised training on the chosen answer, and the odds of the two
    "cpo": {"beta": 0.1},  # supervised training on the chosen answer, and DPO without its reference
}

parser = argparse.ArgumentParser()
parser.add_argument("--loss", choices=SETTINGS, default="simpo")
parser.add_argument("--model", default="hf://HuggingFaceTB/SmolLM2-135M-Instruct", help="ms://…, hf://… or a folder")
parser.add_argument("--output", default="output/simpo_orpo")
args = parser.parse_args()

twinkle.initialize(seed=42)
dataset = Dataset(DATA)
dataset.map("preference")
dataset.set_template("chat", model_id=args.model, train_on="last")  # labels on the answers alone
dataset.encode()
dataloader = DataLoader(dataset, batch_size=4, shuffle=True)

model = TransformersModel(model_id=args.model, mixed_precision="no")
model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
model.set_loss(args.loss, **SETTINGS[args.loss])
model.set_optimizer("adamw", lr=5e-4)
model.add_metric("loss", is_training=True)
model.add_metric("dpo", is_training=True)  # rewards, as the loss in use defines them
for _ in range(2):
    for batch in dataloader:
        # four pairs are eight rows; two pairs at a time need half the memory, and give the same gradients
        model.forward_backward(inputs=batch, micro_batch_size=4)
        model.clip_grad_and_step(max_grad_norm=1.0)
        numbers = model.calculate_metric(is_training=True)
        print(f"{numbers['loss']:.4f}  margin {numbers['reward_margin']:.4f}  accuracy {numbers['reward_accuracy']:.2f}")
print("saved", model.save("last", args.output))
