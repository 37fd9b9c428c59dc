"""Conversations with images and videos: the same rows as transformers' own processors make, and labels on words alone."""

from __future__ import annotations

import base64
import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from twinkle_core.data.dataset import Dataset, LazyDataset
from twinkle_core.data.packing import PackingDataset
from twinkle_core.data.streaming import IterableDataset
from twinkle_core.errors import BadMedia, DataError, NeedsLibrary, NoLabels, RowTooLong, TemplateError
from twinkle_core.templates import truncate
from twinkle_core.templates.chat import ChatTemplate
from twinkle_core.templates.vision import VisionTemplate
from twinkle_core.testing.vision import FAMILIES, FrameByFrame, picture, vision_processor, write_tiny_vision
from twinkle_core.types import MEDIA_FIELDS

datasets.disable_progress_bars()
TALL, WIDE, CLIP = picture(60, 90), picture(100, 50, 1), [picture(60, 40, k) for k in range(5)]


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def text(words):
    return {"type": "text", "text": words}


def image(source=None):
    return {"type": "image"} if source is None else {"type": "image", "image": source}


TALK = [user([image(TALL), text("look "), image(WIDE), text(" well")]), assistant("yo"), user("ok"), assistant("all right")]


def processor_of(family):
    made = vision_processor(family)
    made.video_processor = FrameByFrame(made.image_processor, tiles=family == "internvl")
    return made


@pytest.fixture(scope="module", params=FAMILIES)
def template(request):
    made = VisionTemplate(processor_of(request.param))
    made.family = request.param
    return made


@pytest.fixture(scope="module")
def qwen():
    return VisionTemplate(processor_of("qwen2_5_vl"))


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert np.array_equal(value, other[name]), name


def pads(template, row):
    """How many tokens of images and videos a row has."""
    return sum(token in template._pixels.padding for token in row["input_ids"])


def patches(template, row):
    """How many it should have by its pixels."""
    if template.processor.__class__.__name__ == "InternVLProcessor":
        return 4 * len(row.get("pixel_values", ()))
    grids = [row[name] for name in ("image_grid_thw", "video_grid_thw") if name in row]
    return sum(int(grid.prod(-1).sum()) // 4 for grid in grids)


# ------------------------------------------------------------------------------------------------ as transformers does it


def in_parts(messages):
    return [{**m, "content": [text(m["content"])] if isinstance(m["content"], str) else m["content"]} for m in messages]


@pytest.mark.parametrize(
    "talk", [TALK, [user([text("a "), image(WIDE)]), assistant("b")], [user("no picture"), assistant("b")]]
)
def test_a_row_is_what_the_models_processor_makes(template, talk):
    row = template.encode({"messages": talk})
    theirs = template.processor.apply_chat_template(in_parts(talk), tokenize=True, return_dict=True)
    assert row["input_ids"] == list(theirs["input_ids"][0]) and row["length"] == len(row["input_ids"])
    for name in ("mm_token_type_ids", *MEDIA_FIELDS):
        there = theirs.get(name)
        assert (name in row) == (there is not None), name
        if name in row:
            assert np.array_equal(row[name], np.asarray(there).reshape(np.shape(row[name]))), name
    assert pads(template, row) == patches(template, row)
    assert template.check({"messages": talk}) is None


def test_a_video_is_what_the_models_processor_makes_of_it(template):
    talk = [user([image(TALL), {"type": "video", "video": CLIP, "fps": 2}, text("what?")]), assistant("a film")]
    row = template.encode({"messages": talk})
    frames = np.stack([np.asarray(frame) for frame in CLIP])
    told = {"total_num_frames": 5, "fps": 2.0, "frames_indices": [0, 1, 2, 3, 4]}
    from transformers.video_utils import VideoMetadata

    written = template.processor.apply_chat_template([{**m, "content": bare(m["content"])} for m in talk])
    theirs = template.processor(text=[written], images=[TALL], videos=[frames], video_metadata=[VideoMetadata(**told)])
    assert row["input_ids"] == list(theirs["input_ids"][0])
    for name in MEDIA_FIELDS:
        if name in row:
            assert np.allclose(row[name], np.asarray(theirs[name])), name
    assert pads(template, row) == patches(template, row)
    shown = template.decode(row["input_ids"])
    if template.family in ("qwen3_vl", "qwen3_5"):
        assert [f"<{t} seconds>" in shown for t in ("0.2", "1.2", "2.0")] == [True] * 3 and "second_per_grid_ts" not in row
    elif template.family == "qwen2_5_vl":
        assert row["second_per_grid_ts"].tolist() == [1.0] and row["video_grid_thw"][0, 0] == 3
    else:
        assert "Frame5: <img>" in shown and len(row["pixel_values"]) == 3 + 5
    assert template.decode(row["labels"]) == "a film<|im_end|>"


def bare(content):
    return (
        [part if part["type"] == "text" else {"type": part["type"]} for part in content]
        if isinstance(content, list)
        else content
    )


# ------------------------------------------------------------------------------------------------ labels


def test_only_the_assistants_words_are_trained(template):
    row = template.encode({"messages": [*TALK[:3], assistant([text("see "), image(WIDE), text("there")])]})
    assert template.decode(row["labels"]).replace("\n", "") == "yo<|im_end|>see there<|im_end|>"
    targets = [-100, *row["labels"][:-1]]
    seen = template._pixels.ids
    assert all(t in (-100, i) for t, i in zip(targets, row["input_ids"], strict=True)) and not seen & set(targets)
    last = VisionTemplate(template.processor, train_on="last").encode({"messages": TALK})
    assert template.decode(last["labels"]) == "all right<|im_end|>"


def test_times_of_frames_are_not_trained_even_in_an_answer():
    template = VisionTemplate(processor_of("qwen3_vl"))
    row = template.encode(
        {"messages": [user("show"), assistant([text("so: "), {"type": "video", "video": CLIP, "fps": 1}, text("!")])]}
    )
    assert "seconds>" in template.decode(row["input_ids"]) and template.decode(row["labels"]) == "so: !<|im_end|>"


def test_a_prompt_has_pixels_and_no_labels(template):
    row = template.encode({"messages": TALK[:1]}, add_generation_prompt=True)
    assert "labels" not in row and pads(template, row) == patches(template, row) > 0
    shown = template.render({"messages": TALK[:1]}, add_generation_prompt=True)
    assert template.decode(row["input_ids"]) == shown and shown.endswith("<|im_start|>assistant\n")


# ------------------------------------------------------------------------------------------------ where images come from


def png(shown):
    out = io.BytesIO()
    shown.save(out, format="PNG")
    return out.getvalue()


def test_all_ways_to_give_an_image_give_the_same_row(template, tmp_path):
    (tmp_path / "a b.png").write_bytes(png(TALL))
    path, data = tmp_path / "a b.png", f"data:image/png;base64,{base64.b64encode(png(TALL)).decode()}"
    expected = template.encode({"messages": [user([image(TALL), text("hi")]), assistant("yo")]})
    sources = [path, str(path), path.as_uri(), png(TALL), data, {"bytes": png(TALL), "path": None}, {"path": str(path)}]
    for source in sources:
        same(template.encode({"messages": [user([image(source), text("hi")]), assistant("yo")]}), expected)
        beside = {"messages": [user("<image>hi"), assistant("yo")], "images": [source]}
        same(template.encode(beside), expected)
        same(template.encode({**beside, "messages": [user([image(), text("hi")]), assistant("yo")]}), expected)
        assert beside["messages"][0]["content"] == "<image>hi" and beside["images"] == [source]
    for part in (
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "image", "path": path},
        {"type": "image", "url": data},
    ):
        same(template.encode({"messages": [user([part, text("hi")]), assistant("yo")]}), expected)


def test_keys_that_a_typed_file_filled_with_none_name_nothing(template):
    filled = [{"type": "text", "text": "see ", "image": None}, {"type": "image", "image": TALL, "text": None}]
    expected = template.encode({"messages": [user([text("see "), image(TALL)]), assistant("yo")]})
    same(template.encode({"messages": [user(filled), assistant("yo")], "images": None, "videos": []}), expected)


def test_frames_need_their_times_only_where_the_model_counts_them(template):
    talk = {"messages": [user([{"type": "video", "video": CLIP}, text("?")]), assistant("yo")]}
    if template.family == "internvl":
        assert template.encode(talk)["pixel_values"].shape[0] == len(CLIP)
    else:
        with pytest.raises(BadMedia, match="frames without 'fps'"):
            template.encode(talk)


def test_placeholders_and_parts_share_the_rows_images_in_order(qwen):
    messages = [user("<image> or "), assistant("?"), user([text("<image> is a word; "), image(), image(TALL)]), assistant("yo")]
    row = qwen.encode({"messages": messages, "images": [WIDE, TALL]})
    alone = qwen.encode({"messages": [user([image(WIDE), image(TALL), image(TALL)]), assistant("yo")]})
    assert np.array_equal(row["pixel_values"], alone["pixel_values"]) and "<image> is a word" in qwen.decode(row["input_ids"])
    plain = VisionTemplate(qwen.processor, placeholders=False).encode({"messages": [user("an <image>"), assistant("yo")]})
    assert "an <image>" in qwen.decode(plain["input_ids"]) and "pixel_values" not in plain


def test_an_image_is_upright_and_in_three_colours(qwen, tmp_path):
    turned = TALL.rotate(90, expand=True)
    note = Image.Exif()
    note[0x0112] = 6  # the camera was held sideways
    turned.save(tmp_path / "t.png", exif=note)
    grey = TALL.convert("L")
    for source, wanted in ((tmp_path / "t.png", TALL), (grey, grey.convert("RGB")), (png(TALL.convert("RGBA")), TALL)):
        row, expected = (qwen.encode({"messages": [user([image(s), text("x")]), assistant("y")]}) for s in (source, wanted))
        same(row, expected)


# ------------------------------------------------------------------------------------------------ truncation


@pytest.mark.parametrize("strategy", ["left", "right"])
@pytest.mark.parametrize("video", [False, True])
def test_a_cut_never_goes_through_an_image(template, strategy, video):
    film = [{"type": "video", "video": CLIP, "fps": 2}] if video else []
    messages = [user([text("a"), image(TALL)]), assistant("one"), user([image(WIDE), *film, text("b")]), assistant("two")]
    talk = {"messages": [user("a"), assistant("no"), *messages, user([image(TALL)]), assistant("three")]}
    whole = template.encode(talk)
    ids, seen = whole["input_ids"], set()
    for longest in range(2, len(ids), 1 if len(ids) < 80 else 3):
        try:
            row = VisionTemplate(template.processor, max_length=longest, truncation_strategy=strategy).encode(talk)
        except NoLabels:
            continue
        count = len(row["input_ids"])
        start = 0 if strategy == "right" else len(ids) - count
        assert 0 < count <= longest and row["input_ids"] == ids[start : start + count]
        assert pads(template, row) == patches(template, row)
        assert row["labels"][:-1] == whole["labels"][start : start + count - 1]
        for name in ("pixel_values", "pixel_values_videos"):
            if name in row:
                there, here = whole[name], row[name]
                assert np.array_equal(here, there[: len(here)] if strategy == "right" else there[-len(here) :])
        opened, closed = (
            sum(t in side for t in row["input_ids"]) for side in (template._pixels.opening, template._pixels.closing)
        )
        assert opened == closed
        seen.add(pads(template, row))
    assert len(seen) > 2 and 0 in seen


def test_the_other_strategies(qwen):
    def build(strategy, longest=20):
        return VisionTemplate(qwen.processor, max_length=longest, truncation_strategy=strategy)

    talk = {"messages": TALK}
    with pytest.raises(RowTooLong):
        build("raise").encode(talk)
    assert build("delete").encode(talk) is None
    with pytest.raises(BadMedia, match=r"truncation_strategy='split' does not cut rows with images"):
        build("split").encode(talk)
    with pytest.raises(RowTooLong):
        truncate.prompt_row([1] * 6, 3, "right", [(0, 5)])
    same(build("split", 200).encode(talk)[0], qwen.encode(talk))
    long = {"messages": [user("hi " * 20), assistant("yo " * 20)]}
    assert len(build("split").encode(long)) > 1


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("row", "text_of_it"),
    [
        ({"images": [TALL], "messages": [user("<image> <image>"), assistant("a")]}, r"2 places for an image .*'images' has 1"),
        ({"images": [TALL, WIDE], "messages": [user("<image>"), assistant("a")]}, r"1 place for an image .*'images' has 2"),
        ({"messages": [user("<image>"), assistant("a")]}, r"1 place for an image .*'images' has 0"),
        ({"images": [TALL], "messages": [user("hi"), assistant("a")]}, r"0 places for an image"),
        ({"images": "a.png", "messages": [user("<image>"), assistant("a")]}, r"'images' of a row is a list"),
        (
            {"images": ["no.png"], "messages": [user("<image>"), assistant("a")]},
            r"message 0, images\[0\]: there is no file 'no.png'",
        ),
        ({"images": [b"junk"], "messages": [user("<image>"), assistant("a")]}, r"message 0, images\[0\]: bytes can't be read"),
        ({"images": [7], "messages": [user("<image>"), assistant("a")]}, r"images\[0\]: a int is no image; give a path"),
        ({"images": [None], "messages": [user("<image>"), assistant("a")]}, r"images\[0\]: nothing is no image"),
        ({"images": ["https://e.org/a.png"], "messages": [user("<image>"), assistant("a")]}, r"encoding fetches nothing"),
        ({"images": ["data:image/png;base64,@@"], "messages": [user("<image>"), assistant("a")]}, r"is not base64"),
        ({"messages": [user([image(png(TALL)[:300])]), assistant("a")]}, r"message 0, image: bytes can't be read as an image"),
        ({"messages": [user("a <|image_pad|>"), assistant("a")]}, r"message 0 \(user\): its text holds <\|image_pad\|>"),
        ({"messages": [user([image(picture(400, 1))]), assistant("a")]}, r"image processor refuses it: absolute aspect ratio"),
        ({"messages": [user("a"), assistant([image(TALL)])]}, r"message 1 \(assistant\): .*without a text"),
        ({"messages": [user([{"type": "video", "video": []}]), assistant("a")]}, r"message 0, video: a list is no video"),
        (
            {"messages": [user([{"type": "video", "video": [TALL, WIDE]}]), assistant("a")]},
            r"frame 1 is 100x50, frame 0 is 60x90",
        ),
        ({"messages": [user([{"type": "video", "video": CLIP, "fps": 0}]), assistant("a")]}, r"fps=0 is not a number above 0"),
        (
            {"messages": [user([{"type": "video", "video": CLIP}]), assistant("a")]},
            r"message 0, video: it has frames without 'fps'",
        ),
        ({"messages": [user([{"type": "video", "video": "no.mp4"}]), assistant("a")]}, r"there is no file 'no.mp4'"),
        ({"messages": [user([{"type": "video", "video": b"junk"}]), assistant("a")]}, r"bytes can't be read as a video"),
        ({"messages": [user([{"type": "video", "video": [TALL, "no.png"]}]), assistant("a")]}, r"video, frame 1: there is no"),
    ],
)
def test_what_can_not_be_used_is_told_with_its_place(qwen, row, text_of_it):
    before = qwen.dropped
    with pytest.raises(BadMedia, match=text_of_it):
        qwen.encode(row)
    assert qwen.check(row) and qwen.dropped == before
    lazy = LazyDataset([{"messages": [user("hi"), assistant("yo")]}, row])
    lazy.set_template(qwen)
    lazy.encode()
    assert lazy[0]["length"]
    with pytest.raises(DataError, match=r"row 1: [\s\S]*" + text_of_it):
        lazy[1]


def test_without_its_library_a_video_is_refused(qwen):
    template = VisionTemplate(vision_processor("qwen2_5_vl"))
    with pytest.raises(NeedsLibrary, match=r"torchvision[\s\S]*twinkle-core\[video\]"):
        template.encode({"messages": [user([{"type": "video", "video": CLIP}]), assistant("a")]})


def test_templates_of_texts_do_not_drop_images_in_silence(qwen):
    plain = ChatTemplate(qwen.tokenizer)
    with pytest.raises(TemplateError, match=r"the row has 1 images, which this template does not show"):
        plain.encode({"messages": [user("hi"), assistant("yo")], "images": [TALL]})
    with pytest.raises(TemplateError, match=r"the row has 2 videos"):
        ChatTemplate(qwen.tokenizer, use_chat_template=False).encode({"text": "hello you", "videos": [CLIP, CLIP]})
    with pytest.raises(TemplateError, match=r"the row has 1 audios, which this template does not show"):
        qwen.encode({"messages": [user("hi"), assistant("yo")], "audios": ["a.wav"]})
    bare_text = VisionTemplate(qwen.processor, use_chat_template=False)
    with pytest.raises(BadMedia, match="plain text"):
        bare_text.encode({"messages": TALK})
    assert (
        bare_text.encode({"text": "hello you"})["mm_token_type_ids"] == [0] * bare_text.encode({"text": "hello you"})["length"]
    )


def test_a_folder_without_a_processor(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(BadMedia, match=r"no processor of images[\s\S]*template 'chat'"):
        VisionTemplate(str(tmp_path))
    with pytest.raises(BadMedia, match="no processor"):
        VisionTemplate(ChatTemplate)


# ------------------------------------------------------------------------------------------------ folders and data sets


@pytest.mark.parametrize("family", FAMILIES)
def test_a_models_folder_gives_the_same_rows(family, tmp_path):
    template = VisionTemplate(str(write_tiny_vision(tmp_path, family)))
    same(template.encode({"messages": TALK}), VisionTemplate(vision_processor(family)).encode({"messages": TALK}))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_a_folder_as_older_releases_wrote_it(family, tmp_path):
    """Sizes as least and most pixels, a class that needs torchvision, the chat template in a file of JSON beside another."""
    write_tiny_vision(tmp_path, family)
    config = json.loads((tmp_path / "preprocessor_config.json").read_text())
    if family == "qwen2_5_vl":
        size = config.pop("size")
        config |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    config["image_processor_type"] = config["image_processor_type"].removesuffix("Pil") + "Fast"
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    shown = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": shown}))
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    told["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    expected = VisionTemplate(vision_processor(family)).encode({"messages": TALK})
    same(VisionTemplate(str(tmp_path)).encode({"messages": TALK}), expected)


ROWS = [
    {"messages": [user("<image> and <image>"), assistant("yo")], "images": [TALL, png(WIDE)]},
    {"messages": [user("hi"), assistant("you")]},
    {"messages": [user([image(WIDE), text("b")]), assistant("so")]},
]


def test_data_sets_keep_images_and_pixels(template, tmp_path):
    expected = [template.encode(row) for row in ROWS]
    eager, lazy, stream = Dataset(ROWS), LazyDataset(ROWS), IterableDataset(ROWS)
    for dataset in (eager, lazy, stream):
        dataset.set_template(template)
        dataset.map(lambda row: {**row, "user_data": 1}).encode()
        for row, wanted in zip(dataset, expected, strict=True):
            same({k: v for k, v in row.items() if k != "user_data"}, wanted)
    for name in ("rows.jsonl", "rows.parquet", "folder"):
        saved = Dataset(eager.save_as(tmp_path / name))
        for row, wanted in zip(saved, expected, strict=True):
            same(row, wanted)


def test_images_of_a_typed_file(qwen, tmp_path):
    features = datasets.Features({"q": datasets.Value("string"), "pic": datasets.Image()})
    datasets.Dataset.from_dict({"q": ["a", "b"], "pic": [TALL, WIDE]}, features=features).save_to_disk(str(tmp_path / "d"))
    dataset = Dataset(str(tmp_path / "d"))
    dataset.map(lambda row: {"messages": [user(f"<image>{row['q']}"), assistant("yo")], "images": [row["pic"]]})
    dataset.set_template(qwen)
    for row, shown, word in zip(dataset.encode(), (TALL, WIDE), "ab", strict=True):
        same(row, qwen.encode({"messages": [user([image(shown), text(word)]), assistant("yo")]}))


def test_packs_hold_the_pixels_of_their_rows(template):
    packed = PackingDataset(ROWS, max_length=200)
    packed.set_template(template)
    (pack,) = list(packed.encode())
    rows = [template.encode(row) for row in ROWS]
    assert pack["seq_lens"] == [row["length"] for row in rows]
    assert np.array_equal(pack["pixel_values"], np.concatenate([row["pixel_values"] for row in rows if "pixel_values" in row]))
    assert pack["row_counts"]["pixel_values"] == [len(row.get("pixel_values", ())) for row in rows]


# ------------------------------------------------------------------------------------------------ files of videos


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """A file of 8 frames, 4 a second, and its frames as its decoder gives them."""
    import av

    path = tmp_path_factory.mktemp("film") / "film.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for k in range(8):
            shown = np.full((48, 64, 3), 30 * k, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    with av.open(str(path)) as file:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
    assert frames.shape == (8, 48, 64, 3)
    return path, frames


def test_a_file_is_the_video_of_its_frames(template, film):
    path, frames = film
    talk = {"messages": [user("<video>what?"), assistant("a film")]}
    expected = template.encode({**talk, "videos": [{"frames": frames, "fps": 4}]})
    same(template.encode({**talk, "videos": [{"frames": list(map(Image.fromarray, frames)), "fps": 4.0}]}), expected)
    for source in (path, str(path), path.read_bytes(), {"path": str(path), "bytes": None}):
        same(template.encode({**talk, "videos": [source]}), expected)
    same(
        template.encode({"messages": [user([{"type": "video", "video": str(path)}, text("what?")]), assistant("a film")]}),
        expected,
    )


def test_the_processor_chooses_a_files_frames(film):
    path, frames = film
    processor = processor_of("qwen3_vl")
    processor.video_processor.do_sample_frames = True
    processor.video_processor.sample_frames = lambda metadata, **_: np.arange(0, metadata.total_num_frames, 2)
    template = VisionTemplate(processor)
    row = template.encode({"messages": [user("<video>what?"), assistant("a film")], "videos": [path]})
    shown = template.decode(row["input_ids"])
    assert row["video_grid_thw"][0, 0] == 2  # frames 0, 2 and 4, 6 at 4 a second: 0.25 and 1.25
    assert [f"<{t} seconds>" in shown for t in ("0.2", "1.2")] == [True, True]
    given = {"frames": frames[::2], "fps": 2}
    again = template.encode({"messages": [user("<video>what?"), assistant("a film")], "videos": [given]})
    assert np.array_equal(row["pixel_values_videos"], again["pixel_values_videos"])
