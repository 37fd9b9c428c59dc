"""Weights in and out as Hugging Face and PEFT have them. All ranks take part; the first one writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore_bridge.utils import SafetensorLazyLoader
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from twinkle_core.errors import BadAdapter, CheckpointDamaged, CheckpointNotFound, CheckpointUnfit
from twinkle_megatron.families import stays
from twinkle_megatron.load import Built, set_weights

ADAPTER_FILE, ADAPTER_CONFIG, MODEL_FILE = "adapter_model.safetensors", "adapter_config.json", "model.safetensors"
#: bytes of one file
LARGEST = 5 * 2**30
#: what belongs beside a model's weights, by the beginning of its name
BESIDE = ("tokenizer", "special_tokens", "vocab", "merges", "added_tokens", "chat_template", "generation_config", "spiece")


def exported(built: Built, inner: str | None, *, first_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors under their plain names, of the model (``inner`` None) or of an adapter; no more than a layer is there at
    once. Collective: go to its end on all ranks.

    ``first_only``: on the first rank, in the CPU's memory; the others send what they hold, and have no tensor given.
    """
    where: dict[str, Any] = {"target_device": "cpu", "only_master_rank": True} if first_only else {}
    pairs = built.bridge.export_weights(
        list(built.wholes), peft_format=inner is not None, adapter_name=inner or "default", **where
    )
    padded = -(-built.vocabulary // built.config.tensor_model_parallel_size) * built.config.tensor_model_parallel_size
    pending: dict[str, torch.Tensor] = {}
    for key, tensor in pairs:
        if tensor is None:
            continue
        if key.endswith(("embed_tokens.weight", "lm_head.weight")) and tensor.shape[0] == padded:
            tensor = tensor[: built.vocabulary]
        if built.bare and inner is None:
            key = key.removeprefix("model.")
        if built.hf_config.model_type != "glm4":
            yield key, tensor
        elif ".gate_proj." in key:
            pending[key] = tensor
        elif ".up_proj." in key:  # this family has both in one, which mcore-bridge forgets when it writes
            gate = pending.pop(key.replace("up_proj", "gate_proj"))
            yield key.replace("up_proj", "gate_up_proj"), gate if ".lora_A." in key else torch.cat([gate, tensor])
        else:
            yield key, tensor


def _apart(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What ``exported`` has joined in an adapter, as mcore-bridge takes it apart for tensor ranks."""
    if ".gate_up_proj." not in key:
        return {key: tensor}
    halves = (tensor, tensor) if ".lora_A." in key else tensor.chunk(2)
    return {key.replace("gate_up_proj", part): half for part, half in zip(("gate_proj", "up_proj"), halves, strict=True)}


class _Held:
    """A tensor in memory, as mcore-bridge asks for one of a file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def load(self) -> torch.Tensor:
        return self.tensor


def loaded(built: Built, state: Mapping[str, torch.Tensor], inner: str | None) -> None:
    """Set the weights of this rank from whole tensors."""
    if inner is not None:
        state = {k: t for key, tensor in state.items() for k, t in _apart(key, tensor).items()}
    set_weights(built, {key: _Held(tensor) for key, tensor in state.items()}, inner)


# ---------------------------------------------------------------------------------------------------- files


def read_tensors(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    """All tensors of a folder: of one file, or of those that its index names."""
    index = folder / f"{stem}.index.json"
    names = [stem]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    state: dict[str, torch.Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointNotFound(str(folder / name), "there is no such file (pickled weights are not read)")
        try:
            with safe_open(folder / name, framework="pt") as file:
                state |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no mapping)
        except (SafetensorError, OSError) as error:
            raise CheckpointDamaged(str(folder / name), str(error)) from error
    return state


def _untouched(built: Built) -> Iterator[tuple[str, torch.Tensor]]:
    """What the model's folder holds beside what is trained."""
    if built.folder is None:
        return
    lazy = SafetensorLazyLoader(str(built.folder)).get_state_dict()
    for key in lazy:
        if stays(built.hf_config, key):
            yield key, lazy[key].load()


def read_model(built: Built, folder: Path) -> dict[str, torch.Tensor]:
    """What of a model's folder is trained."""
    return {k: t for k, t in read_tensors(folder, MODEL_FILE).items() if not stays(built.hf_config, k)}


def _names_in(folder: Path) -> set[str]:
    """The tensors of a model's folder, from headers alone."""
    index = folder / f"{MODEL_FILE}.index.json"
    if index.is_file():
        return set(json.loads(index.read_text("utf-8"))["weight_map"])
    if not (folder / MODEL_FILE).is_file():
        return set()
    with safe_open(folder / MODEL_FILE, framework="pt") as file:
        return set(file.keys())


def adapter_config(name: str, folder: Path) -> LoraConfig:
    """The config of a saved adapter."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        raise CheckpointNotFound(str(folder), f"no adapter is saved there ({ADAPTER_CONFIG} is missing)")
    try:
        return LoraConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise BadAdapter(name, f"{file} is no config that peft understands: {error}") from error


def write(built: Built, folder: Path, inner: str | None, config: LoraConfig | None) -> None:
    """Write a model or an adapter. Collective; files that would not be read back are refused.

    Raises:
        CheckpointUnfit: the names are not those of the folder that the model came from.
    """
    first = dist.get_rank() == 0
    writer = _Writer(folder, MODEL_FILE if inner is None else ADAPTER_FILE)
    failed: Exception | None = None
    for key, tensor in exported(built, inner, first_only=True):
        try:
            if failed is None:
                writer.add(key, tensor)
        except (OSError, SafetensorError) as error:
            failed = error  # the others wait for this rank's part of the tensors that are left
    if failed is not None:
        raise failed
    if not first:
        return
    for key, tensor in _untouched(built) if inner is None else ():
        writer.add(key, tensor)
    writer.finish()
    if inner is None:
        _check_names(built, writer.places.keys())
        built.hf_config.save_pretrained(str(folder))
        for path in sorted(built.folder.iterdir()) if built.folder is not None else ():
            if path.name.startswith(BESIDE) and path.is_file():
                shutil.copyfile(path, folder / path.name)
        return
    assert config is not None
    saved = LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        target_modules=sorted({key.split(".lora_")[0].rpartition(".")[2] for key in writer.places}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(built.folder) if built.folder is not None else None,
        inference_mode=True,
    )
    saved.save_pretrained(str(folder))


def _check_names(built: Built, names: Any) -> None:
    source = _names_in(built.folder) if built.folder is not None else set()
    odd = sorted(source ^ set(names)) if source else []
    odd = [key for key in odd if not key.endswith(("lm_head.weight", "rotary_emb.inv_freq"))]  # tied, or made anew
    if odd:
        family = built.hf_config.model_type
        why = f"written and read names differ ({odd[0]}, …): mcore-bridge does not write '{family}' as it reads it"
        raise CheckpointUnfit("the model", why)


class _Writer:
    """Tensors to files of limited size, one after the other; ties are written twice, as whole tensors."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder, self.stem = folder, stem
        self.held: dict[str, torch.Tensor] = {}
        self.size = self.total = 0
        self.parts: list[Path] = []
        self.places: dict[str, int] = {}

    def add(self, key: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.held and self.size + size > LARGEST:
            self._flush()
        self.held[key] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        self.places[key] = len(self.parts)
        self.size, self.total = self.size + size, self.total + size

    def _flush(self) -> None:
        path = self.folder / f"part-{len(self.parts)}.safetensors"
        save_file(self.held, path, metadata={"format": "pt"})
        self.parts.append(path)
        self.held, self.size = {}, 0

    def finish(self) -> None:
        self._flush()
        if len(self.parts) == 1:
            self.parts[0].rename(self.folder / self.stem)
            return
        base, count = self.stem.removesuffix(".safetensors"), len(self.parts)
        names = [f"{base}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for path, name in zip(self.parts, names, strict=True):
            path.rename(self.folder / name)
        index = {"metadata": {"total_size": self.total}, "weight_map": {k: names[i] for k, i in self.places.items()}}
        (self.folder / f"{self.stem}.index.json").write_text(json.dumps(index, indent=1))
