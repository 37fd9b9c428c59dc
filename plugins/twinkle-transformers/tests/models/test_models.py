"""Each family of the table of supported models: trained, saved, loaded by itself and in plain PEFT, and told rightly."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel

from twinkle_core.errors import BadAdapter
from twinkle_core.processors.input import InputProcessor

PAGE = Path(__file__).parents[4] / "docs" / "models.md"
sys.path.insert(0, str(Path(__file__).parent))
try:
    families = import_module("families")
finally:
    sys.path.remove(str(Path(__file__).parent))
FAMILIES, load, rows = families.FAMILIES, families.load, families.rows
CAUSAL = [name for name, family in FAMILIES.items() if family.task == "causal_lm"]
#: run at once; the others differ from one of these in sizes alone, or are slow to build
QUICK = {"Qwen3.5 MoE", "Qwen2.5", "DeepSeek V4", "DeepSeek V3, R1", "GLM-4", "InternLM2.5", "GTE, BERT"}
pytestmark = [
    # plain peft warns of patterns that it adds itself
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning:peft"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]


def marked(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """name -> the folder of a tiny model of that family, made once. Read only."""
    made = {}

    def give(name):
        if name not in made:
            made[name] = families.write(name, tmp_path_factory.mktemp("family") / "model")
        return made[name]

    return give


def adapter(name, **changes):
    experts = FAMILIES[name].experts
    extra = {"target_parameters": list(experts)} if experts else {}
    return LoraConfig(r=2, lora_alpha=8, target_modules="all-linear", **{**extra, **changes})


def steps(m, batch, count=2, **kwargs):
    found = []
    for _ in range(count):
        found.append(float(m.forward_backward(batch, **kwargs)))
        m.clip_grad_and_step()
    return found


def plain(name, folder):
    options = FAMILIES[name].options
    cls = getattr(transformers, options.get("model_cls", "AutoModelForCausalLM"))
    rest = {k: v for k, v in options.items() if k != "model_cls"}
    return cls.from_pretrained(folder, dtype=torch.float32, **rest).eval()


def outputs(module, ids):
    with torch.no_grad():
        result = module(input_ids=ids)
    return result.logits if "logits" in result else result.last_hidden_state


IDS = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", marked(FAMILIES))
def test_a_family_trains_saves_and_loads_here_and_in_plain_peft(name, folder, tmp_path):
    """Two steps change what the adapter computes; a copy that loads it computes the same, here and in plain PEFT."""
    m = load(name, folder(name))
    m.add_adapter_to_model("a", adapter(name))
    m.set_optimizer("adamw", lr=0.05)
    if FAMILIES[name].task == "embedding":
        pool = "last_token" if "Qwen" in name else "cls"
        m.apply_patch("embedding", pooling=pool)
        m.set_loss("infonce")
        batch = [{"input_ids": row["input_ids"], "labels": [i % 2 == 0]} for i, row in enumerate(rows(7, 4, 5, 6))]
        batch = [{**row, "labels": int(row["labels"][0])} for row in batch]
    else:
        batch = rows(7, 4)
    before = outputs(plain(name, folder(name)), IDS)
    assert all(p.grad is None for p in m.module.parameters())
    losses = steps(m, batch)
    assert losses[1] < losses[0]
    with m_eval(m):
        live = outputs(m.module, IDS)
    assert not torch.allclose(live, before, atol=1e-3)
    place = m.save("a", tmp_path)

    again = load(name, folder(name))
    again.add_adapter_to_model("b", place)
    with m_eval(again):
        torch.testing.assert_close(outputs(again.module, IDS), live, rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(plain(name, folder(name)), place)
    torch.testing.assert_close(outputs(theirs.eval(), IDS), live, rtol=1e-5, atol=1e-5)


class m_eval:
    """Evaluation mode of a model's module inside, with its adapter."""

    def __init__(self, m):
        self.module = m.module

    def __enter__(self):
        self.module.eval()

    def __exit__(self, *error):
        self.module.train()


@pytest.mark.parametrize("name", marked(CAUSAL))
def test_the_loss_is_that_of_transformers(name, folder):
    """What the verbs compute of a padded batch is the mean cross entropy of the model's own logits, also split in two."""
    m, batch = load(name, folder(name)), rows(7, 4)
    m.set_optimizer("sgd", lr=0.0)
    loss = float(m.forward_backward(batch))
    m.clip_grad_norm(float("inf"))
    found = {k: p.grad.clone() for k, p in m.module.named_parameters() if p.grad is not None}
    m.zero_grad(drop=True)
    own, total = plain(name, folder(name)), 0.0
    for row in batch:
        logits = own(input_ids=torch.tensor([row["input_ids"]])).logits[0].float()
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(row["labels"]), reduction="sum")
    (total / 9).backward()
    assert loss == pytest.approx(total.item() / 9, rel=1e-5)
    for key, p in own.named_parameters():
        if key in found:
            torch.testing.assert_close(found[key], p.grad, rtol=1e-3, atol=1e-5)
    split = float(m.forward_backward(batch, micro_batch_size=1))
    assert split == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("name", marked(n for n in CAUSAL if FAMILIES[n].experts and n != "DeepSeek V3, R1"))
def test_a_routers_loss_reaches_the_adapter(name, folder):
    """With the loss of the router the step is another one, by coefficient x what the model says it is."""

    def one(**changes):
        m = load(name, folder(name), **changes)
        m.add_adapter_to_model("a", adapter(name, init_lora_weights=False))
        m.set_optimizer("sgd", lr=0.0)
        m.add_metric("loss", is_training=True)
        torch.manual_seed(3)
        for p in m.adapters.parameters("a").values():
            torch.nn.init.normal_(p, std=0.1)
        m.forward_backward(rows(7, 4))
        m.clip_grad_norm(float("inf"))
        grads = torch.cat([p.grad.flatten() for p in m.adapters.parameters("a").values() if p.grad is not None])
        return m.calculate_metric(is_training=True), grads

    bare, without = one()
    told, got = one(output_router_logits=True, router_aux_loss_coef=0.5)
    assert "aux_loss" not in bare and told["aux_loss"] > 0
    assert told["loss"] == pytest.approx(bare["loss"] + 0.5 * told["aux_loss"], rel=1e-5)
    assert (got - without).norm() > 1e-3 * without.norm()


def table():
    found = {}
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| family"):
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            found[cells[0]] = cells
    return found


@pytest.mark.parametrize("name", marked(FAMILIES))
def test_the_page_says_what_is_found(name, folder):
    """``python tools/generate_models.py`` writes it."""
    assert table()[name] == families.cells(name, families.facts(name, folder(name)))


def test_the_page_has_each_family_and_nothing_else():
    assert list(table()) == list(FAMILIES)


def test_packed_and_padded_agree_where_packing_is_allowed(folder):
    """Multi-head latent attention of DeepSeek V3, whose keys and values differ in width, row by row."""
    name, found = "DeepSeek V3, R1", []
    for free in (False, True):
        m = load(name, folder(name))
        m.set_optimizer("sgd", lr=0.0)
        m.set_processor(InputProcessor(padding_free=free))
        loss = float(m.forward_backward(rows(7, 4)))
        found.append((loss, torch.cat([p.grad.flatten() for p in m.module.parameters() if p.grad is not None])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert (found[0][1] - found[1][1]).norm() < 1e-5 * found[0][1].norm()


def test_a_tied_output_layer_stays_tied(folder, tmp_path):
    m = load("Qwen2.5", folder("Qwen2.5"))
    m.set_optimizer("sgd", lr=0.1)
    steps(m, rows(7, 4))
    again = load("Qwen2.5", Path(m.save("whole", tmp_path)))
    again.set_optimizer("sgd", lr=0.1)
    for one in (m, again):
        steps(one, rows(7, 4), 1)
        assert one.module.lm_head.weight is one.module.model.embed_tokens.weight
    assert torch.equal(m.module.lm_head.weight, again.module.lm_head.weight)


def test_what_all_linear_does_not_reach_is_said(folder, caplog):
    """Layers that multiply by blocks, and those that peft takes for a model's experts by their names."""
    m = load("DeepSeek V4", folder("DeepSeek V4"))
    m.add_adapter_to_model("a", LoraConfig(target_modules="all-linear"))
    assert "leaves out 3 linear layer(s): self_attn.o_a_proj" in caplog.text
    with pytest.raises(BadAdapter, match=r"o_a_proj is a DeepseekV4GroupedLinear, which multiplies by blocks"):
        m.add_adapter_to_model("b", LoraConfig(target_modules=["o_a_proj", "q_a_proj"]))
    caplog.clear()
    load("DeepSeek V3, R1", folder("DeepSeek V3, R1")).add_adapter_to_model("a", LoraConfig(target_modules="all-linear"))
    assert "leaves out 6 linear layer(s): mlp.down_proj, mlp.gate_proj, mlp.up_proj, shared_experts.down_proj" in caplog.text
    caplog.clear()
    load("Qwen2.5", folder("Qwen2.5")).add_adapter_to_model("a", LoraConfig(target_modules="all-linear"))
    assert not caplog.records
