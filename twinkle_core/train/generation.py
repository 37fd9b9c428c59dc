"""The verb that completes prompts (L2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinkle_core import arguments
from twinkle_core.contracts.engine import GENERATE
from twinkle_core.contracts.model import Inputs
from twinkle_core.errors import EmptyBatch, NoTemplate, Unsupported
from twinkle_core.train import micro
from twinkle_core.train.prepare import completed, count_rows, dummy_row
from twinkle_core.train.sessions import Sessions, one_at_a_time
from twinkle_core.train.together import in_pass, until_met


class GenerateVerb(Sessions):
    """generate."""

    @one_at_a_time
    def generate(
        self,
        inputs: Inputs,
        *,
        adapter_name: str | None = None,
        disable_lora: bool = False,
        return_rows: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Completions, in the order of the inputs.

        Args:
            inputs: conversations (encoded up to the assistant's turn) or encoded prompts.
            disable_lora: the base model without any adapter.
            return_rows: give prompt and completion as rows to train on, in place of texts.
            kwargs: the backend's (``max_new_tokens``, ``temperature``, …).

        Returns:
            One text for each row. With ``return_rows`` an encoded row for each: ``input_ids`` of prompt and completion, its end
            token included where it wrote one; aligned ``labels`` on the completion alone; ``length``. The text of such a row is
            ``template.decode(row["labels"], skip_special_tokens=True)``.

        Raises:
            Unsupported: the backend does not generate. NoTemplate: there is none to encode or decode with.
        """
        with until_met(self.engine, self.engine.in_step):
            session = self._session(adapter_name)
            if GENERATE not in self.engine.capabilities:
                raise Unsupported("generate", type(self.engine).__name__, "a sampler")
            template = self._or_base(session, "template")
            if template is None and not return_rows:
                raise NoTemplate.of_completions(session.name)
            if return_rows:
                kwargs = {"keep_end": True, **kwargs}
            arguments.check(self.engine.generate, kwargs, f"{type(self.engine).__name__}.generate", positional=1)
            prompts = self._encode(session, inputs, add_generation_prompt=True)
            if isinstance(prompts, Mapping):
                prompts = [micro.cut_batch(prompts, range(i, i + 1)) for i in range(count_rows(prompts))]
            count = len(prompts)
            if not count and self.engine.mesh.data_world_size == 1:
                raise EmptyBatch
        with self.adapters.activate(self._active(session, disable_lora)), in_pass(self.engine):
            made = self.engine.generate(prompts or [dummy_row()], **kwargs)[:count]  # a rank without rows takes part
        if return_rows:
            return [completed(prompt, ids) for prompt, ids in zip(prompts, made, strict=True)]
        return list(template.batch_decode(made))
