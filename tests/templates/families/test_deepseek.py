"""DeepSeek V3 and R1: raw system message, thoughts begun by R1's prompt, answers after results without a header."""

from __future__ import annotations

import pytest

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
A, B = ('{"a": 1}', '{"b": 2}')
CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n%s\n```<｜tool▁call▁end｜>"


def user(text):
    return {"role": "user", "content": text}


def assistant(text, thought=None, *arguments):
    made = [{"type": "function", "function": {"name": "weather", "arguments": a}} for a in arguments]
    told = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": text, **told, **({"tool_calls": made} if made else {})}


def tool(text):
    return {"role": "tool", "content": text}


TALK = [user("hi 你"), assistant("yo"), user("ok"), assistant(" go 👋🏽\n")]


@pytest.fixture(scope="module")
def v3(build, deepseek):
    return build(deepseek, "deepseek_v3")


@pytest.fixture(scope="module")
def r1(build, deepseek):
    return build(deepseek, "deepseek_r1")


def test_v3(v3, marked, prompt):
    expected = f"<｜User｜>hi 你<｜Assistant｜>⟦yo{EOS}⟧<｜User｜>ok<｜Assistant｜>⟦ go 👋🏽\n{EOS}⟧"
    assert marked(v3, TALK) == BOS + expected
    assert marked(v3, [{"role": "system", "content": "be kind"}, *TALK]) == BOS + "be kind" + expected
    assert prompt(v3, TALK[:1]) == f"{BOS}<｜User｜>hi 你<｜Assistant｜>"
    assert v3.encode({"messages": TALK})["input_ids"][0] == 0


def test_v3_only_the_last_answer(build, deepseek, marked):
    shown = marked(build(deepseek, "deepseek_v3", train_on="last"), TALK)
    assert shown == f"{BOS}<｜User｜>hi 你<｜Assistant｜>yo{EOS}<｜User｜>ok<｜Assistant｜>⟦ go 👋🏽\n{EOS}⟧"


INLINE = [user("hi"), assistant("<think>\nr1\n</think>\n\nyo"), user("ok"), assistant("<think>\nr2\n</think>\n\ngo")]


@pytest.mark.parametrize("talk", [INLINE, [user("hi"), assistant("yo", "r1"), user("ok"), assistant("go", "r2")]])
def test_r1_trains_the_live_thought_though_its_template_cuts_all(r1, marked, prompt, talk):
    """What the prompt begins is not trained; in history the template leaves the line breaks."""
    assert marked(r1, talk) == (
        f"{BOS}<｜User｜>hi<｜Assistant｜>⟦\n\nyo{EOS}⟧<｜User｜>ok<｜Assistant｜><think>\n⟦r2\n</think>\n\ngo{EOS}⟧"
    )
    assert prompt(r1, talk[:1]) == f"{BOS}<｜User｜>hi<｜Assistant｜><think>\n"


def test_r1_a_live_answer_begins_as_its_prompt_does(r1, marked):
    """With another layout of the thought the row would not be what the model sees."""
    shown = marked(r1, [user("hi"), assistant("<think>r</think>yo")])
    assert shown == f"{BOS}<｜User｜>hi<｜Assistant｜><think>\n⟦r\n</think>\n\nyo{EOS}⟧"


def test_r1_without_thoughts(r1, build, deepseek, marked):
    plain = f"{BOS}<｜User｜>hi 你<｜Assistant｜>⟦yo{EOS}⟧"
    assert marked(r1, TALK[:2]) == plain
    quiet = build(deepseek, "deepseek_r1", enable_thinking=False)
    assert marked(quiet, [TALK[0], assistant("yo", "r1")]) == plain


def test_calls_and_results(v3, marked):
    talk = [
        user("w?"),
        assistant("", None, {"city": "Bern"}, '{"city": "Genève"}'),
        tool("sun"),
        tool("rain"),
        assistant("Done."),
    ]
    expected = (
        f"{BOS}<｜User｜>w?<｜Assistant｜>⟦<｜tool▁calls▁begin｜>"
        + CALL % '{"city": "Bern"}' + "\n" + CALL % '{"city": "Genève"}' + f"<｜tool▁calls▁end｜>{EOS}⟧"
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>sun<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>rain<｜tool▁output▁end｜>"
        f"<｜tool▁outputs▁end｜>⟦Done.{EOS}⟧"
    )  # fmt: skip
    assert marked(v3, talk) == expected


def test_r1_a_single_call_without_an_end_is_refused(r1, marked):
    """R1's own template forgets the end token after one call; the model would learn not to stop. Two are right."""
    talk = [user("w?"), assistant("", None, {}), tool("sun"), assistant("Done.")]
    with pytest.raises(
        ValueError, match=r"message 1 \(assistant\): the chat template writes no end token '<｜end▁of▁sentence｜>'"
    ):
        r1.encode({"messages": talk})
    talk[1] = assistant("", None, {"a": 1}, {"b": 2})
    assert f"⟦<｜tool▁calls▁begin｜>{CALL % A}\n{CALL % B}<｜tool▁calls▁end｜>{EOS}⟧" in marked(r1, talk)


def test_completions_are_read_back(r1, v3):
    frame = "<｜tool▁calls▁begin｜>" + CALL % '{"city": "Bern"}'
    for template in (r1, v3):
        assert template.tool_format == "deepseek_v3"
        for text in (frame, f"{frame}<｜tool▁calls▁end｜>{EOS}"):
            assert template.parse(text) == assistant("", None, {"city": "Bern"})
    assert r1.parse(f"r\n</think>\n\ngo{EOS}") == assistant("go", "r")
    assert r1.parse("never done") == assistant("", "never done")
    assert v3.parse("done") == assistant("done")
