"""What a training run is told: the typed tree of ``twinkle train CONFIG.yaml`` (L1).

A component (loss, optimizer, ...) is a name, or a mapping of ``cls`` and that component's own arguments. The schema knows no
component's arguments: the caller checks them against the signature of what the name resolves to, before anything is loaded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator


class _Strict(BaseModel):
    """An unknown key is an error, and so is a value of another type: ``max_steps: true`` is not 1."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class Component(BaseModel):
    """A component by name, with its own arguments beside ``cls``."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    cls: str = Field(min_length=1, description="its name, 'distribution/name' or 'module:Class'")

    @property
    def arguments(self) -> dict[str, Any]:
        """Everything but ``cls``."""
        return dict(self.model_extra or {})


def _named(value: Any) -> Any:
    return {"cls": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) or value is None else [value]


#: ``cross_entropy`` or ``{cls: cross_entropy, …}``
Named = Annotated[Component, BeforeValidator(_named, json_schema_input_type=str | Component)]


class ModelConfig(_Strict):
    """Which model, and in which precision."""

    id: str = Field(
        min_length=1, description="ms://owner/name, hf://owner/name, a folder, or 'quickstart': the quickstart's small model"
    )
    cls: str = Field("transformers", min_length=1, description="the backend: a name of kind 'model'")
    mixed_precision: Literal["bf16", "fp16", "fp8", "no"] = Field("bf16", description="'no' is fp32: for a CPU without bf16")
    gradient_checkpointing: bool | None = Field(None, description="less memory, 30-50 % slower; off unless asked")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    arguments: dict[str, Any] = Field(default_factory=dict, description="further arguments of the backend's constructor")


class AdapterConfig(_Strict):
    """A LoRA; null instead of it trains all weights."""

    name: str = Field("default", min_length=1, description="what the adapter is called in the model and in checkpoints")
    r: PositiveInt = Field(8, description="rank")
    lora_alpha: float = Field(16, gt=0, description="the update is scaled by lora_alpha / r")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="share of the adapter's inputs that training drops at random")
    target_modules: str | list[str] = Field("all-linear", description="'all-linear', a regular expression, or a list of names")
    arguments: dict[str, Any] = Field(default_factory=dict, description="further fields of peft.LoraConfig")
    path: str | None = Field(None, description="a folder with an adapter to start from; then no other field but name")

    @model_validator(mode="after")
    def _path_alone(self) -> AdapterConfig:
        besides = self.model_fields_set - {"path", "name"}
        if self.path is not None and besides:
            raise ValueError(f"with 'path' the adapter's own configuration is used; remove {', '.join(sorted(besides))}")
        return self


class TemplateConfig(_Strict):
    """How a conversation becomes tokens and labels."""

    cls: str = Field("chat", min_length=1, description="a name of kind 'template'")
    max_length: PositiveInt = Field(8192, description="tokens of a row")
    truncation_strategy: Literal["raise", "left", "right", "split", "delete"] = Field("raise", description="for longer rows")
    default_system: str | None = Field(None, description="the system message of conversations without one")
    train_on: Literal["all", "last"] = Field("all", description="all of the assistant's turns, or the last")
    arguments: dict[str, Any] = Field(default_factory=dict, description="further arguments of the template")


class DatasetConfig(_Strict):
    """One set of conversations (dpo: of pairs of them; pt, embedding: of texts)."""

    id: str = Field(
        min_length=1,
        description="ms://…, hf://…, a file or folder (json, jsonl, csv, parquet), bundled://self-cognition, or for the "
        "task embedding bundled://exclusions",
    )
    subset: str = Field("default", description="the configuration of a data set that has several")
    split: str = Field("train", description="which part of it: train, validation, test, ...")
    slice: int | Annotated[list[int], Field(min_length=2, max_length=2)] | None = Field(
        None, description="the first N rows, or [start, stop]"
    )
    preprocessor: Named | None = Field(
        None,
        description="a name of kind 'preprocessor'; none: rows hold 'messages' already (dpo: 'positive' and 'negative'; pt: "
        "'text'; embedding: 'anchor', 'positive', 'negatives')",
    )


class DataloaderConfig(_Strict):
    """How rows are drawn."""

    batch_size: PositiveInt = Field(4, description="rows of a batch")
    shuffle: bool = Field(
        True, description="draw each epoch in another order, fixed by training.seed; evaluation is never shuffled"
    )
    num_workers: int = Field(0, ge=0, description="processes that prepare batches; 0: the training process")
    drop_last: bool = Field(False, description="leave out an epoch's last batch where it is short")


class TrainingConfig(_Strict):
    """How long, and what is written when. A step is an update of the weights."""

    max_steps: PositiveInt | None = Field(None, description="stop after so many steps; wins over epochs")
    epochs: PositiveInt = Field(1, description="rounds over the data")
    gradient_accumulation_steps: PositiveInt = Field(1, description="batches of a step")
    micro_batch_size: PositiveInt | None = Field(None, description="rows that go through the model at once; null: the batch")
    max_grad_norm: float = Field(1.0, gt=0, description="longer gradients are scaled down to this norm")
    logging_steps: PositiveInt = Field(1, description="a line of metrics.jsonl each so many steps")
    save_steps: PositiveInt | None = Field(None, description="a checkpoint each so many steps; there is one at the end anyway")
    save_total_limit: PositiveInt | None = Field(None, description="keep the newest so many checkpoints; null: all")
    save_sharded: bool = Field(
        False, description="each process writes its own part of all weights, and none holds the whole; needs adapter: null"
    )
    eval_steps: PositiveInt | None = Field(None, description="evaluate each so many steps; null: at the end")
    seed: int = Field(
        42, ge=0, lt=2**32, description="of new weights, dropout and the order of rows; the same seed gives the same run"
    )


def _default_metrics() -> list[Component]:
    return [Component(cls=name) for name in ("loss", "accuracy", "train")]


class WorkersConfig(_Strict):
    """The workers that a mode other than local starts."""

    ranks: PositiveInt | None = Field(None, description="how many; null: as the mesh has ranks")
    device_type: str = Field("GPU", min_length=1, description="what they compute on: GPU, CPU, or what else the runtime counts")
    gpus_per_worker: PositiveInt = Field(1, description="devices of each; without effect on CPUs")
    cpus_per_worker: PositiveInt = Field(1, description="CPU cores of each")


class MeshConfig(_Strict):
    """How the processes that torchrun starts, or workers, share the work. Data parallelism takes those that are over."""

    dp_size: PositiveInt = Field(1, description="ranks with different rows, each with all weights")
    fsdp_size: PositiveInt | None = Field(None, description="ranks with different rows, among which the weights lie apart")
    tp_size: PositiveInt | None = Field(None, description="ranks that compute each layer together")
    pp_size: PositiveInt | None = Field(None, description="ranks that have some layers each")
    cp_size: PositiveInt | None = Field(None, description="ranks that share long rows (context parallel)")
    ulysses_size: PositiveInt | None = Field(None, description="ranks of dp and fsdp that share long rows")
    ep_size: PositiveInt | None = Field(None, description="ranks that share the experts of a mixture")


class TrainConfig(_Strict):
    """A run of ``twinkle train``."""

    task: Literal["sft", "pt", "dpo", "embedding"] = Field(
        "sft",
        description="sft: fine-tuning on conversations; pt: pretraining on plain text; dpo: training on pairs of answers; "
        "embedding: contrastive training on groups of texts",
    )
    model: ModelConfig = Field(description="which model, and in which precision")
    adapter: AdapterConfig | None = Field(default_factory=AdapterConfig, description="a LoRA; null trains all weights")
    template: TemplateConfig = Field(default_factory=TemplateConfig, description="how a conversation becomes tokens and labels")
    dataset: Annotated[list[DatasetConfig], BeforeValidator(_listed)] = Field(
        min_length=1, description="what is trained on: one set, or a list of them"
    )
    dataset_mix: Literal["interleave", "concat"] = Field("interleave", description="how several sets become one")
    packing: bool | None = Field(
        None, description="put rows together to template.max_length without padding; null: as the task does (pt: true)"
    )
    eval_dataset: Annotated[list[DatasetConfig], BeforeValidator(_listed)] = Field(
        default_factory=list, description="what is evaluated on: one set, or a list of them; none: no evaluation"
    )
    dataloader: DataloaderConfig = Field(default_factory=DataloaderConfig, description="how rows are drawn")
    patches: Annotated[list[Named], BeforeValidator(_listed)] = Field(
        default_factory=list,
        description="what the model is given before its adapter: names of kind 'patch'; embedding: a pooling head "
        "({cls: embedding, pooling: last_token})",
    )
    processor: Named | None = Field(None, description="padding or packing: a name of kind 'processor'")
    loss: Named = Field(
        default_factory=lambda: Component(cls="cross_entropy"), description="what is made small: a name of kind 'loss'"
    )
    optimizer: Named = Field(
        default_factory=lambda: Component(cls="adamw"),
        description="a name of kind 'optimizer', with its arguments; lr, where it is not given: 1e-4 for an adapter, 1e-5 for "
        "all weights",
    )
    scheduler: Named | None = Field(
        default_factory=lambda: Component(cls="cosine_warmup"),
        description="a name of kind 'scheduler'; num_training_steps and num_warmup_steps (5 % of the run, begun at lr 0) are "
        "filled in where it has them; null: a constant lr",
    )
    metrics: list[Named] = Field(default_factory=_default_metrics, description="what is measured: names of kind 'metric'")
    mode: str = Field(
        "local", min_length=1, description="local: this process, or torchrun's; ray: workers of a Ray cluster, by twinkle-ray"
    )
    workers: WorkersConfig | None = Field(None, description="with mode ray: how many, on what; null: as many as the mesh has")
    mesh: MeshConfig | None = Field(None, description="how processes (torchrun) or workers share the work; null: data parallel")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="how long, and what is written when")
    output_dir: str = Field(
        "output", min_length=1, description="folder of checkpoints, metrics.jsonl, loss.png, config.yaml and data_order.json"
    )

    @model_validator(mode="after")
    def _shards_are_of_all_weights(self) -> TrainConfig:
        if self.training.save_sharded and self.adapter is not None:
            raise ValueError("training.save_sharded is for all weights (adapter: null); an adapter is always plain files")
        return self

    @model_validator(mode="after")
    def _eval_has_data(self) -> TrainConfig:
        if self.training.eval_steps is not None and not self.eval_dataset:
            raise ValueError("training.eval_steps is given, but there is no eval_dataset")
        return self
