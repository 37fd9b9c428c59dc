"""The version of the plugin API, and the policy in words (L0).

A distribution states the version it was written for in its own metadata, readable without importing it::

    [project.entry-points."twinkle.api"]
    v1 = "acme_losses"

``API`` rises only when a working plugin would break. The version before is kept for two minor releases. Contracts grow only by
optional methods with defaults and by keyword arguments, so most releases change nothing here.
"""

API = 1
#: versions that this core can load
SUPPORTED = (1,)
