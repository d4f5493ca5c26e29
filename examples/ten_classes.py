"""Ten classes of handwritten digits: ten latent processes with one kernel, softmax likelihood, minibatches.

3000 images to train, 1000 to test. Compares a smooth kernel of the pixels with a linear one, which is Bayesian softmax
regression. Draws the images with the least confident predictions, and how well the probabilities are calibrated.

    python examples/ten_classes.py [--smoke] [--output ten_classes.png]
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

CLASSES = 10


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pixels, 14 × 14 between 0 and 1, and labels: of the training set, then of the test set."""
    with np.load(Path(__file__).parent / "data" / "digits.npz") as file:
        X, y, test = file["X"] / np.float32(255.0), file["y"].astype(np.int32), file["test"]
    return X[~test], y[~test], X[test], y[test]


def smooth():
    lengthscale = numpyro.param("lengthscale", 3.0, constraint=dist.constraints.positive)
    variance = numpyro.param("variance", 20.0, constraint=dist.constraints.positive)
    return sgp.kernels.SquaredExponential(lengthscale, variance)


def linear():
    variance = numpyro.param("variance", 0.05, constraint=dist.constraints.positive)
    return sgp.kernels.Linear(variance) + sgp.kernels.Constant(1.0)


def model(X, y=None, num_data=None, *, kernel=smooth):
    """Labels y ~ Categorical(softmax(f_1(x) … f_10(x))): one kernel, so one factorisation for all ten."""
    k = kernel()
    with numpyro.plate("class", CLASSES):
        f = numpyro.sample("f", sgp.GaussianProcess(k, X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


def fit(kernel, num_inducing: int, num_steps: int, X, y):
    """The guide and its parameters, by minibatches of 200."""
    fitted = partial(model, kernel=kernel)
    # In 196 dimensions 200 images represent few of the others, so the inducing images are trained from k-means on.
    guide = sgp.AutoTSVGP(fitted, sgp.kmeans(None, X, num_inducing=num_inducing), learn_inducing=True)
    # Natural steps on minibatches are noisy in proportion to ρ, so it decreases.
    rates = optax.cosine_decay_schedule(0.1, num_steps, 0.1), optax.cosine_decay_schedule(0.05, num_steps)
    optim = sgp.NaturalGradient(rates[0], optax.adam(rates[1]))
    svi = SVI(fitted, guide, optim, sgp.QuadratureELBO(num_samples=16))
    result = sgp.fit(svi, jax.random.key(0), (X, y), batch_size=200, num_steps=num_steps, progress_bar=False)
    return guide, result


def probabilities(rng_key, guide, params, X, num_samples: int) -> np.ndarray:
    """p(y | x) for each row, (N, 10): the softmax averaged over draws of the ten latents."""
    q = guide.posterior(rng_key, params, X)["f"]
    z = jax.random.normal(rng_key, (num_samples, *q.mean.shape), q.mean.dtype)
    return np.asarray(jax.nn.softmax(q.mean + jnp.sqrt(q.variance) * z, axis=1).mean(axis=0).T)


def reliability(p: np.ndarray, y: np.ndarray, num_bins: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean confidence, share of right answers and its standard error, in bins of equally many rows."""
    confidence, right = p.max(axis=1), p.argmax(axis=1) == y
    bins = np.array_split(np.argsort(confidence), num_bins)
    means = np.array([[confidence[rows].mean(), right[rows].mean()] for rows in bins])
    sizes = np.array([len(rows) for rows in bins])
    return means[:, 0], means[:, 1], np.sqrt(means[:, 0] * (1.0 - means[:, 0]) / sizes)


def main(num_inducing: int, num_steps: int, num_samples: int, output: Path) -> None:
    """Fit both kernels, score them on the test set, draw the figure."""
    X, y, X_test, y_test = digits()
    p = {}
    for name, kernel in {"linear": linear, "smooth": smooth}.items():
        guide, result = fit(kernel, num_inducing, num_steps, X, y)
        p[name] = probabilities(jax.random.key(1), guide, result.params, X_test, num_samples)
        nlpd = -np.log(p[name][np.arange(len(y_test)), y_test]).mean()
        accuracy = np.mean(p[name].argmax(axis=1) == y_test)
        print(
            f"{name:6s} bound {-np.mean(result.losses[-20:]):8.1f}, {sgp.num_refused(result.state)} steps refused; "
            f"test: accuracy {accuracy:.3f}, negative log predictive density {nlpd:.3f}"
        )

    best = p["smooth"]
    order = np.argsort(-np.sum(best * np.log(best), axis=1))  # the surest first, by entropy
    shown = np.concatenate([order[[10, 150]], order[:-6:-1]])
    figure = plt.figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2.2, 1))
    axes = left.subplots(2, len(shown), height_ratios=(1, 1), sharey="row")
    for (image, bars), row in zip(axes.T, shown, strict=True):
        image.imshow(X_test[row].reshape(14, 14), cmap="gray_r")
        image.set_axis_off()
        bars.bar(range(CLASSES), best[row], color=["C0" if c == y_test[row] else "0.7" for c in range(CLASSES)])
        bars.set(xticks=(0, 3, 6, 9), ylim=(0, 1))
        bars.tick_params(labelsize=7)
        bars.spines[["top", "right"]].set_visible(False)
    axes[1, 0].set_ylabel("probability")
    left.supxlabel("digit (blue: the label)", fontsize="medium")
    axes[0, 0].set_title("two it is sure of", fontsize=9, loc="left")
    axes[0, 2].set_title("the five it is least sure of", fontsize=9, loc="left")

    ax = right.subplots()
    ax.plot([0.4, 1.0], [0.4, 1.0], color="0.8", zorder=0)
    for (name, value), style in zip(p.items(), ("C3s--", "C0o-"), strict=True):
        confidence, share, error = reliability(value, y_test)
        ax.errorbar(confidence, share, 2.0 * error, fmt=style, markersize=4, capsize=2, label=name)
    ax.set(
        xlabel="probability of the likeliest digit", ylabel="share of right answers", xlim=(0.4, 1.03), ylim=(0.4, 1.06)
    )
    ax.legend(frameon=False, loc="upper left")
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("ten_classes.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(20, 10, 50, arguments.output)
    else:
        main(200, 1000, 1000, arguments.output)
