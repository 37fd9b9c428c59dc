"""Models on workers train as in one process on the same global batches."""

from __future__ import annotations

import os

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from training import batches, built, compare, state, train

import twinkle
from twinkle_core import plugins
from twinkle_core.contracts.model import TwinkleModel
from twinkle_core.data.dataloader import DataLoader
from twinkle_core.data.dataset import Dataset
from twinkle_core.errors import BadRow, EmptyBatch, UnknownAdapter, WhichAdapter
from twinkle_core.hookspecs import hookimpl
from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.toys import contrast_rows, random_rows
from twinkle_core.types import LossOutput
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def lora(tmp_path_factory, tiny):
    """The folder of an adapter that is not zero."""
    model = TransformersModel(model_id=tiny, mixed_precision="no")
    model.add_adapter_to_model("a", LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))
    return model.save("a", tmp_path_factory.mktemp("lora"))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_data_ranks(cluster, tiny, optimizer):
    compare(tiny, optimizer=optimizer, dp_size=2)


def test_two_data_ranks_with_an_adapter(cluster, tiny, lora):
    compare(tiny, optimizer="adamw", adapter=lora, dp_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"window": 5, "dp_size": 2, "optimizer": "adamw"},
        {"fsdp_size": 2, "optimizer": "adamw"},
        {"tp_size": 2, "optimizer": "adamw"},
        {"dp_size": 2, "ulysses_size": 2, "optimizer": "sgd"},
    ],
)
def test_other_meshes(cluster, tiny, lora, how):
    compare(tiny, **how)
    compare(tiny, adapter=lora, **how)


def test_verbs_taken_apart_and_arguments_of_the_loss(cluster, tiny):
    """Rows of a forward are divided; what is as long as they are and comes later, with the loss, is divided as they were."""
    rows, weights = random_rows([5, 3, 8], vocabulary=250), [1.0, 0.0, 3.0]
    found = []
    for model in (built(tiny), built(tiny, "actor")):
        model.set_loss(weighted)
        # what lies at padding is no output: it depends on what a row is computed beside
        logits = torch.cat([row[: len(own["labels"])] for row, own in zip(model.forward(rows).logits, rows, strict=True)])
        model.forward_only(rows[:2])  # of another number of rows, and beside the forward that waits for its backward
        loss = model.calculate_loss(weights=weights)
        model.backward()
        norm = model.clip_grad_norm(0.5)
        assert [model.step(), model.zero_grad(), model.lr_step()] == [True, True, False]
        whole = model.forward_backward(rows, weights=torch.tensor(weights))
        found.append((logits, loss, norm, float(whole), model.flush()))
        assert isinstance(loss, float)
    assert isinstance(whole, float)
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(there), torch.as_tensor(here), rtol=1e-4, atol=1e-5)


def weighted(inputs, outputs, weights):
    labelled = inputs["labels"] != -100
    each = torch.as_tensor(weights, dtype=torch.float32)
    return LossOutput(-(outputs.logps.sum(-1) * each).sum(), (labelled.sum(-1) * each).sum())


weighted.needs = {"logps"}


def test_rows_that_belong_together_stay_on_one_rank(cluster, tiny):
    """3 pairs on two ranks: 4 rows and 2, not 3 and 3; and logps of a reference, which are as wide as the widest row of all."""
    rows = random_rows([5, 3, 8, 2, 4, 6], vocabulary=250)
    found = []
    for model in (built(tiny), built(tiny, "actor")):
        model.set_loss("dpo", beta=0.5)
        reference = model.forward_only(rows).logps
        model.set_optimizer("sgd", lr=0.5)
        losses = [float(model.forward_backward(rows, ref_logps=reference + 0.1)), model.clip_grad_and_step()]
        losses += [float(model.forward_backward(rows, ref_logps=reference)), model.clip_grad_and_step()]
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=2e-5)


def test_embeddings_are_contrasted_over_all_workers(cluster, tiny):
    rows = contrast_rows([2, 3, 2])
    found = []
    for model in (built(tiny), built(tiny, "actor")):
        model.apply_patch("embedding", pooling="mean")
        model.set_loss("infonce")
        model.set_optimizer("sgd", lr=0.1)
        found.append([x for _ in range(2) for x in (float(model.forward_backward(rows)), model.clip_grad_and_step())])
    assert found[1] == pytest.approx(found[0], rel=2e-5)


def test_outputs_come_in_row_order(cluster, tiny):
    rows = random_rows([5, 3, 8], vocabulary=250)
    here, there = built(tiny), built(tiny, "actor")
    for options in ({}, {"padding_side": "left"}, {"padding_free": True}):
        outputs = []
        for model in (here, there):
            model.set_processor("input", **options)
            outputs.append(model.forward_only(rows))
        torch.testing.assert_close(outputs[1].logps, outputs[0].logps, rtol=1e-4, atol=1e-5)
    assert there.forward_only(rows[:1]).logps.shape == (1, 5)
    with pytest.raises(EmptyBatch):
        there.forward_backward([])
    many = random_rows([5, 3, 6, 4, 7], vocabulary=250)  # three for the first worker, two for the second
    bad = [*many[:4], {**many[4], "labels": many[4]["labels"][:-1]}]
    with pytest.raises(BadRow, match=r"^row 4: 'labels' has 6 values") as caught:
        there.forward_backward(bad)
    assert caught.value.row == 4 and "raised by worker 1" in caught.value.__notes__[0]
    assert float(there.forward_backward(many)) > 0, "all workers failed together, so they go on"
    prompts = [{"input_ids": row["input_ids"]} for row in rows]
    for few in (prompts, prompts[:1]):  # with one prompt a rank has none
        made = [model.generate(few, return_rows=True, max_new_tokens=4, do_sample=False) for model in (here, there)]
        assert made[0] == made[1]


def test_adapters_by_context_and_by_name(cluster, tiny, lora):
    model = built(tiny, "actor", adapter=lora)
    model.add_adapter_to_model("b", LoraConfig(r=2, target_modules="all-linear"))
    rows = random_rows([5, 3], vocabulary=250)
    with pytest.raises(WhichAdapter):
        model.forward_only(rows)
    with model.adapter("a") as name:
        assert name == "a"
        inside = model.forward_only(rows).logps
        with model.adapter("a", disable_lora=True):
            base = model.forward_only(rows).logps
    assert torch.equal(inside, model.forward_only(rows, adapter_name="a").logps)
    assert torch.equal(base, model.forward_only(rows, adapter_name="a", disable_lora=True).logps)
    assert not torch.equal(inside, base)
    with pytest.raises(UnknownAdapter, match="'c'"), model.adapter("c"):
        raise AssertionError
    assert isinstance(model, TransformersModel) and isinstance(model, TwinkleModel)


def test_saving_is_as_in_one_process_and_resuming_goes_on(cluster, tiny, lora, tmp_path):
    """Relative paths begin where this process is; the files hold the same; each side goes on from the other's checkpoint."""
    output = os.path.relpath(tmp_path / "output")
    rows = batches()
    here, there = built(tiny, adapter=lora, optimizer="adamw"), built(tiny, "actor", adapter=lora, optimizer="adamw")
    paths = []
    for model, name in ((here, "here"), (there, "there")):
        train(model, rows[:3])
        paths.append(model.save(name, output, save_optimizer=True, consumed_train_samples=11))
        assert (tmp_path / "output" / name).is_dir()
    files = [{p.name for p in (tmp_path / "output" / name).iterdir()} for name in ("here", "there")]
    assert files[0] == files[1]
    for name in (n for n in files[0] if n.endswith(".safetensors")):
        saved = [load_file(tmp_path / "output" / side / name) for side in ("here", "there")]
        others = {key for key in saved[1] if key.startswith("rank1/")}  # each worker has a random state of its own
        assert saved[0].keys() == saved[1].keys() - others
        for key, value in saved[0].items():
            if value.is_floating_point():
                torch.testing.assert_close(saved[1][key], value, rtol=1e-4, atol=1e-5)
    unbroken = train(here, rows[3:6])
    for path in paths:
        resumed = built(tiny, "actor", adapter=lora, optimizer="adamw")
        assert resumed.resume_from_checkpoint(path) == {
            "cur_step": 3,
            "consumed_train_samples": 11,
            "gradient_accumulation_steps": 1,
        }
        assert train(resumed, rows[3:6]) == [pytest.approx(step, rel=2e-5) for step in unbroken]
    back = built(tiny, adapter=lora, optimizer="adamw")
    back.resume_from_checkpoint(paths[1])
    assert train(back, rows[3:6]) == [pytest.approx(step, rel=2e-5) for step in unbroken]


def test_listeners_here_hear_of_workers_once(cluster, tiny):
    class Listener:
        def __init__(self):
            self.heard = []

        @hookimpl
        def twinkle_after_step(self, session, result):
            self.heard.append(("step", session.name, session.cur_step, result.acted))

        @hookimpl
        def twinkle_metrics_logged(self, step, metrics):
            self.heard.append(("metrics", step, sorted(metrics)))

    model = built(tiny, "actor")
    listener = Listener()
    with plugins.listening(listener):
        train(model, batches()[:1])
    assert listener.heard == [("step", "", 1, True), ("metrics", 1, ["loss"])]


def test_the_drivers_loader_gives_global_batches_and_so_does_one_on_workers(cluster, tiny):
    mesh = DeviceMesh.from_sizes(dp_size=2)
    rows = random_rows([5, 3, 8, 2, 4], vocabulary=250)
    local = DataLoader(Dataset(rows), batch_size=2, device_mesh=mesh)
    dataset = Dataset(rows, remote_group="actor")
    assert len(dataset) == 5 and dataset[1] == Dataset(rows)[1]
    remote = DataLoader(dataset, batch_size=2, device_mesh=mesh, remote_group="actor")
    assert list(map(len, local)) == [2, 2, 1]
    assert list(remote) == list(local)
    assert len(remote) == 3
    remote.resume_from_checkpoint(2)
    assert [len(batch) for batch in remote] == [2, 1]
    assert remote.get_state() == {"consumed_train_samples": 5} and remote.epoch == 1
    from_driver = DataLoader(dataset, batch_size=2)  # reads row by row
    assert list(from_driver) == list(local)


def test_a_dataset_on_workers_is_encoded_there(cluster, tiny):
    talk = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"ho {i}"}]} for i in range(3)]
    found = []
    for where in ({}, {"remote_group": "one"}):
        dataset = Dataset(talk, **where)
        dataset.set_template("chat", model_id=str(tiny), max_length=64)
        dataset.encode()
        found.append([dataset[i] for i in range(3)])
    assert found[0] == found[1]
    model = built(tiny, "actor")
    model.set_template("chat", model_id=str(tiny))
    assert model.forward_backward(talk) == pytest.approx(model.forward_backward(found[0]), rel=1e-6)


def test_the_specs_example_runs(cluster, tiny):
    """As the documents have it, with ids replaced; on two workers."""
    from twinkle import DeviceMesh
    from twinkle.dataloader import DataLoader
    from twinkle.model import TransformersModel

    dataloader = DataLoader(random_rows([5] * 34, vocabulary=250), batch_size=2)
    model = TransformersModel(
        model_id=str(tiny), device_mesh=DeviceMesh.from_sizes(dp_size=1, fsdp_size=2, device_type="cpu"), remote_group="actor"
    )
    model.add_adapter_to_model("default", LoraConfig(r=4, target_modules="all-linear"))
    model.set_optimizer("AdamW", adapter_name="default")
    norms = []
    for data in dataloader:
        model.forward_backward(inputs=data, adapter_name="default")
        norms.append(model.clip_grad_and_step(adapter_name="default", gradient_accumulation_steps=16))
    assert [i for i, norm in enumerate(norms) if norm is not None] == [15]
    assert "1 rank" not in model.get_train_configs()
    assert twinkle.get_device_placement().startswith("ray: 3 worker(s)")


def test_weights_of_workers_are_equal_after_training(cluster, tiny):
    model = built(tiny, "actor", fsdp_size=2)
    train(model, batches()[:2])
    assert all(type(value) is torch.Tensor for value in state(model).values())
