"""A file and its overrides to a typed tree, and every fault with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinkle_core import errors
from twinkle_core.config.load import keys_at, load, options
from twinkle_core.config.schema import TrainConfig

SMALL = """\
model: {id: quickstart, mixed_precision: no}
adapter:
  r: 4
dataset:
  id: bundled://self-cognition
  preprocessor: {cls: self_cognition, model_name: Ada, model_author: me}
optimizer: adamw
training:
  max_steps: 3
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "sft.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def _told(write, text: str, words: list[str] | None = None) -> str:
    with pytest.raises(errors.BadConfig) as caught:
        load(write(text), options(words or []))
    return str(caught.value)


def test_a_small_file(write):
    config, _ = load(write(SMALL))
    assert config.model.mixed_precision == "no"
    assert config.dataset[0].preprocessor is not None
    assert config.dataset[0].preprocessor.arguments == {"model_name": "Ada", "model_author": "me"}
    assert config.optimizer.cls == "adamw"
    assert config.adapter is not None and config.adapter.r == 4


def test_null_adapter_trains_all_weights(write):
    config, _ = load(write(SMALL.replace("adapter:\n  r: 4", "adapter: null")))
    assert config.adapter is None


def test_options_in_both_forms():
    assert options(["--a.b", "1", "--c=2=3", "--d", "--seed", "-1", "--e="]) == [
        ("a.b", "1"),
        ("c", "2=3"),
        ("d", None),
        ("seed", "-1"),
        ("e", ""),
    ]
    with pytest.raises(errors.StrayWord, match="'x' belongs to no option"):
        options(["--a", "1", "x"])


@pytest.mark.parametrize(
    ("words", "read_back", "value"),
    [
        (["--optimizer.lr", "1e-4"], lambda c: c.optimizer.arguments["lr"], 1e-4),
        (["--optimizer.cls=sgd"], lambda c: c.optimizer.cls, "sgd"),
        (["--training.max-steps=7"], lambda c: c.training.max_steps, 7),
        (["--training.save_steps", "5"], lambda c: c.training.save_steps, 5),
        (["--training.max_steps", "null"], lambda c: c.training.max_steps, None),
        (["--adapter", "null"], lambda c: c.adapter, None),
        (["--adapter.target_modules", "[q_proj, v_proj]"], lambda c: c.adapter.target_modules, ["q_proj", "v_proj"]),
        (["--dataset.slice", "[2, 9]"], lambda c: c.dataset[0].slice, [2, 9]),
        (["--dataloader.drop_last"], lambda c: c.dataloader.drop_last, True),
        (["--output_dir", "a:b c"], lambda c: c.output_dir, "a:b c"),
    ],
)
def test_overrides(write, words, read_back, value):
    config, _ = load(write(SMALL), options(words))
    found = read_back(config)
    assert found == value
    assert type(found) is type(value)


def test_override_of_a_list_item(write):
    text = SMALL.replace("dataset:\n  id: bundled://self-cognition", "dataset:\n- id: a.jsonl\n- id: b.jsonl").replace(
        "  preprocessor: {cls: self_cognition, model_name: Ada, model_author: me}\n", ""
    )
    config, _ = load(write(text), options(["--dataset.1.id", "c.jsonl"]))
    assert [d.id for d in config.dataset] == ["a.jsonl", "c.jsonl"]
    assert "--dataset.2.id: '2' is no index of a list of 2" in _told(write, text, ["--dataset.2.id", "x"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("optimizer: adamw", "optimzer: adamw"), "line 7: unknown key 'optimzer'. Did you mean 'optimizer'?"),
        (("  r: 4", "  lora_alhpa: 4"), "line 3: unknown key 'adapter.lora_alhpa'. Did you mean 'adapter.lora_alpha'?"),
        (("  id: bundled", "  di: bundled"), "line 5: unknown key 'dataset.di'; there are: id, subset"),
        (("  id: bundled", "  di: bundled"), "line 4: 'dataset.id' is missing"),
        (("  r: 4", "  zzz: 4"), "line 3: unknown key 'adapter.zzz'; there are: name, r, lora_alpha,"),
        (("max_steps: 3", "max_steps: fast"), "line 9: training.max_steps: must be a valid integer, not 'fast'"),
        (("max_steps: 3", "max_steps: true"), "line 9: training.max_steps: must be a valid integer, not True"),
        (("max_steps: 3", "max_steps: 0"), "line 9: training.max_steps: must be greater than 0, not 0"),
        (("precision: no", "precision: bf61"), "model.mixed_precision: must be 'bf16', 'fp16', 'fp8' or 'no', not 'bf61"),
        (("max_steps: 3", "eval_steps: 3"), "training.eval_steps is given, but there is no eval_dataset"),
        (("  r: 4", "  r: 4\n  path: x"), "line 2: adapter: with 'path' the adapter's own configuration is used; remove r"),
        (("model: {id: quickstart, mixed_precision: no}\n", ""), "'model' is missing"),
        (("optimizer: adamw", "optimizer: 3"), "line 7: optimizer: must be"),
    ],
)
def test_faults_are_told_with_line_and_guess(write, change, told):
    assert told in _told(write, SMALL.replace(*change))


def test_all_faults_at_once(write):
    text = _told(write, SMALL.replace("  r: 4", "  rr: 4").replace("max_steps: 3", "max_steps: x"), ["--lr", "3"])
    assert "has 3 faults" in text
    assert "line 3: unknown key 'adapter.rr'" in text
    assert "line 9: training.max_steps" in text
    assert "--lr: unknown key 'lr'" in text


def test_an_unknown_option_is_told_as_it_was_written(write):
    text = _told(write, SMALL, ["--training.max_stpes=4"])
    assert "--training.max_stpes: unknown key 'training.max_stpes'. Did you mean 'training.max_steps'?" in text
    assert "--training.max_steps.x: 'training.max_steps' is a value; it has no keys" in _told(
        write, SMALL, ["--training.max_steps.x", "1"]
    )


def test_a_wrong_value_of_an_option_names_the_option_not_the_line(write):
    assert "    --training.max_steps: must be a valid integer, not 'x'" in _told(write, SMALL, ["--training.max_steps", "x"])


def test_the_schema_is_json_and_knows_every_key():
    schema = json.loads(json.dumps(TrainConfig.model_json_schema()))
    assert set(schema["properties"]) == set(keys_at(()))
    assert schema["additionalProperties"] is False
    assert keys_at(("dataset", 0)) == ["id", "subset", "split", "slice", "preprocessor"]
    assert keys_at(("training", "nowhere", "deeper")) == []


def test_the_default_configuration_is_valid_by_its_own_rules():
    config = TrainConfig.model_validate({"model": {"id": "m"}, "dataset": {"id": "d"}})
    assert TrainConfig.model_validate(config.model_dump()) == config


def test_an_option_within_an_absent_section_keeps_what_the_section_is_by_default(write):
    text = SMALL.replace("optimizer: adamw\n", "")
    words = ["--optimizer.weight_decay", "0.1", "--scheduler.num_warmup_steps", "3", "--metrics.0", "train"]
    config, _ = load(write(text), options(words))
    assert (config.optimizer.cls, config.optimizer.arguments) == ("adamw", {"weight_decay": 0.1})
    assert (config.scheduler.cls, config.scheduler.arguments) == ("cosine_warmup", {"num_warmup_steps": 3})
    assert [metric.cls for metric in config.metrics] == ["train", "accuracy", "train"]


def test_a_character_that_yaml_does_not_have(write):
    assert "is not YAML" in _told(write, SMALL + "output_dir: 'a\0b'\n")
