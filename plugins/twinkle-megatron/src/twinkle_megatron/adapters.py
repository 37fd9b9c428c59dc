"""Whose weights: the model's own, and LoRA adapters on Megatron's layers, under the names that Hugging Face and PEFT have."""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mcore_bridge.tuners  # noqa: F401  (peft learns of Megatron's layers)
import torch
from megatron.core import parallel_state
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

from twinkle_core import hub
from twinkle_core.contracts.adapters import BASE, AdapterStore
from twinkle_core.errors import CheckpointMismatch, CheckpointNotFound, DuplicateAdapter, UnknownAdapter
from twinkle_core.names import closest
from twinkle_core.train.single import check_state
from twinkle_core.train.together import on_all
from twinkle_megatron import files, foreign
from twinkle_megatron.cpu.runtime import RUNTIME, computes
from twinkle_megatron.load import Built, mark_experts
from twinkle_megatron.parallel import Layout, common_seed
from twinkle_megatron.targets import check_shared, checked, layers_of, parts_of


class MegatronAdapters(AdapterStore):
    """The weights of this rank, and adapters by name.

    ``state_dict``, ``load_state_dict`` and ``write`` are collective: all ranks call them. ``state_dict`` gives whole tensors.

    Args:
        built: the chunks. ``layout``: of the ranks. ``changed``: told the parameters whose values were set from outside.
        gone: told the parameters of an adapter that was released.
    """

    def __init__(
        self,
        built: Built,
        layout: Layout,
        changed: Callable[[Mapping[str, Any]], None],
        gone: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.built, self.layout, self._changed, self._gone = built, layout, changed, gone
        self.family = str(built.hf_config.model_type)
        self.layers = layers_of(self.family)
        self._trees: list[Any] = []
        self._inner: dict[str, str] = {}
        self._configs: dict[str, LoraConfig] = {}
        self._outlines: dict[str, dict[str, torch.Tensor]] = {}
        self._base = [p for chunk in built.chunks for p in chunk.parameters()]
        self._made = 0

    def names(self) -> list[str]:
        return list(self._inner)

    def _known(self, name: str) -> str:
        if name != BASE and name not in self._inner:
            raise UnknownAdapter(name, closest(name, self.names()), self.names())
        return name

    # ------------------------------------------------------------------------------------------------ come and go

    @computes
    def acquire(self, name: str, config: Any) -> str:
        self.check_new(name)
        outputs = {}
        if isinstance(config, (str, Path)):  # collective, so before one of the ranks can fail
            outputs = {key.removesuffix(".weight"): len(tensor) for key, tensor in self.outline(BASE).items() if tensor.dim()}
        ready, state = on_all(lambda: self._planned_of(name, config, outputs))
        inner, seed = self.next_place(), common_seed()
        try:
            self.inject(inner, ready)
            self._inner[name], self._configs[name] = inner, ready
            self.start(name, seed)
            if state is not None:
                self.load_state_dict(name, state)
        except BaseException:
            self.eject(inner)
            self._inner.pop(name, None)
            self._configs.pop(name, None)
            raise
        return name

    def _planned_of(
        self, name: str, config: Any, outputs: Mapping[str, int]
    ) -> tuple[LoraConfig, dict[str, torch.Tensor] | None]:
        """The adapter's config, and its tensors where it is read from a folder."""
        state = None
        if isinstance(config, (str, Path)):
            folder = Path(hub.resolve(str(config)))
            config, state = files.adapter_config(name, folder), files.read_tensors(folder, files.ADAPTER_FILE)
            config, state = foreign.joined(name, config, state, self.layers, outputs)
        ready = checked(name, config, self.family, self.layout)
        self.check_room(name, ready)
        return ready, state

    def check_new(self, name: str) -> None:
        """Whether an adapter of this name may come.

        Raises:
            DuplicateAdapter
        """
        if name in self._inner:
            raise DuplicateAdapter(name)

    def check_room(self, name: str, config: LoraConfig) -> None:
        """Whether there is room for an adapter of this config. Default: as long as there is memory."""

    def next_place(self) -> str:
        """What the next adapter is called in the trees."""
        self._made += 1
        return f"a{self._made - 1}"

    @computes
    def inject(self, inner: str, config: LoraConfig) -> None:
        """Put an adapter into the trees; its numbers are of no account yet, and torch's random state is not moved."""
        flags = [p.requires_grad for p in self._base]
        with torch.random.fork_rng():  # peft starts with numbers of its own
            if not self._trees:
                self._trees = [PeftModel(chunk, config, adapter_name=inner) for chunk in self.built.chunks]
            else:
                for tree in self._trees:
                    tree.add_adapter(inner, config)
        mark_experts(self.built.chunks)
        for layer in self._layers():
            if inner in layer.lora_A:  # a first adapter's settings don't all reach mcore-bridge through newer versions of peft
                layer.scaling[inner] = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
                layer.lora_dropout[inner] = torch.nn.Dropout(config.lora_dropout)
            layer.train(self.built.chunks[0].training)
        for p, flag in zip(self._base, flags, strict=True):
            p.requires_grad_(flag)

    def eject(self, inner: str) -> None:
        """Take an adapter out of the trees, also one that is there in part; without any, they are as they were."""
        beside = self._beside()
        held = {key for _, _, layer in beside for key in layer.lora_A} - {inner}
        for parent, key, layer in beside:
            if held:
                layer._active_adapter = [min(held)]
                layer.delete_adapter(inner)
                continue
            layer.base_layer.return_layernorm_output = False  # the adapter asked it for its norm's output too
            setattr(parent, key, layer.base_layer)
        for tree in self._trees if held else ():
            if inner in tree.peft_config:
                tree.delete_adapter(inner)
        self._trees = self._trees if held else []

    def release(self, name: str) -> None:
        if self._known(name) == BASE:
            raise UnknownAdapter(name, None, self.names())
        gone = self.parameters(name)
        self.eject(self._inner.pop(name))
        del self._configs[name]
        self._outlines.pop(name, None)
        self._gone(gone)

    def _beside(self) -> list[tuple[Any, str, Any]]:
        """The layers with adapters: where each hangs, under which name, and itself."""
        parents = [m for chunk in self.built.chunks for m in chunk.modules() if not isinstance(m, BaseTunerLayer)]
        children = ((parent, key, child) for parent in parents for key, child in parent.named_children())
        return [found for found in children if isinstance(found[2], BaseTunerLayer)]

    def _layers(self) -> list[Any]:
        return [layer for _, _, layer in self._beside()]

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[str | None]:
        """Inside, layers without this adapter are the model's own: mcore-bridge takes each layer of LoRA's for one that has
        it. Gives what the adapter is called in the trees."""
        inner = self._inner.get(name)
        others = [found for found in self._beside() if inner not in found[2].lora_A]
        try:
            for parent, key, layer in others:
                setattr(parent, key, layer.base_layer)
            yield inner
        finally:
            for parent, key, layer in others:
                setattr(parent, key, layer)

    @torch.no_grad()
    def start(self, name: str, seed: int) -> None:
        """A random, B zero, whatever the layout: each whole tensor by the seed and its name, of which a rank takes its part."""
        for key, parameter in self.parameters(name).items():
            if ".lora_B." in key:
                parameter.zero_()
                continue
            shape, dim = list(parameter.shape), getattr(parameter, "partition_dim", -1)
            split = self.layout.tp > 1 and ".experts." not in key and bool(getattr(parameter, "tensor_model_parallel", False))
            if split:
                shape[dim] *= self.layout.tp
            random = torch.Generator().manual_seed(seed ^ zlib.crc32(key.encode()))
            whole = (torch.rand(shape, generator=random) * 2 - 1) / math.sqrt(shape[-1])
            if split:
                whole = whole.chunk(self.layout.tp, dim)[parallel_state.get_tensor_model_parallel_rank()]
            parameter.copy_(whole)

    # ------------------------------------------------------------------------------------------------ activate

    @contextlib.contextmanager
    def activate(self, name: str) -> Iterator[None]:
        self._known(name)
        if not self._inner:
            yield
            return
        layers = [(layer, layer._active_adapter, layer._disable_adapters) for layer in self._layers()]
        flags = [(p, p.requires_grad) for chunk in self.built.chunks for p in chunk.parameters()]
        own = {id(p) for p in self.parameters(name).values()}
        try:
            for layer, _, _ in layers:
                layer._disable_adapters = name == BASE
                if name != BASE:
                    layer._active_adapter = [self._inner[name]]
            for p, _ in flags:
                p.requires_grad_(id(p) in own)
            yield
        finally:
            for layer, active, disabled in layers:
                layer._active_adapter, layer._disable_adapters = active, disabled
            for p, flag in flags:
                p.requires_grad_(flag)

    # ------------------------------------------------------------------------------------------------ tensors

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """This rank's, under Megatron's names with the layers and experts of the whole model."""
        self._known(name)
        mark = f".{self._inner[name]}" if name != BASE else ""
        found: dict[str, torch.nn.Parameter] = {}
        for key, parameter in plain_parameters(self.built.chunks):
            if name == BASE and ".lora_" not in key:
                if parameter.requires_grad or self._inner:
                    found[key.replace(".base_layer", "")] = parameter
            elif name != BASE and (f".lora_A{mark}." in key or f".lora_B{mark}." in key):
                found[key.replace(mark, "", 1)] = parameter
        return found

    @computes
    def state_dict(self, name: str) -> dict[str, torch.Tensor]:
        with self._alone(self._known(name)) as inner:
            return dict(files.exported(self.built, inner))

    @computes
    def outline(self, name: str) -> Mapping[str, torch.Tensor]:
        self._known(name)
        if name not in self._outlines:
            with self._alone(name) as inner:
                self._outlines[name] = {key: tensor.to("meta") for key, tensor in files.exported(self.built, inner)}
        return self._outlines[name]

    def stream(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        self._known(name)
        with RUNTIME.active(), self._alone(name) as inner:
            yield from files.exported(self.built, inner)

    @computes
    def load_state_dict(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        live = self.outline(name)
        check_state(live, state, f"adapter '{name}'" if name else "weights")
        if name != BASE:
            check_shared(name, state, self.layers)
        with self._alone(name) as inner:
            files.loaded(self.built, state, inner)
        self._changed(self.parameters(name))

    @computes
    def write(self, name: str, folder: Path) -> None:
        with self._alone(self._known(name)) as inner:
            files.write(self.built, folder, inner, self._configs.get(name))

    def read(self, name: str, folder: Path) -> dict[str, torch.Tensor]:
        if self._known(name) != BASE:
            return files.read_tensors(folder, files.ADAPTER_FILE)
        if not (folder / "config.json").is_file():
            raise CheckpointNotFound(str(folder), "there is no model in it (config.json is missing)")
        return files.read_model(self.built, folder)

    def check_compatible(self, name: str, folder: Path) -> None:
        file = folder / files.ADAPTER_CONFIG
        if self._known(name) == BASE or not file.is_file():
            return
        saved, here = json.loads(file.read_text("utf-8")), self._configs[name]
        fields = ("r", "lora_alpha", "use_rslora")
        other = [
            f"{f} is {saved.get(f)!r} there and {getattr(here, f)!r} here" for f in fields if saved.get(f) != getattr(here, f)
        ]
        if other:
            raise CheckpointMismatch(str(file), f"adapter '{name}' would compute something else: {'; '.join(other)}")

    def describe(self, name: str) -> dict[str, Any]:
        if self._known(name) == BASE:
            return {}
        config = self._configs[name]
        targets = sorted(parts_of(config, self.layers))
        return {"method": "LORA", "rank": config.r, "alpha": config.lora_alpha, "targets": ", ".join(targets)}

    def size(self) -> tuple[int, str]:
        alone = self.layout.world == 1
        return sum(p.numel() for p in self._base), "in the base model" if alone else "in this rank's part of the base model"


def plain_parameters(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    """Parameters with the numbers of layers and experts that they have in the whole model."""
    first_expert: dict[str, int] = {}
    for chunk in chunks:
        layers = {i: layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)}
        for path, module in chunk.named_modules():
            if hasattr(module, "num_gemms"):
                first_expert[path] = parallel_state.get_expert_model_parallel_rank() * module.num_gemms
        for key, parameter in chunk.named_parameters():
            path, _, last = key.rpartition(".")
            kind = last.rstrip("0123456789")
            if path in first_expert and kind != last:
                last = f"{kind}{int(last[len(kind) :]) + first_expert[path]}"
            head, mark, tail = path.partition("decoder.layers.")
            if mark:
                number, _, rest = tail.partition(".")
                path = f"{head}{mark}{layers[int(number)]}.{rest}"
            yield f"{path}.{last}", parameter
        first_expert.clear()
