"""Contrastive training of embeddings, in a few lines: a small encoder learns what "about this, not that" asks for.

python cookbook/embedding_basic.py [--model ms://… | hf://… | FOLDER] [--pooling mean | cls | last_token] [--output FOLDER]
"""

import argparse
from pathlib import Path

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel

DATA = str(Path(__file__).parents[1] / "twinkle_core/data/bundled/exclusions.jsonl")  # rows of query, positive, negative

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="hf://sentence-transformers/all-MiniLM-L6-v2", help="ms://…, hf://… or a folder")
parser.add_argument("--pooling", default="mean", choices=("mean", "cls", "last_token"), help="as the model was trained with")
parser.add_argument("--output", default="output/embedding_basic")
args = parser.parse_args()

twinkle.initialize(seed=42)
dataset = Dataset(DatasetMeta(DATA, data_slice=range(100)))
dataset.map("triplet")  # to groups of an anchor, its positive and its negatives
dataset.set_template("chat", model_id=args.model, use_chat_template=False, max_length=64, truncation_strategy="right")
dataset.encode()
dataloader = DataLoader(dataset, batch_size=8, shuffle=True)  # groups; a batch has all their rows

model = TransformersModel("AutoModel", model_id=args.model, mixed_precision="no")  # "bf16" on a GPU
model.apply_patch("embedding", pooling=args.pooling)
model.set_template(dataset.template)  # its tokenizer is saved with the model
model.set_loss("infonce", temperature=0.05)  # the documents of other groups are negatives too
model.set_optimizer("adamw", lr=1e-4)
model.add_metric("loss", is_training=True)
model.add_metric("embedding", is_training=True)
for epoch in range(3):
    for batch in dataloader:
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
    numbers = model.calculate_metric(is_training=True)
    print(f"epoch {epoch}  loss {numbers['loss']:.4f}  recall@1 {numbers['recall_at_1']:.2f}")
print("saved", model.save("last", args.output))
