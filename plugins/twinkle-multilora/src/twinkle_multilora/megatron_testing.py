"""Five tenants who have nothing in common, trained in turns and each alone, under one layout after the other."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig

from twinkle_core.data.sampler import share
from twinkle_core.errors import NonFiniteGradients
from twinkle_core.mesh import DeviceMesh
from twinkle_multilora.megatron import MultiLoraMegatronModel

if TYPE_CHECKING:
    from twinkle_core.types import InputFeature


@dataclass(frozen=True)
class Tenant:
    """How one trains: an adapter, an optimizer and its learning rate, backwards of a window, rows of a batch."""

    adapter: dict[str, Any]
    optimizer: str
    lr: float
    backwards: int
    rows: int
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> LoraConfig:
        return LoraConfig(**self.adapter)


TENANTS = {
    "ada": Tenant({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}, "adam", 1e-2, 2, 4, {"weight_decay": 0.1}),
    "bob": Tenant({"r": 2, "use_rslora": True, "target_modules": ["o_proj", "down_proj"]}, "sgd", 0.3, 1, 2),
    "cyd": Tenant(
        {"r": 8, "lora_alpha": 4, "lora_dropout": 0.2, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        *("adam", 2e-2, 1, 3),
    ),
    "dan": Tenant({"r": 1}, "adam", 3e-3, 3, 2),
    "eve": Tenant(
        {"r": 6, "lora_dropout": 0.1, "target_modules": ["gate_proj", "up_proj", "down_proj"]}, *("adam", 1e-2, 1, 5)
    ),
}
STEPS = 6


def rows_of(name: str, step: int) -> list[InputFeature]:
    """A tenant's batch, of rows of unequal length in which the first tokens are not trained. It comes again after three."""
    random = torch.Generator().manual_seed(ord(name[0]) * 100 + step % 3)
    rows: list[Any] = []
    for length in torch.randint(2, 12, (TENANTS[name].rows,), generator=random).tolist():
        ids = torch.randint(1, 250, (length + 1,), generator=random).tolist()
        labels = [-100 if i < length // 3 else token for i, token in enumerate(ids[1:])]
        rows.append({"input_ids": ids[:-1], "labels": labels, "length": length})
    return rows


def built(folder: str | None, sizes: dict[str, Any] | None = None, **options: Any) -> MultiLoraMegatronModel:
    """A model in fp32; the one before must be out of use if it had another layout."""
    gc.collect()
    mesh = DeviceMesh.from_sizes(device_type="cpu", **(sizes or {}))
    given = {"mixed_precision": "no", "max_loras": 5, "max_r": 8, "max_length": 64, **options}
    return MultiLoraMegatronModel(folder, device_mesh=mesh, **given)


def prepared(model: Any, name: str) -> None:
    """Optimizer, schedule and metric of a tenant."""
    tenant = TENANTS[name]
    model.set_optimizer("default", adapter_name=name, lr=tenant.lr, optimizer=tenant.optimizer, **tenant.more)
    model.set_lr_scheduler("default", adapter_name=name, lr_warmup_steps=2, lr_decay_steps=20)
    model.add_metric("loss", adapter_name=name)


def join(model: Any, name: str, config: Any = None) -> None:
    """A tenant comes; where nothing is said, with the same numbers each time."""
    torch.manual_seed(ord(name[0]))
    config = TENANTS[name].config if config is None else config
    model.add_adapter_to_model(name, config, gradient_accumulation_steps=TENANTS[name].backwards)
    prepared(model, name)


def turn(model: Any, name: str, step: int) -> list[float]:
    """One call of ``forward_backward``, and an update where a window closes: this rank's loss, and the gradient norm."""
    mesh = model.engine.mesh
    mine = share(rows_of(name, step), mesh.data_rank, mesh.data_world_size)
    loss = float(model.forward_backward(mine, adapter_name=name, micro_batch_size=2))
    return [loss, float(model.clip_grad_and_step(0.5, adapter_name=name) or 0.0)]


def state(model: Any, name: str) -> tuple[list[torch.Tensor], str]:
    """All numbers of a tenant on this rank: weights, gradients, the optimizer's, the schedule, the window, the metric."""
    session = model.sessions[name]
    tensors = list(model.get_state_dict(adapter_name=name).values())
    tensors += [gradient for p in session.named.values() if (gradient := model.engine.gradient(p)) is not None]
    for part in session.optimizer.inner.chained_optimizers:
        states = part.optimizer.state.values() if part.optimizer is not None else ()  # a rank may hold nothing of its kind
        tensors += [v for held in states for v in held.values() if isinstance(v, torch.Tensor)]
    rates = [group["lr"] for group in session.optimizer.param_groups]
    facts = (rates, session.window.count, session.cur_step, session.scheduler.num_steps)
    metrics = [metric.state() for metric in session.metrics[True]]
    return [t.detach().clone() for t in tensors], f"{facts} {metrics}"


def same(found: tuple[list[torch.Tensor], str], expected: tuple[list[torch.Tensor], str]) -> bool:
    """Whether all numbers are the same, to the bit."""
    tensors = len(found[0]) == len(expected[0]) and all(map(torch.equal, found[0], expected[0]))
    return tensors and found[1] == expected[1]


def order(step: int) -> list[str]:
    """Whose turn it is: another order each time."""
    names = list(TENANTS)
    return [*names[step % 5 :], *names[: step % 5]]


class InTurns:
    """Methods for ``twinkle_core.testing.ranks.run``."""

    def apart(self, rank: int, world_size: int, folder: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Under each layout: five in turns, of whom the last comes when the others have trained; then each alone."""
        found = []
        for sizes in layouts:
            model = built(folder, sizes)
            base = {key: tensor.clone() for key, tensor in model.get_state_dict(adapter_name="").items()}
            numbers: dict[str, list[list[float]]] = {name: [] for name in TENANTS}
            for name in list(TENANTS)[:4]:
                join(model, name)
            late = {name: 2 if name == "eve" else 0 for name in TENANTS}
            for step in range(STEPS):
                if step == late["eve"]:
                    join(model, "eve")
                for name in order(step):
                    if step >= late[name]:
                        numbers[name].append(turn(model, name, step - late[name]))
            states = {name: state(model, name) for name in TENANTS}
            moved = {
                name: max(float(v.abs().max()) for k, v in model.get_state_dict(adapter_name=name).items() if "lora_B" in k)
                for name in TENANTS
            }
            left = model.get_state_dict(adapter_name="")
            untouched = all(torch.equal(tensor, left[key]) for key, tensor in base.items())
            del model
            alone, differ = {}, []
            for name in TENANTS:
                model = built(folder, sizes)
                join(model, name)
                alone[name] = [turn(model, name, step) for step in range(STEPS - late[name])]
                if not same(states[name], state(model, name)):
                    differ.append(name)
                del model
            facts = {"differ": differ, "moved": moved, "base untouched": untouched}
            found.append({"in turns": numbers, "alone": alone, **facts})
        return found

    def resume(
        self, rank: int, world_size: int, folder: str, home: str, layouts: list[dict[str, Any]], names: list[str]
    ) -> list[dict[str, list[list[float]]]]:
        """Under each layout, tenants go on from their checkpoints, in other slots; where there are none, they train
        first, to where no window is open, and save."""
        found = []
        for sizes in layouts:
            model = built(folder, sizes)
            there = Path(home, names[0]).is_dir()
            for name in reversed(names) if there else names:
                join(model, name)
            if there:
                for name in names:
                    turn(model, name, 5)  # so that what was there before is replaced
                for name in names:
                    model.resume_from_checkpoint(Path(home) / name, adapter_name=name)
            else:
                for step in range(STEPS):
                    for name in names:
                        turn(model, name, step)
                for name in names:
                    model.save(name, home, adapter_name=name, save_optimizer=True)
            numbers: dict[str, list[list[float]]] = {name: [] for name in names}
            for step in range(STEPS, 2 * STEPS):
                for name in names:
                    numbers[name].append(turn(model, name, step))
            found.append(numbers)
            del model
        return found

    def saved(self, rank: int, world_size: int, folder: str, home: str, sizes: dict[str, Any]) -> dict[str, Any]:
        """Train all, save each, and give the logits of each on all ranks."""
        model = built(folder, sizes)
        for name in TENANTS:
            join(model, name)
        for step in range(STEPS):
            for name in order(step):
                turn(model, name, step)
        found: dict[str, Any] = {}
        for name in TENANTS:
            model.save(name, home, adapter_name=name)
            found[name] = model.forward_only(rows_of(name, 0), adapter_name=name).logits
        return found

    def failures(self, rank: int, world_size: int, folder: str, sizes: dict[str, Any]) -> list[str]:
        """Of what befalls one tenant, what another one feels: the faults after which its numbers are other ones."""

        def nan(inputs: Any, outputs: Any) -> Any:
            return outputs.logits.sum() * float("nan")

        def raises(inputs: Any, outputs: Any) -> Any:
            raise ZeroDivisionError

        felt = []
        model, plain = built(folder, sizes), built(folder, sizes)
        for name in ("ada", "bob", "eve"):
            join(model, name)
        for name in ("ada", "eve"):
            join(plain, name)
        for step, fault in enumerate((nan, raises, nan, raises)):
            numbers = [turn(one, "ada", step) for one in (model, plain)]
            model.set_loss(fault, adapter_name="bob")
            try:
                turn(model, "bob", 0)
            except (NonFiniteGradients, ZeroDivisionError):
                numbers += [turn(one, "eve", step) for one in (model, plain)]
            else:
                felt.append(f"{fault.__name__} was not told")
            if numbers[0::2] != numbers[1::2] or any(not same(state(model, n), state(plain, n)) for n in ("ada", "eve")):
                felt.append(fault.__name__)
        names = ["ada", "eve"] if rank else ["eve", "ada"]  # ranks may name them in any order
        mesh = model.engine.mesh
        rows = {name: share(rows_of(name, 9), mesh.data_rank, mesh.data_world_size) for name in names}
        for name in ("eve", "ada"):
            plain.forward_backward(rows[name], adapter_name=name)
        model.forward_backward_many(rows)
        if any(not same(state(model, name), state(plain, name)) for name in ("ada", "eve")):
            felt.append("another order on each rank")
        return felt
