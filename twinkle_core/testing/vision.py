"""Tiny models that see: real processors with small sizes, and random weights of the very architectures (L2).

The chat templates have the families' layouts in words of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from twinkle_core.testing.tokenizers import chat_tokenizer

#: ChatML with parts: ``IMAGE`` and ``VIDEO`` stand for what the family writes for one.
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}VIDEO{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_START, _END = "<|vision_start|>", "<|vision_end|>"
QWEN = _CHATML.replace("IMAGE", f"{_START}<|image_pad|>{_END}").replace("VIDEO", f"{_START}<|video_pad|>{_END}")
INTERNVL = _CHATML.replace("IMAGE", "<IMG_CONTEXT>\n").replace("VIDEO", "<video>\n")

_QWEN_TOKENS = ("<|im_start|>", _START, _END, "<|image_pad|>", "<|video_pad|>", "<|endoftext|>")
_INTERN_TOKENS = ("<|im_start|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<|endoftext|>")
#: pixels of the smallest and the largest picture, in tokens' worth
_TOKENS = (1, 16)


def _qwen(name: str, patch: int) -> Any:
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from twinkle_core.templates.multimodal import without_video

    side = (2 * patch) ** 2
    make: Any = Qwen2VLImageProcessorPil
    images = make(patch_size=patch, size={"shortest_edge": _TOKENS[0] * side, "longest_edge": _TOKENS[1] * side})
    tokenizer = chat_tokenizer(QWEN, _QWEN_TOKENS)
    return without_video(getattr(transformers, name))(images, tokenizer, None, chat_template=QWEN)


def _internvl() -> Any:
    import transformers
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    from twinkle_core.templates.multimodal import without_video

    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    plain = chat_tokenizer(INTERNVL, _INTERN_TOKENS)
    wrap: Any = transformers.PreTrainedTokenizerFast
    tokenizer = wrap(
        tokenizer_object=plain.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={**named, "video_token": "<video>"},
    )
    tokenizer.chat_template = INTERNVL
    make: Any = GotOcr2ImageProcessorPil
    images = make(size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=3)
    cls = without_video(transformers.InternVLProcessor)
    return cls(images, tokenizer, None, image_seq_length=4, chat_template=INTERNVL)


#: family -> its processor with a small tokenizer and small pictures
_PROCESSORS: dict[str, Callable[[], Any]] = {
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VLProcessor", 14),
    "qwen3_vl": lambda: _qwen("Qwen3VLProcessor", 16),
    "qwen3_5": lambda: _qwen("Qwen3VLProcessor", 16),
    "internvl": _internvl,
}
FAMILIES = tuple(_PROCESSORS)


def vision_processor(family: str) -> Any:
    """The processor of a family: pictures of at most 16 tokens, a tokenizer of a few hundred."""
    return _PROCESSORS[family]()


def _text(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.2,
    }


def vision_config(family: str, processor: Any) -> Any:
    """A config of the family, 32 wide, whose special tokens are the processor's."""
    import transformers

    ids = processor.tokenizer.convert_tokens_to_ids
    text = _text(processor.tokenizer)
    seeing: dict[str, Any] = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    tokens = {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids(_START),
        "vision_end_token_id": ids(_END),
        "tie_word_embeddings": False,
    }
    if family == "internvl":
        tower: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        tower |= {"image_size": (28, 28), "patch_size": (7, 7)}
        one = ids("<IMG_CONTEXT>")
        return transformers.InternVLConfig(
            text_config={"model_type": "qwen2", **text}, vision_config=tower, image_token_id=one, image_seq_length=4
        )
    if family == "qwen2_5_vl":
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
        seeing |= {"window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=seeing, **tokens)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    seeing |= {"num_position_embeddings": 64}
    text |= {"head_dim": 16, "rope_parameters": rope}
    if family == "qwen3_vl":
        seeing |= {"deepstack_visual_indexes": [0, 1]}
        return transformers.Qwen3VLConfig(text_config=text, vision_config=seeing, **tokens)
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    text |= {**linear, "layer_types": ["linear_attention", "full_attention"]}
    text["rope_parameters"] = {**rope, "partial_rotary_factor": 1.0}
    return transformers.Qwen3_5Config(text_config=text, vision_config=seeing, **tokens)


def vision_model(family: str, processor: Any, seed: int = 0) -> Any:
    """A model of the family with random weights, fp32, in evaluation mode."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = transformers.AutoModelForImageTextToText
        model = auto.from_config(vision_config(family, processor))
        for parameter in model.parameters():
            if not parameter.any():  # what begins at 0, as biases and gates, would hide mistakes
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def write_tiny_vision(folder: Path | str, family: str = "qwen2_5_vl", seed: int = 0) -> Path:
    """A folder as a hub would give it: weights, config, tokenizer, chat template, sizes of pictures."""
    from twinkle_core.templates.vision import VisionTemplate

    processor = vision_processor(family)
    vision_model(family, processor, seed).save_pretrained(folder)
    VisionTemplate(processor).save_pretrained(str(folder))
    return Path(folder)


def picture(width: int, height: int, seed: int = 0) -> Any:
    """A picture of random colours."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


class FrameByFrame:
    """Stands in for transformers' processors of videos, which need torchvision: each frame goes through the processor of
    images, and ``temporal_patch_size`` of them make one patch in time.

    Args:
        images: the processor of images.
        tiles: one picture a frame, as InternVL takes them, instead of patches.
    """

    do_sample_frames = False
    valid_kwargs = None

    def __init__(self, images: Any, tiles: bool = False) -> None:
        self.images, self.tiles = images, tiles
        self.merge_size = getattr(images, "merge_size", 1)
        self.temporal_patch_size = getattr(images, "temporal_patch_size", 1)

    def save_pretrained(self, folder: str) -> None:
        """Nothing: its sizes are those of the processor of images."""

    def __call__(self, videos: Any, video_metadata: Any = None, **kwargs: Any) -> dict[str, Any]:
        import numpy as np

        metadata = dict.fromkeys(("video_metadata",), video_metadata)
        if self.tiles:
            made = [self.images(list(video), crop_to_patches=False)["pixel_values"] for video in videos]
            return {"pixel_values_videos": torch.as_tensor(np.stack(made)), **metadata}
        pixels, grids = [], []
        for video in videos:
            step = self.temporal_patch_size
            frames = [*video, *[video[-1]] * (-len(video) % step)]
            made = [self.images([frame]) for frame in frames]
            _, high, wide = made[0]["image_grid_thw"][0].tolist()
            # an image is its own next frame: a patch is [3, step, p, p], and each frame gives its own place in it
            parts = [m["pixel_values"].reshape(high * wide, 3, step, -1) for m in made]
            for k in range(0, len(frames), step):
                one = np.stack([parts[k + s][:, :, s] for s in range(step)], axis=2)
                pixels.append(one.reshape(high * wide, -1))
            grids.append([len(frames) // step, high, wide])
        return {"pixel_values_videos": np.concatenate(pixels), "video_grid_thw": np.asarray(grids), **metadata}
