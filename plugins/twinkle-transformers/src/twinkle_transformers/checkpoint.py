"""Weight files: an adapter as PEFT writes it, a model as transformers writes it; strict keys; ties are kept as they are."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.dynamic_module_utils import custom_object_save

from twinkle_core.errors import BadAdapter, CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, WeightsMismatch
from twinkle_core.ops.sharded import is_sharded, local, whole
from twinkle_transformers.tree import plain_state, weight_of

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


def check_keys(live: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], what: str) -> None:
    """Same keys, same shapes, and numbers of one kind, or WeightsMismatch that names them."""
    missing = [k for k in live if k not in state]
    unknown = [k for k in state if k not in live]
    misshapen = [(k, state[k].shape, live[k].shape) for k in live if k in state and state[k].shape != live[k].shape]
    mistyped = [
        (k, str(state[k].dtype), str(live[k].dtype))
        for k in live
        if k in state and state[k].is_floating_point() != live[k].is_floating_point()  # copying would cut values off
    ]
    if missing or unknown or misshapen or mistyped:
        raise WeightsMismatch(what, missing=missing, unknown=unknown, misshapen=misshapen, mistyped=mistyped)


def _storage(tensor: torch.Tensor) -> tuple[Any, ...]:
    tensor = local(tensor)
    return (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())


def with_ties(live: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the names that a file leaves out because they are tied: in ``live`` they share storage with a name that is there.

    Raises:
        WeightsMismatch: the file holds two different tensors for what is one tensor here.
    """
    complete = dict(state)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for key, tensor in live.items():
        if local(tensor).numel():
            groups.setdefault(_storage(tensor), []).append(key)
    for names in groups.values():
        stored = [n for n in names if n in state]
        if len(names) == 1 or not stored:
            continue
        first = state[stored[0]]
        parted = [n for n in stored[1:] if not torch.equal(first, state[n])]
        if parted:
            raise WeightsMismatch("the model", parted=[stored[0], *parted])
        complete.update(dict.fromkeys((n for n in names if n not in state), first))
    return complete


def gather(state: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Tensors whole, on the CPU where they lie apart on ranks; ties stay ties. All ranks call it; those that do
    not ``keep`` get nothing."""
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        if not is_sharded(tensor):
            found[key] = tensor
            continue
        place = _storage(tensor)
        value = made[place] if place in made and local(tensor).numel() else whole(tensor)
        found[key] = made[place] = value.cpu() if keep else value[:0]
    return found if keep else {}


def _load(file: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
        return tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointDamaged(str(file), str(error)) from error


# ---------------------------------------------------------------------------------------------------- adapters


def adapter_folder(path: str | Path) -> Path:
    """The folder of a saved adapter: a local one, or ``ms://`` and ``hf://``."""
    from twinkle_core import hub
    from twinkle_core.train.checkpoint import read_state

    folder = Path(hub.resolve(str(path)))
    read_state(folder)  # a checkpoint of ours knows the hashes of its files
    if not (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointNotFound(str(folder), f"no adapter is saved there ({ADAPTER_CONFIG} is missing)")
    return folder


def same_model(first: str, second: str) -> bool:
    """Whether two names of models may be of one: equal, one folder, or a hub's id and its folder in a cache."""
    paths = [Path(name) for name in (first, second)]
    if first == second or (all(p.is_dir() for p in paths) and paths[0].samefile(paths[1])):
        return True
    ids = ["/".join(p.parts[-2:]) for p in paths]
    cached = ["models--" + name.replace("/", "--") for name in ids]
    return (
        (ids[0] == ids[1] and len(paths[0].parts) != len(paths[1].parts))
        or cached[0] in paths[1].parts
        or cached[1] in paths[0].parts
    )


def adapter_config(name: str, folder: Path) -> PeftConfig:
    """The config in a folder, ready to train (PEFT saves every config as if it were for inference)."""
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise BadAdapter(name, f"{folder / ADAPTER_CONFIG} is no config that peft understands: {error}") from error
    config.inference_mode = False
    return config


#: Fields of peft's configs that say where tensors are, where they come from, or how they begin, not what they compute.
_NO_FUNCTION = frozenset(
    {"auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern"}
    | {"layers_to_transform", "megatron_config", "megatron_core", "modules_to_save", "peft_version", "progressbar", "revision"}
    | {"runtime_config", "save_projection", "target_modules", "task_type", "ensure_weight_tying"}
    | {"corda_config", "eva_config", "loftq_config", "lora_ga_config"}
)


def _plain(value: Any) -> Any:
    """A field's value in one form, however it was written down; all that is empty is one."""
    value = getattr(value, "value", value)
    return (sorted(value) if isinstance(value, (set, tuple)) else value) or None


def config_differences(saved: PeftConfig, live: PeftConfig) -> dict[str, tuple[Any, Any]]:
    """Fields, with both values, by which two configs compute differently from the same tensors (or differ in dropout)."""
    there, here = dict(vars(saved)), dict(vars(live))
    if _plain(saved.peft_type) != _plain(live.peft_type):
        return {"peft_type": (_plain(saved.peft_type), _plain(live.peft_type))}
    fields = [f for f in here if f in there and f not in _NO_FUNCTION and not f.startswith("init_")]
    return {f: (there[f], here[f]) for f in fields if _plain(there[f]) != _plain(here[f])}


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved adapter. Only safetensors are read; pickle files are not."""
    file = Path(folder) / ADAPTER_FILE
    if not file.is_file():
        raise CheckpointNotFound(str(folder), f"it holds no {ADAPTER_FILE} (pickled weights are not read)")
    return _load(file)


def write_adapter(module: Any, config: PeftConfig, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """``adapter_model.safetensors`` and ``adapter_config.json``."""
    seen: set[tuple[Any, ...]] = set()
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        # safetensors refuses two names for one storage; PEFT expects both names of a tied pair
        tensors[key] = tensor.clone() if _storage(tensor) in seen else tensor
        seen.add(_storage(tensor))
    save_file(tensors, Path(folder) / ADAPTER_FILE, metadata={"format": "pt"})
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(module).__name__, "parent_library": type(module).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)


# ---------------------------------------------------------------------------------------------------- whole models


def write_model(module: Any, state: dict[str, torch.Tensor], folder: Path) -> None:
    """What ``save_pretrained`` writes, from the plain view of the model (adapters left out).

    A tied weight is stored once. Where the config promises a tie that the tensors no longer have, both are stored and the
    stored config says so; else every loader but the newest would rebuild one from the other.
    """
    module.save_pretrained(str(folder), state_dict=state)
    _note_ties(module, folder)


def write_config(module: Any, folder: Path) -> None:
    """What ``save_pretrained`` writes beside a model's weights."""
    module.config.dtype = str(module.dtype).removeprefix("torch.")
    module.config.architectures = [type(module).__name__.removeprefix("FSDP")]
    if module.is_remote_code():
        custom_object_save(module, str(folder), config=module.config)
    module.config.save_pretrained(str(folder))
    if module.can_generate():
        module.generation_config.save_pretrained(str(folder))
    _note_ties(module, folder)


def _note_ties(module: Any, folder: Path) -> None:
    """The stored config says so where it promises a tie that is none."""
    first, last = module.get_input_embeddings(), module.get_output_embeddings()
    if first is None or last is None:
        return
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text("utf-8"))
    parted = _storage(weight_of(first)) != _storage(weight_of(last))
    if parted and config.get("tie_word_embeddings", True) is not False:
        config["tie_word_embeddings"] = False
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def model_files(folder: Path) -> list[Path]:
    """The safetensors files of a saved model, by its index where it is cut into several."""
    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
        if (Path(folder) / ADAPTER_CONFIG).is_file() and not (Path(folder) / names[0]).exists():
            way = "load it into an adapter: load(..., adapter_name=...), or add_adapter_to_model(name, folder)"
            raise CheckpointMismatch(str(folder), f"it holds an adapter, and the base model was to be loaded; {way}")
    files = [Path(folder) / name for name in names]
    for file in files:
        if not file.is_file() or os.path.getsize(file) == 0:
            raise CheckpointDamaged(str(file), "it is missing or empty")
    return files


def read_model(module: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved model under the names that ``module`` has in memory."""
    state: dict[str, torch.Tensor] = {}
    for file in model_files(folder):
        state.update(_load(file))
    if set(state) <= set(plain_state(module)):
        return state
    return _translated(module, folder, state)


def _translated(module: Any, folder: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers stores some architectures (fused experts) in another layout than it computes in; only it can translate."""
    if importlib.util.find_spec("transformers.conversion_mapping") is None:  # before version 5 the two layouts are one
        return state
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not get_model_conversion_mapping(module, add_legacy=False):
        return state
    loaded, report = type(module).from_pretrained(str(folder), config=module.config, dtype="auto", output_loading_info=True)
    if report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]:
        return state  # another model's: the caller's check says which keys
    return loaded.state_dict()  # type: ignore[no-any-return]
