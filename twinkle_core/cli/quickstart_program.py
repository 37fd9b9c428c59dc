"""The quickstart as a program of its own: what a reader types who wants the loop in their own hands (L0)."""

from __future__ import annotations

from twinkle_core.cli.quickstart_model import bundled_set
from twinkle_core.config.schema import TrainConfig


def program(config: TrainConfig, model_id: str, steps: int, per_epoch: int) -> list[str]:
    """The lines. They give the very weights that the command gives.

    Args:
        config: the quickstart's.
        model_id: what its model was loaded from.
        steps: of the run.
        per_epoch: batches of one pass over the data.
    """
    assert config.adapter is not None and config.dataset[0].preprocessor is not None and config.scheduler is not None
    who = ", ".join(f"{key}={value!r}" for key, value in config.dataset[0].preprocessor.arguments.items())
    schedule = ", ".join(f"{key}={value!r}" for key, value in config.scheduler.arguments.items())
    whole = steps == per_epoch
    batches = "loader" if whole else f"islice(chain.from_iterable(repeat(loader)), {steps})"
    rank, alpha = config.adapter.r, config.adapter.lora_alpha
    return [
        *([] if whole else ["from itertools import chain, islice, repeat"]),
        "import twinkle",
        "from peft import LoraConfig",
        "from twinkle.dataloader import DataLoader",
        "from twinkle.dataset import Dataset",
        "from twinkle.model import TransformersModel",
        "",
        f"MODEL = {model_id!r}",
        f"twinkle.initialize(seed={config.training.seed})",
        f"dataset = Dataset({str(bundled_set())!r})",
        f"dataset.map('self_cognition', {who})",
        "dataset.set_template('chat', model_id=MODEL)",
        "dataset.encode()",
        f"loader = DataLoader(dataset, batch_size={config.dataloader.batch_size}, shuffle=True, seed={config.training.seed})",
        f"model = TransformersModel(model_id=MODEL, mixed_precision={config.model.mixed_precision!r})",
        f"model.add_adapter_to_model('default', LoraConfig(r={rank}, lora_alpha={alpha:g}, target_modules='all-linear'))",
        f"model.set_optimizer('adamw', lr={config.optimizer.arguments['lr']!r})",
        f"model.set_lr_scheduler('cosine_warmup', num_training_steps={steps}, {schedule})",
        f"for batch in {batches}:",
        "    print(float(model.forward_backward(inputs=batch)))",
        "    model.clip_grad_and_step()",
        f"model.save('adapter', {config.output_dir!r})",
    ]
