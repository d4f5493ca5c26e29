"""MNIST digits, odd or even: the stress test of Evans and Nair (2020), section 4.

A logistic likelihood, and m random Fourier features of a squared exponential kernel with one lengthscale, which is
trained. SVGP by natural gradients and Adam comes first, with trained inducing inputs; the others start at its
hyperparameters: the paper's mean-field covariance at its mean, and a mean in the weights with a covariance of inducing
variables at its posterior. Accuracy and mean negative log probability are of the 10000 test rows;
the paper has 97.85 % and 0.068 with m = 10⁶, M = 20000 and B = 100 in 11.1 minutes on its GPU, and 0.063 with m = 10⁷.

    python benchmarks/qsgp_mnist.py --data mnist.npz [--rank 100000] [--steps 2000] [--output results]
"""

import argparse
from pathlib import Path
import time

from common import report
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp
from numpyro_sgp.math.quadrature import gauss_hermite

# Accuracy, mean negative log probability and minutes on its GPU, with m = 10⁶, M = 20000 and B = 100.
PAPER = {"accuracy": 0.9785, "nlp": 0.068, "minutes": 11.1}


def digits(data: Path | None) -> tuple[np.ndarray, ...]:
    """Pixels between 0 and 1, and whether the digit is odd."""
    if data is None:
        rng = np.random.default_rng(0)
        X = rng.uniform(size=(400, 6)).astype(np.float32)
        y, test = (X[:, 0] > X[:, 1]).astype(np.float32), np.arange(400) >= 300
    else:
        with np.load(data, allow_pickle=False) as file:
            X = file["X"].astype(np.float32) / 255.0
            y, test = (file["y"] % 2).astype(np.float32), file["test_mask"][:, 0]
    return X[~test], y[~test], X[test], y[test]


def model_of(rank: int | None, lengthscale: float):
    """A logistic GP with trained hyperparameters; with random Fourier features where a rank is given."""

    def model(X, y=None, num_data=None):
        positive = dist.constraints.positive
        scale = numpyro.param("lengthscale", lengthscale, constraint=positive)
        variance = numpyro.param("variance", 5.0, constraint=positive)
        kernel = sgp.kernels.SquaredExponential(scale, variance)
        if rank is not None:
            kernel = sgp.features.RandomFourier(kernel, rank, jax.random.key(0))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    return model


def judged(guide, params, X, y) -> tuple[float, float]:
    """Accuracy, and mean negative log probability by quadrature."""
    nodes, weights = gauss_hermite(30)
    right, logs = 0.0, 0.0
    for rows in np.array_split(np.arange(len(X)), -(-len(X) // 2000)):
        q = guide.posterior(jax.random.key(0), params, X[rows])["f"]
        f = np.asarray(q.mean)[:, None] + np.sqrt(np.asarray(q.variance))[:, None] * nodes
        probability = (1.0 / (1.0 + np.exp(-f))) @ weights
        right += np.sum((probability > 0.5) == (y[rows] > 0.5))
        logs -= np.sum(np.log(np.where(y[rows] > 0.5, probability, 1.0 - probability)))
    return right / len(y), logs / len(y)


def trained(guide, model, optim, state, data, batch: int, steps: int) -> tuple[dict, dict]:
    """Parameters and a row of the table."""
    X, y, X_test, y_test = data
    svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    clock = np.array([time.perf_counter(), time.process_time()])
    state = state(svi)
    result = sgp.fit(
        svi, jax.random.key(0), (X, y), batch_size=batch, num_steps=steps, init_state=state, progress_bar=False
    )
    jax.block_until_ready(result.losses)
    wall, cpu = np.array([time.perf_counter(), time.process_time()]) - clock
    accuracy, nlp = judged(guide, result.params, X_test, y_test)
    row = {"accuracy": accuracy, "nlp": nlp, "wall": wall, "cpu": cpu}
    row.update({name: result.params[name] for name in ("lengthscale", "variance")})
    row = {name: float(value) for name, value in row.items()}
    return result.params, {**row, "steps": steps, "refused": int(sgp.num_refused(result.state))}


def main(arguments: argparse.Namespace) -> None:
    """SVGP, then each covariance."""
    data = digits(arguments.data)
    X, y = data[:2]
    forms, settings = arguments.covariance, {**vars(arguments)}
    for name in ("data", "output", "covariance", "reduced"):
        del settings[name]
    if arguments.reduced:
        forms = ["inducing"]
        settings.update(rank=300, basis_batch=40, batch=30, steps=5, svgp_steps=5, num_inducing=10, start_rows=20)
        settings["lengthscale"] = 1.0
    rank, M, steps = settings["rank"], settings["num_inducing"], settings["steps"]
    rows: dict = {}

    def note(name: str, row: dict) -> None:
        rows[name] = row
        print(f"{name:10s}", *(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
        report("qsgp_mnist", {"settings": settings, "paper": PAPER, "rows": rows}, arguments.output)

    model, first = model_of(None, settings["lengthscale"]), (X[:512], y[:512], len(X))
    inducing = sgp.kmeans(None, X[: 20 * M], jax.random.key(0), num_inducing=M)
    svgp = sgp.AutoSVGP(model, inducing, natural=True, learn_inducing=True)
    rates = (
        optax.linear_schedule(0.1, 0.02, settings["svgp_steps"]),
        optax.cosine_decay_schedule(0.02, settings["svgp_steps"]),
    )
    optim = sgp.NaturalGradient(rates[0], optax.adam(rates[1]))
    before, row = trained(
        svgp,
        model,
        optim,
        lambda svi: svi.init(jax.random.key(0), *first),
        data,
        min(512, len(X)),
        settings["svgp_steps"],
    )
    note("svgp", row)
    Z = before["f_auto_inducing"].Z
    X_at = np.concatenate([np.asarray(Z), X[np.random.default_rng(0).permutation(len(X))[: settings["start_rows"]]]])
    mean = svgp.posterior(jax.random.key(0), before, X_at)["f"].mean
    process = sgp.process_posterior(svgp, jax.random.key(0), before, X[:2])["f"]
    for form in forms:
        model = model_of(rank, settings["lengthscale"])
        covariance = {"inducing": Z} if form == "inducing" else {"covariance": form}
        guide = sgp.AutoQSGP(model, basis_batch=settings["basis_batch"], **covariance)

        def started(svi, guide=guide, form=form):
            start = {name: before[name] for name in ("lengthscale", "variance")}
            params = svi.get_params(svi.init(jax.random.key(0), *first, init_params=start))
            if form == "inducing":
                params = guide.with_posterior(params, process)
            else:
                params = guide.with_mean(jax.random.key(0), params, mean, X_at)
            return svi.init(jax.random.key(0), *first, init_params=params)

        step_size = optax.exponential_decay(settings["step_size"], steps, 0.02)
        optim = sgp.RowSparse(step_size, optax.adam(optax.exponential_decay(1e-4, steps, 0.05)))
        note(form, trained(guide, model, optim, started, data, settings["batch"], steps)[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the digits as .npz with X, y and test_mask")
    parser.add_argument("--rank", type=int, default=100_000)
    parser.add_argument("--basis-batch", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--svgp-steps", type=int, default=2000)
    parser.add_argument("--num-inducing", type=int, default=512)
    parser.add_argument("--start-rows", type=int, default=3500, help="of the data, at which the mean starts as SVGP's")
    parser.add_argument("--step-size", type=float, default=0.03)
    parser.add_argument("--lengthscale", type=float, default=6.0)
    parser.add_argument("--covariance", nargs="*", default=["inducing", "chevron"], choices=["inducing", "chevron"])
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    options = parser.parse_args()
    if not options.reduced and options.data is None:
        parser.error("`--data` is needed; without it there is only `--reduced`.")
    main(options)
