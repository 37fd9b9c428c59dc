"""The special tokens of DeepSeek's chat format, and texts that all releases share.

The vertical line is U+FF5C, the low line U+2581.
"""

from __future__ import annotations

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
THINK_END = "</think>"
#: one token; the angle bracket before it and the tag's name after it are ordinary text
DSML = "｜DSML｜"

#: what a message's ``task`` writes
TASKS = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}

#: what neither a thought nor an answer may hold: a reader could not tell it from the format's own
RESERVED = (BOS, EOS, THINK, THINK_END, DSML)

RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
