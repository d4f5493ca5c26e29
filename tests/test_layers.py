"""The layers of the package, read from its source: imports go downwards only, NumPyro's internals stay contained."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "numpyro_sgp"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}

# A module imports modules of smaller levels only. Files of a folder share its level, and may import each other.
LEVELS = {
    "checks": -1,
    "eager": -1,
    "signatures": -1,
    "linalg": 0,
    "pytrees": 0,
    "distances": 1,
    "kernels": 2,
    "quadrature": 2,
    "finite_rank": 2,
    "inducing": 3,
    "expansion": 3,
    "features": 4,
    "adversary": 5,
    "coefficients": 5,
    "tables": 5,
    "sites": 5,
    "conditionals": 6,
    "all_weights": 7,
    "mean_basis": 7.5,
    "marginal_likelihood": 7,
    "concavity": 7.5,
    "pairing": 7.75,
    "distributions": 8,
    "elbo": 9,
    "optim": 9,
    "reparam": 9,
    "regression": 9,
    "variables": 9,
    "process": 9.25,
    "families": 9.5,
    "predict": 10,
    "autoguide": 11,
    "svgp": 12,
    "tsvgp": 12,
    "decoupled": 12,
    "qsgp": 12,
    "weightspace": 12,
    "marginal_losses": 13,
    "fitting": 13,
    "diagnostics": 13,
}
WITHOUT_NUMPYRO = {module for module, level in LEVELS.items() if level <= LEVELS["marginal_likelihood"]}
MAY_USE_NUMPYRO_INTERNALS = {"distributions", "autoguide", "elbo", "optim", "reparam"}
NUMPYRO_INTERNALS = ("numpyro.util", "numpyro.primitives", "numpyro.ops")
IMPORTED_WHERE_USED = ("arviz", "matplotlib", "pandas", "sklearn", "scipy.stats")
GLOBAL_SETTINGS = (
    "jax.config.update",
    "jax.enable_x64",
    "jax.experimental.enable_x64",
    "numpyro.enable_x64",
    "numpyro.set_host_device_count",
    "numpyro.set_platform",
)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def imports(tree: ast.AST, *, inside_functions: bool) -> Iterator[str]:
    """Dotted names of what is imported; `from a import b` is a.b."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, inside_functions=inside_functions)


def used_names(tree: ast.AST) -> Iterator[str]:
    """Imported names, and dotted names in the code with the import that they start from written out."""
    yield from imports(tree, inside_functions=True)
    origin = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            origin.update(
                (a.asname or a.name.partition(".")[0], a.name if a.asname else a.name.partition(".")[0])
                for a in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            origin.update((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in origin:
                yield ".".join([origin[value.id], *reversed(parts)])


def violations(path: str, source: str) -> set[str]:
    """What the file at `path`, relative to the package, does against the rules: names of rules with the offender."""
    module = path.partition("/")[0].removesuffix(".py")
    tree = ast.parse(source)
    used = set(used_names(tree))
    found = {
        f"imported when the package loads: {name}"
        for name in imports(tree, inside_functions=False)
        if any(is_within(name, package) for package in IMPORTED_WHERE_USED)
    }
    found |= {f"sets global state: {name}" for name in used if name in GLOBAL_SETTINGS}
    found |= {
        f"sets global state: {ast.unparse(target)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if ast.unparse(target).startswith("jax.config.")
    }
    found |= {f"relative import: {name}" for name in used if name.startswith(".")}
    if module in WITHOUT_NUMPYRO:
        found |= {f"imports numpyro: {name}" for name in used if is_within(name, "numpyro")}
    if module not in MAY_USE_NUMPYRO_INTERNALS:
        found |= {
            f"internal to NumPyro: {name}"
            for name in used
            if is_within(name, "numpyro")
            and (is_private(name) or any(is_within(name, internal) for internal in NUMPYRO_INTERNALS))
        }
    if module != "__init__":
        found |= _upward(module, set(imports(tree, inside_functions=True)))
    return found


def _upward(module: str, imported: set[str]) -> set[str]:
    if module not in LEVELS:
        return {f"no level: give {module} one in LEVELS"}
    found = set()
    for name in imported:
        package, _, inner = name.partition(".")
        target = inner.partition(".")[0]
        if package != "numpyro_sgp" or target == module:
            continue
        if target not in LEVELS:
            found.add(f"not from the defining module: {name}")
        elif LEVELS[target] >= LEVELS[module]:
            found.add(f"not downwards: {name}")
    return found


@pytest.mark.parametrize("path", SOURCES)
def test_every_module_keeps_to_its_layer(path):
    assert violations(path, SOURCES[path]) == set()


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("linalg.py", "import numpyro", "imports numpyro"),
        ("linalg.py", "def f():\n    from numpyro import handlers", "imports numpyro"),
        ("conditionals/dual.py", "import numpyro.distributions as dist", "imports numpyro"),
        ("linalg.py", "from numpyro_sgp.kernels import Matern12", "not downwards"),
        ("linalg.py", "from numpyro_sgp import kernels", "not downwards"),
        ("linalg.py", "def f():\n    import numpyro_sgp.kernels", "not downwards"),
        ("autoguide.py", "from numpyro_sgp.svgp import Whitened", "not downwards"),
        ("svgp.py", "from numpyro_sgp.tsvgp import Dual", "not downwards"),
        ("svgp.py", "from numpyro_sgp import AutoTSVGP", "not from the defining module"),
        ("svgp.py", "import numpyro_sgp", "not from the defining module"),
        ("svgp.py", "from . import tsvgp", "relative import"),
        ("unheard_of.py", "", "no level"),
        ("diagnostics.py", "import arviz as az", "imported when the package loads"),
        (
            "diagnostics.py",
            "try:\n    from matplotlib import pyplot\nexcept ImportError:\n    pass",
            "imported when the package loads",
        ),
        ("fit.py", "from scipy import stats", "imported when the package loads"),
        ("__init__.py", "import jax\njax.config.update('jax_enable_x64', True)", "sets global state"),
        ("fit.py", "from jax import config\ndef f():\n    config.update('jax_enable_x64', True)", "sets global state"),
        ("fit.py", "import jax\njax.config.jax_enable_x64 = True", "sets global state"),
        ("fit.py", "import numpyro\nnumpyro.enable_x64()", "sets global state"),
        ("svgp.py", "from numpyro.optim import _NumPyroOptim", "internal to NumPyro"),
        ("svgp.py", "from numpyro.util import fori_collect", "internal to NumPyro"),
        ("svgp.py", "import numpyro\nnumpyro.primitives.Messenger", "internal to NumPyro"),
        ("svgp.py", "from numpyro import infer\ndef f():\n    return infer.autoguide._unravel", "internal to NumPyro"),
    ],
)
def test_a_planted_violation_is_found(path, source, rule):
    assert any(violation.startswith(rule) for violation in violations(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("linalg.py", "import jax\nfrom numpyro_sgp_other import f"),
        ("conditionals/dual.py", "from numpyro_sgp.conditionals.moments import Moments"),
        ("svgp.py", "from numpyro_sgp.autoguide import AutoSparseGP\nimport numpyro\nnumpyro.param"),
        ("optim/natural_gradient.py", "from numpyro.optim import _NumPyroOptim"),
        ("diagnostics.py", "def f():\n    import arviz"),
    ],
)
def test_what_the_layers_allow_is_not_a_violation(path, source):
    assert violations(path, source) == set()
