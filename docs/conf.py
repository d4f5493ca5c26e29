"""Configuration of the documentation: `python -m sphinx -W docs docs/_build`."""

from importlib.metadata import version as installed_version
import os
from pathlib import Path
import sys

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "numpyro_sgp"
author = "The numpyro_sgp authors"
copyright = "The numpyro_sgp authors"
version = release = installed_version("numpyro-sgp")

extensions = [
    "myst_nb",
    "public_names",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "jupyter_execute", "**.ipynb_checkpoints"]
default_role = "code"  # docstrings mark code with single backticks

html_theme = "furo"
html_title = f"numpyro_sgp {release}"
html_static_path = ["_static"]
html_css_files = ["style.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them; docstrings give shapes
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

# Pages are run when they are built, and a page that fails to run fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm in a kernel without widgets would print its path

# The build fails when a name in `__all__` of one of these, or of a module in it, is not documented on any page.
public_names_modules = ["numpyro_sgp"]
