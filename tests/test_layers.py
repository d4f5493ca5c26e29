"""The layers of the package, read from its source: imports go downwards only, NumPyro's internals stay contained."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "numpyro_sgp"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}

# The order in which modules build on one another. A module imports what is in its own entry or in an earlier one.
LAYERS = [
    "_internal",
    "math",
    "kernels",
    "functionals",
    "inducing",
    "features",
    # The mathematics of posteriors: parameters and formulas.
    "posteriors/perturbation",
    "posteriors/sites",
    "posteriors/moments",
    "posteriors/decoupled/coefficients",
    "posteriors/weight_space/adversary",
    "posteriors/quadruply_stochastic/weight_table",
    "posteriors/whitened/formulas",
    "posteriors/dual/formulas",
    "posteriors/markov/state_space",
    "posteriors/markov/formulas",
    "posteriors/markov/pair_formulas",
    "posteriors/markov/separable",
    "posteriors/markov/space_formulas",
    "posteriors/kronecker/formulas",
    "posteriors/dual/tied",
    "posteriors/joint/effects",
    "posteriors/joint/predictors",
    "posteriors/joint/formulas",
    "posteriors/joint/independent",
    "posteriors/joint/by_rows",
    "posteriors/markov/timeline",
    "posteriors/markov/pair_timeline",
    "posteriors/markov/space_timeline",
    "posteriors/vecchia/neighbours",
    "posteriors/vecchia/formulas",
    "posteriors/decoupled/formulas",
    "posteriors/weight_space/formulas",
    "posteriors/weight_space/stale",
    "posteriors/quadruply_stochastic/formulas",
    "posteriors/quadruply_stochastic/table_sums",
    "posteriors/mean_basis",
    # What knows NumPyro.
    "distributions",
    "optim",
    "posteriors/parameters",
    "posteriors/process",
    "posteriors/gaussian",
    "posteriors/family",
    "posteriors/functions",
    "posteriors/conditioned",
    "posteriors/markov/family",
    "posteriors/markov/pair_family",
    "posteriors/vecchia/family",
    "posteriors/kronecker/family",
    "posteriors/weight_space/families",
    "guides",
    "losses",
    # A guide conditions by means of a loss.
    "guides/conditioning",
    "guides/guide",
    "posteriors",
    "diagnostics",
    "fitting",
]
WITHOUT_NUMPYRO = LAYERS[: LAYERS.index("distributions")]
MAY_USE_NUMPYRO_INTERNALS = {"distributions", "guides", "losses", "optim"}
NUMPYRO_INTERNALS = {"distributions", "autoguide", "elbo", "optim", "reparam"}
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
    layer = layer_of(path.removesuffix("/__init__.py").removesuffix(".py"))
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
    if layer in WITHOUT_NUMPYRO:
        found |= {f"imports numpyro: {name}" for name in used if is_within(name, "numpyro")}
    if layer not in MAY_USE_NUMPYRO_INTERNALS:
        found |= {
            f"internal to NumPyro: {name}"
            for name in used
            if is_within(name, "numpyro")
            and (is_private(name) or any(is_within(name, internal) for internal in NUMPYRO_INTERNALS))
        }
    if path != "__init__.py":
        found |= _upward(layer, set(imports(tree, inside_functions=True)))
    return found


def layer_of(module: str) -> str | None:
    """The layer that a module, as a path relative to the package, belongs to: the longest entry that it is within."""
    return max((layer for layer in LAYERS if f"{module}/".startswith(f"{layer}/")), key=len, default=None)


def _upward(layer: str | None, imported: set[str]) -> set[str]:
    if layer is None:
        return {"no layer: give it one in LAYERS"}
    found = set()
    for name in imported:
        package, _, inner = name.partition(".")
        if package != "numpyro_sgp":
            continue
        target = layer_of(inner.replace(".", "/"))
        if target is None:
            found.add(f"not from the defining module: {name}")
        elif LAYERS.index(target) > LAYERS.index(layer):
            found.add(f"not downwards: {name}")
    return found


@pytest.mark.parametrize("path", SOURCES)
def test_every_module_keeps_to_its_layer(path):
    assert violations(path, SOURCES[path]) == set()


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("math/linalg.py", "import numpyro", "imports numpyro"),
        ("math/linalg.py", "def f():\n    from numpyro import handlers", "imports numpyro"),
        ("posteriors/dual/formulas.py", "import numpyro.distributions as dist", "imports numpyro"),
        ("math/linalg.py", "from numpyro_sgp.kernels import Matern12", "not downwards"),
        ("math/linalg.py", "from numpyro_sgp import kernels", "not downwards"),
        ("math/linalg.py", "def f():\n    import numpyro_sgp.kernels", "not downwards"),
        ("guides/guide.py", "from numpyro_sgp.posteriors.whitened.guide import Whitened", "not downwards"),
        ("posteriors/dual/formulas.py", "from numpyro_sgp.posteriors.dual.guide import Dual", "not downwards"),
        ("posteriors/dual/guide.py", "from numpyro_sgp import AutoTSVGP", "not from the defining module"),
        ("posteriors/dual/guide.py", "import numpyro_sgp", "not from the defining module"),
        ("posteriors/dual/guide.py", "from . import tied", "relative import"),
        ("unheard_of.py", "", "no layer"),
        ("diagnostics/plots.py", "import arviz as az", "imported when the package loads"),
        (
            "diagnostics/plots.py",
            "try:\n    from matplotlib import pyplot\nexcept ImportError:\n    pass",
            "imported when the package loads",
        ),
        ("fitting/fit.py", "from scipy import stats", "imported when the package loads"),
        ("__init__.py", "import jax\njax.config.update('jax_enable_x64', True)", "sets global state"),
        (
            "fitting/fit.py",
            "from jax import config\ndef f():\n    config.update('jax_enable_x64', True)",
            "sets global state",
        ),
        ("fitting/fit.py", "import jax\njax.config.jax_enable_x64 = True", "sets global state"),
        ("fitting/fit.py", "import numpyro\nnumpyro.enable_x64()", "sets global state"),
        ("posteriors/dual/guide.py", "from numpyro.optim import _NumPyroOptim", "internal to NumPyro"),
        ("posteriors/dual/guide.py", "from numpyro.util import fori_collect", "internal to NumPyro"),
        ("posteriors/dual/guide.py", "import numpyro\nnumpyro.primitives.Messenger", "internal to NumPyro"),
        (
            "posteriors/dual/guide.py",
            "from numpyro import infer\ndef f():\n    return infer.autoguide._unravel",
            "internal to NumPyro",
        ),
    ],
)
def test_a_planted_violation_is_found(path, source, rule):
    assert any(violation.startswith(rule) for violation in violations(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("math/linalg.py", "import jax\nfrom numpyro_sgp_other import f"),
        ("posteriors/dual/formulas.py", "from numpyro_sgp.posteriors.moments import Moments"),
        (
            "posteriors/dual/guide.py",
            "from numpyro_sgp.guides.guide import AutoSparseGP\nimport numpyro\nnumpyro.param",
        ),
        ("optim/natural_gradient.py", "from numpyro.optim import _NumPyroOptim"),
        ("diagnostics/plots.py", "def f():\n    import arviz"),
    ],
)
def test_what_the_layers_allow_is_not_a_violation(path, source):
    assert violations(path, source) == set()
