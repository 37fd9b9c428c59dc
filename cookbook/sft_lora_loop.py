"""Supervised fine-tuning of a LoRA with every verb by itself, evaluation, and a checkpoint that can be resumed.

It gives the very weights of sft_lora_basic.py. Stop it whenever you like, and go on with --resume FOLDER.

python cookbook/sft_lora_loop.py [--model ms://… | hf://… | FOLDER] [--output FOLDER] [--resume FOLDER]
"""

import argparse
from pathlib import Path

from peft import LoraConfig

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import SelfCognitionProcessor

DATA = str(Path(__file__).parents[1] / "twinkle_core/data/bundled/self_cognition.jsonl")
WINDOW = 2  # batches of a step
EVALUATE_AND_SAVE = 10  # each so many steps


def load(model_id: str, meta: DatasetMeta) -> Dataset:
    """Rows of token ids, with labels on what the assistant says."""
    dataset = Dataset(meta)
    dataset.map(SelfCognitionProcessor("Twinkle", "the Twinkle team"))
    dataset.set_template("chat", model_id=model_id, max_length=512, truncation_strategy="raise")
    dataset.encode()
    return dataset


def evaluate(model: TransformersModel, dataloader: DataLoader) -> dict[str, float]:
    """No gradients, no dropout; the model is left as it was."""
    for batch in dataloader:
        model.forward_only(inputs=batch)
    return model.calculate_metric(is_training=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="hf://HuggingFaceTB/SmolLM2-135M-Instruct", help="ms://…, hf://… or a folder")
    parser.add_argument("--output", default="output/sft_lora_loop")
    parser.add_argument("--resume", metavar="FOLDER")
    args = parser.parse_args()

    twinkle.initialize(seed=42)
    dataloader = DataLoader(load(args.model, DatasetMeta(DATA)), batch_size=2, shuffle=True, seed=42)
    held_out = DataLoader(load(args.model, DatasetMeta(DATA, data_slice=range(8))), batch_size=8)
    steps = len(dataloader) // WINDOW

    model = TransformersModel(model_id=args.model, mixed_precision="no")
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    model.set_template("chat", model_id=args.model)  # for generate(); the rows above are encoded already
    model.set_loss("cross_entropy")
    model.set_optimizer("adamw", lr=1e-3)
    model.set_lr_scheduler("cosine_warmup", num_warmup_steps=0, num_training_steps=steps)
    model.add_metric("loss")
    model.add_metric("accuracy")
    print(model.get_train_configs())

    step = 0
    if args.resume:
        state = model.resume_from_checkpoint(args.resume)
        dataloader.resume_from_checkpoint(state["consumed_train_samples"])
        step = state["cur_step"]

    for batch in dataloader:
        model.forward(inputs=batch)
        model.calculate_loss()
        model.backward()
        # Each of these acts when a window of WINDOW backwards has closed, and does nothing before.
        norm = model.clip_grad_norm(1.0, gradient_accumulation_steps=WINDOW)
        stepped = model.step(gradient_accumulation_steps=WINDOW)
        model.zero_grad(gradient_accumulation_steps=WINDOW)
        model.lr_step(gradient_accumulation_steps=WINDOW)
        if not stepped:
            continue
        step += 1
        numbers = model.calculate_metric(is_training=True)
        print(f"step {step}/{steps}  loss {numbers['loss']:.4f}  accuracy {numbers['accuracy']:.2f}  gradient norm {norm:.2f}")
        if step % EVALUATE_AND_SAVE == 0:
            print("evaluation:", evaluate(model, held_out))
            samples = dataloader.get_state()["consumed_train_samples"]
            print("saved", model.save(f"step-{step}", args.output, save_optimizer=True, consumed_train_samples=samples))

    print("saved", model.save("last", args.output))
    question = {"messages": [{"role": "user", "content": "Who are you?"}]}
    print(model.generate([question], max_new_tokens=30, do_sample=False)[0])


if __name__ == "__main__":
    main()
