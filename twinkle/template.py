"""Templates of all installed distributions. ``Template`` is the one for models that bring their chat template; the contract is
``twinkle_core.Template``.
"""

from twinkle_core.lazy import attach

__getattr__, __dir__, _ = attach(
    __name__,
    {
        "Template": "twinkle_core.templates.chat:ChatTemplate",
    },
    kind="template",
)
