"""What each of several processes does when something fails on one of them alone, or is not what the others were given."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from jobs import model, share, state
from peft import LoraConfig

from twinkle_core.contracts.loss import Loss
from twinkle_core.contracts.metric import Metric
from twinkle_core.contracts.patch import Patch
from twinkle_core.errors import TwinkleError
from twinkle_core.testing.toys import random_rows
from twinkle_core.train import leaving
from twinkle_core.types import LossOutput
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import tiny_config

ROWS = random_rows([5, 7, 6, 5, 4, 8, 7, 5], vocabulary=250)


class Failing(Loss):
    """Cross entropy, which fails at the second micro-batch where it is told to."""

    needs = frozenset({"logps"})

    def __init__(self, here, kind=ZeroDivisionError):
        self.here, self.kind, self.calls = here, kind, 0

    def __call__(self, inputs, outputs, **kwargs):
        self.calls += 1
        if self.here and self.calls == 2:
            raise self.kind("of this loss")
        labelled = inputs["labels"] != -100
        return LossOutput(-outputs["logps"][labelled].sum(), labelled.sum())


class Weighted(Loss):
    """Cross entropy times numbers that are given."""

    needs = frozenset({"logps"})

    def __call__(self, inputs, outputs, beta=1.0, weights=None, something=None, **kwargs):
        labelled = inputs["labels"] != -100
        each = 1.0 if weights is None else torch.as_tensor(weights)[:, None]
        return LossOutput(-beta * (each * outputs["logps"] * labelled).sum(), labelled.sum())


class Unfit(Patch):
    """Can't be applied where it is told so."""

    def __init__(self, here):
        self.here = here

    def apply(self, model):
        if self.here:
            raise ZeroDivisionError("of this patch")

    def undo(self, model):
        """It has done nothing."""


class Refusing(Metric):
    """Reads logits, so that it takes in each micro-batch in the middle of a pass, and fails where it is told to."""

    needs = frozenset({"logits"})
    here = True

    def accumulate(self, inputs, outputs):
        if self.here:
            raise KeyError("of this metric")

    def calculate(self):
        return {}

    def reset(self):
        """It holds nothing."""

    def state(self):
        return None

    def merge(self, state):
        """It holds nothing."""


def told(call):
    try:
        call()
    except (ZeroDivisionError, KeyError, SystemExit, TwinkleError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def trained(built, rows, adapter, windows=2):
    """(loss of this rank, norm) of each window of two calls."""
    seen = []
    for _ in range(windows):
        for _ in range(2):
            loss = built.forward_backward(rows, adapter_name=adapter, micro_batch_size=2, gradient_accumulation_steps=2)
            seen.append(float(loss))
        seen.append(built.clip_grad_and_step(adapter_name=adapter))
    return seen


def ready(sizes, kind="llama", adapter="", **options):
    built = model(sizes, kind, adapter, **options)
    built.set_optimizer("adamw", lr=1e-3, adapter_name=adapter)
    return built


class Failures:
    """Called in a process of its own."""

    def losses(self, rank, world_size, jobs):
        """A loss, a plain function, a metric that fail on the last rank alone; then what all train, and what they train that
        have met no failure."""
        found = {}
        for name, spec in jobs.items():
            adapter = spec.get("adapter", "")
            built, plain = (ready(spec["sizes"], spec.get("kind", "llama"), adapter) for _ in range(2))
            mesh, last, words = built.engine.mesh, rank == world_size - 1, []
            mine = list(share(ROWS, mesh.data_rank, mesh.data_world_size))

            def call(built=built, mine=mine, adapter=adapter):
                built.forward_backward(mine, adapter_name=adapter, micro_batch_size=1, gradient_accumulation_steps=2)

            call()  # a window is open
            for kind in (ZeroDivisionError, SystemExit):
                built.set_loss(Failing(last, kind), adapter_name=adapter)
                words.append(told(call))

            def plainly(inputs, outputs, last=last):
                return 1 / 0 if last else outputs.logits.float().mean()

            built.set_loss(plainly, adapter_name=adapter)
            words.append(told(call))
            held = built.sessions[adapter].window.count
            grads = sum(float(p.grad.abs().sum()) for p in built._named(built.sessions[adapter]).values() if p.grad is not None)
            built.set_loss("cross_entropy", adapter_name=adapter)
            metric = Refusing()
            metric.here = last
            built.add_metric(metric, is_training=True, adapter_name=adapter)
            words.append(told(call))
            built.add_metric(metric, is_training=False, adapter_name=adapter)
            words.append(told(lambda b=built, m=mine, a=adapter: b.forward_only(m, adapter_name=a, micro_batch_size=2)))
            metric.here = False
            found[name] = {"words": words, "held": held, "grads": grads}
            found[name] |= {key: trained(m, mine, adapter) for key, m in (("seen", built), ("plain", plain))}
            found[name] |= {key: state(m, adapter) for key, m in (("weights", built), ("plain weights", plain))}
        return found

    def differ(self, rank, world_size, meshes):
        """Arguments that are not what the other rank gave, and whether a model trains on as one that was never asked."""
        found = {}
        for name, sizes in meshes.items():
            built, plain = ready(sizes), ready(sizes)
            mesh, words = built.engine.mesh, {}
            mine = list(share(ROWS, mesh.data_rank, mesh.data_world_size))
            for each in (built, plain):
                each.set_loss(Weighted())
                each.forward_backward(mine)
            for key, clip in (("norm", (1.0 + rank,)), ("kind", (1.0, 2 + rank)), ("none", (-1.0 if rank else 1.0,))):
                words[key] = told(lambda b=built, c=clip: b.clip_grad_and_step(*c))
            norms = [each.clip_grad_and_step(0.5) for each in (built, plain)]
            of_rows = torch.arange(len(mine)).float()
            for key, given in {
                "temperature": {"temperature": 1.0 + rank},
                "scalar": {"beta": 0.5 + rank},
                "list": {"weights": [1.0] * (len(mine) - 1) + [float(rank)]},
                "tensor": {"weights": of_rows + rank},
            }.items():
                words[key] = told(lambda b=built, m=mine, g=given: b.forward_backward(m, micro_batch_size=2, **g))
                built.zero_grad(drop=True)
            words["evaluated"] = told(lambda b=built, m=mine: b.forward_only(m, temperature=1.0 + rank))
            for each in (built, plain):
                each.forward_backward(mine, micro_batch_size=2, beta=0.5, weights=of_rows, something=object())
            if rank:
                built.set_optimizer("adamw", lr=1e-3)  # and what it has gathered is forgotten
            words["anew"] = told(built.clip_grad_and_step)
            if not rank:
                built.set_optimizer("adamw", lr=1e-3)
            plain.set_optimizer("adamw", lr=1e-3)
            norms += [each.clip_grad_and_step() for each in (built, plain)]
            found[name] = {"words": words, "norms": norms} | {k: state(m) for k, m in (("built", built), ("plain", plain))}
        return found

    def reading(self, rank, world_size, sizes, home):
        """Folders that the second rank can't read, or in which it finds something else; and what the model trains after it."""
        built, plain = (ready(sizes, "llama", "a") for _ in range(2))
        words, mine = {}, ROWS[rank::world_size]
        first, later = built.save("first", home, adapter_name="a"), f"{home}/later"
        for each in (built, plain):
            trained(each, mine, "a", 1)
        built.save("later", home, adapter_name="a")
        damaged = f"{home}/damaged{rank}"
        shutil.copytree(first, damaged)
        if rank:
            (Path(damaged) / "trainer_state.json").write_text("{")
        before = state(built, "a")
        words["missing"] = told(lambda: built.add_adapter_to_model("b", f"{home}/none" if rank else first))
        words["damaged"] = told(lambda: built.add_adapter_to_model("b", damaged))
        words["others"] = told(lambda: built.add_adapter_to_model("b", later if rank else first))
        words["config"] = told(
            lambda: built.add_adapter_to_model("b", LoraConfig(r=2, target_modules=["q_proj", "nothing"][rank:][:1]))
        )
        for name in ("none", "damaged"):
            words[f"load {name}"] = told(lambda n=name: built.load(f"{n}{rank}" if rank else "first", home, adapter_name="a"))
        words["load others"] = told(lambda: built.load("later" if rank else "first", home, adapter_name="a"))
        words["load argument"] = told(lambda: built.load(3 if rank else "first", home, adapter_name="a"))
        words["resume"] = told(lambda: built.resume_from_checkpoint(f"{home}/none" if rank else first, resume_only_model=True))
        kept = all(torch.equal(before[k], v) for k, v in state(built, "a").items()) and built.adapters.names() == ["a"]
        broken = tiny_config()
        words["made"] = told(
            lambda: TransformersModel(
                config=None if rank else broken,
                model_id=f"{home}/none" if rank else None,
                mixed_precision="no",
                device_mesh=built.engine.mesh,
            )
        )
        return {"words": words, "kept": kept, "seen": [trained(each, mine, "a") for each in (built, plain)]}

    def alone(self, rank, world_size, sizes):
        """Verbs that the first rank calls and the second doesn't."""
        built, plain = (ready(sizes, "llama", "a") for _ in range(2))
        mine, words = ROWS[rank::world_size], {}
        for name, call in {
            "remove_adapter": lambda: built.remove_adapter("a"),
            "apply_patch": lambda: built.apply_patch("value_head"),
            "add_adapter_to_model": lambda: built.add_adapter_to_model("b", LoraConfig(r=2)),
            "load": lambda: built.load("x", "y"),
            "step": lambda: built.step(gradient_accumulation_steps=0),
        }.items():
            words[name] = told(call if rank == 0 else lambda: built.forward_backward(mine, adapter_name="a"))
        words["one patch or another"] = told(lambda: built.apply_patch(["value_head", "embedding"][rank]))
        words["a patch that fits not"] = told(lambda: built.apply_patch(Unfit(rank == 1)))
        patches = [type(patch).__name__ for patch in built.patches] == [type(patch).__name__ for patch in plain.patches]
        if rank == 0:  # what needs no other rank
            built.get_state_dict(adapter_name="a")
            built.get_train_configs(adapter_name="a")
            built.zero_grad(adapter_name="a")
            built.lr_step(adapter_name="a")
        return {"words": words, "patches": patches, "seen": [trained(each, mine, "a") for each in (built, plain)]}

    def model(self, rank, world_size, jobs):
        """A layer that fails on both ranks, then on the second alone: in the middle of a pass."""
        leaving.PATIENCE = 3.0
        found = {}
        for name, spec in jobs.items():
            built, plain = (ready(spec["sizes"], spec.get("kind", "llama")) for _ in range(2))
            mesh = built.engine.mesh
            mine = list(share(ROWS, mesh.data_rank, mesh.data_world_size))

            def broken(module, args, rank=rank):
                raise ZeroDivisionError(f"of this layer on {rank}")

            hook = built.module.model.layers[1].register_forward_pre_hook(broken)
            words = [told(lambda b=built, m=mine: b.forward_backward(m)), told(lambda b=built, m=mine: b.forward(m))]
            hook.remove()
            found[name] = {"words": words, "seen": [trained(each, mine, "") for each in (built, plain)]}
        if rank:
            built.module.model.layers[1].register_forward_pre_hook(broken)
        words = [told(lambda: built.forward_backward(mine)), told(lambda: built.forward_backward(mine)), told(plain.step)]
        found["alone"] = {"words": words}
        return found
