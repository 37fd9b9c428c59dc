"""What each of several processes does: tenants that train over one mesh or another, and what it shows."""

from __future__ import annotations

import threading

import torch
from peft import LoraConfig

from twinkle_core.data.sampler import share
from twinkle_core.errors import RanksApart, TwinkleError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.toys import random_rows
from twinkle_core.types import LossOutput
from twinkle_multilora.model import MultiLoraTransformersModel
from twinkle_multilora.ranks import Turn
from twinkle_transformers.testing import tiny_config

STEPS = 10
#: ranks, targets and windows of tenants
TENANTS = {
    "a": (LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False), 1),
    "b": (LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False), 2),
    "c": (LoraConfig(r=8, target_modules=["v_proj", "up_proj"], init_lora_weights=False, use_rslora=True), 1),
}
RATES = {"sgd": 0.1, "adamw": 1e-3}


def batch(name, step):
    """A global batch of a tenant: 4 rows of unequal lengths, every other time without a label in the second half; at step 3 one
    row, so that a rank has none."""
    shift = sum(map(ord, name))
    rows = random_rows([3 + (5 * step + 7 * i + shift) % 11 for i in range(4)], vocabulary=250)
    rows = [{**row, "input_ids": [(t + step + shift) % 250 for t in row["input_ids"]]} for row in rows]
    for row in rows[1::2] if step % 2 else ():
        row["labels"] = [-100] * len(row["labels"])
    return rows[:1] if step == 3 else rows


def model(sizes, tenants="ab", optimizer="adamw", dropout=0.0, **options):
    torch.manual_seed(5)
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    options = {"mixed_precision": "no", "max_loras": 3, "max_r": 8, **options}
    built = MultiLoraTransformersModel(config=tiny_config(), device_mesh=mesh, **options)
    for name in tenants:
        join(built, name, optimizer, dropout)
    return built


def join(built, name, optimizer="adamw", dropout=0.0):
    config, window = TENANTS[name]
    torch.manual_seed(ord(name) + 1000 * built.engine.mesh.rank)  # only rank 0's count
    built.multi_lora.acquire_lora(name, LoraConfig(**{**config.to_dict(), "lora_dropout": dropout}))
    built.set_optimizer(optimizer, lr=RATES[optimizer], adapter_name=name)
    built.add_metric("loss", is_training=True, adapter_name=name)
    built.sessions[name].window.resize(window)


def mine(built, rows):
    mesh = built.engine.mesh
    return list(share(rows, mesh.data_rank, mesh.data_world_size))


def weights(built, name):
    return {k: v.detach().clone() for k, v in built.get_state_dict(adapter_name=name).items()}


def update(built, name, found):
    norm = built.clip_grad_and_step(0.5, adapter_name=name)
    if norm is not None:
        found.setdefault(name, []).append([built.calculate_metric(adapter_name=name)["loss"], norm])


def train(built, tenants, steps, together):
    """(loss over all ranks, gradient norm) of each window, by tenant."""
    found = {}
    for step in steps:
        rows = {name: mine(built, batch(name, step)) for name in tenants}
        if together:
            built.forward_backward_many(rows)
        for name in tenants:
            if not together:
                built.forward_backward(rows[name], adapter_name=name)
            update(built, name, found)
    return found


def all_of(built, name):
    """All numbers of a tenant that must not differ."""
    session = built.sessions[name]
    tensors = dict(weights(built, name))
    for key, parameter in session.named.items():
        held = session.optimizer.state[parameter]
        tensors |= {f"{key}.{k}": v.clone() for k, v in held.items() if isinstance(v, torch.Tensor)}
    return tensors


def counted(built):
    """How many tenants share each pass from here on."""
    groups, inner = [], built.engine.run_shared
    built.engine.run_shared = lambda shares, **how: (groups.append(len(shares)), inner(shares, **how))[1]
    return groups


def scaled(inputs, outputs):
    """A loss of its own."""
    labelled = inputs["labels"] != -100
    return LossOutput(-outputs["logps"].sum() * 0.5, labelled.sum())


scaled.needs = {"logps"}


class Jobs:
    """Called in a process of its own; several jobs share one group of processes."""

    def train(self, rank, world_size, jobs):
        found = {}
        for name, spec in jobs.items():
            built = model(spec["sizes"], optimizer=spec["optimizer"])
            start = {tenant: weights(built, tenant) for tenant in "ab"}
            seen = train(built, "ab", range(STEPS), spec["together"])
            found[name] = {"start": start, "seen": seen, "weights": {tenant: weights(built, tenant) for tenant in "ab"}}
        return found

    def company(self, rank, world_size, meshes):
        """Everything of a tenant after some steps: alone, in company, in another order, by threads."""
        found = {}
        for mesh, sizes in meshes.items():
            for case, tenants in {"a alone": "a", "b alone": "b", "abc": "abc", "cba": "cba"}.items():
                built = model(sizes, tenants, dropout=0.3)
                seen = train(built, tenants, range(4), together=True)
                found[f"{mesh} {case}"] = {name: {"seen": seen[name], **all_of(built, name)} for name in tenants}
            built = model(sizes, "abc", dropout=0.3)
            seen, groups = {}, counted(built)
            built.scheduler.patience = 0.2
            together = threading.Barrier(3)

            def run(name, built=built, seen=seen, together=together):
                torch.set_num_threads(1)
                together.wait()
                for step in range(4):
                    # threads of two ranks never come in the same order
                    threading.Event().wait(0.02 * ((ord(name) + step + rank) % 3))
                    built.forward_backward(mine(built, batch(name, step)), adapter_name=name)
                    update(built, name, seen)

            threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in "abc"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            found[f"{mesh} threads"] = {name: {"seen": seen[name], **all_of(built, name)} for name in "abc"}
            found[f"{mesh} groups"] = groups
        return found

    def checkpoints(self, rank, world_size, folder, jobs):
        """Train, save, train on; the same from the checkpoint, in another slot and beside others."""
        found = {}
        for name, (sizes, dropout) in jobs.items():
            first = model(sizes, "ab", dropout=dropout)
            train(first, "ab", range(4), together=True)
            paths = {t: first.save(f"{name}-{t}", folder, adapter_name=t, save_optimizer=True) for t in "ab"}
            saved = {t: weights(first, t) for t in "ab"}
            unbroken = train(first, "ab", range(4, 8), together=True)
            second = model(sizes, "cba", dropout=dropout)
            second.multi_lora.release_lora("a")
            second.multi_lora.acquire_lora("a", paths["a"])
            second.set_optimizer("adamw", lr=RATES["adamw"], adapter_name="a")
            second.add_metric("loss", is_training=True, adapter_name="a")
            train(second, "c", range(2), together=True)
            for tenant in "ab":
                second.resume_from_checkpoint(paths[tenant], adapter_name=tenant)
            resumed = train(second, "abc", range(4, 8), together=True)
            found[name] = {"paths": paths, "saved": saved, "unbroken": unbroken, "resumed": {t: resumed[t] for t in "ab"}}
            found[name] |= {"first": [all_of(first, t) for t in "ab"], "second": [all_of(second, t) for t in "ab"]}
        return found

    def resume(self, rank, world_size, paths, sizes):
        """One process goes on from what ranks wrote."""
        built = model(sizes, "ba")
        for tenant, path in paths.items():
            built.resume_from_checkpoint(path, adapter_name=tenant)
        seen = train(built, "ab", range(4, 8), together=True)
        return {"seen": seen, "weights": {t: weights(built, t) for t in "ab"}}

    def questions(self, rank, world_size, folder, meshes):
        """Small questions of two ranks."""
        found = {}
        for name, sizes in meshes.items():
            found[name] = {"micro": self.micro(sizes), "faults": self.faults(rank, sizes, f"{folder}/{name}")}
            found[name]["answers"] = self.answers(rank, sizes)
            found[name]["mixed"] = self.mixed(sizes)
        return found

    def mixed(self, sizes):
        """bf16, dropout and checkpointing: a tenant beside another, and alone."""
        found = {}
        for tenants in ("ab", "a"):
            built = model(sizes, tenants, dropout=0.3, mixed_precision="bf16", gradient_checkpointing=True)
            seen = train(built, tenants, range(3), together=True)
            found[tenants] = {"seen": seen["a"], **all_of(built, "a")}
        return found

    def micro(self, sizes):
        """Micro-batches, of which one rank has more than the other, none, and whole."""
        built = model(sizes, "ab")
        found = {}
        for count in (3, 1, 4):
            for name in "ab":
                rows = batch(name, 0)[:count]
                built.forward_backward(mine(built, rows), adapter_name=name, micro_batch_size=1)
                update(built, name, found)
        packed = model(sizes, "a")
        packed.set_processor("input", padding_free=True, adapter_name="a")
        return {"seen": found, "packed": train(packed, "a", range(4), together=False)}

    def faults(self, rank, sizes, folder):
        """What goes wrong on one rank alone."""
        found = {}
        built, other = model(sizes, "ab", "sgd"), model(sizes, "ab", "sgd")

        def told(call):
            try:
                call()
            except TwinkleError as error:
                return [type(error).__name__, str(error)]
            except ZeroDivisionError as error:
                return [type(error).__name__, str(error)]
            return ["none", ""]

        rows = {name: mine(built, batch(name, 0)) for name in "ab"}
        broken = [{**row, "labels": row["labels"][:-1]} for row in rows["a"]] if rank == 1 else rows["a"]
        found["rows"] = told(lambda: built.forward_backward(broken, adapter_name="a"))
        found["many"] = told(lambda: built.forward_backward_many({"a": broken, "b": rows["b"]}))
        found["nothing"] = told(lambda: built.forward_backward([], adapter_name="a"))
        for name, call in (
            ("apart", lambda: built.forward_backward(rows["a"], adapter_name="a", temperature=1.0 + rank)),
            ("apart in company", lambda: built.forward_backward_many(rows, temperature=1.0 + rank)),
        ):
            found[name] = told(call)
        found["counts"] = [built.sessions[name].window.count for name in "ab"]

        def failing(inputs, outputs):
            return scaled(inputs, outputs) if rank == 0 else 1 / 0

        failing.needs = {"logps"}
        built.set_loss(failing, adapter_name="a")
        found["loss"] = told(lambda: built.forward_backward(rows["a"], adapter_name="a"))
        found["loss in company"] = told(lambda: built.forward_backward_many(rows))
        found["windows"] = [built.sessions[name].window.count for name in "ab"]
        other.forward_backward(rows["b"], adapter_name="b")
        for each in (built, other):
            each.forward_backward(rows["b"], adapter_name="b")
            each.clip_grad_and_step(adapter_name="b")
        built.set_loss("cross_entropy", adapter_name="a")
        for each in (built, other):
            each.forward_backward_many(rows)
            each.clip_grad_and_step(adapter_name="a")
        found["as if nothing was"] = all(
            torch.equal(v, weights(other, name)[k]) for name in "ab" for k, v in weights(built, name).items()
        )
        path = built.save("a", folder, adapter_name="a")
        before = torch.get_rng_state()
        found["acquire"] = told(lambda: built.multi_lora.acquire_lora("c", path if rank == 0 else f"{folder}/missing"))
        found["free"] = built.multi_lora.free
        found["rng"] = torch.equal(before, torch.get_rng_state())
        join(built, "c")
        found["c"] = weights(built, "c")
        found["local"] = built.get_train_configs(adapter_name="c") if rank == 0 else ""  # one rank alone may ask
        found["tenants"] = len(built.multi_lora.tenants()) if rank == 1 else 0
        return found

    def answers(self, rank, sizes):
        """A self-test that comes out otherwise on one rank; a turn of several calls; calls that are not the same."""
        import twinkle_multilora.probe as probe

        found = {}
        kept = probe.rows_invariant
        if rank == 1:
            probe.rows_invariant = lambda *args, **kwargs: False
        built = model(sizes, "ab")
        built.forward_backward_many({name: mine(built, batch(name, 0)) for name in "ab"})
        found["way"] = built.engine.sharing.way
        probe.rows_invariant = kept
        with built.turns, built.multi_lora.adapter("a"):
            built.forward_backward(mine(built, batch("a", 0)))
            found["norm"] = built.clip_grad_and_step()
        with built.multi_lora.adapter("b"):
            built.forward(mine(built, batch("b", 0)), return_logits=False)
            built.backward()
            built.clip_grad_and_step(gradient_accumulation_steps=2)
        found["logps"] = built.forward_only(batch("a", 0), adapter_name="a").logps.detach()
        if rank == 0:
            built.turns.tell(Turn("step", ("b",)))
            return found
        try:
            built.forward_backward(batch("a", 0), adapter_name="a")
        except RanksApart as error:
            found["apart"] = str(error)
        return found
