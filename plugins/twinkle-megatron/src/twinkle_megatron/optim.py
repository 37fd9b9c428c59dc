"""Megatron's distributed optimizer and its scheduler, as core's verbs drive them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as _Scheduler

from twinkle_core.errors import BadOptimizer, BadScheduler, UnknownOption
from twinkle_core.names import closest


class MegatronDistributedOptimizer(torch.optim.Optimizer):
    """Adam whose state, and in 16 bits whose fp32 weights, are shared out over data ranks. (SGD, of which Megatron has no such
    form, holds them on each.)

    Its groups hold the model's own parameters and the hyperparameters; Megatron's optimizer inside holds the shards, and is
    told the hyperparameters before each update.

    Args:
        params: groups of parameters.
        lr: learning rate; a scheduler's peak.
        weight_decay: of matrices (decoupled).
        optimizer: ``adam`` or ``sgd``.
        adam_beta1, adam_beta2, adam_eps, sgd_momentum: Megatron's.
        initial_loss_scale, min_loss_scale, loss_scale_window, hysteresis: of the gradient scaler under ``fp16``.
    """

    inner: Any = None  # Megatron's optimizer, once ``wrap`` has made it
    ddps: list[Any]

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-5,
        weight_decay: float = 0.01,
        optimizer: Literal["adam", "sgd"] = "adam",
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        adam_eps: float = 1e-8,
        sgd_momentum: float = 0.9,
        initial_loss_scale: float = 2.0**16,
        min_loss_scale: float = 1.0,
        loss_scale_window: float = 1000,
        hysteresis: int = 2,
    ) -> None:
        if optimizer not in ("adam", "sgd"):
            raise BadOptimizer(type(self).__name__, f"optimizer={optimizer!r} is neither 'adam' nor 'sgd'")
        self.settings = {
            "optimizer": optimizer,
            "adam_beta1": adam_beta1,
            "adam_beta2": adam_beta2,
            "adam_eps": adam_eps,
            "sgd_momentum": sgd_momentum,
            "initial_loss_scale": initial_loss_scale,
            "min_loss_scale": min_loss_scale,
            "loss_scale_window": loss_scale_window,
            "hysteresis": hysteresis,
        }
        self.ddps = []
        super().__init__(list(params), {"lr": lr, "weight_decay": weight_decay})
        for group in self.param_groups:
            group["wd_mult"] = 1.0 if group["weight_decay"] else 0.0  # what Megatron's scheduler multiplies its decay by

    @property
    def distributed(self) -> bool:
        """Whether Megatron shares out its state."""
        return self.settings["optimizer"] == "adam"

    def wrap(self, ddps: list[Any], dtype: torch.dtype) -> None:
        """Make Megatron's optimizer over the buffers of ``ddps``."""
        decay = max(float(group["weight_decay"]) for group in self.param_groups)
        config = OptimizerConfig(
            lr=float(self.param_groups[0]["lr"]),
            min_lr=0.0,
            weight_decay=decay,
            clip_grad=0.0,  # core clips, when a window closes
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            params_dtype=dtype,
            use_distributed_optimizer=self.distributed,
            **self.settings,
        )
        self.ddps = ddps
        self.inner = get_megatron_optimizer(config, ddps)
        for part in self.inner.chained_optimizers if not self.distributed else ():
            part.init_state_fn = _start  # Megatron has none for SGD, and asks for it before a load

    def tell(self) -> None:
        """Megatron's groups get the hyperparameters of these."""
        lr = float(self.param_groups[0]["lr"])
        decay = max(float(group["weight_decay"]) for group in self.param_groups)
        for group in self.inner.param_groups:
            group["lr"], group["weight_decay"] = lr, decay * group.get("wd_mult", 1.0)

    def step(self, closure: Any = None) -> Any:
        """One update with gradients that the engine has finished. Returns whether there was one."""
        self.tell()
        return self.inner.step_with_ready_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for ddp in self.ddps:
            ddp.zero_grad_buffer()
        self.inner.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """Take what ``checkpoint.prepare`` found: hyperparameters, and a function that reads this rank's shards."""
        for group, saved in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(saved)
        state_dict["read"]()


def _start(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Momentum as it is before the first update."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


#: the forms that Megatron's schedule has, of the rate, of weight decay, and of the rate at WSD's end
STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WD_STYLES = ("constant", "linear", "cosine")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")


def _check_style(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnknownOption(name, value, closest(str(value), known), known)


class OptimizerParamScheduler(_Scheduler):  # type: ignore[misc]
    """Megatron's schedule of learning rate and weight decay. A step is one optimizer update.

    Args:
        optimizer: given by ``set_lr_scheduler``.
        lr_decay_steps: updates in all, warm-up included.
        max_lr: the peak; default the optimizer's.
        init_lr, min_lr: where warm-up begins, and where the decay ends.
        lr_warmup_steps: updates of warm-up.
        lr_decay_style: ``constant``, ``linear``, ``cosine``, ``inverse-square-root`` or ``WSD``.
        start_wd, end_wd: of the weight decay; default the optimizer's, constant.
        wd_incr_steps, wd_incr_style, wsd_decay_steps, lr_wsd_decay_style: Megatron's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        lr_decay_steps: int,
        max_lr: float | None = None,
        init_lr: float = 0.0,
        min_lr: float = 0.0,
        lr_warmup_steps: int = 0,
        lr_decay_style: str = "cosine",
        start_wd: float | None = None,
        end_wd: float | None = None,
        wd_incr_steps: int = 0,
        wd_incr_style: str = "constant",
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        decay = max(float(group["weight_decay"]) for group in optimizer.param_groups)
        start = decay if start_wd is None else start_wd
        peak = float(optimizer.param_groups[0]["lr"]) if max_lr is None else max_lr
        end = start if end_wd is None else end_wd
        _check_style("lr_decay_style", lr_decay_style, STYLES)
        _check_style("wd_incr_style", wd_incr_style, WD_STYLES)
        grows = wd_incr_style != "constant"
        rules = (
            (lr_decay_steps >= 1, f"lr_decay_steps={lr_decay_steps} must be at least 1"),
            (
                lr_warmup_steps < lr_decay_steps,
                f"lr_warmup_steps={lr_warmup_steps} must be below lr_decay_steps={lr_decay_steps}",
            ),
            (init_lr <= peak, f"init_lr={init_lr} must be at most max_lr={peak}"),
            (0 <= min_lr <= peak, f"min_lr={min_lr} must be from 0 to max_lr={peak}"),
            (0 <= start <= end, f"end_wd={end} must be at least start_wd={start}"),
            (start == end or grows, "a weight decay that changes needs wd_incr_style='linear' or 'cosine'"),
            (wd_incr_steps >= 1 or not grows, f"wd_incr_style='{wd_incr_style}' needs wd_incr_steps of at least 1"),
            (wsd_decay_steps is not None or lr_decay_style != "WSD", "lr_decay_style='WSD' needs wsd_decay_steps"),
        )
        for kept, why in rules:
            if not kept:
                raise BadScheduler(type(self).__name__, why)
        if lr_decay_style == "WSD":
            _check_style("lr_wsd_decay_style", lr_wsd_decay_style, WSD_STYLES)
        super().__init__(
            optimizer,
            init_lr=init_lr,
            max_lr=peak,
            min_lr=min_lr,
            lr_warmup_steps=lr_warmup_steps,
            lr_decay_steps=lr_decay_steps,
            lr_decay_style=lr_decay_style,
            start_wd=start,
            end_wd=end,
            wd_incr_steps=wd_incr_steps,
            wd_incr_style=wd_incr_style,
            wsd_decay_steps=wsd_decay_steps,
            lr_wsd_decay_style=lr_wsd_decay_style,
        )

    def step(self, increment: int = 1) -> None:
        """One update on."""
        super().step(increment=increment)

    def load_state_dict(self, state_dict: Any) -> None:
        """Sets the count of updates; Megatron's own adds it."""
        self.num_steps = 0
        super().load_state_dict(state_dict)
