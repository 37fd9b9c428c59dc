"""Qwen2.5-VL with its real vocabulary: what stands for an image, and how many tokens a size makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinkle_core.templates.multimodal import without_video
from twinkle_core.templates.vision import VisionTemplate
from twinkle_core.testing.vision import picture

START, END, PAD, VIDEO = 151652, 151653, 151655, 151656


@pytest.fixture(scope="module")
def processor(qwen):
    from transformers import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    source = (Path(__file__).parent / "qwen2_5_vl.jinja").read_text("utf-8").rstrip("\n")
    sizes = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # as the class, and most checkpoints, have them
    return without_video(Qwen2_5_VLProcessor)(Qwen2VLImageProcessorPil(size=sizes), qwen, None, chat_template=source)


def user(*parts):
    return {"role": "user", "content": list(parts)}


ASK = {"type": "text", "text": "What is it?"}
ANSWER = {"role": "assistant", "content": "A cat."}


def test_the_layout(processor, marked):
    template = VisionTemplate(processor)
    conversation = [user({"type": "image", "image": picture(56, 28)}, ASK), ANSWER]
    expected = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>What is it?<|im_end|>\n"
        "<|im_start|>assistant\n⟦A cat.<|im_end|>⟧\n"
    )
    # 56 x 28 is below the smallest area: 84 x 56, 3 x 2 blocks of 28
    assert marked(template, conversation) == expected


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (56, 56, (1, 4, 4)),
        (70, 84, (1, 6, 4)),  # 70 / 28 = 2.5 goes to the even number
        (640, 480, (1, 34, 46)),  # 644 x 476
        (28, 28, (1, 4, 4)),
        (3000, 2000, (1, 58, 86)),  # above 1280 tokens: both sides shrink by sqrt(6e6 / 1003520), down to multiples of 28
    ],
)
def test_how_many_tokens_an_image_has(processor, width, height, grid):
    row = VisionTemplate(processor).encode(
        {"messages": [user({"type": "image", "image": picture(width, height)}, ASK), ANSWER]}
    )
    assert tuple(row["image_grid_thw"][0]) == grid
    count = grid[1] * grid[2] // 4
    at = row["input_ids"].index(START)
    assert row["input_ids"][at : at + count + 2] == [START, *[PAD] * count, END] and row["input_ids"].count(PAD) == count
    assert row["pixel_values"].shape == (4 * count, 3 * 2 * 14 * 14)
    assert row["mm_token_type_ids"] == [int(token == PAD) for token in row["input_ids"]]


def test_tokens_of_pictures_in_a_text_are_refused(processor):
    template = VisionTemplate(processor)
    for word in ("<|image_pad|>", "<|video_pad|>"):
        told = template.check({"messages": [{"role": "user", "content": f"what is {word}?"}, ANSWER]})
        assert word in told and "message 0 (user)" in told
