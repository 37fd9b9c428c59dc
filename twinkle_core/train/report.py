"""What ``get_train_configs`` prints (L2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from twinkle_core import registry
from twinkle_core.errors import BadMetricResult
from twinkle_core.train import losses
from twinkle_core.train.limits import is_number
from twinkle_core.train.session import Session

if TYPE_CHECKING:
    from twinkle_core.train.sessions import Sessions


def numbers_of(metric: str, result: Any) -> dict[str, float]:
    """What a metric calculated, checked: numbers (a tensor of one element counts as one) by name.

    Raises:
        BadMetricResult
    """
    if not isinstance(result, Mapping):
        raise BadMetricResult(metric, f"{type(result).__name__}")
    found: dict[str, float] = {}
    for key, value in result.items():
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if not isinstance(key, str) or not is_number(number):
            raise BadMetricResult(metric, f"{key!r}: {value!r}")
        found[key] = number
    return found


def _count(tensors: Any) -> int:
    return sum(t.numel() for t in tensors)


def _own(component: Any, fallback: bool) -> str:
    if component is None:
        return "none"
    return type(component).__name__ + (" (of the base session)" if fallback else "")


def _optimizer(optimizer: Any) -> str:
    if optimizer is None:
        return "none"
    groups = [
        f"{_count(g['params']):,} parameters, "
        + ", ".join(f"{k} {float(g[k]):g}" for k in ("lr", "weight_decay") if g.get(k) is not None)
        for g in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}: " + "; ".join(groups)


def _loss(model: Sessions, session: Session) -> str:
    loss = model._loss(session)
    text = f"{losses.name_of(loss)} (needs {', '.join(sorted(loss.needs))}; scope {loss.scope})"
    coefficient = model.engine.aux_loss_coef
    if coefficient:
        text += f" + {coefficient:g} x the routers' auxiliary loss (scope batch)"
    if loss.scope == "batch" or coefficient:
        text += "\nnot exact under splitting: a window is the weighted mean of its micro-batches' losses"
    return text


def table(model: Sessions, session: Session) -> str:
    """Two columns, one line a fact."""
    trainable = model.adapters.parameters(session.name)
    everything, where = model.adapters.size()
    share = _count(trainable.values())
    window = session.window
    rows: list[tuple[str, str]] = [
        ("adapter", session.name or "(base model)"),
        *((key.replace("_", " "), str(value)) for key, value in model.engine.describe().items()),
        *((key.replace("_", " "), str(value)) for key, value in model.adapters.describe(session.name).items()),
        ("parameters", f"{share:,} trainable, {everything:,} {where}"),
        ("mesh", repr(model.engine.mesh).splitlines()[0]),
        ("loss", _loss(model, session)),
        ("optimizer", _optimizer(session.optimizer)),
        ("scheduler", _own(session.scheduler, False)),
        ("window", f"{window.size or 'size not set yet (1)'}, {window.count} backward(s) held" if window.open
         else f"{window.size or 'size not set yet (1)'}"),
        ("gradients", f"not finite: {model.engine.on_nonfinite}; {session.skipped_steps} update(s) skipped"),
        *((part, _own(model._or_base(session, part), getattr(session, part) is None)) for part in ("template", "processor")),
        *((f"metrics ({'training' if mode else 'evaluation'})", ", ".join(type(m).__name__ for m in metrics) or "none")
          for mode, metrics in session.metrics.items()),
        ("patches", ", ".join(type(p).__name__ for p in model.patches) or "none"),
        ("updates", str(session.cur_step)),
        *(("plugin", f"{r['kind']} {r['name']}: {r['distribution']} {r['version']}".rstrip()) for r in registry.snapshot()),
    ]  # fmt: skip
    wide = max(len(key) for key, _ in rows)
    lines = []
    for key, value in rows:
        first, *rest = value.splitlines() or [""]
        lines += [f"{key:<{wide}}  {first}", *(f"{'':<{wide}}  {line}" for line in rest)]
    return "\n".join(lines)
