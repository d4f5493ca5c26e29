"""A GPLVM: twelve measurements of each of 100 oil flows, explained by a few latent coordinates.

The inputs of twelve GPs are latent variables of the model. The base guide has a Gaussian for each of them, started at
the principal components. Their lengthscales tell how many coordinates are needed. The model never sees the
regimes of flow, but separates them.

    python examples/latent_variables.py [--smoke] [--output latent_variables.png]
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from matplotlib.patches import Ellipse
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, init_to_value
from numpyro.infer.autoguide import AutoNormal
import optax

import numpyro_sgp as sgp

numpyro.enable_x64()


def oil_flow() -> tuple[np.ndarray, np.ndarray]:
    """Standardised measurements, (100, 12), and the regime of each flow."""
    table = np.loadtxt(Path(__file__).parent / "data" / "oilflow.csv", delimiter=",", skiprows=5)
    Y = table[:, :-1]
    return (Y - Y.mean(axis=0)) / Y.std(axis=0), table[:, -1].astype(int)


def model(Y, num_latent):
    """Y = f(X) + noise for each column, with X ~ N(0, I) of shape (N, num_latent)."""
    num_rows, num_outputs = Y.shape
    X = numpyro.sample("X", dist.Normal(0.0, 1.0).expand([num_rows, num_latent]).to_event(2))
    lengthscale = numpyro.param("lengthscale", 2.0 * jnp.ones(num_latent), constraint=dist.constraints.positive)
    variance = numpyro.param("variance", 1.0, constraint=dist.constraints.positive)
    noise = numpyro.param("noise", 0.3, constraint=dist.constraints.positive)
    kernel = sgp.kernels.SquaredExponential(lengthscale, variance)
    with numpyro.plate("output", num_outputs):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    # Each entry of Y depends on one latent, so its term of the bound is integrated over that one alone.
    with numpyro.plate("output", num_outputs, dim=-2), numpyro.plate("row", num_rows, dim=-1):
        numpyro.sample("y", dist.Normal(f, noise), obs=Y.T)


def principal_components(Y: np.ndarray, num: int) -> np.ndarray:
    """The first components, each with variance one."""
    U, _, _ = np.linalg.svd(Y - Y.mean(axis=0), full_matrices=False)
    return U[:, :num] * np.sqrt(len(Y))


def neighbour_errors(X: np.ndarray, labels: np.ndarray) -> int:
    """How many rows have a nearest neighbour of another label."""
    distance = np.linalg.norm(X[:, None] - X[None], axis=-1) + np.diag(np.full(len(X), np.inf))
    return int((labels[distance.argmin(axis=1)] != labels).sum())


def main(num_latent: int, num_inducing: int, num_steps: int, output: Path) -> None:
    """Fit, count neighbours, draw the latent plane."""
    Y, labels = oil_flow()
    start = principal_components(Y, num_latent)
    base = partial(AutoNormal, init_loc_fn=init_to_value(values={"X": start}), init_scale=0.1)
    Z = sgp.kmeans(None, start, num_inducing=num_inducing)
    guide = sgp.AutoTSVGP(model, inducing=Z, learn_inducing=True, base=base)
    # The sites see one draw of X in each step: a step size that ends small averages over draws.
    optim = sgp.NaturalGradient(
        optax.linear_schedule(0.3, 0.03, num_steps), optax.adam(optax.cosine_decay_schedule(2e-2, num_steps))
    )
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_particles=2))
    result = svi.run(jax.random.key(0), num_steps, Y, num_latent, progress_bar=False)
    params = result.params
    print(f"ELBO {-np.mean(result.losses[-100:]):.1f}, noise {params['noise']:.2f} of a standard deviation of one")

    mean, scale = (np.asarray(params[f"X_auto_{name}"]) for name in ("loc", "scale"))
    relevance = 1.0 / np.asarray(params["lengthscale"])
    order = np.argsort(-relevance)
    print("1 / lengthscale:", " ".join(f"{value:.2f}" for value in relevance[order]))
    first, second = order[:2]
    errors = {
        "the two most relevant latents": neighbour_errors(
            mean[:, [first, second]] * relevance[[first, second]], labels
        ),
        "two principal components": neighbour_errors(start[:, :2], labels),
        "all twelve measurements": neighbour_errors(Y, labels),
    }
    for name, count in errors.items():
        print(f"{count} of {len(Y)} flows have a nearest neighbour of another regime, by {name}")

    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(9, 3.6), layout="constrained", width_ratios=(1.0, 1.25, 0.75)
    )
    colors = np.array(["C0", "C1", "C2"])
    for regime in range(3):
        rows = labels == regime
        left.plot(*start[rows, :2].T, ".", color=colors[regime], markersize=5)
        middle.plot(
            mean[rows, first], mean[rows, second], ".", color=colors[regime], markersize=5, label=f"regime {regime + 1}"
        )
    for centre, size, color in zip(mean[:, [first, second]], scale[:, [first, second]], colors[labels], strict=True):
        middle.add_patch(Ellipse(centre, *(2 * 1.645 * size), color=color, alpha=0.2, linewidth=0))
    left.set(xlabel="component 1", ylabel="component 2", title="PCA")
    middle.set(xlabel=f"latent {first + 1}", ylabel=f"latent {second + 1}", title="GPLVM, 90 % of each coordinate")
    figure.legend(*middle.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    right.bar(np.arange(num_latent), relevance[order], color="0.6")
    right.set_xticks(np.arange(num_latent), [str(number + 1) for number in order])
    right.set(xlabel="latent", ylabel="1 / lengthscale", title="relevance")
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("latent_variables.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(3, 10, 20, arguments.output)
    else:
        main(5, 25, 3000, arguments.output)
