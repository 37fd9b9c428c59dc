"""``task: embedding``: what it means where the configuration is silent, what it refuses, and that it resumes bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from twinkle_core.cli import planning
from twinkle_core.cli.plans import base as plans
from twinkle_core.config.schema import TrainConfig

SET = "bundled://exclusions"


@pytest.fixture
def embedding(config):
    """Writes a configuration of the task."""

    def write(**sections):
        dataset = {"id": SET, "slice": 12, "preprocessor": "triplet"}
        given = {"task": "embedding", "dataset": dataset, "dataloader": {"batch_size": 4}, "training": {"max_steps": 3}}
        return config(**given | sections)

    return write


def test_it_trains_measures_and_draws(embedding, twinkle, tmp_path, lines):
    held_out = {"id": SET, "slice": [100, 110], "preprocessor": {"cls": "triplet", "query_prefix": "query: "}}
    status, text = twinkle("train", embedding(eval_dataset=held_out))
    assert status == 0, text
    rows = lines(tmp_path / "out/metrics.jsonl")
    assert all({"loss", "recall_at_1", "positive_similarity", "negative_similarity", "lr"} <= row.keys() for row in rows[:3])
    assert "eval_recall_at_1" in rows[-1] and "InfoNCELoss" in text and "EmbeddingPatch" in text
    used = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert used["patches"] == [{"cls": "embedding"}] and used["model"]["arguments"] == {"model_cls": "AutoModel"}
    assert used["template"]["arguments"] == {"use_chat_template": False}
    assert json.loads((tmp_path / "out/checkpoint-3/adapter_config.json").read_text())["task_type"] == "FEATURE_EXTRACTION"


def test_a_resumed_run_is_the_unbroken_one(embedding, twinkle, tmp_path, lines):
    how = {"training": {"max_steps": 4}, "scheduler": None}
    twinkle("train", embedding(**how, output_dir=str(tmp_path / "whole")))
    path = embedding(**how, output_dir=str(tmp_path / "parts"))
    twinkle("train", path, "--training.max_steps", 2)
    status, text = twinkle("train", path, "--resume")
    assert status == 0 and "after step 2" in text
    whole, parts = (load_file(tmp_path / name / "checkpoint-4/adapter_model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all((whole[k] == parts[k]).all() for k in whole)


def test_what_is_written_stays_and_what_is_not_is_filled_in():
    given = {"model": {"id": "m"}, "dataset": [{"id": "d"}]}
    mine = {
        "task": "embedding", "template": {"truncation_strategy": "left", "arguments": {"use_chat_template": True}},
        "patches": {"cls": "embedding", "pooling": "cls"}, "metrics": ["loss"],
        "loss": {"cls": "infonce", "temperature": 0.1}, "model": {"id": "m", "arguments": {"model_cls": "BertModel"}},
    }  # fmt: skip
    used = plans.of("embedding").complete(TrainConfig.model_validate(given | mine))
    assert used.template.max_length == 512 and used.template.truncation_strategy == "left"
    assert used.template.arguments == {"use_chat_template": True}
    assert [patch.arguments for patch in used.patches] == [{"pooling": "cls"}] and used.loss.arguments == {"temperature": 0.1}
    assert used.model.arguments == {"model_cls": "BertModel"} and [m.cls for m in used.metrics] == ["loss"]
    assert plans.of("embedding").peft_type(used) == "CAUSAL_LM"
    plain = TrainConfig.model_validate(given)
    only_a_rate = {**plain.model_dump(), "optimizer": {"cls": "adamw", "lr": 1e-4}}
    assert plans.of("sft").complete(plain).model_dump() == only_a_rate
    other = TrainConfig.model_validate({**given, "task": "embedding", "model": {"id": "m", "cls": "megatron"}})
    assert plans.of("embedding").complete(other).model.arguments == {}


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"loss": "cross_entropy"}, "loss 'cross_entropy' reads no embeddings; take infonce"),
        (
            {"patches": {"cls": "embedding", "poling": "mean"}},
            "EmbeddingPatch has no parameter 'poling'. Did you mean 'pooling'",
        ),
        ({"patches": [{"cls": "embedding", "pooling": "max"}]}, "it must be one of 'last_token', 'mean', 'cls'"),
        ({"patches": "embeding"}, "Did you mean 'embedding'"),
        ({"dataset": {"id": "bundled://self-cognition"}}, "Let a preprocessor make groups of them: preprocessor: triplet"),
        ({"task": "embeddings"}, "task: must be 'sft', 'pt', 'dpo' or 'embedding'"),
    ],
    ids=str,
)
def test_faults_are_told_before_anything_is_loaded(embedding, twinkle, sections, told):
    status, text = twinkle("train", embedding(**sections))
    assert status == 1 and told in text


def test_the_bundled_set_holds_out_what_it_asks_for():
    """Things of the last 30 rows are in none of the 100 before them; a training pair is there both ways round."""
    rows = [json.loads(line) for line in Path(planning.BUNDLED[SET]()).read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 130 and all(row.keys() == {"query", "positive", "negative"} for row in rows)
    texts = [{row["positive"], row["negative"]} for row in rows]
    trained, held_out = set().union(*texts[:100]), set().union(*texts[100:])
    assert len(trained) == 100 and len(held_out) == 60 and not trained & held_out
    assert texts[:50] == texts[50:100]
    assert all(a["positive"] == b["negative"] for a, b in zip(rows[:50], rows[50:100], strict=True))
