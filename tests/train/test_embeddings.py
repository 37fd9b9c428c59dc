"""Embeddings through the verbs: the faults of contrastive training where they would show, and which task needs imply."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from twinkle_core.contracts.metric import Metric
from twinkle_core.data.dataloader import DataLoader
from twinkle_core.data.dataset import Dataset
from twinkle_core.errors import LabelsMissing, NotComputed, PatchRefused
from twinkle_core.mesh import DeviceMesh
from twinkle_core.ops.gather import Ranks
from twinkle_core.patches.embedding import EmbeddingPatch
from twinkle_core.patches.value_head import ValueHeadPatch
from twinkle_core.templates.chat import ChatTemplate
from twinkle_core.testing import ranks
from twinkle_core.testing.engines import ToyEngine, session_model
from twinkle_core.testing.tokenizers import chatml_tokenizer
from twinkle_core.testing.toys import TinyLM, contrast_rows, random_rows


class Scaled(torch.nn.Module):
    """One trainable number times a fixed vector for each token."""

    def __init__(self, vectors):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.vectors = torch.tensor(vectors, dtype=torch.float64)
        self.output_layer = torch.nn.Identity()

    def forward(self, inputs):
        return self.theta * self.vectors[inputs["input_ids"]]


class DataRanks(ToyEngine):
    """Data ranks over the processes there are; gradients are summed when a window closes."""

    def __init__(self, module):
        super().__init__(module, mesh=DeviceMesh.from_sizes())

    def ranks(self, over="dp"):
        return Ranks()

    def all_reduce(self, x, over="dp"):
        dist.all_reduce(x)
        return x

    def gather_objects(self, obj, over="dp"):
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, obj)
        return found

    def finish_grads(self, optimizer, scale):
        for parameter in self.module.parameters():
            self.all_reduce(parameter.grad)
        return super().finish_grads(optimizer, scale)


class Values(Metric):
    """Reads values and says nothing."""

    needs = frozenset({"values"})

    def accumulate(self, inputs, outputs): ...

    def state(self):
        return {}

    def merge(self, state): ...

    def calculate(self):
        return {}

    def reset(self): ...


def model_over(vectors, engine=ToyEngine, **loss):
    model = session_model(Scaled(vectors), engine=engine)
    model.apply_patch("embedding", pooling="cls", normalize=False)
    model.set_loss("infonce", temperature=1.0, **loss)
    model.set_optimizer("sgd", lr=1.0)
    return model


class Encoder:
    """Two queries, each with its document: (1, 0) with itself, (0, 1) with (1, 1)."""

    component, arguments = None, {}
    ROWS = [{"input_ids": [token], "labels": label} for token, label in ((0, 1), (1, 0), (2, 1), (3, 0))]

    def step(self, rows, engine=ToyEngine):
        model = model_over([[1, 0], [1, 0], [0, 1], [1, 1]], engine)
        value = float(model.forward_backward(rows))
        model.clip_grad_and_step(max_grad_norm=math.inf)
        return [value, 1.0 - float(model.module.theta.detach())]  # the gradient, of a step of length 1

    def one_group(self, rank, world_size):
        return self.step(self.ROWS[2 * rank : 2 * rank + 2], DataRanks)


@pytest.mark.slow  # two processes that import torch
def test_B34_two_ranks_take_the_step_of_one_process():
    """The loss value alone would not tell: gathered without a gradient it is the same."""
    assert Encoder().step(Encoder.ROWS) == pytest.approx([0.503204, -0.268941], abs=1e-6)
    parts = ranks.run(Encoder, "one_group", 2, {})
    assert sum(value for value, _ in parts) / 2 == pytest.approx(0.503204, abs=1e-6)
    assert [slope for _, slope in parts] == pytest.approx([-0.268941] * 2, abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_B35_a_group_of_few_negatives_is_trained_as_it_is(seed):
    """From a row of a data set to the loss: one negative where three may be, and the same value whatever the seed."""
    torch.manual_seed(seed)
    dataset = Dataset([{"query": "a", "pos": "b", "neg": "c"}])
    dataset.map("triplet")
    template = ChatTemplate(chatml_tokenizer(), use_chat_template=False)
    dataset.set_template(template)
    (rows,) = DataLoader(dataset.encode(), batch_size=1, shuffle=True, seed=seed)
    firsts = [row["input_ids"][0] for row in rows]
    vectors = torch.zeros(max(firsts) + 1, 2)
    vectors[firsts] = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    model = model_over(vectors.tolist(), in_batch=False, hard_negatives=3)
    assert len(set(firsts)) == 3
    assert float(model.forward_backward(rows)) == pytest.approx(0.313262, abs=1e-6)


def test_what_needs_embeddings_asks_for_the_task_and_for_nothing_else():
    model = session_model(TinyLM())
    model.apply_patch(EmbeddingPatch(pooling="mean"))
    model.set_loss("infonce")
    model.add_metric("embedding", is_training=False)
    rows = contrast_rows([2, 3])
    for run in (model.forward_only, model.forward, model.forward_backward):
        model.engine.calls.clear()
        run(rows)
        assert [(needs, task) for needs, _, _, task in model.engine.calls] == [(frozenset({"embeddings"}), "embedding")]
    model.forward_only(rows, task="seq_cls")  # what is said stands
    assert model.engine.calls[-1][3] == "seq_cls"


def test_texts_without_labels_are_embedded_in_any_number():
    model = session_model(TinyLM())
    model.apply_patch("embedding", pooling="mean")
    model.set_loss("infonce")
    texts = [{k: v for k, v in row.items() if k != "labels"} for row in contrast_rows([3, 2])]
    got = model.forward_only(texts, micro_batch_size=2).embeddings
    alone = torch.cat([model.forward_only([text]).embeddings for text in texts])
    torch.testing.assert_close(got, alone)
    with pytest.raises(LabelsMissing, match="InfoNCELoss"):
        model.calculate_loss()


def test_a_loss_on_logits_takes_no_part_in_the_task():
    """It is cross entropy where none was set; labels of groups are no tokens."""
    model = session_model(TinyLM())
    model.apply_patch("embedding", pooling="mean")
    model.add_metric("embedding", is_training=False)
    model.add_metric("loss", is_training=False)
    assert list(model.forward_only(contrast_rows([2, 2]), task="embedding")) == ["embeddings"]
    assert "recall_at_1" in model.calculate_metric(is_training=False)
    assert list(model.forward(contrast_rows([2, 2]), task="embedding")) == ["embeddings"]


def test_networks_of_other_kinds_take_heads_too():
    """A network without a config says no width, one with a head of that name keeps it."""
    model = session_model(TinyLM())
    with pytest.raises(NotComputed, match="TinyLM gives no embeddings"):
        model.forward_only(random_rows([3]), task="embedding")
    with pytest.raises(PatchRefused, match="it has a Linear under the name 'value_head' already"):
        model.apply_patch(ValueHeadPatch(hidden_size=8))
    del model.module.value_head
    with pytest.raises(PatchRefused, match=r"its config says no hidden_size\.\n.*hidden_size=\.\.\."):
        model.apply_patch("value_head")
    assert model.patches == []
    model.apply_patch("value_head", hidden_size=8)
    model.add_metric(Values(), is_training=False)
    got = model.forward_only(random_rows([3, 2]))
    assert got["values"].shape == (2, 3) and bool((got["values"] == 0).all())
