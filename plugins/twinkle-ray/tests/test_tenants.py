"""Many tenants on workers: shared passes, and threads of the driver."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from peft import LoraConfig

from twinkle_core import registry
from twinkle_core.errors import BadArgument, BadRow, UnknownAdapter
from twinkle_core.testing.toys import random_rows
from twinkle_core.types import LossOutput
from twinkle_transformers.testing import write_tiny_llama

NAMES = ("ann", "bob", "cy")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def loras(tmp_path_factory, tiny):
    """Folders of adapters that are not zero, by tenant."""
    model = registry.resolve("model", "multi_lora_transformers")(model_id=str(tiny), mixed_precision="no", max_loras=3, max_r=4)
    found = {}
    for name in NAMES:
        model.add_adapter_to_model(name, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        found[name] = model.save(name, tmp_path_factory.mktemp("loras"), adapter_name=name)
    return found


def built(tiny, loras, group=None):
    where = {} if group is None else {"remote_group": group}
    multi = registry.resolve("model", "multi_lora_transformers")
    model = multi(model_id=str(tiny), mixed_precision="no", max_loras=3, max_r=4, **where)
    for name, folder in loras.items():
        model.multi_lora.acquire_lora(name, folder)
        model.set_optimizer("adamw", lr=1e-2, adapter_name=name)
    return model


def rows_of(name, step=0):
    """``cy`` has a row alone: fewer than there are workers."""
    lengths = {"ann": [5, 3, 8, 4, 6], "bob": [4, 7], "cy": [6]}[name]
    return [{**row, "input_ids": [(t + step) % 250 for t in row["input_ids"]]} for row in random_rows(lengths, vocabulary=250)]


def weighted(inputs, outputs, weights=None, scale=1.0):
    labelled = inputs["labels"] != -100
    each = torch.ones(len(labelled)) if weights is None else torch.as_tensor(weights, dtype=torch.float32)
    return LossOutput(-scale * (outputs.logps.sum(-1) * each).sum(), (labelled.sum(-1) * each).sum())


weighted.needs = {"logps"}


@pytest.mark.parametrize("group", ["one", "actor"])
def test_rows_of_many_are_divided_as_those_of_each(cluster, tiny, loras, group):
    """Losses and norms are those of one process, and of calls of each alone on the same workers to the bit."""
    here, there, apart = built(tiny, loras), built(tiny, loras, group), built(tiny, loras, group)
    for step in range(2):
        rows = {name: rows_of(name, step) for name in NAMES}
        found = []
        for model in (here, there):
            losses = model.forward_backward_many(rows)
            assert list(losses) == list(NAMES)
            found.append([[float(losses[n]), model.clip_grad_and_step(0.5, adapter_name=n)] for n in NAMES])
        assert found[1] == [pytest.approx(each, rel=2e-5) for each in found[0]]
        alone = [apart.forward_backward(rows[n], adapter_name=n) for n in NAMES]
        assert [[a, apart.clip_grad_and_step(0.5, adapter_name=n)] for a, n in zip(alone, NAMES, strict=True)] == found[1]
    assert all(type(loss) is float for loss in losses.values())


def test_arguments_of_losses_are_divided_with_the_rows_of_those_they_are_meant_for(cluster, tiny, loras):
    """A dict by tenant (or slot), and one value for all, which some have as many rows as; and some tenants have none."""
    here, there = built(tiny, loras), built(tiny, loras, "actor")
    rows = {name: rows_of(name) for name in NAMES}
    by_slot = {"ann": rows["ann"], "lora_1": rows["bob"]}
    given = [
        (rows, {"weights": {"ann": [1.0, 0.0, 3.0, 2.0, 1.0], "lora_1": torch.tensor([2.0, 5.0])}, "scale": 2.0}),
        (by_slot, {"weights": {"lora_0": [1.0, 0.0, 3.0, 2.0, 1.0]}, "scale": {"bob": 3.0}}),
        ({"bob": rows["bob"]}, {"weights": torch.tensor([2.0, 5.0])}),
        ({"bob": rows["bob"], "cy": [*rows["cy"], *rows["cy"]]}, {"weights": [1.0, 4.0]}),
        ({"bob": rows["bob"], "cy": rows["cy"]}, {}),
    ]
    found = []
    for model in (here, there):
        for name in NAMES:
            model.set_loss(weighted, adapter_name=name)
        found.append([{n: float(x) for n, x in model.forward_backward_many(each, **args).items()} for each, args in given])
    assert [list(each) for each in found[1]] == [list(each) for each, _ in given]
    assert found[1] == [pytest.approx(each, rel=2e-5) for each in found[0]]
    many = there.forward_backward_many({"ann": rows["ann"], "cy": []} | {"cy": rows["cy"]})
    assert set(many) == {"ann", "cy"}


def test_pairs_of_a_tenant_stay_on_one_worker(cluster, tiny, loras):
    """Three pairs over two workers, beside a tenant whose rows are by themselves."""
    rows = {"ann": random_rows([5, 3, 8, 2, 4, 6], vocabulary=250), "bob": rows_of("bob")}
    found = []
    for model in (built(tiny, loras), built(tiny, loras, "actor")):
        model.set_loss("dpo", beta=0.5, adapter_name="ann")
        reference = model.forward_only(rows["ann"], adapter_name="ann").logps + 0.1
        found.append({n: float(x) for n, x in model.forward_backward_many(rows, ref_logps={"ann": reference}).items()})
    assert found[1] == pytest.approx(found[0], rel=2e-5)


def test_what_is_wrong_with_a_call_for_many_is_told_as_in_one_process(cluster, tiny, loras):
    """The same class and words; nothing was changed, and the group goes on."""
    here, there = built(tiny, loras), built(tiny, loras, "actor")
    bad = [*rows_of("ann")[:4], {**rows_of("ann")[4], "labels": [1]}]
    wrong = [
        ({"ann": rows_of("ann"), "bop": []}, {}, UnknownAdapter),
        ({}, {}, BadArgument),
        ([1, 2], {}, BadArgument),
        ({"ann": rows_of("ann"), "lora_0": rows_of("ann")}, {}, BadArgument),
        ({"ann": rows_of("ann"), "": rows_of("bob")}, {}, BadArgument),
        ({"ann": rows_of("ann"), None: rows_of("bob")}, {}, BadArgument),
        ({"ann": rows_of("ann")}, {"weights": {"ann": [1.0], "bob": [1.0]}}, BadArgument),
        ({"bob": rows_of("bob"), "ann": bad}, {}, BadRow),
    ]
    for rows, args, kind in wrong:
        told = []
        for model in (here, there):
            with pytest.raises(kind) as caught:
                model.forward_backward_many(rows, **args)
            told.append(str(caught.value))
        assert told[0] == told[1]
    assert caught.value.row == 4 and caught.value.adapter == "ann"
    assert "twinkle: in the call of adapter 'ann'" in caught.value.__notes__
    assert there.clip_grad_and_step(adapter_name="ann") is None, "no window was opened"


def lives(model, name, start=None):
    """What a tenant sees of three steps, by its context, verbs whole and taken apart."""
    found = []
    if start is not None:
        start.wait(60)
    with model.multi_lora.adapter(name):
        for step in range(3):
            if step == 1:
                model.forward(rows_of(name, step), return_logits=False)
                found.append(float(model.calculate_loss()))
                model.backward()
            else:
                found.append(float(model.forward_backward(rows_of(name, step))))
            found.append(model.clip_grad_and_step(0.5))
    return found


@pytest.mark.parametrize("group", ["one", "actor"])
def test_threads_of_the_driver_never_mix(cluster, tiny, loras, group):
    """Two train a tenant each, at once, by contexts of their own. On one worker they get the numbers of one process, to the
    bit; on two those of the same two workers with one thread, and of one process but for rounding."""
    loras = {name: loras[name] for name in NAMES[:2]}
    here, there, calm = built(tiny, loras), built(tiny, loras, group), built(tiny, loras, group)
    start = Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        begun = {name: threads.submit(lives, there, name, start) for name in loras}
        found = {name: each.result(120) for name, each in begun.items()}
    alone = {name: lives(here, name) for name in loras}
    assert found == {name: lives(calm, name) for name in loras}
    assert found == (alone if group == "one" else {name: pytest.approx(each, rel=2e-5) for name, each in alone.items()})
    for name in loras:
        states = [model.get_state_dict(adapter_name=name) for model in (there, calm, here)]
        assert all(torch.equal(states[0][key], value) for key, value in states[1].items())
        if group == "one":
            assert all(torch.equal(states[0][key], value) for key, value in states[2].items())
