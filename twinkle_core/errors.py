"""Every exception of twinkle with its text (L0). Other rooms raise these; none builds a text of its own.

An exception takes values and writes the sentence: what was given, why it can't be, and the way out. It is raised before any
state changes, unless its text says otherwise.
"""

from __future__ import annotations


class TwinkleError(Exception):
    """Base of all errors raised on purpose by twinkle."""


# ---------------------------------------------------------------------------------------------------- names and plugins


# ---------------------------------------------------------------------------------------------------- meshes and runtimes


# ---------------------------------------------------------------------------------------------------- hubs and data


# ---------------------------------------------------------------------------------------------------- templates and processors


# ---------------------------------------------------------------------------------------------------- training


# ---------------------------------------------------------------------------------------------------- adapters


# ---------------------------------------------------------------------------------------------------- checkpoints


# ---------------------------------------------------------------------------------------------------- backends


# ---------------------------------------------------------------------------------------------------- configuration files and the command line
