"""``twinkle train`` of plain text and of pairs: what each task trains on, its reference, resuming, and what it refuses."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig
from safetensors.torch import load_file

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, PackingDataset
from twinkle.model import TransformersModel
from twinkle_core.cli import plot
from twinkle_core.cli.plans import base as plans
from twinkle_core.config.schema import TrainConfig
from twinkle_core.runtime.local import seed_everything
from twinkle_core.train import checkpoint, optim

TEXTS = ["the moon goes round the earth " * n for n in (1, 4, 2, 9, 3, 1, 6, 2, 5)]
PAIRS = [(f"question {k}", "yes " * (k % 3 + 1), "certainly not " * (k % 4 + 1)) for k in range(9)]
DPO = {"task": "dpo", "scheduler": None}
PT = {"task": "pt", "template": {"max_length": 40}, "scheduler": None}


def written(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def texts(tmp_path):
    return {"id": written(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])}


@pytest.fixture
def pairs(tmp_path):
    rows = [{"prompt": q, "chosen": better, "rejected": worse} for q, better, worse in PAIRS]
    return {"id": written(tmp_path / "pairs.jsonl", rows), "preprocessor": "preference"}


def weights(folder: Path) -> dict[str, list]:
    return {name: t.tolist() for name, t in load_file(next(folder.glob("*model.safetensors"))).items()}


# ------------------------------------------------------------------------------------------------ the same by hand


def test_pretraining_is_the_loop_that_one_would_write(config, twinkle, tmp_path, texts, tiny):
    """Texts are cut and packed to max_length, and every token but the first of each row is a target."""
    status, text = twinkle("train", config(dataset=texts, **PT, adapter=None, metrics=["loss"]))
    assert status == 0, text
    dataset = packs(texts["id"], tiny)
    assert f"{len(dataset)} rows" in text
    seed_everything(42)
    model = TransformersModel(model_id=tiny, mixed_precision="no")
    model.set_processor("input", padding_free=True)
    model.set_optimizer("adamw", lr=1e-3)
    losses, steps = [], 0
    loader = DataLoader(dataset, batch_size=2, shuffle=True, seed=42)
    while steps < 4:
        for batch in loader:
            losses.append(float(model.forward_backward(inputs=batch)))
            model.clip_grad_and_step()
            steps += 1
            if steps == 4:
                break
    model.save("hand", tmp_path)
    assert weights(tmp_path / "out/checkpoint-4") == weights(tmp_path / "hand")
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx(losses)
    assert twinkle("train", tmp_path / "out/config.yaml", "--output_dir", tmp_path / "again")[0] == 0
    assert weights(tmp_path / "again/checkpoint-4") == weights(tmp_path / "hand")


def packs(path, tiny):
    dataset = PackingDataset(path)
    dataset.set_template("chat", model_id=str(tiny), use_chat_template=False, max_length=40, truncation_strategy="split")
    dataset.encode()
    assert all(row["length"] <= 40 for row in dataset)
    trained = sum(label != -100 for row in dataset for label in row["labels"])
    assert trained == sum(row["length"] for row in dataset) - len(TEXTS)
    return dataset


def test_preference_training_is_the_loop_that_one_would_write(config, twinkle, tmp_path, pairs, tiny):
    path = config(dataset=pairs, **DPO, adapter={"r": 4, "lora_dropout": 0.1}, loss={"cls": "dpo", "beta": 0.3})
    status, text = twinkle("train", path)
    assert status == 0, text
    assert "9 rows, 5 steps an epoch, 4 steps in all" in text
    seed_everything(42)
    dataset = Dataset(pairs["id"])
    dataset.map("preference")
    dataset.set_template("chat", model_id=str(tiny), train_on="last")
    dataset.encode()
    model = TransformersModel(model_id=tiny, mixed_precision="no")
    lora = LoraConfig(r=4, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    model.add_adapter_to_model("default", lora)
    model.set_loss("dpo", beta=0.3)
    model.set_optimizer("adamw", lr=1e-3)
    for _, batch in zip(range(4), DataLoader(dataset, batch_size=2, shuffle=True, seed=42), strict=False):
        ref = model.forward_only(inputs=batch, disable_lora=True, return_logits=False).logps
        model.forward_backward(inputs=batch, ref_logps=ref)
        model.clip_grad_and_step()
    model.save("hand", tmp_path)
    assert weights(tmp_path / "out/checkpoint-4") == weights(tmp_path / "hand")


# ------------------------------------------------------------------------------------------------ references


def test_the_reference_is_the_model_as_the_run_begins(config, twinkle, tmp_path, pairs, lines):
    """A new LoRA, all weights, and an adapter that was trained before: at first policy and reference are one, so the loss is
    log 2 to the bit of float32; then they part."""
    where = {}
    for name, adapter in (("new", {"r": 4}), ("all", None), ("old", {"path": str(tmp_path / "new/checkpoint-4")})):
        path = config(dataset=pairs, **DPO, adapter=adapter, output_dir=str(tmp_path / name), eval_dataset=pairs)
        status, text = twinkle("train", path)
        assert status == 0, text
        rows = lines(tmp_path / name / "metrics.jsonl")
        assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-7) and rows[0]["reward_margin"] == 0
        assert all(abs(row["loss"] - math.log(2)) > 1e-5 for row in rows[1:4])
        where[name] = rows
    last = where["new"][-1]
    assert {"eval_loss", "eval_reward_margin", "eval_reward_accuracy"} <= set(last) and last["eval_reward_margin"] > 0


def test_a_loss_without_a_reference_has_one_forward_a_batch(config, twinkle, tmp_path, pairs, monkeypatch):
    monkeypatch.setattr(TransformersModel, "forward_only", lambda *_, **__: pytest.fail("a forward for a reference"))
    for loss in ("simpo", "orpo", {"cls": "dpo", "reference_free": True}):
        name = loss if isinstance(loss, str) else "free"
        path = config(dataset=pairs, **DPO, adapter=None, loss=loss, training={"max_steps": 1}, output_dir=str(tmp_path / name))
        status, text = twinkle("train", path)
        assert status == 0, text


@pytest.mark.parametrize("task", ["pt", "dpo", "dpo, all weights"])
def test_resumed_equals_unbroken_bit_for_bit(config, twinkle, tmp_path, lines, texts, pairs, task):
    """Broken off within an epoch, with dropout and a short window at the epoch's end."""
    what = {**PT, "dataset": texts} if task == "pt" else {**DPO, "dataset": pairs}
    adapter = None if "all" in task else {"r": 4, "lora_dropout": 0.1}
    training = {"epochs": 2, "gradient_accumulation_steps": 2, "save_steps": 2, "micro_batch_size": 2}
    path = config(**what, adapter=adapter, training=training)
    assert twinkle("train", path)[0] == 0
    status, text = twinkle("train", path, "--output_dir", tmp_path / "b", "--resume", tmp_path / "out/checkpoint-2")
    assert status == 0, text
    last = max(int(p.name.removeprefix("checkpoint-")) for p in (tmp_path / "out").glob("checkpoint-*"))
    assert last > 3
    assert weights(tmp_path / f"out/checkpoint-{last}") == weights(tmp_path / f"b/checkpoint-{last}")
    assert lines(tmp_path / "out/metrics.jsonl")[2:] == lines(tmp_path / "b/metrics.jsonl")


def test_conversations_are_packed_where_it_is_asked_for(config, twinkle, tmp_path, lines):
    """The loss of the first step, over all rows, is that of padded rows."""
    found = []
    for packing in (False, True):
        path = config(packing=packing, dataloader={"batch_size": 18}, training={"max_steps": 1}, template={"max_length": 200})
        status, text = twinkle("train", path, "--output_dir", tmp_path / str(packing), "--adapter", "null")
        assert status == 0, text
        found.append((lines(tmp_path / str(packing) / "metrics.jsonl")[0]["loss"], text.count("18 rows")))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    assert [count for _, count in found] == [1, 0]


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"task": "dpoo"}, "task"),
        ({"task": "dpo", "packing": True}, "packing: pairs can't be packed"),
        ({"task": "dpo", "loss": "cross_entropy"}, "loss 'cross_entropy' reads no pairs"),
        ({"task": "dpo", "loss": "infonce"}, "loss 'infonce' reads embeddings, and task 'dpo' makes none"),
        ({"task": "dpo", "metrics": ["loss", "embedding"]}, "metric 'embedding' reads embeddings"),
        ({"loss": "dpo"}, "loss 'dpo' needs ['ref_logps'], which task 'sft' does not give"),
        ({"loss": "grpo"}, "loss 'grpo' needs ['advantages']"),
        ({"loss": "simpo"}, "loss 'simpo' reads groups of rows, and task 'sft' has single ones; for pairs take task: dpo"),
        ({"task": "pt", "loss": "infonce"}, "loss 'infonce' reads groups of rows"),
        ({"task": "embedding", "loss": "dpo"}, "loss 'dpo' needs ['ref_logps'], which task 'embedding' does not give"),
        ({"task": "dpo", "loss": {"cls": "dpo", "bta": 1}}, "Did you mean 'beta'?"),
        ({"task": "pt", "template": {"arguments": {"use_chat_templat": False}}}, "Did you mean 'use_chat_template'?"),
        ({"task": "dpo", "dataset": {"id": "bundled://self-cognition", "preprocessor": "preferences"}}, "'preference'?"),
    ],
)
def test_faults_of_a_task_are_told_with_their_line(config, twinkle, tmp_path, sections, told):
    path = config(**sections)
    status, text = twinkle("train", path)
    assert status == 1 and "BadConfig" in text and told in text and "line " in text
    assert not (tmp_path / "out").exists()


def test_rows_of_another_task_are_refused_before_the_model_is_loaded(config, twinkle, tmp_path, pairs, monkeypatch):
    monkeypatch.setattr("twinkle_core.cli.training._model", lambda *_: pytest.fail("the model was loaded"))
    status, text = twinkle("train", config(task="dpo"))
    assert status == 1 and "task 'dpo' trains on pairs of answers" in text and "the rows have 'messages'" in text
    status, text = twinkle("train", config(dataset=pairs))
    assert status == 1 and "the rows are groups ('negative', 'positive'), and task 'sft' trains on single rows" in text


# ------------------------------------------------------------------------------------------------ what a run leaves


def test_a_signal_while_the_plot_is_drawn_leaves_the_plot(config, twinkle, tmp_path, monkeypatch):
    draw = plot.draw

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return draw(*args)

    monkeypatch.setattr(plot, "draw", interrupted)
    assert twinkle("train", config(training={"max_steps": 2}))[0] == 0
    assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")


def test_weights_are_hashed_once_at_resume(config, twinkle, tmp_path, monkeypatch):
    twinkle("train", config(training={"max_steps": 1}, scheduler=None))
    read, sha256 = [], checkpoint.sha256
    monkeypatch.setattr(checkpoint, "sha256", lambda path: (read.append(path), sha256(path))[1])
    status, text = twinkle("train", config(scheduler=None), "--resume", "--training.max_steps", 2)
    assert status == 0, text
    assert read.count(tmp_path / "out/checkpoint-1/adapter_model.safetensors") == 1


def test_seconds_go_on_at_resume(config, twinkle, tmp_path):
    twinkle("train", config(training={"max_steps": 1}, scheduler=None))
    file = tmp_path / "out/metrics.jsonl"
    row = json.loads(file.read_text())
    file.write_text(json.dumps({**row, "seconds": 1000.0}) + "\n")
    twinkle("train", config(scheduler=None), "--resume", "--training.max_steps", 2)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2] and rows[1]["seconds"] > 1000


@pytest.mark.parametrize("optimizer", [None, "adamw", {"cls": "AdamW", "weight_decay": 0.1}, {"cls": "sgd"}], ids=str)
@pytest.mark.parametrize("task", ["sft", "pt", "dpo", "embedding"])
def test_a_rate_that_is_not_written_is_that_of_what_is_trained(task, optimizer):
    """All weights at the rate that set_optimizer takes by itself, an adapter ten times as fast; a written one stays."""
    tree = {"task": task, "model": {"id": "m"}, "dataset": {"id": "d"}}
    tree |= {} if optimizer is None else {"optimizer": optimizer}

    def rate(**more):
        return plans.of(task).complete(TrainConfig.model_validate({**tree, **more})).optimizer.arguments["lr"]

    assert rate(adapter=None) == optim.DEFAULTS["lr"] == 1e-5
    assert rate() == rate(adapter={"r": 4}) == 1e-4
    assert rate(adapter=None, optimizer={"cls": "adamw", "lr": 3e-3}) == 3e-3


def test_an_optimizer_without_a_rate_gets_none():
    config = TrainConfig.model_validate({"model": {"id": "m"}, "dataset": {"id": "d"}, "optimizer": "no_such"})
    assert plans.of("sft").complete(config).optimizer.arguments == {}


def test_the_written_configuration_holds_what_the_task_filled_in(config, twinkle, tmp_path, pairs):
    twinkle("train", config(dataset=pairs, **DPO, training={"max_steps": 1}))
    tree = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert tree["template"]["train_on"] == "last" and tree["loss"] == {"cls": "dpo"}
    assert [metric["cls"] for metric in tree["metrics"]] == ["loss", "dpo", "train"]
