"""Sphinx extension: the build fails when a public name is on no page, or has no docstring.

Public are the names in `__all__` of the modules in the configuration value `public_names_modules`, and, where such a
name is itself a module, those in its own `__all__`; and the methods that the package defines on its public classes.
"""

from collections.abc import Iterator
import dataclasses
import importlib
import inspect
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Dotted name and object of everything public in a module, modules inside it included."""
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield from public_names(value)
        else:
            yield f"{module.__name__}.{name}", value


def has_docstring(value: Any) -> bool:
    """Whether somebody wrote one: those that `dataclass` and `NamedTuple` make up begin with the signature."""
    if not inspect.isclass(value):
        return bool(inspect.getdoc(value))
    made_up = dataclasses.is_dataclass(value) or hasattr(value, "_fields")
    written = value.__dict__.get("__doc__") or ""
    return bool(written) and not (made_up and written.startswith(f"{value.__name__}("))


def undocumented_methods(name: str, value: Any) -> Iterator[str]:
    """Public methods of a class, defined in its own package, that have no docstring and inherit none."""
    if not inspect.isclass(value):
        return
    package = name.partition(".")[0]
    for cls in value.__mro__:
        if cls.__module__.partition(".")[0] != package:
            continue
        for method, member in cls.__dict__.items():
            is_method = isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)
            if is_method and not method.startswith("_") and not inspect.getdoc(getattr(value, method)):
                yield f"{name}.{method}"


def check_public_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Raise with every public name that is missing from the pages or has no docstring."""
    pages = env.domains["py"].data["objects"]
    problems = set()
    for module in app.config.public_names_modules:
        for name, value in public_names(importlib.import_module(module)):
            if name not in pages:
                problems.add(f"{name} is on no page: add it to docs/reference/api.md")
            if not has_docstring(value):
                problems.add(f"{name} has no docstring")
            problems.update(f"{method} has no docstring" for method in undocumented_methods(name, value))
    if problems:
        raise ExtensionError("Public names:\n  " + "\n  ".join(sorted(problems)))


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the check, once every page was read."""
    app.add_config_value("public_names_modules", [], "env", list)
    app.connect("env-check-consistency", check_public_names)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
