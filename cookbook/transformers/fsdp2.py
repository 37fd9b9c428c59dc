"""Supervised fine-tuning of all weights, which lie apart on the processes (FSDP2); with checkpoints that any number of
processes can resume.

torchrun --nproc-per-node 2 cookbook/transformers/fsdp2.py [--model …] [--output FOLDER] [--resume FOLDER] [--fsdp N]

On CPUs the processes meet over gloo, on GPUs over NCCL; nothing else changes. --fsdp: over how many of the processes
the weights lie apart (default: all); the others are copies of these, with other rows.
"""

import argparse
import os
import sys
from pathlib import Path

import twinkle
from twinkle import DeviceMesh
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import SelfCognitionProcessor

DATA = str(Path(__file__).parents[2] / "twinkle_core/data/bundled/self_cognition.jsonl")
SAVE = 10  # each so many steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="hf://HuggingFaceTB/SmolLM2-135M-Instruct", help="ms://…, hf://… or a folder")
    parser.add_argument("--output", default="output/fsdp2")
    parser.add_argument("--resume", metavar="FOLDER")
    parser.add_argument("--fsdp", type=int, default=int(os.environ.get("WORLD_SIZE", "1")))
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    mesh = DeviceMesh.from_sizes(fsdp_size=args.fsdp)
    first = mesh.rank == 0
    twinkle.initialize(seed=42, global_device_mesh=mesh)

    dataset = Dataset(DatasetMeta(DATA))
    dataset.map(SelfCognitionProcessor("Twinkle", "the Twinkle team"))
    dataset.set_template("chat", model_id=args.model, max_length=512, truncation_strategy="raise")
    dataset.encode()
    dataloader = DataLoader(dataset, batch_size=8, shuffle=True, seed=42, device_mesh=mesh)  # 8 rows of all processes together

    # weights from the checkpoint's folder, then optimizer, schedule and progress
    model = TransformersModel(
        model_id=args.resume or args.model,
        device_mesh=mesh,
        strategy="native_fsdp",
        mixed_precision="no",  # bf16 on GPUs
        memory_efficient_init=True,  # the first process reads, and hands out
    )
    model.set_template(dataset.template)  # its tokenizer is saved with the model
    model.set_optimizer("adamw", lr=1e-4)
    model.set_lr_scheduler("cosine_warmup", num_warmup_steps=0, num_training_steps=args.steps)
    model.add_metric("loss")
    step = 0
    if args.resume:
        state = model.resume_from_checkpoint(args.resume)
        dataloader.resume_from_checkpoint(state["consumed_train_samples"])
        step = state["cur_step"]
    if first:
        print(model.get_train_configs())

    while step < args.steps:
        for batch in dataloader:
            model.forward_backward(inputs=batch)
            norm = model.clip_grad_and_step()
            step += 1
            numbers = model.calculate_metric(is_training=True)  # over all processes
            if first:
                print(f"step {step}/{args.steps}  loss {numbers['loss']:.4f}  gradient norm {norm:.4f}")
            if step % SAVE == 0 or step == args.steps:
                name = "last-checkpoint" if step == args.steps else f"step-{step}"
                samples = dataloader.get_state()["consumed_train_samples"]
                model.save(name, args.output, save_optimizer=True, consumed_train_samples=samples)
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
    sys.stdout.flush()
