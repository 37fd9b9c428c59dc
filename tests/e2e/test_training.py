"""From data to a checkpoint and on: the loop that users write, on a tiny real model."""

from __future__ import annotations

import json
import random
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from twinkle_core.data.dataloader import DataLoader
from twinkle_core.data.dataset import Dataset
from twinkle_core.data.sources import DatasetMeta
from twinkle_core.errors import BadCheckpointName, CheckpointDamaged, CheckpointMismatch, CheckpointNotWritten, DuplicateAdapter
from twinkle_core.runtime import local
from twinkle_transformers.model import TransformersModel

CURVES = Path(__file__).parent / "curves"
QUESTIONS = ("Who are you?", "What is your name?", "Who made you?", "hi", "Are you a person?", "2+2?", "a b c", "A colour?")
ANSWERS = ("I am twinkle.", "twinkle", "Some people did.", "hello there", "No, a model.", "4", "d e f", "blue, or red")


def conversations(count=22):
    texts = [(QUESTIONS[i % 8] * (1 + i % 3), ANSWERS[(i * 3) % 8]) for i in range(count)]
    return [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in texts]


def encoded(folder):
    dataset = Dataset(DatasetMeta("conversations", data=conversations()))
    dataset.set_template("chat", model_id=str(folder), max_length=256)
    dataset.encode()
    return dataset


def lora(**options):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.1, **options})


def trainer(folder, kind, config_or_dir=None, **kwargs):
    """A model ready to train: kind ``lora`` or ``full``."""
    options = {"attention_dropout": 0.1, "attn_implementation": "eager"}
    m = TransformersModel(model_id=folder, mixed_precision="no", **options, **kwargs)
    if kind == "lora":
        m.add_adapter_to_model("default", config_or_dir or lora())
    m.set_optimizer("adamw", lr=1e-2 if kind == "lora" else 2e-3)
    m.set_lr_scheduler("cosine_warmup", num_warmup_steps=3, num_training_steps=20)
    return m


def stream(loader):
    """Epoch after epoch. An iterator that is left in the middle gives up the rest of its epoch, so there is one."""
    while True:
        yield from loader


def steps(m, batches, count):
    """``count`` updates of two micro-batches each. The losses of all calls, and the learning rates."""
    session = m.sessions["default" if "default" in m.sessions else ""]
    losses, rates = [], []
    while len(rates) < count:
        losses.append(m.forward_backward(inputs=next(batches)).item())
        if m.clip_grad_and_step(gradient_accumulation_steps=2) is not None:
            rates.append(session.optimizer.param_groups[0]["lr"])
    return losses, rates


def curve(folder, kind):
    """Losses of 20 updates from fixed seeds."""
    torch.manual_seed(11)
    m = trainer(folder, kind)
    return steps(m, stream(DataLoader(encoded(folder), batch_size=3, shuffle=True, seed=5)), 20)[0]


def test_the_usage_example_of_the_docs(tiny):
    """As written there, with a local folder for the hub's id and one process, where a group of workers means nothing."""
    from twinkle import DeviceMesh
    from twinkle.dataloader import DataLoader as FacadeLoader
    from twinkle.model import TransformersModel as FacadeModel

    dataset = Dataset(DatasetMeta("conversations", data=conversations()))
    dataset.set_template("chat", model_id=str(tiny))
    dataset.encode()
    dataloader = FacadeLoader(dataset, batch_size=4)
    local.initialize()
    try:
        model = FacadeModel(model_id=str(tiny), device_mesh=DeviceMesh.from_sizes(), remote_group="actor")
    finally:
        local.shutdown()
    model.add_adapter_to_model("tenant", LoraConfig(target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=1e-2, adapter_name="tenant")
    before = {k: v.clone() for k, v in model.get_state_dict(adapter_name="tenant").items()}
    norms = []
    for _ in range(3):
        for data in dataloader:
            model.forward_backward(inputs=data, adapter_name="tenant")
            norms.append(model.clip_grad_and_step(adapter_name="tenant", gradient_accumulation_steps=16))
    assert [i for i, norm in enumerate(norms) if norm is not None] == [15]
    after = model.get_state_dict(adapter_name="tenant")
    assert any(not torch.equal(v, before[k]) for k, v in after.items())


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_stored_loss_curve(tiny, kind):
    """20 updates meet the stored losses. ``python tests/e2e/test_training.py`` writes them anew, if they are to change."""
    stored = json.loads((CURVES / f"tiny_{kind}.json").read_text())
    found = curve(tiny, kind)
    assert len(found) == 40
    np.testing.assert_allclose(found, stored, rtol=0, atol=1e-4)
    assert np.mean(found[-6:]) < 0.75 * np.mean(found[:6])


@pytest.mark.parametrize("kind", ["lora", "lora from folder", "full"])
@pytest.mark.parametrize("cut", [7, 4])
def test_resume_goes_on_bit_for_bit(tiny, tmp_path, kind, cut):
    """Weights, optimizer, scheduler, random numbers (dropout) and the order of the data, in the middle of an epoch."""
    how, _, source = kind.partition(" from ")

    def loader():
        return DataLoader(encoded(tiny), batch_size=3, shuffle=True, seed=5)

    torch.manual_seed(3)
    unbroken, data = trainer(tiny, how), loader()
    batches = stream(data)
    steps(unbroken, batches, cut)
    folder = unbroken.save("mid", tmp_path, save_optimizer=True, **data.get_state())
    rest = steps(unbroken, batches, 5)

    torch.manual_seed(999)
    torch.rand(10)
    fresh = trainer(folder if how == "full" else tiny, how, folder if source else None)
    other = loader()
    told = fresh.resume_from_checkpoint(folder)
    assert told == {
        "cur_step": cut, "consumed_train_samples": data_position(told, cut), "gradient_accumulation_steps": 2,
    }  # fmt: skip
    other.resume_from_checkpoint(told["consumed_train_samples"])
    assert steps(fresh, stream(other), 5) == rest
    left, right = unbroken.get_state_dict(), fresh.get_state_dict()
    assert list(left) == list(right)
    assert all(torch.equal(left[k], right[k]) for k in left)


def data_position(told, cut):
    """7 batches of 3 and one of 1 an epoch of 22; two batches an update."""
    return sum(3 if i % 8 < 7 else 1 for i in range(2 * cut))


def test_saved_lora_loads_in_plain_peft(tiny, tmp_path):
    m = trainer(tiny, "lora")
    steps(m, stream(DataLoader(encoded(tiny), batch_size=4)), 3)
    folder = m.save("adapter", tmp_path)
    ids = torch.tensor([encoded(tiny)[0]["input_ids"]])
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager"), folder).eval()
    ours = m.forward_only([{"input_ids": ids[0].tolist()}]).logits
    torch.testing.assert_close(plain(input_ids=ids).logits, ours, rtol=0, atol=1e-5)
    base = m.forward_only([{"input_ids": ids[0].tolist()}], disable_lora=True).logits
    assert not torch.allclose(base, ours, atol=1e-3)


def test_saved_full_model_loads_in_plain_transformers_with_its_tokenizer(tiny, tmp_path):
    m = trainer(tiny, "full")
    m.set_template("chat", model_id=str(tiny))
    for rows in (conversations(4), conversations(8)[4:]):
        m.forward_backward(rows, gradient_accumulation_steps=1)
        m.clip_grad_and_step()
    folder = m.save("full", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = tokenizer.apply_chat_template(conversations(1)[0]["messages"], return_tensors="pt", return_dict=False)
    ours = m.forward_only([{"input_ids": ids[0].tolist()}]).logits
    torch.testing.assert_close(plain(input_ids=ids).logits, ours, rtol=0, atol=1e-5)


def test_generate_answers_as_plain_transformers_does(tiny):
    m = trainer(tiny, "lora")
    m.set_template("chat", model_id=str(tiny))
    rows = conversations(20)
    for _ in range(40):
        m.forward_backward(rows[:2], gradient_accumulation_steps=1)
        m.clip_grad_and_step()
    m.module.train()
    flags = [x.training for x in m.module.modules()]
    prompts = [{"messages": row["messages"][:1]} for row in rows[:2]]
    texts = m.generate(prompts, max_new_tokens=24, do_sample=False)
    assert [x.training for x in m.module.modules()] == flags
    alone = [m.generate([p], max_new_tokens=24, do_sample=False)[0] for p in prompts]
    assert texts == alone
    assert m.generate(prompts, max_new_tokens=24, do_sample=False, disable_lora=True) != texts
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": False}
    ids = tokenizer.apply_chat_template(prompts[0]["messages"], **how)
    m.module.eval()
    with m.adapters.activate("default"):
        made = m.module.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    assert tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True) == texts[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_mixed_precision_learns_saves_and_resumes(tiny, tmp_path, precision, kind):
    def fresh(source, scale=64.0):
        scaler = {"grad_scaler_config": {"init_scale": scale}} if precision == "fp16" else {}
        m = TransformersModel(model_id=source, mixed_precision=precision, **scaler)
        if kind == "lora":
            m.add_adapter_to_model("default", lora(lora_dropout=0.0))
        m.set_optimizer("adamw", lr=5e-3)
        return m

    rows = [encoded(tiny)[i] for i in range(4)]
    m = fresh(tiny)
    losses = []
    for _ in range(12):
        losses.append(m.forward_backward(rows).item())
        m.clip_grad_and_step()
    assert losses[-1] < 0.8 * losses[0]
    trained = m.adapters.parameters("default" if kind == "lora" else "")
    optimizer = m.sessions["default" if kind == "lora" else ""].optimizer
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {v.dtype for s in optimizer.state.values() for k, v in s.items() if k != "step"} == {torch.float32}
    compute = torch.bfloat16 if precision == "bf16" else torch.float16
    frozen = {p.dtype for p in m.module.parameters()} - {torch.float32}
    assert frozen == ({compute} if kind == "lora" else set())
    assert m.forward_only(rows).logits.dtype == compute
    folder = m.save("mid", tmp_path, save_optimizer=True)
    again = fresh(folder if kind == "full" else tiny, scale=2.0)
    again.resume_from_checkpoint(folder)
    found = []
    for one in (m, again):
        one.forward_backward(rows)
        one.clip_grad_and_step()
        found.append(one.get_state_dict())
    assert all(torch.equal(v, found[1][k]) for k, v in found[0].items())
    if precision == "fp16":
        assert again.engine.scaler.get_scale() == m.engine.scaler.get_scale() == 64.0


# ---------------------------------------------------------------------------------------------------- bad input


def test_checkpoint_of_another_model_is_refused(tiny, tmp_path):
    from twinkle_transformers.testing import write_tiny_llama

    wide = write_tiny_llama(tmp_path / "wide", intermediate_size=96)
    for kind in ("lora", "full"):
        folder = trainer(wide, kind).save(f"of-wide-{kind}", tmp_path, save_optimizer=True)
        m = trainer(tiny, kind)
        before = {k: v.clone() for k, v in m.get_state_dict().items()}
        for call in (
            lambda m=m, folder=folder: m.resume_from_checkpoint(folder),
            lambda m=m, folder=folder: m.load(Path(folder).name, tmp_path),
        ):
            with pytest.raises(CheckpointMismatch):
                call()
        assert all(torch.equal(v, before[k]) for k, v in m.get_state_dict().items())
    m = trainer(tiny, "full")
    with pytest.raises(CheckpointMismatch):
        m.add_adapter_to_model("b", tmp_path / "of-wide-lora")
    assert m.adapters.names() == []


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json"])
@pytest.mark.parametrize("harm", ["cut", "changed", "gone"])
def test_damaged_checkpoint_is_refused_with_its_file(tiny, tmp_path, file, harm):
    m = trainer(tiny, "lora")
    steps(m, stream(DataLoader(encoded(tiny), batch_size=4)), 1)
    folder = Path(m.save("x", tmp_path, save_optimizer=True))
    whole = (folder / file).read_bytes()
    if harm == "gone":
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(whole[:-7] if harm == "cut" else whole[:-7] + bytes(255 - b for b in whole[-7:]))
    before = {k: v.clone() for k, v in m.get_state_dict().items()}
    with pytest.raises((CheckpointDamaged, FileNotFoundError), match=file.replace(".", r"\.")):
        m.resume_from_checkpoint(folder)
    assert all(torch.equal(v, before[k]) for k, v in m.get_state_dict().items())
    if file.startswith("adapter"):
        with pytest.raises((CheckpointDamaged, FileNotFoundError), match=file.replace(".", r"\.")):
            m.add_adapter_to_model("again", folder)
        assert m.adapters.names() == ["default"]


def test_second_adapter_of_one_name_leaves_the_live_one_alone(tiny):
    m = trainer(tiny, "lora")
    data = stream(DataLoader(encoded(tiny), batch_size=4))
    steps(m, data, 2)
    before, optimizer = {k: v.clone() for k, v in m.get_state_dict().items()}, m.sessions["default"].optimizer
    with pytest.raises(DuplicateAdapter, match="default"):
        m.add_adapter_to_model("default", lora(r=2))
    assert all(torch.equal(v, before[k]) for k, v in m.get_state_dict().items())
    assert m.sessions["default"].optimizer is optimizer
    steps(m, data, 1)
    assert any(not torch.equal(v, before[k]) for k, v in m.get_state_dict().items())


@pytest.mark.parametrize("name", ["../x", "/absolute", "", ".", "a/../../x"])
def test_save_stays_in_its_folder(tiny, tmp_path, name):
    m = trainer(tiny, "lora")
    with pytest.raises(BadCheckpointName):
        m.save(name, tmp_path / "out")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_full_disk_leaves_the_old_checkpoint_whole(tiny, tmp_path, kind):
    """The system refuses to write on in the middle of a file, as a full disk does."""
    m = trainer(tiny, kind)
    folder = Path(m.save("last", tmp_path, save_optimizer=True))
    old = {p.name: p.read_bytes() for p in folder.iterdir()}
    steps(m, stream(DataLoader(encoded(tiny), batch_size=4)), 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, hard))
    try:
        with pytest.raises(CheckpointNotWritten, match=r"last"):
            m.save("last", tmp_path, save_optimizer=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == old
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
    trainer(folder if kind == "full" else tiny, kind).resume_from_checkpoint(folder)
    m.save("last", tmp_path, save_optimizer=True)


if __name__ == "__main__":
    import tempfile

    from twinkle_transformers.testing import write_tiny_llama

    torch.set_num_threads(1)
    random.seed(0)
    with tempfile.TemporaryDirectory() as place:
        base = write_tiny_llama(place)
        for one in ("lora", "full"):
            (CURVES / f"tiny_{one}.json").write_text(json.dumps([round(x, 6) for x in curve(base, one)]) + "\n")
