"""What ``twinkle check`` and the tests hold these templates to."""

from __future__ import annotations

from twinkle_core.testing import TemplateSuite
from twinkle_dsml.template import DeepseekV4Template, DeepseekV32Template, DSMLTemplate
from twinkle_dsml.testing import tiny_tokenizer

_TOKENIZER = tiny_tokenizer()


class DSMLSuite(TemplateSuite):
    """Thinking mode: what follows the prompt is a thought until ``</think>``, so a bare answer is not parsed as one."""

    component = DSMLTemplate
    arguments = {"model_id": _TOKENIZER, "reasoning_effort": "low"}
    parses = False


class DeepseekV4Suite(TemplateSuite):
    """Chat mode."""

    component = DeepseekV4Template
    arguments = {"model_id": _TOKENIZER, "enable_thinking": False}


class DeepseekV32Suite(TemplateSuite):
    """Chat mode of the release before."""

    component = DeepseekV32Template
    arguments = {"model_id": _TOKENIZER, "enable_thinking": False}
