"""How the documentation is built: ``tox run -e docs``."""

from __future__ import annotations

from twinkle_core.version import __version__

project = "twinkle"
author = "the twinkle authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"twinkle {__version__}"

myst_heading_anchors = 3  # links to headings: [UnknownName](errors.md#unknownname)

autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # "The rows: none only with …" is a sentence, no type

# Types of other libraries, whose pages are not on this site, and names that signatures only mention.
nitpick_ignore_regex = [
    ("py:.*", r"(argparse|collections|contextlib|pathlib|torch|typing)\..*"),
    ("py:class", r"(twinkle_core\..*\.)?(Session|DeviceMesh|LossFn|Inputs|Path|optional)"),
    ("py:exc", r"[\w.]+"),  # they have headings in errors.md
]
