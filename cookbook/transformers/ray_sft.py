"""Supervised fine-tuning on the workers of a Ray cluster, driven by one program; with checkpoints to resume from.

pip install -e plugins/twinkle-ray      # in a clone; docs/quickstart.md tells how everything is installed
python cookbook/transformers/ray_sft.py [--model …] [--workers 2] [--device GPU] [--fsdp N] [--output FOLDER] [--resume FOLDER]

Ray is started on this machine; RAY_ADDRESS=… uses a cluster that runs. Beside the first lines of main nothing differs from a
program that torchrun starts, except that this process is no rank: it reads global batches, and the model divides them.
"""

import argparse
from pathlib import Path

from peft import LoraConfig

import twinkle
from twinkle import DeviceGroup, DeviceMesh
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import SelfCognitionProcessor

DATA = str(Path(__file__).parents[2] / "twinkle_core/data/bundled/self_cognition.jsonl")
SAVE = 10  # each so many steps


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="hf://HuggingFaceTB/SmolLM2-135M-Instruct", help="ms://…, hf://… or a folder")
    parser.add_argument("--workers", type=int, default=2, help="how many, each of which is a rank")
    parser.add_argument("--device", default="CPU", help="CPU, GPU, …: of each worker one")
    parser.add_argument("--fsdp", type=int, default=1, help="over how many workers the weights lie apart")
    parser.add_argument("--output", default="output/ray", help="a folder that the workers see too")
    parser.add_argument("--resume", metavar="FOLDER", help="a checkpoint to go on from")
    parser.add_argument("--steps", type=int, default=20, help="updates in all, those before --resume included")
    args = parser.parse_args()

    mesh = DeviceMesh.from_sizes(world_size=args.workers, fsdp_size=args.fsdp)
    twinkle.initialize(mode="ray", groups=[DeviceGroup("actor", args.workers, device_type=args.device)])
    print(twinkle.get_device_placement())

    dataset = Dataset(DatasetMeta(DATA))
    dataset.map(SelfCognitionProcessor("Twinkle", "the Twinkle team"))
    dataset.set_template("chat", model_id=args.model, max_length=512, truncation_strategy="raise")
    dataset.encode()
    dataloader = DataLoader(dataset, batch_size=8, shuffle=True, seed=42)

    model = TransformersModel(
        model_id=args.model,
        device_mesh=mesh,
        mixed_precision="no" if args.device == "CPU" else "bf16",
        remote_group="actor",
    )
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    model.set_optimizer("adamw", lr=1e-3)
    model.set_lr_scheduler("cosine_warmup", num_warmup_steps=0, num_training_steps=args.steps)
    model.add_metric("loss")
    step = 0
    if args.resume:
        state = model.resume_from_checkpoint(args.resume)
        dataloader.resume_from_checkpoint(state["consumed_train_samples"])
        step = state["cur_step"]
    print(model.get_train_configs())

    while step < args.steps:
        for batch in dataloader:
            model.forward_backward(inputs=batch)
            norm = model.clip_grad_and_step()
            step += 1
            numbers = model.calculate_metric(is_training=True)
            print(f"step {step}/{args.steps}  loss {numbers['loss']:.4f}  gradient norm {norm:.4f}")
            if step % SAVE == 0 or step == args.steps:
                name = "last-checkpoint" if step == args.steps else f"step-{step}"
                samples = dataloader.get_state()["consumed_train_samples"]
                model.save(name, args.output, save_optimizer=True, consumed_train_samples=samples)
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
