"""What each of several processes does when something fails on one of them alone, or is not what the others were given."""

from __future__ import annotations

from jobs import model, share, state

from twinkle_core.contracts.loss import Loss
from twinkle_core.contracts.metric import Metric
from twinkle_core.errors import TwinkleError
from twinkle_core.testing.toys import random_rows
from twinkle_core.types import LossOutput

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
