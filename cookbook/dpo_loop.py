"""DPO of a LoRA with every verb by itself, accumulation, evaluation, and a checkpoint that can be resumed.

It gives the weights of dpo_basic.py, to rounding. Stop it whenever you like, and go on with --resume FOLDER.

python cookbook/dpo_loop.py [--model ms://… | hf://… | FOLDER] [--output FOLDER] [--resume FOLDER]
"""

import argparse
from pathlib import Path

from peft import LoraConfig

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel

DATA = str(Path(__file__).parent / "data/preference.jsonl")  # rows of {"prompt", "chosen", "rejected"}
WINDOW = 2  # batches of a step
EPOCHS, SAVE = 2, 5  # a checkpoint and an evaluation each so many steps


def load(model_id: str, meta: DatasetMeta) -> Dataset:
    """Pairs of encoded rows, with labels on the answers alone."""
    dataset = Dataset(meta)
    dataset.map("preference")
    dataset.set_template("chat", model_id=model_id, max_length=512, train_on="last")
    dataset.encode()
    return dataset


def reference_logps(model: TransformersModel, batch: list):
    """Of the base model, without the adapter: it costs a forward, and no second model."""
    return model.forward_only(inputs=batch, disable_lora=True, return_logits=False).logps


def evaluate(model: TransformersModel, dataloader: DataLoader) -> dict[str, float]:
    """A loss that takes arguments gets them here too."""
    for batch in dataloader:
        model.forward_only(inputs=batch, return_logits=False, ref_logps=reference_logps(model, batch))
    return model.calculate_metric(is_training=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="hf://HuggingFaceTB/SmolLM2-135M-Instruct", help="ms://…, hf://… or a folder")
    parser.add_argument("--output", default="output/dpo_loop")
    parser.add_argument("--resume", metavar="FOLDER")
    args = parser.parse_args()

    twinkle.initialize(seed=42)
    dataloader = DataLoader(load(args.model, DatasetMeta(DATA)), batch_size=2, shuffle=True, seed=42)
    held_out = DataLoader(load(args.model, DatasetMeta(DATA, data_slice=range(6))), batch_size=6)
    steps = EPOCHS * len(dataloader) // WINDOW

    model = TransformersModel(model_id=args.model, mixed_precision="no")
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    model.set_loss("dpo", beta=0.1)
    model.set_optimizer("adamw", lr=5e-4)
    model.add_metric("loss")
    model.add_metric("dpo")
    print(model.get_train_configs())

    step = 0
    if args.resume:
        state = model.resume_from_checkpoint(args.resume)
        dataloader.resume_from_checkpoint(state["consumed_train_samples"])
        step = state["cur_step"]

    while step < steps:
        for batch in dataloader:
            reference = reference_logps(model, batch)
            model.forward(inputs=batch, return_logits=False)
            model.calculate_loss(ref_logps=reference)
            model.backward()
            model.clip_grad_norm(1.0, gradient_accumulation_steps=WINDOW)
            stepped = model.step()
            model.zero_grad()
            model.lr_step()
            if not stepped:
                continue
            step += 1
            numbers = model.calculate_metric(is_training=True)
            print(f"step {step}/{steps}  " + "  ".join(f"{name} {value:.4f}" for name, value in numbers.items()))
            if step % SAVE == 0:
                print("evaluation:", evaluate(model, held_out))
                samples = dataloader.get_state()["consumed_train_samples"]
                print("saved", model.save(f"step-{step}", args.output, save_optimizer=True, consumed_train_samples=samples))

    print("saved", model.save("last", args.output))


if __name__ == "__main__":
    main()
