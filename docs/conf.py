"""How Sphinx builds the site: `python -m sphinx -W --keep-going -n -b html docs build/site`."""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from docstrings import as_rst
from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx
from sphinx.util.nodes import find_pending_xref_condition

import kda_stream

project = "kda_stream"
project_copyright = "the kda_stream developers"
version = release = kda_stream.__version__

extensions = ["kda_reference", "myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_ext"]
smartquotes = False  # "auto" is a value
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"kda_stream {release}"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

# What is none of the package's own is not linked to: the site is built without a network.
_own = "|".join(kda_stream.__all__)
nitpick_ignore_regex = [(r"py:.*", rf"(?!kda_stream\.)(?!(?:{_own})$).*")]


def _docstring(*arguments: Any) -> None:
    """Turn what autodoc has read, which is the last argument, into reStructuredText."""
    lines: list[str] = arguments[-1]
    lines[:] = as_rst(lines)


def _leave_builtins(_: Sphinx, doctree: nodes.document) -> None:
    """Link no builtin: Sphinx would take `bytes` for an attribute of that name."""
    for reference in list(doctree.findall(pending_xref)):
        if reference.get("refdomain") == "py" and hasattr(builtins, reference["reftarget"]):
            shown = find_pending_xref_condition(reference, "resolved") or reference
            reference.replace_self(shown.children)


def _hand_out_files(app: Sphinx, doctree: nodes.document) -> None:
    """Make a link to a Markdown file of the repository outside of docs/ one to the file itself."""
    for reference in list(doctree.findall(pending_xref)):
        page = Path(app.srcdir, f"{reference.get('reftarget')}.md").resolve()
        if (
            reference.get("refdomain") == "doc"
            and app.srcdir not in page.parents
            and page.is_file()
        ):
            file = os.path.relpath(page, Path(app.env.doc2path(app.env.docname)).parent)
            link = download_reference("", "", *reference.children, reftarget=file)
            link["refdoc"] = app.env.docname
            reference.replace_self(link)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("doctree-read", _hand_out_files, priority=100)  # before files are collected
    app.connect("doctree-read", _leave_builtins)
    app.connect("autodoc-process-docstring", _docstring)
