"""Qwen3.5 with its real vocabulary, when it sees: thoughts and images together, times of frames, patches of 16."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinkle_core.templates.multimodal import without_video
from twinkle_core.templates.vision import VisionTemplate
from twinkle_core.testing.vision import FrameByFrame, picture


@pytest.fixture(scope="module")
def build(qwen35):
    from transformers import Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    def make(**options):
        source = (Path(__file__).parent / "qwen3_5.jinja").read_text("utf-8").rstrip("\n")
        images = Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 64})
        processor = without_video(Qwen3VLProcessor)(images, qwen35, None, chat_template=source)
        processor.video_processor = FrameByFrame(images)
        return VisionTemplate(processor, **options)

    return make


IMAGE = {"type": "image", "image": picture(64, 32)}
PADS = f"<|vision_start|>{'<|image_pad|>' * 2}<|vision_end|>"
TALK = [
    {"role": "user", "content": [IMAGE, {"type": "text", "text": " hi "}]},
    {"role": "assistant", "content": "yo", "reasoning_content": "r1"},
    {"role": "user", "content": [{"type": "text", "text": "and "}, IMAGE]},
    {"role": "assistant", "content": "go", "reasoning_content": "r2"},
]


def test_a_thought_about_an_image(build, marked):
    beginning = f"<|im_start|>user\n{PADS} hi<|im_end|>\n<|im_start|>assistant\n⟦yo<|im_end|>⟧\n"
    asked = f"<|im_start|>user\nand {PADS}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert marked(build(), TALK) == f"{beginning}{asked}⟦r2\n</think>\n\ngo<|im_end|>⟧\n"
    quiet = marked(build(enable_thinking=False), TALK)
    assert quiet == f"{beginning}{asked}\n</think>\n\n⟦go<|im_end|>⟧\n"


def test_a_prompt_with_an_image(build):
    template = build()
    row = template.encode({"messages": TALK[:3]}, add_generation_prompt=True)
    assert template.decode(row["input_ids"]).endswith(f"and {PADS}<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert row["image_grid_thw"].tolist() == [[1, 2, 4]] * 2 and row["pixel_values"].shape == (16, 3 * 2 * 16 * 16)


def test_times_stand_before_frames_and_are_not_trained(build, marked):
    film = {"type": "video", "video": [picture(32, 32, k) for k in range(4)], "fps": 1}
    pad = "<|vision_start|><|video_pad|><|vision_end|>"
    shown = marked(
        build(enable_thinking=False), [{"role": "user", "content": [film]}, {"role": "assistant", "content": "a film"}]
    )
    frames = f"<|vision_start|><0.5 seconds>{pad}<2.5 seconds>{pad}<|vision_end|>"
    assert shown == (
        f"<|im_start|>user\n{frames}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦a film<|im_end|>⟧\n"
    )


def test_a_tool_shows_an_image(build, marked):
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    talk = [
        {"role": "user", "content": "see?"},
        {"role": "assistant", "content": "", "reasoning_content": "ask", "tool_calls": [call]},
        {"role": "tool", "content": [IMAGE, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "so"},
    ]
    shown = marked(build(), talk)
    assert f"<tool_response>\n{PADS}there\n</tool_response>" in shown
    assert shown.endswith("<think>\n⟦so\n</think>\n\nYes.<|im_end|>⟧\n")
