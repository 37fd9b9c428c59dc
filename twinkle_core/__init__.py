"""twinkle's core. What plugin authors use is importable from here; each name is loaded when it is asked for."""

from twinkle_core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "API": "twinkle_core.api:API",
        "AdapterStore": "twinkle_core.contracts.adapters:AdapterStore",
        "Batch": "twinkle_core.contracts.engine:Batch",
        "Engine": "twinkle_core.contracts.engine:Engine",
        "IGNORE_INDEX": "twinkle_core.types:IGNORE_INDEX",
        "InputFeature": "twinkle_core.types:InputFeature",
        "Loss": "twinkle_core.contracts.loss:Loss",
        "LossOutput": "twinkle_core.types:LossOutput",
        "Message": "twinkle_core.types:Message",
        "Metric": "twinkle_core.contracts.metric:Metric",
        "ModelOutput": "twinkle_core.types:ModelOutput",
        "Patch": "twinkle_core.contracts.patch:Patch",
        "Processor": "twinkle_core.contracts.processor:Processor",
        "Runtime": "twinkle_core.contracts.runtime:Runtime",
        "StepResult": "twinkle_core.contracts.metric:StepResult",
        "Template": "twinkle_core.contracts.template:Template",
        "Trajectory": "twinkle_core.types:Trajectory",
        "TwinkleError": "twinkle_core.errors:TwinkleError",
        "TwinkleModel": "twinkle_core.contracts.model:TwinkleModel",
        "__version__": "twinkle_core.version:__version__",
        "hookimpl": "twinkle_core.hookspecs:hookimpl",
        "registry": "twinkle_core.registry:",
        "remote_class": "twinkle_core.runtime.dispatch:remote_class",
        "remote_function": "twinkle_core.runtime.dispatch:remote_function",
    },
)
