"""Training from a configuration: what ``twinkle train`` and ``twinkle quickstart`` run (L0 at import).

``prepare`` builds what the configuration names, ``loop`` is the training loop, ``run`` is both with checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from twinkle_core import plugins, registry
from twinkle_core.cli import checkpoints, planning, plot, quickstart_model, resume, run_files, workers
from twinkle_core.cli.interrupts import Interrupts
from twinkle_core.cli.plans.base import Beside
from twinkle_core.config.schema import DatasetConfig, TrainConfig
from twinkle_core.listeners import jsonl, progress

if TYPE_CHECKING:
    from twinkle_core.contracts.engine import Engine
    from twinkle_core.contracts.model import TwinkleModel
    from twinkle_core.contracts.template import Template
    from twinkle_core.data.dataloader import DataLoader
    from twinkle_core.data.dataset import Dataset

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Data:
    """What is trained on, and how long. ``content``: the fingerprint of the rows before they were encoded."""

    model_id: str
    template: Template
    loader: DataLoader
    eval_loader: DataLoader | None
    content: str
    total: int  # steps of the whole run


@dataclass(slots=True)
class Run:
    """What is trained, on what, and how far it is."""

    plan: planning.Plan
    model: TwinkleModel
    loader: DataLoader
    eval_loader: DataLoader | None
    total: int  # steps of the whole run
    beside: Beside  # what the verbs are given of a batch besides its rows
    step: int = 0  # steps done
    updates_before: int = 0  # of the run that is gone on with; a step whose update was skipped is none

    @property
    def config(self) -> TrainConfig:
        """The plan's."""
        return self.plan.config


def run(plan: planning.Plan, say: Callable[[str], None] = print, bar: bool = True) -> int:
    """Train, with checkpoints each ``save_steps``, at the end, and where a signal stops it.

    Returns:
        The exit status: 0, or 130 and 143 after SIGINT and SIGTERM.
    """
    say = say if plan.first else _silent
    start = resume.look(plan, plan.resume, say) if plan.resume is not None else None
    if start is not None and plan.config.training.max_steps is not None and start.step >= plan.config.training.max_steps:
        return _nothing_to_do(start, plan.config.training.max_steps, say)
    data = load_data(plan, say)
    if start is not None and start.step >= data.total:
        return _nothing_to_do(start, data.total, say)
    with workers.running(plan.config, plan.mesh) as where:
        return _train(plan, data, start, say, bar, where)


def _train(
    plan: planning.Plan,
    data: Data,
    start: resume.Start | None,
    say: Callable[[str], None],
    bar: bool,
    where: Mapping[str, Any],
) -> int:
    """``run``, once the data is there. ``where``: what the model is told of its workers."""
    current = build(plan, data, start, say, where)
    if plan.first:
        checkpoints.sweep(plan.output_dir)
        note(current, data, start.config if start is not None else plan.config)
    save_steps, limit = plan.config.training.save_steps, plan.config.training.save_total_limit
    saved = current.step

    def keep() -> None:
        nonlocal saved
        path = save(current, checkpoints.name_of(current.step))
        saved = current.step
        if plan.first:
            checkpoints.rotate(plan.output_dir, limit)
            progress.note(f"saved {path}")

    def each_step() -> None:
        if save_steps is not None and current.step % save_steps == 0:
            keep()

    say(current.model.get_train_configs())
    picture, missing = plan.output_dir / "loss.png", None

    def close() -> None:
        nonlocal missing
        if saved != current.step:
            keep()
        if plan.first:
            missing = plot.draw(jsonl.read(plan.output_dir / METRICS), picture, title(plan.config), plan.task.unit)

    status = loop(current, each_step, close, bar=bar and plan.first)
    say(f"no loss plot: {missing}" if missing else f"loss plot: {picture}")
    if status:
        say(f"stopped after step {current.step} of {current.total}; go on with --resume")
    return status


def save(current: Run, name: str, *, resumable: bool = True) -> str:
    """A checkpoint in the run's folder, with how far the data is read. Returns its path."""
    consumed = current.loader.get_state()["consumed_train_samples"]
    own = current.plan.output_dir
    sharded = current.config.training.save_sharded
    return current.model.save(name, own, save_optimizer=resumable, consumed_train_samples=consumed, sharded=sharded)


def title(config: TrainConfig) -> str:
    """Of the plot: what was trained on what."""
    names = [part.rstrip("/").rpartition("/")[2] for part in (config.model.id, *(dataset.id for dataset in config.dataset))]
    return f"{names[0]} ({'LoRA' if config.adapter is not None else 'all weights'}) on {', '.join(names[1:])}"


def _nothing_to_do(start: resume.Start, total: int, say: Callable[[str], None]) -> int:
    say(f"nothing to do: the run is at step {start.step} of {total} (to go on, raise training.max_steps or training.epochs)")
    return 0


def note(current: Run, data: Data, config: TrainConfig) -> None:
    """What the run is, in its folder; when nothing can refuse it any more. ``config``: what is really used."""
    run_files.write_config(config, current.plan.output_dir)
    order = run_files.data_order(config, len(data.loader.dataset), data.content)
    run_files.write_data_order(order, current.plan.output_dir)


def loop(
    current: Run, each_step: Callable[[], None] = lambda: None, at_end: Callable[[], object] = lambda: None, *, bar: bool = True
) -> int:
    """The training loop: from ``current.step`` to ``current.total``, or until a signal comes.

    Args:
        each_step: called after each step.
        at_end: called after the last one; a signal that comes while it saves and draws is noted too, and does not break it off.
        bar: whether to draw a progress bar.

    Returns:
        The exit status, as ``run``.
    """
    training = current.config.training
    with Interrupts() as interrupts, plugins.listening(*_listeners(current, bar)):
        for _ in _steps(current):
            current.step += 1
            stopped = _stopped(current, interrupts)
            last = current.step == current.total or stopped
            evaluates = current.eval_loader is not None and (
                current.step == current.total or _each(training.eval_steps, current.step)
            )
            if last or evaluates or _each(training.logging_steps, current.step):
                current.model.calculate_metric(is_training=True)
            if evaluates:
                evaluate(current)
            each_step()
            if last or _stopped(current, interrupts):
                break
        at_end()
        return interrupts.exit_status if current.step < current.total else 0  # a signal at the very end stopped nothing


def _silent(text: str) -> None:
    """What ranks beside the first say."""


def _stopped(current: Run, interrupts: Interrupts) -> bool:
    """Whether a signal came; of several processes, to any: all stop after the same step."""
    received = interrupts.received is not None
    if current.plan.ranks is None:
        return received
    engine: Engine = current.model.engine  # type: ignore[attr-defined]  # models of several processes have one
    return any(told for (told,) in engine.gather_numbers([float(received)]))


def _listeners(current: Run, bar: bool) -> tuple[Any, ...]:
    def epoch() -> dict[str, float]:
        return {"epoch": round(current.loader.get_state()["consumed_train_samples"] / len(current.loader.dataset), 4)}

    if not current.plan.first:
        return ()
    return (
        jsonl.JsonLinesWriter(current.plan.output_dir / METRICS, current.updates_before, more=epoch),
        progress.ProgressBar(current.total, current.step, shown=bar),
    )


def _steps(current: Run) -> Iterator[float | None]:
    """Train; yields the gradient norm each time that an accumulation window has closed.

    The last window of an epoch may be short: its gradients are divided by what it really held.
    """
    training = current.config.training
    size = training.gradient_accumulation_steps
    while current.step < current.total:
        held = 0
        for rows in current.loader:
            current.model.forward_backward(
                inputs=rows,
                micro_batch_size=training.micro_batch_size,
                gradient_accumulation_steps=size,
                **current.beside(rows),
            )
            held += 1
            if held == size:
                held = 0
                yield current.model.clip_grad_and_step(max_grad_norm=training.max_grad_norm)
        if held:
            yield current.model.flush(max_grad_norm=training.max_grad_norm)


def evaluate(current: Run) -> None:
    """Read the metrics of the evaluation set."""
    assert current.eval_loader is not None
    size = current.config.training.micro_batch_size
    for rows in current.eval_loader:
        current.model.forward_only(inputs=rows, return_logits=False, micro_batch_size=size, **current.beside(rows))
    current.model.calculate_metric(is_training=False)


def _each(steps: int | None, step: int) -> bool:
    return steps is not None and step % steps == 0


# ---------------------------------------------------------------------------------------------------- building


def prepare(plan: planning.Plan, say: Callable[[str], None] = print) -> Run:
    """Data, model and the state of training of a new run."""
    return build(plan, load_data(plan, say), None, say)


def load_data(plan: planning.Plan, say: Callable[[str], None]) -> Data:
    """The data, and what they tell of the run; before the model, because a fault in them shows sooner than a model loads.

    Raises:
        BadConfig: a schedule that is too long for the run. DataOrderChanged: not what the run to go on with had.
    """
    from twinkle_core.runtime.local import seed_everything

    config = plan.config
    seed_everything(config.training.seed)
    model_id = config.model.id
    if model_id in (quickstart_model.DEFAULT, quickstart_model.TOY):
        model_id = quickstart_model.choose(model_id, say).id
    template = _template(config, model_id)
    dataset = _rows(plan, config.dataset)
    content = run_files.fingerprint(dataset)
    loader = _loader(plan, dataset, template, training=True)
    held_out = config.eval_dataset
    eval_loader = _loader(plan, _rows(plan, held_out), template, training=False) if held_out else None
    per_epoch = math.ceil(len(loader) / config.training.gradient_accumulation_steps)
    total = config.training.max_steps or config.training.epochs * per_epoch
    planning.check_scheduler(plan, total)
    say(f"{len(loader.dataset)} rows, {per_epoch} steps an epoch, {total} steps in all")
    if plan.resume is not None:
        run_files.check_data_order(run_files.data_order(config, len(loader.dataset), content), plan.resume)
    return Data(model_id, template, loader, eval_loader, content, total)


def build(
    plan: planning.Plan,
    data: Data,
    start: resume.Start | None,
    say: Callable[[str], None],
    where: Mapping[str, Any] = MappingProxyType({}),
) -> Run:
    """The model and the state of training, from the beginning or from a checkpoint."""
    model = _model(plan, data, where)
    # before a checkpoint's random state is put back: loading another model draws from it
    beside = plan.task.beside(plan.config, model, lambda: _untrained(plan, data.model_id, where))
    current = Run(plan, model, data.loader, data.eval_loader, data.total, beside)
    if start is not None:
        state = model.resume_from_checkpoint(start.folder)
        data.loader.resume_from_checkpoint(state["consumed_train_samples"])
        # a step whose update was skipped (fp16) is none to the model; the folder's name counts them all
        current.step, current.updates_before = start.step, state["cur_step"]
        say(f"going on from {start.folder} after step {current.step}")
    return current


def _template(config: TrainConfig, model_id: str) -> Template:
    from twinkle_core.contracts.template import Template

    section = config.template
    given = {"model_id": model_id, **planning.own_arguments(section), **section.arguments}
    template: Template = registry.build("template", section.cls, given, contract=Template)
    return template


def _rows(plan: planning.Plan, sets: list[DatasetConfig]) -> Dataset:
    """Conversations (or what the task trains on), not yet encoded."""
    from twinkle_core.data.dataset import DatasetMeta

    metas = [DatasetMeta(planning.dataset_path(part), part.subset, part.split, _slice(part.slice)) for part in sets]
    dataset = plan.task.dataset(plan.config)(metas[0])
    for meta in metas[1:]:
        dataset.add_dataset(meta)
    for meta, part in zip(metas, sets, strict=True):
        if part.preprocessor is not None:
            dataset.map(part.preprocessor.cls, dataset_meta=meta, **part.preprocessor.arguments)
    if len(metas) > 1:
        dataset.mix_dataset(interleave=plan.config.dataset_mix == "interleave")
    plan.task.check_rows(dataset, plan.config.task)
    return dataset


def _slice(given: int | list[int] | None) -> range | None:
    return None if given is None else range(given) if isinstance(given, int) else range(*given)


def _loader(plan: planning.Plan, dataset: Dataset, template: Template, training: bool) -> DataLoader:
    from twinkle_core.data.dataloader import DataLoader

    dataset.set_template(template)
    dataset.encode()
    config, section = plan.config, plan.config.dataloader
    return DataLoader(
        dataset,
        batch_size=section.batch_size,
        shuffle=section.shuffle and training,
        seed=config.training.seed,
        num_workers=section.num_workers,
        drop_last=section.drop_last and training,
        device_mesh=plan.ranks,
    )


def _untrained(plan: planning.Plan, model_id: str, where: Mapping[str, Any]) -> TwinkleModel:
    """The model with its adapter, as a run begins."""
    from twinkle_core.contracts.model import TwinkleModel

    config, section = plan.config, plan.config.model
    mesh = {} if plan.mesh is None else {"device_mesh": plan.mesh}
    given = {"model_id": model_id, **mesh, **where, **planning.own_arguments(section), **section.arguments}
    model: TwinkleModel = registry.build("model", section.cls, given, contract=TwinkleModel)
    for patch in config.patches:
        model.apply_patch(patch.cls, **patch.arguments)
    if config.adapter is not None:
        size = config.training.gradient_accumulation_steps
        model.add_adapter_to_model(config.adapter.name, _adapter_config(plan), gradient_accumulation_steps=size)
    return model


def _model(plan: planning.Plan, data: Data, where: Mapping[str, Any]) -> TwinkleModel:
    config, model = plan.config, _untrained(plan, data.model_id, where)
    model.set_template(data.template)
    if config.processor is not None:
        model.set_processor(config.processor.cls, **config.processor.arguments)
    model.set_loss(config.loss.cls, **config.loss.arguments)
    model.set_optimizer(config.optimizer.cls, **config.optimizer.arguments)
    if config.scheduler is not None:
        given = planning.with_lengths(plan.classes["scheduler"], config.scheduler.arguments, data.total)
        model.set_lr_scheduler(config.scheduler.cls, **given)
    for metric in config.metrics:
        model.add_metric(metric.cls, **metric.arguments)
    return model


def _adapter_config(plan: planning.Plan) -> Any:
    """A peft config, or the folder of an adapter."""
    config = plan.config
    assert config.adapter is not None
    if config.adapter.path is not None:
        return str(Path(config.adapter.path).expanduser())
    from peft import LoraConfig

    given = config.adapter.model_dump(include={"r", "lora_alpha", "lora_dropout", "target_modules"})
    return LoraConfig(**given, task_type=plan.task.peft_type(config), **config.adapter.arguments)
