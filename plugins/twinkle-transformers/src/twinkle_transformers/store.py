"""What every store of adapters over a transformers model has: the base model itself, and files that PEFT reads."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig

from twinkle_core import hub, settings
from twinkle_core.contracts.adapters import BASE, AdapterStore
from twinkle_core.errors import BadAdapter, CheckpointDamaged, CheckpointMismatch, UnknownAdapter
from twinkle_core.log import get_logger
from twinkle_core.names import closest
from twinkle_core.ops.sharded import is_sharded, set_to
from twinkle_core.patches.heads import VALUE_HEAD
from twinkle_core.train.folder import STATE_FILE
from twinkle_transformers import checkpoint
from twinkle_transformers.layout import Layout
from twinkle_transformers.precision import Precision, widen
from twinkle_transformers.tree import plain_parameters, plain_state, untied_state


class ModelStore(AdapterStore):
    """The base model's part of a store, and the files of adapters. Which tensors are an adapter's is up to the subclass.

    Args:
        module: the model.
        precision: which types weights have; default: leave them as they are.
        tokenizer: gives the tokenizer, or what else has a ``save_pretrained``, whose files belong beside a whole model's
            weights, or None.
        layout: how the model lies over several ranks; None: in one process.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        precision: Precision | None = None,
        tokenizer: Callable[[], Any] = lambda: None,
        layout: Layout | None = None,
    ) -> None:
        self.module = module
        self.precision = precision or Precision("no")
        self.layout = layout
        self._tokenizer = tokenizer
        self._gathered: dict[str, torch.Tensor] | None = None  # what ``write`` writes, where it lay apart on ranks

    # ------------------------------------------------------------------------------------------------ of the subclass

    @abstractmethod
    def config(self, name: str) -> PeftConfig:
        """The peft config of a live adapter."""

    @abstractmethod
    def targets(self, name: str) -> list[str]:
        """Full names of the modules that carry a live adapter."""

    @abstractmethod
    def adapter_state(self, name: str) -> dict[str, torch.Tensor]:
        """A live adapter's tensors under PEFT's keys."""

    @abstractmethod
    def load_adapter(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors, which fit, into a live adapter."""

    @property
    @abstractmethod
    def rests(self) -> bool:
        """Whether the base model is frozen beneath adapters."""

    def rest_shards(self) -> None:
        """What a forward brought together on each rank lies apart again."""
        if self.layout is not None:
            self.layout.rest()

    def known(self, name: str) -> str:
        """The name, if it is an adapter's or the base model's.

        Raises:
            UnknownAdapter
        """
        if name == BASE or name in self.names():
            return name
        raise UnknownAdapter(name, closest(name, self.names()), self.names())

    def from_folder(self, name: str, path: str | Path) -> tuple[PeftConfig, dict[str, torch.Tensor]]:
        """Config and tensors of a saved adapter: a folder, ``ms://`` or ``hf://``."""
        folder = checkpoint.adapter_folder(path)
        self.tell_other_base(name, folder)
        return checkpoint.adapter_config(name, folder), checkpoint.read_adapter(folder)

    def kept_wide(self) -> set[torch.nn.Parameter]:
        """What the model's authors say must stay in fp32 (routers, gates of recurrent layers), and a value head."""
        lists = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        names = {VALUE_HEAD, *(name for each in lists for name in getattr(self.module, each, None) or ())}
        return {p for key, p in plain_parameters(self.module).items() if any(f".{n}." in f".{key}." for n in names)}

    # ------------------------------------------------------------------------------------------------ tensors

    def state_dict(self, name: str) -> dict[str, torch.Tensor]:
        self.rest_shards()
        return plain_state(self.module) if self.known(name) == BASE else self.adapter_state(name)

    def size(self) -> tuple[int, str]:
        return sum(p.numel() for p in plain_parameters(self.module).values()), "in the base model"

    def load_state_dict(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        live = self.state_dict(name)
        if name == BASE:
            state = checkpoint.with_ties(live, state)
        checkpoint.check_keys(live, state, f"adapter '{name}'" if name else "the model")
        if name == BASE:
            self._load_base(state)
        else:
            self.load_adapter(name, state)

    def _load_base(self, state: Mapping[str, torch.Tensor]) -> None:
        """A weight that the file holds in a wider type takes that type, as a model loaded from the file would have it; but not
        beneath adapters, where the base is in the compute type on purpose, or will be."""
        parameters = plain_parameters(self.module)
        for key, parameter in {} if self.rests else parameters.items():
            if key in state and parameter.is_floating_point() and state[key].element_size() > parameter.element_size():
                widen(parameter, state[key].dtype)
        live = self.state_dict(BASE)
        with torch.no_grad():
            for key, tensor in state.items():
                set_to(live[key], tensor)
        for key, parameter in parameters.items():
            if key in state:
                self.precision.note_stored(parameter, state[key])

    # ------------------------------------------------------------------------------------------------ files

    def check_compatible(self, name: str, folder: Path) -> None:
        """Raise CheckpointMismatch if what ``folder`` holds computes another function than the live adapter (scale, method)."""
        file = Path(folder) / checkpoint.ADAPTER_CONFIG
        if self.known(name) == BASE or not file.is_file():
            return
        try:
            saved = checkpoint.adapter_config(name, Path(folder))
        except BadAdapter as error:
            raise CheckpointDamaged(str(file), str(error.__cause__)) from error
        self.tell_other_base(name, Path(folder))
        found = checkpoint.config_differences(saved, self.config(name))
        dropout = {field: found.pop(field) for field in list(found) if "dropout" in field}
        if found:
            listed = "; ".join(f"{field} is {there!r} there and {here!r} here" for field, (there, here) in found.items())
            raise CheckpointMismatch(str(file), f"adapter '{name}' would compute something else with these tensors: {listed}")
        for field, (there, here) in dropout.items():
            get_logger("transformers").warning(
                "adapter '%s' trains on with %s=%r; the checkpoint '%s' was trained with %r", name, field, here, folder, there
            )

    def tell_other_base(self, name: str, folder: Path) -> None:
        """A plain folder tells of its base model by name alone; where core's state file is, core compares values."""
        there, here = hub.base_of_adapter(folder), getattr(getattr(self.module, "config", None), "_name_or_path", None)
        if there and here and not (folder / STATE_FILE).is_file() and not checkpoint.same_model(there, here):
            text = "adapter '%s' of '%s' was made for the base model '%s', and this one is '%s'"
            get_logger("transformers").warning(text, name, folder, there, here)

    def write(self, name: str, folder: Path) -> None:
        if self.known(name) == BASE:
            self._tell_rounded()
            checkpoint.write_model(self.module, self._gathered or self.state_dict(BASE), folder)
            self._write_tokenizer(folder)
        else:
            checkpoint.write_adapter(self.module, self._saved_config(name), self._gathered or self.state_dict(name), folder)

    def sharded_state(self, name: str) -> dict[str, torch.Tensor] | None:
        if self.known(name) != BASE:
            return None
        self.rest_shards()
        return untied_state(self.module)

    def write_beside(self, name: str, folder: Path) -> None:
        """The config, and the tokenizer's files."""
        self._tell_rounded()
        checkpoint.write_config(self.module, folder)
        self._write_tokenizer(folder)

    def _write_tokenizer(self, folder: Path) -> None:
        if (tokenizer := self._tokenizer()) is not None:
            tokenizer.save_pretrained(str(folder))

    def _tell_rounded(self) -> None:
        if rounded := sum(s.rounded for s in self.precision.narrowed.values()):
            text = "%d weight(s) of the base model are saved as adapters compute with them, rounded to %s"
            get_logger("transformers").warning(text, rounded, self.precision.mixed)

    @contextmanager
    def gathered(self, name: str) -> Iterator[None]:
        state = self.state_dict(name)
        if any(is_sharded(tensor) for tensor in state.values()):
            self._gathered = checkpoint.gather(state, settings.rank() == 0)
        try:
            yield
        finally:
            self._gathered = None

    def read(self, name: str, folder: Path) -> dict[str, torch.Tensor]:
        if self.known(name) == BASE:
            return checkpoint.read_model(self.module, folder)
        return checkpoint.read_adapter(folder)

    def _saved_config(self, name: str) -> PeftConfig:
        """The config with what was resolved: targets as a list, the base model's path."""
        config = copy.deepcopy(self.config(name))
        if hasattr(config, "target_modules"):
            targets = config.target_modules
            config.target_modules = self.targets(name) if targets is None or isinstance(targets, str) else sorted(targets)
        if not config.base_model_name_or_path:
            config.base_model_name_or_path = getattr(getattr(self.module, "config", None), "_name_or_path", None) or None
        config.inference_mode = True  # as PEFT saves: who loads it to train says so
        return config

    def describe(self, name: str) -> dict[str, Any]:
        if self.known(name) == BASE:
            return {}
        config = self.config(name)
        facts: dict[str, Any] = {"method": str(getattr(config.peft_type, "value", config.peft_type))}
        for field, label in (("r", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout"), ("modules_to_save", "saves")):
            if getattr(config, field, None):
                facts[label] = getattr(config, field)
        ends = {t.removesuffix(".base_layer").rpartition(".")[2] for t in self.targets(name)}
        facts["targets"] = ", ".join(sorted(ends))
        if config.inference_mode:
            facts["frozen"] = True
        return facts
