"""Distillation from a teacher beside the student: on written answers, and on answers that the student makes itself.

Teacher and student must have the same vocabulary. Of a batch in the data, or (--on-policy 1: always) of one that the student
completes, the teacher says what it would have written at each token; the student is drawn there.

python cookbook/gkd_loop.py [--model ms://… | hf://… | FOLDER] [--teacher …] [--on-policy SHARE] [--output FOLDER]
"""

import argparse
import random
from pathlib import Path

import torch
from peft import LoraConfig

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset
from twinkle.model import TransformersModel

DATA = Path(__file__).parent / "data/preference.jsonl"  # rows of {"prompt", "chosen", "rejected"}


def conversation(row: dict) -> dict:
    """A question and its better answer."""
    return {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="hf://HuggingFaceTB/SmolLM2-135M-Instruct", help="the student")
    parser.add_argument("--teacher", default="hf://HuggingFaceTB/SmolLM2-360M-Instruct")
    parser.add_argument("--on-policy", type=float, default=0.5, help="share of batches that the student completes itself")
    parser.add_argument("--output", default="output/gkd_loop")
    args = parser.parse_args()

    twinkle.initialize(seed=42)
    draw, sampling = random.Random(42), torch.Generator().manual_seed(42)
    dataset = Dataset(DATA)
    dataset.map(conversation)
    dataloader = DataLoader(dataset, batch_size=4, shuffle=True)  # conversations: the models' template encodes them

    teacher = TransformersModel(model_id=args.teacher, mixed_precision="no")
    model = TransformersModel(model_id=args.model, mixed_precision="no")
    model.add_adapter_to_model("default", LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    for one in (teacher, model):
        one.set_template("chat", model_id=args.model)
    model.set_loss("gkd", beta=0.5)
    model.set_optimizer("adamw", lr=1e-3)
    model.add_metric("loss", is_training=True)
    for epoch in range(4):
        for batch in dataloader:
            own = draw.random() < args.on_policy
            if own:
                questions = [{"messages": row["messages"][:-1]} for row in batch]
                batch = model.generate(
                    questions, return_rows=True, generator=sampling, max_new_tokens=24, do_sample=True, top_k=0
                )
            logits = teacher.forward_only(inputs=batch).logits
            model.forward_backward(inputs=batch, teacher_logits=logits)
            model.clip_grad_and_step(max_grad_norm=1.0)
            loss = model.calculate_metric(is_training=True)["loss"]
            print(f"epoch {epoch + 1}  divergence {loss:.4f}  {'its own answers' if own else 'answers of the data'}")
    print("saved", model.save("last", args.output))


if __name__ == "__main__":
    main()
