"""Linear coregionalisation: three outputs that are mixtures of two latent processes; one of them has a gap.

While one sensor was down, the others still measured, and the model predicts the missing values from these. The script
compares its predictions with those of a separate process for each output.

    python examples/coregionalisation.py [--smoke] [--output coregionalisation.png]
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, init_to_sample
from numpyro.infer.autoguide import AutoDelta
import optax
from scipy.special import logsumexp
from scipy.stats import norm

import numpyro_sgp as sgp

OUTPUTS, LATENTS = 3, 2
NOISE = np.array([0.15, 0.2, 0.15])
GAP = (4.0, 6.5)  # hours, of the last output


def simulate(N: int = 120) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Times in hours (N, 1), the outputs (3, N) without noise and with it, and which of them were observed."""
    rng = np.random.default_rng(2)
    t = np.sort(rng.uniform(0.0, 10.0, N))
    latents = np.stack([np.sin(1.1 * t) + 0.3 * np.sin(3.1 * t), np.cos(0.6 * t + 1.0) + 0.2 * np.cos(4.0 * t)])
    clean = np.array([[1.0, 0.3], [-0.5, 1.0], [0.8, 0.9]]) @ latents
    observed = np.ones((OUTPUTS, N), bool)
    observed[2] = (t < GAP[0]) | (t > GAP[1])
    return t[:, None], clean, clean + NOISE[:, None] * rng.normal(size=clean.shape), observed


def outcomes(values, y, observed):
    """Gaussian noise of its own for each output; what is not observed is not in the likelihood."""
    with numpyro.plate("output", OUTPUTS, dim=-2):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        with numpyro.plate("data", values.shape[-1], dim=-1), handlers.mask(mask=observed):
            numpyro.sample("y", dist.Normal(values, noise), obs=y)


def mixed(X, y=None, observed=True):
    """Mixtures W f of two latent processes f, of variance 1 and with lengthscales of their own, plus noise."""
    with numpyro.plate("latent", LATENTS):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.7))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale[:, None]), X))
    W = numpyro.sample("W", dist.Normal(0.0, 1.0).expand([OUTPUTS, LATENTS]).to_event(2))
    outcomes(numpyro.deterministic("values", W @ f), y, observed)


def separate(X, y=None, observed=True):
    """A process for each output: a plate of the same name pairs each process with its output."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.7).expand([OUTPUTS]).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0).expand([OUTPUTS]).to_event(1))
    with numpyro.plate("output", OUTPUTS):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale[:, None], variance), X))
    outcomes(numpyro.deterministic("values", f), y, observed)


def main(num_steps: int, num_samples: int, output: Path) -> None:
    """Fit both models, score them in the gap, draw the figure."""
    numpyro.enable_x64()
    X, clean, y, observed = simulate()
    Z, X_new = np.linspace(0.0, 10.0, 30)[:, None], np.linspace(0.0, 10.0, 300)[:, None]
    missing = ~observed[2]
    bands = {}
    for name, model in {"a process each": separate, "mixtures of two": mixed}.items():
        # At W = 0 nothing tells the latents apart, so W starts at a draw of its prior. W and f are determined up to
        # signs and order; a point estimate of W takes one of these.
        guide = sgp.AutoTSVGP(model, inducing=Z, base=partial(AutoDelta, init_loc_fn=init_to_sample))
        optim = sgp.NaturalGradient(step_size=0.5, others=optax.adam(0.02))
        # log p is a polynomial of degree two in f: three nodes along each axis are exact.
        svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_nodes=3))
        result = svi.run(jax.random.key(0), num_steps, X, np.where(observed, y, np.nan), observed, progress_bar=False)

        def draws_at(inputs, guide=guide, params=result.params):
            return guide.sample_posterior(jax.random.key(1), params, inputs, sample_shape=(num_samples,))

        draws = draws_at(X)
        noise = draws["noise"][:, 2]
        log_densities = norm.logpdf(y[2, missing], draws["values"][:, 2, missing], noise)
        nlpd = -np.mean(logsumexp(log_densities, axis=0) - np.log(num_samples))
        error = np.sqrt(np.mean((np.mean(draws["values"][:, 2, missing], axis=0) - clean[2, missing]) ** 2))
        print(
            f"{name}: bound {-np.mean(result.losses[-50:]):.1f}, {sgp.num_refused(result.state)} steps refused\n"
            f"    in the gap: root mean square error {error:.2f}, negative log predictive density {nlpd:.2f}"
        )
        bands[name] = np.quantile(draws_at(X_new)["values"], [0.05, 0.5, 0.95], axis=0)

    figure, axes = plt.subplots(OUTPUTS, 1, figsize=(8, 4.6), layout="constrained", sharex=True)
    for i, ax in enumerate(axes):
        low, median, high = bands["mixtures of two"][:, i]
        ax.fill_between(X_new[:, 0], low, high, color="C0", alpha=0.35, linewidth=0, label="mixtures of two, 90 %")
        ax.plot(X_new[:, 0], median, "C0")
        ax.plot(X[observed[i], 0], y[i, observed[i]], "k.", markersize=3.5, label="measured")
        ax.set_ylabel(f"output {i + 1}")
    ax = axes[-1]
    for j, edge in enumerate(bands["a process each"][[0, 2], -1]):
        ax.plot(X_new[:, 0], edge, "C3--", linewidth=1, label="a process each, 90 %" if j == 0 else None)
    ax.plot(X[missing, 0], y[-1, missing], "o", color="k", markerfacecolor="white", markersize=3.5, label="withheld")
    ax.axvspan(*GAP, color="0.93", zorder=0)
    ax.set(xlabel="time (hours)", xlim=(0.0, 10.0))
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("coregionalisation.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(20, 50, arguments.output)
    else:
        main(1500, 1000, arguments.output)
