"""Adapters of one transformers model: any layer-based peft method, several on one base, under names of the user's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND

from twinkle_core.contracts.adapters import BASE
from twinkle_core.errors import BadAdapter, DuplicateAdapter, UnknownAdapter
from twinkle_core.names import closest
from twinkle_core.ops.sharded import like
from twinkle_core.train.together import on_all
from twinkle_transformers import checkpoint
from twinkle_transformers.layout import Layout
from twinkle_transformers.precision import Precision
from twinkle_transformers.rehearse import Tree, check_not_rounded, rehearse
from twinkle_transformers.rules import check_config, check_name, tell_left_out
from twinkle_transformers.store import ModelStore
from twinkle_transformers.tree import peft_layers, plain_parameters, skeleton, stand_ins, unwrap


class PeftAdapters(ModelStore):
    """The adapters of one model.

    peft's layers are put into the model in place; the model itself stays the object that is called. Inside peft an adapter is
    called ``twinkle0``, ``twinkle1``, ...: peft finds an adapter's tensors by searching its name in parameter names, so a
    user's ``a``, ``lora`` or ``model`` would find others'. The user's name is never part of a key.

    An adapter's parameters are trainable, or frozen (a config with ``inference_mode=True``), from its creation on, whether it
    is active or not. The base model is frozen while there are adapters, except inside ``activate('')``.

    Args:
        module: the model. Its present ``requires_grad`` flags are what ``activate('')`` trains.
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
        super().__init__(module, precision, tokenizer, layout)
        self._peft: Any = None  # while there are adapters
        self._inner: dict[str, str] = {}
        self._count = 0
        self._layers: list[Any] = []
        #: told of all of peft's layers whenever adapters came or went
        self.followers: list[Callable[[list[Any]], None]] = []
        self._base_flags: dict[torch.nn.Parameter, bool] = {}
        self._flags: dict[str, dict[torch.nn.Parameter, bool]] = {}

    # ------------------------------------------------------------------------------------------------ names

    def names(self) -> list[str]:
        return list(self._inner)

    def config(self, name: str) -> PeftConfig:
        return self._peft.peft_config[self._inner[self.known(name)]]

    @property
    def rests(self) -> bool:
        return bool(self._inner)

    # ------------------------------------------------------------------------------------------------ acquire, release

    def acquire(self, name: str, config: Any) -> str:
        inner = f"twinkle{self._count}"
        config, state, read = on_all(lambda: self._planned(name, inner, config))
        everything = str(getattr(config, "target_modules", None)).lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND
        self._count += 1
        if not self._inner:
            self._base_flags = {p: p.requires_grad for p in self.module.parameters()}
        try:
            with self.precision.as_stored(self._base_flags, read):
                self._inject(name, inner, config)
            if state is not None:
                self.load_state_dict(name, state)
        except BaseException:  # what no rehearsal shows, such as a device that is full
            self._withdraw(name, inner)
            raise
        if everything:
            tell_left_out(name, self.module)
        return name

    def _planned(
        self, name: str, inner: str, config: Any
    ) -> tuple[PeftConfig, dict[str, torch.Tensor] | None, set[torch.nn.Parameter]]:
        """The config, checked; its tensors, where it is read from a folder; and which of the model's it begins from."""
        check_name(name)
        if name in self._inner:
            raise DuplicateAdapter(name)
        state: dict[str, torch.Tensor] | None = None
        if isinstance(config, (str, Path)):
            config, state = self.from_folder(name, config)
        config = check_config(name, config, self.module, [self.config(n) for n in self.names()])
        tree = self.module if self._peft is None else self._peft
        trial = rehearse(name, lambda weightless: skeleton(tree, weightless), inner, config, type(self.module).__name__)
        base = plain_parameters(self.module)
        read = {key: base[key] for key in trial.reads}
        if state is not None:
            checkpoint.check_keys(trial.tensors, state, f"adapter '{name}'")
        else:
            check_not_rounded(name, read, self.precision)
        return config, state, set(read.values())

    def _inject(self, name: str, inner: str, config: PeftConfig) -> None:
        known = set(self.module.modules())
        inference_mode, config.inference_mode = config.inference_mode, False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # peft asks the older name
            for patterns in ("rank_pattern", "alpha_pattern"):
                if not getattr(config, patterns, None):  # for fused experts peft adds some itself, and misses them itself
                    warnings.filterwarnings("ignore", f"The following {patterns} keys did not match", RuntimeWarning)
            with stand_ins(self.module):
                if self._peft is None:
                    self._peft = Tree(self.module, config, inner)
                else:
                    self._peft.add_adapter(inner, config)
        self._inner[name] = inner
        self._look()
        for module in self.module.modules():  # peft's new modules start in training mode, wherever the model is
            if module not in known:
                module.training = self.module.training
        self._switch({layer: [inner] for layer in self._layers}, dict.fromkeys(self._layers, True))
        base = set(self._base_flags)
        others = {p for flags in self._flags.values() for p in flags}
        if self.layout is not None:
            try:
                self.layout.adapt(self.module, inner, [p for p in self._peft.parameters() if p not in base and p not in others])
            except TypeError as error:
                raise BadAdapter(name, str(error)) from error
        own = {p: p.requires_grad for p in self._peft.parameters() if p not in base and p not in others}
        self._flags[name] = {p: flag and not inference_mode for p, flag in own.items()}
        config.inference_mode = inference_mode
        self.precision.master(own)
        self.precision.freeze(base - self.kept_wide())
        self._rest()

    def _rest(self) -> None:
        """The flags outside of any activation."""
        for parameter in self._base_flags:
            parameter.requires_grad_(False)
        for flags in self._flags.values():
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)

    def _look(self) -> None:
        """Take note of the layers that are there now."""
        self._layers = peft_layers(self.module)
        for tell in self.followers:
            tell(self._layers)

    def release(self, name: str) -> None:
        if name not in self._inner:
            raise UnknownAdapter(name, closest(name, self.names()), self.names())
        self._withdraw(name, self._inner[name])

    def _withdraw(self, name: str, inner: str) -> None:
        """Take an adapter out, however much of it is there. Without the last one the tree is what it was before the first."""
        self._inner.pop(name, None)
        self._flags.pop(name, None)
        rest = next(iter(self._inner.values()), None)
        if rest is None:
            unwrap(self.module)
            self._peft = None
            self._look()
            for parameter, flag in self._base_flags.items():
                parameter.requires_grad_(flag)
            self._base_flags = {}
            self.precision.thaw()
            return
        self._look()
        self._switch({layer: [rest] for layer in self._layers}, dict.fromkeys(self._layers, True))
        # after a failure peft has forgotten the config, but its layers may hold a part of the adapter
        self._peft.peft_config.setdefault(inner, next(iter(self._peft.peft_config.values())))
        self._peft.delete_adapter(inner)
        self._rest()

    # ------------------------------------------------------------------------------------------------ activate

    @staticmethod
    def _switch(active: Mapping[Any, list[str]], enabled: Mapping[Any, bool]) -> bool:
        """Make these adapters active and enabled, layer by layer, where they are not. Returns whether anything changed."""
        changed = False
        for layer, names in active.items():
            if not isinstance(layer, BaseTunerLayer):  # a whole module to save can't be asked for an adapter without one
                names = [n for n in names if n in layer._adapters]
            if list(layer.active_adapters) != names:
                layer.set_adapter(names)
                changed = True
            if layer.disable_adapters == enabled[layer]:
                layer.enable_adapters(enabled[layer])
                changed = True
        return changed

    @contextmanager
    def activate(self, name: str) -> Iterator[None]:
        self.known(name)
        if not self._inner:
            yield
            return
        flags = [(p, p.requires_grad) for group in [self._base_flags, *self._flags.values()] for p in group]
        active = {layer: list(layer.active_adapters) for layer in self._layers}
        enabled = {layer: not layer.disable_adapters for layer in self._layers}
        try:
            if name == BASE:
                self._switch(active, dict.fromkeys(self._layers, False))
            else:
                self._switch({layer: [self._inner[name]] for layer in self._layers}, dict.fromkeys(self._layers, True))
            # peft ties trainability to being active; here it belongs to the adapter, and the base rests while an adapter works
            for parameter, flag in flags:
                if parameter in self._base_flags:
                    flag = name == BASE and self._base_flags[parameter]
                if parameter.requires_grad != flag:
                    parameter.requires_grad_(flag)
            yield
        finally:
            self._switch(active, enabled)
            for parameter, flag in flags:
                if parameter.requires_grad != flag:
                    parameter.requires_grad_(flag)

    # ------------------------------------------------------------------------------------------------ tensors

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        self.rest_shards()
        if self.known(name) == BASE:
            flags = self._base_flags
            return {k: p for k, p in plain_parameters(self.module).items() if flags.get(p, p.requires_grad)}
        wanted, inner = self._flags[name], self._inner[name]
        # keys as PEFT writes them, where a tensor has one; a copy of a whole module is written under the module's own name
        return {
            key.replace(f".modules_to_save.{inner}", "").replace(f".{inner}", ""): p
            for key, p in self._peft.named_parameters()
            if wanted.get(p, False)
        }

    def adapter_state(self, name: str) -> dict[str, torch.Tensor]:
        # without its embedding layers: asked to decide by itself, peft looks for the base model's config on the hub
        return get_peft_model_state_dict(self._peft, adapter_name=self._inner[name], save_embedding_layers=False)  # type: ignore[no-any-return]

    def load_adapter(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        live = self.adapter_state(name)
        cut = {key: like(tensor, live[key]) for key, tensor in state.items()}
        set_peft_model_state_dict(self._peft, cut, adapter_name=self._inner[name])

    def targets(self, name: str) -> list[str]:
        inner = self._inner[name]
        return [
            key
            for key, m in self.module.named_modules()
            if isinstance(m, BaseTunerLayer) and inner in m._get_available_adapters()
        ]
