"""Adapters of one transformers model: any layer-based peft method, several on one base, under names of the user's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND

from twinkle_core import hub, settings
from twinkle_core.contracts.adapters import BASE, AdapterStore
from twinkle_core.errors import BadAdapter, CheckpointDamaged, CheckpointMismatch, DuplicateAdapter, UnknownAdapter
from twinkle_core.log import get_logger
from twinkle_core.names import closest
from twinkle_core.ops.sharded import is_sharded, like, set_to
from twinkle_core.patches.heads import VALUE_HEAD
from twinkle_core.train.folder import STATE_FILE
from twinkle_transformers import checkpoint
from twinkle_transformers.parallel import Layout
from twinkle_transformers.precision import Precision, widen
from twinkle_transformers.rules import check_config, check_name, tell_left_out
from twinkle_transformers.tree import Reads, peft_layers, plain_parameters, plain_state, skeleton, stand_ins, unwrap

#: What peft raises for a config that it can't inject.
_REFUSALS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, AssertionError, ImportError, NotImplementedError)


class _Tree(PeftModel):  # type: ignore[misc]
    """peft's view of a model. It is never called; it knows the tuner, the configs and the keys."""

    def prepare_model_for_gradient_checkpointing(self, model: Any) -> Any:
        """Nothing: only the re-entrant kind, which isn't used here, needs embeddings that require gradients."""
        return model


class PeftAdapters(AdapterStore):
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
        self.module = module
        self._tokenizer, self._layout = tokenizer, layout
        self._gathered: dict[str, torch.Tensor] | None = None  # what ``write`` writes, where it lay apart on ranks
        self.precision = precision or Precision("no")
        self._peft: Any = None  # while there are adapters
        self._inner: dict[str, str] = {}
        self._count = 0
        self._layers: list[Any] = []
        self._base_flags: dict[torch.nn.Parameter, bool] = {}
        self._flags: dict[str, dict[torch.nn.Parameter, bool]] = {}

    # ------------------------------------------------------------------------------------------------ names

    def names(self) -> list[str]:
        return list(self._inner)

    def _known(self, name: str) -> str:
        if name == BASE or name in self._inner:
            return name
        raise UnknownAdapter(name, closest(name, self.names()), self.names())

    def config(self, name: str) -> PeftConfig:
        """The peft config of a live adapter."""
        return self._peft.peft_config[self._inner[self._known(name)]]

    # ------------------------------------------------------------------------------------------------ acquire, release

    def acquire(self, name: str, config: Any) -> str:
        check_name(name)
        if name in self._inner:
            raise DuplicateAdapter(name)
        state: dict[str, torch.Tensor] | None = None
        if isinstance(config, (str, Path)):
            folder = checkpoint.adapter_folder(config)
            self._tell_other_base(name, folder)
            config, state = checkpoint.adapter_config(name, folder), checkpoint.read_adapter(folder)
        config = check_config(name, config, self.module, [self.config(n) for n in self.names()])
        inner = f"twinkle{self._count}"
        everything = str(getattr(config, "target_modules", None)).lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND
        expected, read = self._rehearse(name, inner, config)
        if state is not None:
            checkpoint.check_keys(expected, state, f"adapter '{name}'")
        else:
            self._check_not_rounded(name, read)
        self._count += 1
        if not self._inner:
            self._base_flags = {p: p.requires_grad for p in self.module.parameters()}
        try:
            with self.precision.as_stored(self._base_flags, set(read.values())):
                self._inject(name, inner, config)
            if state is not None:
                self.load_state_dict(name, state)
        except BaseException:  # what no rehearsal shows, such as a device that is full
            self._withdraw(name, inner)
            raise
        if everything:
            tell_left_out(name, self.module)
        return name

    def _rehearse(
        self, name: str, inner: str, config: PeftConfig
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.nn.Parameter]]:
        """Inject into a copy without weights. Returns the adapter's tensors (shapes only), and the base model's parameters
        whose values the adapter begins from."""
        # numbers that a rehearsal draws must not be missing afterwards: the same seed gives the same adapter as in plain peft
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            try:
                try:
                    return self._trial(inner, config, weightless=True)
                except NotImplementedError:  # a method whose layers look at the base weights' values (SHiRA's mask)
                    return self._trial(inner, config, weightless=False)
            except _REFUSALS as error:
                raise BadAdapter(name, f"peft can't add it to {type(self.module).__name__}: {error}") from error

    def _trial(
        self, inner: str, config: PeftConfig, *, weightless: bool
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.nn.Parameter]]:
        config = copy.deepcopy(config)
        trial: Any = skeleton(self.module if self._peft is None else self._peft, weightless)
        module = trial if self._peft is None else trial.get_base_model()
        with Reads(plain_parameters(module)) as reads:
            if self._peft is None:
                trial = _Tree(trial, config, inner, low_cpu_mem_usage=weightless)
            else:
                trial.add_adapter(inner, config, low_cpu_mem_usage=weightless)
        base = plain_parameters(self.module)
        tensors = get_peft_model_state_dict(trial, adapter_name=inner, save_embedding_layers=False)
        return tensors, {key: base[key] for key in sorted(reads.found)}

    def _check_not_rounded(self, name: str, read: Mapping[str, torch.nn.Parameter]) -> None:
        """Raise BadAdapter if the adapter would begin from values that are not those of the checkpoint any more."""
        narrowed = self.precision.narrowed
        if apart := [key for key, p in read.items() if is_sharded(p)]:
            raise BadAdapter(
                name, f"it begins from values of {apart[0]}, which lie apart on several ranks; take an adapter that does not"
            )
        lost = [key for key, p in read.items() if p in narrowed and narrowed[p].rounded]
        if lost:
            shown, mixed = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else ""), self.precision.mixed
            why = f"it begins from values of {shown}, which are not as stored but rounded to {mixed}, for another adapter"
            way = "add such adapters (modules_to_save, DoRA, trainable tokens) before the first forward"
            raise BadAdapter(name, f"{why}; {way}, or load the model with mixed_precision='no'")

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
                    self._peft = _Tree(self.module, config, inner)
                else:
                    self._peft.add_adapter(inner, config)
        self._inner[name] = inner
        self._layers = peft_layers(self.module)
        for module in self.module.modules():  # peft's new modules start in training mode, wherever the model is
            if module not in known:
                module.training = self.module.training
        self._switch({layer: [inner] for layer in self._layers}, dict.fromkeys(self._layers, True))
        base = set(self._base_flags)
        others = {p for flags in self._flags.values() for p in flags}
        if self._layout is not None:
            self._layout.adapt(self.module, inner, [p for p in self._peft.parameters() if p not in base and p not in others])
        own = {p: p.requires_grad for p in self._peft.parameters() if p not in base and p not in others}
        self._flags[name] = {p: flag and not inference_mode for p, flag in own.items()}
        config.inference_mode = inference_mode
        self.precision.master(own)
        self.precision.freeze(base - self._kept_wide())
        self._rest()

    def _kept_wide(self) -> set[torch.nn.Parameter]:
        """What the model's authors say must stay in fp32 (routers, gates of recurrent layers), and a value head."""
        lists = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        names = {VALUE_HEAD, *(name for each in lists for name in getattr(self.module, each, None) or ())}
        return {p for key, p in plain_parameters(self.module).items() if any(f".{n}." in f".{key}." for n in names)}

    def _rest(self) -> None:
        """The flags outside of any activation."""
        for parameter in self._base_flags:
            parameter.requires_grad_(False)
        for flags in self._flags.values():
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)

    def release(self, name: str) -> None:
        if name not in self._inner:
            raise UnknownAdapter(name, closest(name, self.names()), self.names())
        self._withdraw(name, self._inner[name])

    def _withdraw(self, name: str, inner: str) -> None:
        """Take an adapter out, however much of it is there. Without the last one the tree is what it was before the first."""
        self._inner.pop(name, None)
        self._flags.pop(name, None)
        self._layers = peft_layers(self.module)
        rest = next(iter(self._inner.values()), None)
        if rest is None:
            unwrap(self.module)
            self._peft, self._layers = None, []
            for parameter, flag in self._base_flags.items():
                parameter.requires_grad_(flag)
            self._base_flags = {}
            self.precision.thaw()
            return
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
        self._known(name)
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
        self._rest_shards()
        if self._known(name) == BASE:
            flags = self._base_flags
            return {k: p for k, p in plain_parameters(self.module).items() if flags.get(p, p.requires_grad)}
        wanted, inner = self._flags[name], self._inner[name]
        # keys as PEFT writes them, where a tensor has one; a copy of a whole module is written under the module's own name
        return {
            key.replace(f".modules_to_save.{inner}", "").replace(f".{inner}", ""): p
            for key, p in self._peft.named_parameters()
            if wanted.get(p, False)
        }

    def _rest_shards(self) -> None:
        if self._layout is not None:
            self._layout.rest()

    def state_dict(self, name: str) -> dict[str, torch.Tensor]:
        self._rest_shards()
        if self._known(name) == BASE:
            return plain_state(self.module)
        # without its embedding layers: asked to decide by itself, peft looks for the base model's config on the hub
        return get_peft_model_state_dict(self._peft, adapter_name=self._inner[name], save_embedding_layers=False)  # type: ignore[no-any-return]

    def load_state_dict(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        live = self.state_dict(name)
        if name == BASE:
            state = checkpoint.with_ties(live, state)
        checkpoint.check_keys(live, state, f"adapter '{name}'" if name else "the model")
        if name == BASE:
            self._load_base(state)
            return
        cut = {key: like(tensor, live[key]) for key, tensor in state.items()}
        set_peft_model_state_dict(self._peft, cut, adapter_name=self._inner[name])

    def _load_base(self, state: Mapping[str, torch.Tensor]) -> None:
        """A weight that the file holds in a wider type takes that type, as a model loaded from the file would have it; but not
        beneath adapters, where the base is in the compute type on purpose, or will be."""
        parameters = plain_parameters(self.module)
        for key, parameter in {} if self._inner else parameters.items():
            if key in state and parameter.is_floating_point() and state[key].element_size() > parameter.element_size():
                widen(parameter, state[key].dtype)
        live = self.state_dict(BASE)
        with torch.no_grad():
            for key, tensor in state.items():
                set_to(live[key], tensor)
        for key, parameter in parameters.items():
            if key in state:
                self.precision.note_stored(parameter, state[key])

    def check_compatible(self, name: str, folder: Path) -> None:
        """Raise CheckpointMismatch if what ``folder`` holds computes another function than the live adapter (scale, method)."""
        file = Path(folder) / checkpoint.ADAPTER_CONFIG
        if self._known(name) == BASE or not file.is_file():
            return
        try:
            saved = checkpoint.adapter_config(name, Path(folder))
        except BadAdapter as error:
            raise CheckpointDamaged(str(file), str(error.__cause__)) from error
        self._tell_other_base(name, Path(folder))
        found = checkpoint.config_differences(saved, self.config(name))
        dropout = {field: found.pop(field) for field in list(found) if "dropout" in field}
        if found:
            listed = "; ".join(f"{field} is {there!r} there and {here!r} here" for field, (there, here) in found.items())
            raise CheckpointMismatch(str(file), f"adapter '{name}' would compute something else with these tensors: {listed}")
        for field, (there, here) in dropout.items():
            get_logger("transformers").warning(
                "adapter '%s' trains on with %s=%r; the checkpoint '%s' was trained with %r", name, field, here, folder, there
            )

    def _tell_other_base(self, name: str, folder: Path) -> None:
        """A plain folder tells of its base model by name alone; where core's state file is, core compares values."""
        there, here = hub.base_of_adapter(folder), getattr(getattr(self.module, "config", None), "_name_or_path", None)
        if there and here and not (folder / STATE_FILE).is_file() and not checkpoint.same_model(there, here):
            text = "adapter '%s' of '%s' was made for the base model '%s', and this one is '%s'"
            get_logger("transformers").warning(text, name, folder, there, here)

    def write(self, name: str, folder: Path) -> None:
        if self._known(name) == BASE:
            rounded = sum(s.rounded for s in self.precision.narrowed.values())
            if rounded:
                text = "%d weight(s) of the base model are saved as adapters compute with them, rounded to %s"
                get_logger("transformers").warning(text, rounded, self.precision.mixed)
            checkpoint.write_model(self.module, self._gathered or self.state_dict(BASE), folder)
            if (tokenizer := self._tokenizer()) is not None:
                tokenizer.save_pretrained(str(folder))
        else:
            checkpoint.write_adapter(self.module, self._saved_config(name), self._gathered or self.state_dict(name), folder)

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
        if self._known(name) == BASE:
            return checkpoint.read_model(self.module, folder)
        return checkpoint.read_adapter(folder)

    def _targets(self, name: str) -> list[str]:
        """Full names of the modules that carry the adapter."""
        inner = self._inner[name]
        return [
            key
            for key, m in self.module.named_modules()
            if isinstance(m, BaseTunerLayer) and inner in m._get_available_adapters()
        ]

    def _saved_config(self, name: str) -> PeftConfig:
        """The config with what was resolved: targets as a list, the base model's path."""
        config = copy.deepcopy(self.config(name))
        if hasattr(config, "target_modules"):
            targets = config.target_modules
            config.target_modules = self._targets(name) if targets is None or isinstance(targets, str) else sorted(targets)
        if not config.base_model_name_or_path:
            config.base_model_name_or_path = getattr(getattr(self.module, "config", None), "_name_or_path", None) or None
        config.inference_mode = True  # as PEFT saves: who loads it to train says so
        return config

    def describe(self, name: str) -> dict[str, Any]:
        if self._known(name) == BASE:
            return {}
        config = self.config(name)
        facts: dict[str, Any] = {"method": str(getattr(config.peft_type, "value", config.peft_type))}
        for field, label in (("r", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout"), ("modules_to_save", "saves")):
            if getattr(config, field, None):
                facts[label] = getattr(config, field)
        ends = {t.removesuffix(".base_layer").rpartition(".")[2] for t in self._targets(name)}
        facts["targets"] = ", ".join(sorted(ends))
        if config.inference_mode:
            facts["frozen"] = True
        return facts
