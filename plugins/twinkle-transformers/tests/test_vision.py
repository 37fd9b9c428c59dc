"""Models that see: rows together are what they are alone, in micro-batches, in packs, with adapters, saved and loaded."""

from __future__ import annotations

import inspect
import logging

import numpy as np
import pytest
import torch
from peft import LoraConfig

from twinkle_core.errors import BadInputs, BadRow, PackingLeaks
from twinkle_core.processors.input import InputProcessor
from twinkle_core.templates.vision import VisionTemplate
from twinkle_core.testing.vision import FAMILIES, FrameByFrame, picture, vision_config, vision_model, vision_processor
from twinkle_core.train.micro import cut_batch
from twinkle_core.types import MEDIA_FIELDS
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.vision import fit_media, packed_positions, parts_that_see, rope_index_of

TALL, WIDE, CLIP = picture(60, 90), picture(100, 50, 1), [picture(60, 40, k) for k in range(5)]
PACKS = ("qwen2_5_vl", "qwen3_vl", "internvl")


def talk(content, answer):
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


TALKS = [
    {**talk("look <image> and <image>?", "yo"), "images": [TALL, WIDE]},
    talk("hi", "there you are"),
    talk(
        [{"type": "video", "video": CLIP, "fps": 2}, {"type": "text", "text": "what"}, {"type": "image", "image": WIDE}],
        "a film",
    ),
    talk([{"type": "image", "image": TALL}], "b"),
]


class Scene:
    """A family's template, rows, and models."""

    def __init__(self, family):
        self.family, self.processor = family, vision_processor(family)
        self.processor.video_processor = FrameByFrame(self.processor.image_processor, tiles=family == "internvl")
        self.template = VisionTemplate(self.processor)
        self.rows = [self.template.encode(row) for row in TALKS]
        self.config = vision_config(family, self.processor)
        self.weights = vision_model(family, self.processor).state_dict()

    def model(self, adapter=None, **options):
        made = TransformersModel("AutoModelForImageTextToText", config=self.config, mixed_precision="no", **options)
        made.module.load_state_dict(self.weights)
        if adapter is not None:
            made.add_adapter_to_model("default", adapter)
            made.set_optimizer("adamw", lr=1e-2)
        return made


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request):
    return Scene(request.param)


@pytest.fixture(scope="module")
def qwen():
    return Scene("qwen2_5_vl")


def tensors(row):
    """One row as transformers' own processors give it, B = 1."""
    flat = {name: torch.tensor([row[name]]) for name in ("input_ids", "mm_token_type_ids") if name in row}
    return {**flat, **{name: torch.as_tensor(row[name]) for name in MEDIA_FIELDS if name in row}}


def plain_logps(model, row):
    """log p of the labels by the model itself: what transformers' inputs give, positions its own."""
    taken = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in tensors(row).items() if name in taken}
    with torch.no_grad():
        logps = model(**inputs).logits[0].log_softmax(-1)
    labels = torch.tensor(row["labels"])
    return torch.where(labels == -100, 0.0, logps.gather(-1, labels.clamp_min(0)[:, None])[:, 0])


# ------------------------------------------------------------------------------------------------ forward


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_together_are_what_the_model_itself_gives_for_each(scene, side):
    model = scene.model()
    model.set_processor(InputProcessor(padding_side=side))
    together = model.forward_only(inputs=scene.rows)["logps"]
    for given, row in zip(together, scene.rows, strict=True):
        count = row["length"]
        mine = given[:count] if side == "right" else given[-count:]
        assert torch.allclose(mine, plain_logps(model.module, row), atol=1e-5)


def test_positions_are_the_models_own(scene):
    rope = rope_index_of(vision_model(scene.family, scene.processor))
    if scene.family == "internvl":
        assert rope is None
        return
    model = vision_model(scene.family, scene.processor)
    batch = dict(InputProcessor().collate(scene.rows))
    fit_media(model, batch)
    assert batch["position_ids"].shape == (3, *batch["input_ids"].shape)
    packed = packed_positions(model, InputProcessor(padding_free=True).collate(scene.rows))
    assert packed.shape == (4, 1, sum(row["length"] for row in scene.rows))
    at = 0
    for k, row in enumerate(scene.rows):
        count = row["length"]
        given = {k: v for k, v in tensors(row).items() if not k.startswith("pixel")}
        seen = "image_grid_thw" in given or "video_grid_thw" in given
        alone = rope(**given)[0][:, 0] if seen else torch.arange(count).expand(3, -1)
        assert torch.equal(batch["position_ids"][:, k, :count], alone)
        assert torch.equal(packed[1:, 0, at : at + count], alone)
        assert packed[0, 0, at : at + count].tolist() == list(range(count))
        at += count
    if scene.family == "qwen2_5_vl":  # by the rule, by hand: 6 tokens of 3 x 2 after 9 of text, the next 3 further on
        first = batch["position_ids"][:, 0]
        assert first[:, 9:15].tolist() == [[9] * 6, [9, 9, 10, 10, 11, 11], [9, 10] * 3] and first[:, 15].tolist() == [12] * 3
        film = batch["position_ids"][0, 2, scene.rows[2]["mm_token_type_ids"].index(2) :][:6]
        assert (film - film[0]).tolist() == [0, 0, 2, 2, 4, 4]  # one second a step, two tokens a second


@pytest.mark.parametrize("family", PACKS)
def test_a_packed_row_is_what_it_is_alone(family):
    scene = Scene(family)
    model = scene.model()
    model.set_processor(InputProcessor(padding_free=True))
    flat = model.forward_only(inputs=scene.rows)["logps"][0]
    for mine, row in zip(flat.split([row["length"] for row in scene.rows]), scene.rows, strict=True):
        assert torch.allclose(mine, plain_logps(model.module, row), atol=1e-5)
    whole = InputProcessor(padding_free=True).collate(scene.rows)
    parts = model.forward_only(inputs=whole, micro_batch_size=1)["logps"][0]
    assert torch.allclose(parts, flat, atol=1e-5)


def test_a_packed_batch_without_lengths_keeps_its_samples_apart(qwen):
    """Positions that begin anew say it too; with images something must say whose they are."""
    model = qwen.model()
    words = [row for row in qwen.rows if "pixel_values" not in row] * 2
    batch = dict(InputProcessor(padding_free=True).collate(words))
    del batch["seq_lens"]
    flat = model.forward_only(inputs=batch)["logps"][0]
    for mine in flat.split([row["length"] for row in words]):
        assert torch.allclose(mine, plain_logps(model.module, words[0]), atol=1e-5)
    seen = dict(InputProcessor(padding_free=True).collate(qwen.rows))
    del seen["row_counts"]
    with pytest.raises(BadInputs, match="a packed batch with 'image_grid_thw' needs 'row_counts'"):
        model.forward_only(inputs=seen)


def test_a_recurrent_model_that_sees_refuses_packs_and_says_why():
    scene = Scene("qwen3_5")
    model = scene.model()
    model.set_processor(InputProcessor(padding_free=True))
    with pytest.raises(PackingLeaks, match="carry a state along the sequence"):
        model.forward_only(inputs=scene.rows)


# ------------------------------------------------------------------------------------------------ micro-batches


def gradients(model):
    return {key: p.grad.clone() for key, p in model.adapters.parameters("default").items()}


def test_micro_batches_cut_pixels_with_their_rows(scene):
    """Gradients of one batch, of micro-batches, and of a collated batch that is cut: the same."""
    found, losses = [], []
    everything = LoraConfig(r=2, target_modules="all-linear", exclude_modules=[], init_lora_weights=False)
    for inputs, size in ((scene.rows, None), (scene.rows, 1), (scene.rows, 3), (InputProcessor().collate(scene.rows), 1)):
        torch.manual_seed(0)
        model = scene.model(everything)
        losses.append(float(model.forward_backward(inputs=inputs, micro_batch_size=size)))
        found.append(gradients(model))
    assert any("visual" in key or "vision_tower" in key for key in found[0])
    assert all(float(g.abs().max()) > 0 for key, g in found[0].items() if "visual.blocks" in key or "vision_tower" in key)
    for loss, other in zip(losses[1:], found[1:], strict=True):
        assert loss == pytest.approx(losses[0], abs=1e-6)
        for key, gradient in found[0].items():
            assert (other[key] - gradient).norm() <= 1e-5 * gradient.norm(), key


def test_a_cut_batch_is_the_batch_of_its_rows(scene):
    for packed in (False, True):
        whole = InputProcessor(padding_free=packed).collate(scene.rows)
        for start, stop in ((0, 1), (1, 2), (1, 3), (2, 4)):
            cut = cut_batch(whole, range(start, stop))
            again = InputProcessor(padding_free=packed).collate(scene.rows[start:stop])
            assert {k for k in cut if k in MEDIA_FIELDS} == {k for k in again if k in MEDIA_FIELDS}
            assert cut.get("row_counts") == again.get("row_counts")
            for name in MEDIA_FIELDS:
                if name in again:
                    assert torch.equal(cut[name], again[name])
            width = again["input_ids"].shape[1]
            assert torch.equal(cut["input_ids"][:, :width], again["input_ids"])


def test_a_collated_batch_that_does_not_say_which_row_has_which_is_not_cut(qwen):
    batch = dict(InputProcessor().collate(qwen.rows))
    del batch["row_counts"]
    model = qwen.model()
    whole = model.forward_only(inputs=qwen.rows)["logps"]
    assert torch.allclose(model.forward_only(inputs=batch)["logps"], whole, atol=1e-5)
    with pytest.raises(BadInputs, match=r"'pixel_values' of a collated batch has \d+ entries for 4 rows.*'row_counts'"):
        model.forward_only(inputs=batch, micro_batch_size=2)


# ------------------------------------------------------------------------------------------------ training


def test_an_adapter_learns_is_saved_and_loaded(scene, tmp_path):
    model = scene.model(LoraConfig(r=4, target_modules="all-linear"))
    before = model.forward_only(inputs=scene.rows)["logps"]
    losses = []
    for _ in range(3):
        losses.append(float(model.forward_backward(inputs=scene.rows, micro_batch_size=2)))
        model.clip_grad_and_step()
    assert losses[0] > losses[1] > losses[2]
    after = model.forward_only(inputs=scene.rows)["logps"]
    folder = model.save("last", str(tmp_path))
    again = scene.model()
    again.add_adapter_to_model("default", str(folder))
    assert torch.allclose(again.forward_only(inputs=scene.rows)["logps"], after, atol=1e-6)
    base = model.forward_only(inputs=scene.rows, disable_lora=True)["logps"]
    assert torch.allclose(base, before, atol=1e-6) and not torch.allclose(after, before, atol=1e-3)


def test_a_whole_model_is_saved_with_its_processor(scene, tmp_path):
    model = scene.model()
    model.set_template(scene.template)
    model.set_optimizer("sgd", lr=1e-2)
    model.forward_backward(inputs=scene.rows)
    model.clip_grad_and_step()
    folder = model.save("whole", str(tmp_path))
    again = TransformersModel("AutoModelForImageTextToText", model_id=str(folder), mixed_precision="no")
    rows = [VisionTemplate(str(folder)).encode(TALKS[0])]
    assert np.array_equal(rows[0]["pixel_values"], scene.rows[0]["pixel_values"])
    assert torch.allclose(
        again.forward_only(inputs=rows)["logps"], model.forward_only(inputs=scene.rows[:1])["logps"], atol=1e-6
    )


def test_dpo_with_the_base_as_reference_sees_the_images(scene):
    model = scene.model(LoraConfig(r=4, target_modules="all-linear"))
    model.set_loss("dpo", beta=0.5)
    pairs = []
    for row, other in ((TALKS[0], "never"), (TALKS[1], "no"), (TALKS[3], "nothing at all")):
        worse = {**row, "messages": [*row["messages"][:-1], {"role": "assistant", "content": other}]}
        pairs += [scene.template.encode(row), scene.template.encode(worse)]
    losses = []
    for size in (None, 2, 2):
        reference = model.forward_only(inputs=pairs, disable_lora=True, micro_batch_size=size)
        losses.append(float(model.forward_backward(inputs=pairs, ref_logps=reference["logps"], micro_batch_size=size)))
        model.clip_grad_and_step()
    assert losses[0] == pytest.approx(float(np.log(2)), abs=1e-5) and losses[0] > losses[1] > losses[2]


def test_all_linear_means_the_language_model_unless_it_is_said(scene, caplog):
    parts = parts_that_see(vision_model(scene.family, scene.processor))
    assert parts == (["model.vision_tower", "model.multi_modal_projector"] if scene.family == "internvl" else ["model.visual"])
    logging.getLogger("twinkle").propagate = True
    with caplog.at_level(logging.INFO):
        model = scene.model(LoraConfig(r=2, target_modules="all-linear"))
    assert any("'all-linear' leaves out model.vis" in message for message in caplog.messages)
    names = list(model.adapters.parameters("default"))
    assert names and all("language_model" in name for name in names)
    named = scene.model(LoraConfig(r=2, target_modules=["fc1", "qkv", "linear_fc1", "up_proj"]))
    assert any("vis" in name for name in named.adapters.parameters("default"))  # who names layers gets them
    wide = scene.model(LoraConfig(r=2, target_modules="all-linear", exclude_modules=[]))
    assert any("vis" in name for name in wide.adapters.parameters("default"))


def test_prompts_with_images_are_continued_together_as_alone(scene):
    model = scene.model()
    model.set_template(scene.template)
    asked = [{**row, "messages": row["messages"][:-1]} for row in TALKS]
    prompts = [scene.template.encode(row, add_generation_prompt=True) for row in asked]
    options = {"max_new_tokens": 6, "do_sample": False}
    together = model.engine.generate(prompts, **options)
    assert together == [model.engine.generate([prompt], **options)[0] for prompt in prompts]
    blank = {**prompts[3], "pixel_values": np.zeros_like(prompts[3]["pixel_values"])}
    with torch.no_grad():
        seen, unseen = (
            model.forward_only(inputs=[{**row, "labels": row["input_ids"]}])["logps"] for row in (prompts[3], blank)
        )
    assert not torch.allclose(seen, unseen, atol=1e-3)


# ------------------------------------------------------------------------------------------------ what is refused


def changed(row, **fields):
    return {k: v for k, v in {**row, **fields}.items() if v is not None}


def test_tokens_and_pixels_that_differ_are_told_with_their_row(scene):
    model = scene.model(LoraConfig(r=2, target_modules="all-linear"))
    first, word, film, last = scene.rows
    seen = {name: last[name] for name in ("pixel_values", "image_grid_thw") if name in last}
    bare, blind = changed(last, **dict.fromkeys(seen)), changed(word, **seen)
    half = changed(
        first, **{name: first[name][:size] for name, size in zip(seen, (len(last["pixel_values"]), 1), strict=False)}
    )
    for rows, row in (([word, bare], 1), ([film, word, half], 2), ([word, word, blind], 2)):
        for size in (None, 1):
            with pytest.raises(
                BadRow, match=rf"row {row}: 'input_ids' has \d+ tokens of images .* and 'pixel_values' makes \d+"
            ):
                model.forward_backward(inputs=rows, micro_batch_size=size)
    assert all(p.grad is None for p in model.adapters.parameters("default").values())
    with pytest.raises(BadRow, match="row 0"):
        model.engine.generate([bare])


def test_grids_and_patches_that_differ(qwen):
    row = changed(qwen.rows[3], pixel_values=qwen.rows[3]["pixel_values"][:-4])
    more = changed(qwen.rows[3], pixel_values=np.concatenate([qwen.rows[3]["pixel_values"], qwen.rows[3]["pixel_values"][:4]]))
    for rows in ([qwen.rows[1], row], [qwen.rows[1], row, more]):  # together the last two would be right
        with pytest.raises(BadRow, match=r"row 1: 'pixel_values' has 20 patches, and 'image_grid_thw' speaks of 24"):
            qwen.model().forward_only(inputs=rows)
    with pytest.raises(BadInputs, match="the batch has 'pixel_values' without 'image_grid_thw'"):
        qwen.model().forward_only(inputs=[changed(qwen.rows[3], image_grid_thw=None)])
    with pytest.raises(BadRow, match=r"row 1: 'image_grid_thw' is \[3\]"):
        InputProcessor().collate([qwen.rows[1], changed(qwen.rows[3], image_grid_thw=[1, 4, 6])])
    with pytest.raises(BadRow, match=r"row 1: 'pixel_values' has entries of shape \[5\], row 0 has \[1176\]"):
        InputProcessor().collate([qwen.rows[0], changed(qwen.rows[3], pixel_values=np.zeros((24, 5), np.float32))])


def test_a_model_of_texts_refuses_pixels(qwen, tiny):
    model = TransformersModel(model_id=str(tiny), mixed_precision="no")
    small = [changed(row, input_ids=[5] * row["length"], labels=[5] * row["length"]) for row in qwen.rows]
    with pytest.raises(BadRow, match=r"row 0: 'pixel_values' is not for LlamaForCausalLM.*AutoModelForImageTextToText"):
        model.forward_only(inputs=small)
    assert model.forward_only(inputs=small[1:2])["logps"].shape == (1, small[1]["length"])
