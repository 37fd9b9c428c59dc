"""Functions that two formulas compute, one for vectors and one for what is left over: passes are so large that nothing is."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch.nn import functional as F

from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_multilora.pointwise import GRAIN, SPREAD, Watch, aligned
from twinkle_transformers.testing import tiny_config


@pytest.fixture
def threads():
    found = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(found)


def test_it_is_found_out_which_functions_depend_on_their_place():
    x = torch.randn(35, 48, requires_grad=True)
    with Watch(35) as watch:
        y = (F.silu(x) * x.exp() + x[:, :1]).cos()
        (F.gelu(x[:, :24], approximate="tanh").sum() + y.sum()).backward()
    assert watch.widths == (24, 48) and not watch.why
    with Watch(35) as watch:
        y = x.exp().mul(3).add(x).tanh().float()
        y.sum().backward()
        x.detach().clone().mul_(2).add_(1)
        torch.where(x > 0, x, 0.0).pow(2).neg()
    assert watch.widths == () and not watch.why
    with Watch(35) as watch:
        F.silu(x[:3].reshape(-1)[:100])  # of some rows: no size of the pass helps
    assert "silu" in watch.why and watch.widths == ()
    with Watch(35) as watch:  # in bfloat16 one in thousands differs
        F.silu(x.bfloat16())
    assert watch.widths == (48,)


def gelu(x):
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("function", [F.silu, gelu])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8])
def test_what_is_aligned_has_no_rest(count, function, threads):
    """Against the same numbers in blocks of whole vectors, at sizes for one thread and for several. Kernels of gelu take all
    threads where others take one."""
    threads(count)
    for width in (24, 50, 576, 896):
        wrong = 0
        for tokens in (17, 33, 101, 150, 333, 16384 // width + 9, 25000 // width):
            n = aligned(tokens, (width,), count)
            assert tokens <= n <= tokens + 64 * count
            x = torch.linspace(-6, 6, 4096).repeat(-(-n * width // 4096))[: n * width]
            blocks = torch.cat([function(part.clone()) for part in x.split(4096)])
            assert torch.equal(function(x), blocks)
            odd = tokens * width
            wrong += not torch.equal(function(x[:odd]), blocks[:odd])
        if (width, count) in {(24, 2), (50, 2), (576, 5), (50, 4) if function is gelu else (896, 3)}:
            assert wrong, "sizes as they come would do, so nothing is tried here"


def test_least_sizes():
    assert aligned(16, (), 8) == 16 and aligned(17, (64, 128), 1) == 17
    assert aligned(17, (32,), 1) == 18 and aligned(17, (1,), 1) == 64
    assert aligned(GRAIN // 64 + 1, (64,), 2) == GRAIN // 64 + 2
    assert aligned(SPREAD // 64, (64,), 4) == SPREAD // 64 and aligned(SPREAD // 64 + 1, (64,), 4) == SPREAD // 64 + 4


ROWS = {"a": 41, "b": 17, "c": 90}


def rows_of(name, i):
    made = torch.Generator().manual_seed(ord(name) * 100 + i)
    ids = torch.randint(3, 250, (ROWS[name] + i + 1,), generator=made).tolist()
    return [{"input_ids": ids[:-1], "labels": ids[1:]}]


def trained(names, **options):
    torch.manual_seed(0)
    model = MultiLoraTransformersModel(config=tiny_config(**options), mixed_precision="no", max_loras=3, max_r=4)
    found = {name: [] for name in names}
    for name in names:
        torch.manual_seed(ord(name))
        model.add_adapter_to_model(name, LoraConfig(r=4, target_modules="all-linear"))
        model.set_optimizer("sgd", lr=0.1, adapter_name=name)
    for i in range(2):
        losses = model.forward_backward_many({name: rows_of(name, i) for name in names})
        for name in names:
            found[name] += [float(losses[name]), model.clip_grad_and_step(adapter_name=name)]
    weights = {name: [v.clone() for v in model.get_state_dict(adapter_name=name).values()] for name in names}
    return model, found, weights


def _slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def test_a_function_whose_parts_are_cut_otherwise_is_found(monkeypatch, threads):
    """Were kernels to divide their work in a way that is not known here, tenants take turns."""
    threads(4)
    monkeypatch.setattr("twinkle_multilora.pointwise.SPREAD", 10**9)
    x = torch.randn(35, 64, requires_grad=True)
    with Watch(35) as watch:
        gelu(x)
    assert "gelu" in watch.why and "another size" in watch.why


@pytest.mark.parametrize(
    ("count", "width", "act"),
    [(3, 896, "silu"), (1, 50, "silu"), (5, 576, "gelu_pytorch_tanh"), _slow(5, 1536, "silu"), _slow(2, 24, "silu")],
)
def test_company_changes_no_bit_whatever_the_threads(count, width, act, threads):
    """Passes of more than a hundred tokens, whose layers several threads share in parts that are no whole vectors."""
    threads(count)
    options = {"intermediate_size": width, "num_hidden_layers": 1, "hidden_act": act}
    model, losses, weights = trained("abc", **options)
    assert model.engine.sharing.way == "shared" and model.engine.sharing.widths == (width,)
    for name in "abc":
        _, alone, own = trained(name, **options)
        assert alone[name] == losses[name]
        assert all(map(torch.equal, own[name], weights[name]))
