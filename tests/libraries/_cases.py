"""Typical losses of ten libraries and more, whose long loops are the libraries' own.

None of them knows of this library. Each is long enough for its gradient to be most of
what it takes, and short enough to be run many times.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import eqloop as el

from ..weights import normal

# A loss, and what it is called with. It is differentiated by the first of these.
Loss = tuple[Callable[..., Any], tuple[Any, ...]]

CASES: list["Case"] = []


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss whose loop is in a library.

    Attributes:
        name: The library, and what of it has the loop.
        make: Imports the library, and makes the loss.
        packages: What must be installed.
        schedule: By default, a budget of a quarter of the gradient as it is.
        reference: Takes the gradient of a loss that has none in reverse mode.
        settings: For `Reschedule`, besides the schedule.
    """

    name: str
    make: Callable[[], Loss]
    packages: tuple[str, ...]
    schedule: el.AbstractSchedule | None = None
    reference: Callable[..., Any] | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages that are not installed."""
        is_missing = lambda package: importlib.util.find_spec(package) is None
        return tuple(filter(is_missing, self.packages))


def case(
    name: str,
    *packages: str,
    schedule: el.AbstractSchedule | None = None,
    reference: Callable[..., Any] | None = None,
    **settings: Any,
) -> Callable[..., Any]:
    """Puts what makes a loss among the cases."""

    def add(make: Callable[[], Loss]) -> Callable[[], Loss]:
        others = schedule, reference, tuple(settings.items())
        CASES.append(Case(name, make, packages, *others))
        return make

    return add


@case("dynamax: extended Kalman filter", "dynamax")
def _extended_kalman_filter() -> Loss:
    from dynamax.nonlinear_gaussian_ssm import (
        ParamsNLGSSM,
        extended_kalman_filter,
    )

    def loss(weights: Any, emissions: Any) -> Any:
        model = ParamsNLGSSM(
            initial_mean=jnp.zeros(16),
            initial_covariance=jnp.eye(16),
            dynamics_function=lambda z: z + 0.1 * jnp.tanh(weights["dynamics"] @ z),
            dynamics_covariance=0.1 * jnp.eye(16),
            emission_function=lambda z: jnp.sin(weights["emission"] @ z),
            emission_covariance=0.1 * jnp.eye(4),
        )
        return -extended_kalman_filter(model, emissions).marginal_loglik

    weights = {
        "dynamics": normal(0, (16, 16), scale=0.3),
        "emission": normal(1, (4, 16), scale=0.3),
    }
    return loss, (weights, normal(2, (2000, 4), scale=0.5))


@case("dynamax: Kalman filter", "dynamax")
def _kalman_filter() -> Loss:
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    model = LinearGaussianSSM(state_dim=16, emission_dim=4)
    start, _ = model.initialize(
        jax.random.key(0),
        dynamics_weights=0.9 * jnp.eye(16),
        emission_weights=normal(1, (4, 16), scale=0.3),
    )
    loss = lambda parameters, emissions: -model.marginal_log_prob(parameters, emissions)
    return loss, (start, normal(2, (3000, 4)))


@case("dynamax: hidden Markov model", "dynamax")
def _hidden_markov_model() -> Loss:
    from dynamax.hidden_markov_model import hmm_filter

    def loss(logits: Any, observed: Any) -> Any:
        emissions = jax.nn.log_softmax(logits["emissions"], axis=0)
        start = jax.nn.softmax(logits["start"])

        def transitions(time: Any) -> Any:
            season = jnp.sin(0.01 * time) * logits["season"]
            return jax.nn.softmax(logits["transitions"] + season)

        likelihoods = emissions[observed]
        posterior = hmm_filter(start, None, likelihoods, transition_fn=transitions)
        return -posterior.marginal_loglik

    logits = {
        "start": jnp.zeros(32),
        "transitions": normal(0, (32, 32)),
        "season": normal(1, (32, 32)),
        "emissions": normal(2, (8, 32)),
    }
    return loss, (logits, jnp.arange(3000) ** 2 % 7)


@case("distrax: hidden Markov model", "distrax")
def _distrax_hmm() -> Loss:
    import distrax

    def loss(parameters: Any, observed: Any) -> Any:
        model = distrax.HMM(
            init_dist=distrax.Categorical(logits=parameters["start"]),
            trans_dist=distrax.Categorical(logits=parameters["transitions"]),
            obs_dist=distrax.Normal(parameters["means"], 1.0),
        )
        return -model.forward(observed)[0]

    parameters = {
        "start": jnp.zeros(32),
        "transitions": normal(0, (32, 32)),
        "means": normal(1, (32,), scale=2.0),
    }
    return loss, (parameters, normal(2, (20_000,)))


@case("Flax NNX: RNN of an LSTM", "flax")
def _nnx_rnn() -> Loss:
    from flax import nnx

    model = nnx.RNN(nnx.LSTMCell(32, 64, rngs=nnx.Rngs(0)), return_carry=True)
    structure, weights, others = nnx.split(model, nnx.Param, ...)

    def loss(weights: Any, others: Any, xs: Any) -> Any:
        (_, h), _ = nnx.merge(structure, weights, others, copy=True)(xs)
        return jnp.mean(h**2)

    return loss, (weights, others, normal(0, (16, 1000, 32)))


@case("Flax Linen: scan of a GRU", "flax")
def _linen_scan() -> Loss:
    from flax import linen as nn

    scanned = nn.scan(
        nn.GRUCell,
        variable_broadcast="params",
        split_rngs={"params": False},
        in_axes=1,
        out_axes=1,
    )
    model = scanned(features=64)
    start, xs = jnp.zeros((16, 64)), normal(0, (16, 1000, 32))
    weights = model.init(jax.random.key(0), start, xs[:, :1])

    def loss(weights: Any, xs: Any) -> Any:
        last, _ = model.apply(weights, start, xs)
        return jnp.mean(last**2)

    return loss, (weights, xs)


@case("haliax: fold", "haliax")
def _haliax_fold() -> Loss:
    import haliax as hax

    Time, Batch, Hidden = hax.make_axes(time=1000, batch=16, hidden=64)
    Before = Hidden.alias("before")

    def loss(weights: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            before = h.rename({"hidden": "before"})
            pre = {k: hax.dot(before, w, axis=Before) + x for k, w in weights.items()}
            gate = hax.nn.sigmoid(pre["gate"])
            return gate * h + (1 - gate) * hax.tanh(pre["value"])

        last = hax.fold(step, Time)(hax.zeros((Batch, Hidden)), xs)
        return hax.mean(last**2).scalar()

    weights = {
        name: hax.named(normal(i, (64, 64), scale=0.1), (Before, Hidden))
        for i, name in enumerate(("gate", "value"))
    }
    xs = hax.named(normal(2, (1000, 16, 64)), (Time, Batch, Hidden))
    return loss, (weights, xs)


@case("NumPyro: scan", "numpyro")
def _numpyro_scan() -> Loss:
    import numpyro
    from numpyro import distributions as dist
    from numpyro.contrib.control_flow import scan
    from numpyro.infer.util import log_density

    def weights(name: str, *shape: int) -> Any:
        prior = dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape))
        return numpyro.sample(name, prior)

    def model(observed: Any) -> None:
        inner, gate, outer = (
            weights("inner", 64, 64),
            weights("gate", 64, 64),
            weights("outer", 64, 4),
        )

        def step(h: Any, y: Any) -> Any:
            z = jax.nn.sigmoid(h @ gate)
            h = z * h + (1 - z) * jnp.tanh(h @ inner + jnp.tile(y, 16))
            mean = h @ outer
            numpyro.sample("y", dist.StudentT(4.0, mean).to_event(1), obs=y)
            return h, None

        scan(step, jnp.zeros(64), observed)

    def loss(parameters: Any, observed: Any) -> Any:
        return -log_density(model, (observed,), {}, parameters)[0]

    parameters = {
        "inner": normal(0, (64, 64), scale=0.1),
        "gate": normal(1, (64, 64), scale=0.1),
        "outer": normal(2, (64, 4), scale=0.1),
    }
    return loss, (parameters, normal(3, (10_000, 4)))


@case("gymnax: rollout of a pendulum", "gymnax")
def _gymnax_rollout() -> Loss:
    from gymnax.experimental.rollout import RolloutWrapper

    def policy(weights: Any, observed: Any, key: Any) -> Any:
        del key
        hidden = jnp.tanh(observed @ weights["in"])
        return jnp.tanh(hidden @ weights["out"])

    rollout = RolloutWrapper(policy, env_name="Pendulum-v1", num_env_steps=200)

    def loss(weights: Any, keys: Any) -> Any:
        *_, returns = rollout.batch_rollout(keys, weights)
        return -jnp.mean(returns)

    weights = {
        "in": normal(0, (3, 64), scale=0.5),
        "out": normal(1, (64, 1), scale=0.1),
    }
    return loss, (weights, jax.random.split(jax.random.key(0), 128))


@case("Brax: unroll of a double pendulum", "brax")
def _brax_unroll() -> Loss:
    from brax import envs
    from brax.training.acting import generate_unroll

    pendulum = envs.get_environment("inverted_double_pendulum", backend="spring")
    env = envs.training.wrap(pendulum, episode_length=1000)

    def loss(weights: Any, state: Any, key: Any) -> Any:
        def policy(observed: Any, key: Any) -> Any:
            del key
            hidden = jnp.tanh(observed @ weights["in"])
            return jnp.tanh(hidden @ weights["out"]), {}

        _, data = generate_unroll(env, state, policy, key, unroll_length=100)
        return -jnp.mean(data.reward)

    size, actions = env.observation_size, env.action_size
    weights = {
        "in": normal(0, (size, 32), scale=0.1),
        "out": normal(1, (32, actions), scale=0.1),
    }
    state = jax.jit(env.reset)(jax.random.split(jax.random.PRNGKey(0), 32))
    return loss, (weights, state, jax.random.PRNGKey(1))


@case("JAX MD: simulation of soft spheres", "jax_md")
def _jax_md_simulation() -> Loss:
    from jax import lax
    from jax_md import energy, simulate, space

    displacement, shift = space.periodic(8.0)

    def loss(parameters: Any, positions: Any) -> Any:
        spheres = energy.soft_sphere_pair(displacement, **parameters)
        init, apply = simulate.nvt_nose_hoover(spheres, shift, dt=5e-3, kT=0.5)
        state = init(jax.random.key(0), positions)
        state = lax.fori_loop(0, 300, lambda _, state: apply(state), state)
        return spheres(state.position)

    parameters = {"sigma": jnp.float32(1.0), "epsilon": jnp.float32(1.0)}
    grid = jnp.stack(jnp.meshgrid(jnp.arange(8.0), jnp.arange(8.0)), -1)
    return loss, (parameters, grid.reshape(-1, 2) + normal(0, (64, 2), scale=0.05))


@case("tinygp: quasiseparable Gaussian process", "tinygp")
def _tinygp() -> Loss:
    import functools
    import operator

    from tinygp import GaussianProcess
    from tinygp.kernels import quasisep

    def loss(parameters: Any, times: Any, observed: Any) -> Any:
        modes = zip(*jax.tree.map(jnp.exp, parameters), strict=True)
        kernel = functools.reduce(operator.add, (quasisep.SHO(*mode) for mode in modes))
        process = GaussianProcess(kernel, times, diag=0.1)
        return -process.log_probability(observed)

    # Frequencies, qualities and amplitudes of the modes of a star.
    parameters = normal(0, (8,)), jnp.full(8, 1.0), jnp.full(8, -1.0)
    times = jnp.linspace(0.0, 200.0, 4000)
    return loss, (parameters, times, jnp.sin(times) + normal(1, (4000,), scale=0.1))


def _forward(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The value and the gradient, by forward mode."""

    def run(parameters: Any, *args: Any) -> Any:
        of = lambda parameters: loss(parameters, *args)
        return of(parameters), jax.jacfwd(of)(parameters)

    return run


@case("Optax: L-BFGS", "optax")
def _optax_lbfgs() -> Loss:
    import optax

    return _tuned(optax.lbfgs(0.02, memory_size=8, linesearch=None), steps=100)


@case(
    "Optax: L-BFGS with a line search",
    "optax",
    schedule=el.Recursive(16),
    reference=_forward,
    whiles=16,
)
def _optax_line_search() -> Loss:
    import optax

    search = optax.scale_by_backtracking_linesearch(15)
    return _tuned(optax.lbfgs(memory_size=8, linesearch=search), steps=20)


def _tuned(solver: Any, steps: int) -> Loss:
    """The error of a fit, as it depends on what is penalised how much."""
    import optax
    from jax import lax

    def loss(penalty: Any, features: Any, targets: Any) -> Any:
        def objective(weights: Any) -> Any:
            error = jnp.tanh(features @ weights) - targets
            return jnp.mean(error**2) + jnp.sum(jnp.exp(penalty) * weights**2)

        def step(carry: Any, _: Any) -> Any:
            weights, state = carry
            value, grad = jax.value_and_grad(objective)(weights)
            updates, state = solver.update(
                grad, state, weights, value=value, grad=grad, value_fn=objective
            )
            return (optax.apply_updates(weights, updates), state), value

        # At zero, the first step of Optax's L-BFGS has a gradient that is not finite.
        start = jnp.full(features.shape[1], 0.1)
        (weights, _), _ = lax.scan(step, (start, solver.init(start)), length=steps)
        return jnp.mean((features @ weights - targets) ** 2)

    features, targets = normal(0, (256, 512)), jnp.tanh(normal(1, (256,)))
    return loss, (jnp.full(512, -3.0), features, targets)


@case("BlackJAX: Hamiltonian Monte Carlo", "blackjax")
def _blackjax_hmc() -> Loss:
    import blackjax
    from blackjax.util import run_inference_algorithm

    def loss(parameters: Any, start: Any, key: Any) -> Any:
        density = lambda x: (
            -jnp.sum(jnp.logaddexp(0.0, (x @ parameters["mixing"]) ** 2))
            - 0.5 * jnp.sum(x**2)
        )
        kernel = blackjax.hmc(
            density,
            step_size=jnp.exp(parameters["step size"]),
            inverse_mass_matrix=jnp.ones(64),
            num_integration_steps=8,
        )
        _, samples = run_inference_algorithm(
            key,
            kernel,
            num_steps=500,
            initial_position=start,
            transform=lambda state, _: jnp.mean(state.position**2),
        )
        return jnp.mean(samples)

    parameters = {
        "mixing": normal(0, (64, 64), scale=0.1),
        "step size": jnp.float32(-2.0),
    }
    return loss, (parameters, jnp.zeros(64), jax.random.key(0))
