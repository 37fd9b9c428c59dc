"""What users import. Each name is loaded when it is asked for; ``twinkle.loss`` and the like hold what is installed."""

from twinkle_core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "DeviceGroup": "twinkle_core.mesh:DeviceGroup",
        "DeviceMesh": "twinkle_core.mesh:DeviceMesh",
        "__version__": "twinkle_core.version:__version__",
        "advantage": "twinkle.advantage:",
        "dataloader": "twinkle.dataloader:",
        "dataset": "twinkle.dataset:",
        "get_device_placement": "twinkle_core.runtime.local:get_device_placement",
        "get_logger": "twinkle_core.log:get_logger",
        "initialize": "twinkle_core.runtime.local:initialize",
        "listener": "twinkle.listener:",
        "loss": "twinkle.loss:",
        "metric": "twinkle.metric:",
        "model": "twinkle.model:",
        "optimizer": "twinkle.optimizer:",
        "patch": "twinkle.patch:",
        "preprocessor": "twinkle.preprocessor:",
        "processor": "twinkle.processor:",
        "remote_class": "twinkle_core.runtime.dispatch:remote_class",
        "remote_function": "twinkle_core.runtime.dispatch:remote_function",
        "scheduler": "twinkle.scheduler:",
        "template": "twinkle.template:",
    },
)
