"""Five wrong values for every public parameter: each is one clear error of ours.

The parameters are those of the public signatures. What a parameter can be follows from
its name, which means the same everywhere. A new parameter needs an entry in `WRONG`, or
in `ANY` if it may be any tree.
"""

import contextlib
import inspect
import traceback
import types
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import eqloop as el

from ..mapping.devices import mesh_of

ARRAY, OBJECT, TEXT = jnp.ones(3), object(), "nonsense"
NO_FUNCTIONS = (3.5, TEXT, None, ARRAY, {"a": 1})
NO_COUNTS = (3.5, TEXT, OBJECT, ARRAY, -1)
NO_SIZES = (3.5, TEXT, OBJECT, ARRAY, 0)
NO_BOOLS = (3.5, TEXT, None, ARRAY, 2)
NO_AXES = (3.5, TEXT, OBJECT, 1j, b"x")
NO_BYTES = (3.5, TEXT, OBJECT, ARRAY, -1)
NO_NAMES = (3.5, OBJECT, ARRAY, {"a": 1}, 7)
NO_PATHS = (3.5, OBJECT, ARRAY, {"a": 1}, 7)
NO_KEYS = (0, 3.5, TEXT, OBJECT, ARRAY)
NO_DEVICES = (3.5, TEXT, OBJECT, ARRAY, -7)
NO_JAXPRS = (3.5, TEXT, OBJECT, ARRAY, jnp.sin)
NO_SCHEDULES = (3, TEXT, OBJECT, ARRAY, jnp.sin)
NO_SPECS = (3.5, TEXT, OBJECT, 1j, ARRAY)
NO_LISTS = (3.5, OBJECT, ARRAY, 7, None)


def each(names: str, values: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), values)


WRONG: dict[str, tuple[Any, ...]] = {
    **each("f cond body true_f false_f inverse make loss handler", NO_FUNCTIONS),
    **each("block chunk_size batch every unroll checkpoints batch_size", NO_SIZES),
    **each("keep tangents whiles", NO_SIZES),
    **each("length max_steps axis_size depth start stop step steps", NO_COUNTS),
    "constant_limit": NO_COUNTS,
    "base": (3.5, TEXT, OBJECT, ARRAY, 1),
    **each("reverse split_keys has_aux return_value holomorphic", NO_BOOLS),
    **each(
        "check_vma check_conditions measure foreign split prevent_cse interpret",
        NO_BOOLS,
    ),
    **each("in_axes out_axes f_axes axis argnums", NO_AXES),
    **each("nbytes budget total host disk", NO_BYTES),
    **each("name desc msg memory_kind names src dst", NO_NAMES),
    **each("directory path", NO_PATHS),
    **each("in_specs out_specs", NO_SPECS),
    **each("branches layers eqns", NO_LISTS),
    **each("invars outvars constvars consts", (3.5, TEXT, OBJECT, 7, ARRAY)),
    "save": (3.5, TEXT, OBJECT, ARRAY, 7),
    "key": NO_KEYS,
    "device": NO_DEVICES,
    "jaxpr": NO_JAXPRS,
    "schedule": NO_SCHEDULES,
    "policy": (3, TEXT, OBJECT, ARRAY, 1j),
    "f_transform": (3.5, TEXT, OBJECT, ARRAY, 7),
    "backward": (3.5, TEXT, OBJECT, ARRAY, el.Truncate),
    "progress": (3.5, TEXT, OBJECT, ARRAY, -7),
    "reduce": (3.5, TEXT, OBJECT, 1j, b"x"),
    "dtype": (TEXT, OBJECT, 3.5, {"a": 1}, "int32"),
    "max_norm": (TEXT, OBJECT, ARRAY, -1.0, None),
    "damping": (TEXT, OBJECT, {"a": 1}, -1.0, None),
    "log": (3.5, TEXT, OBJECT, 7, jnp.ones(2, int)),
    "donate": (3.5, TEXT, OBJECT, None, True),
    "mesh": (3.5, TEXT, OBJECT, ARRAY, 7),
    "devices": (3.5, TEXT, OBJECT, ARRAY, 7),
    "axis_name": ({1}, ARRAY, {"a": 1}, [1], bytearray(b"x")),
    "axis_names": (3.5, ARRAY, OBJECT, {"nonsense"}, TEXT),
    "static_argnums": (3.5, TEXT, OBJECT, ARRAY, 7),
    "only": (3.5, TEXT, OBJECT, ARRAY, 7),
    "op": (3.5, TEXT, OBJECT, None, 7),
    "where": (3.5, OBJECT, ARRAY, 7, None),
    "when": (3.5, TEXT, OBJECT, ARRAY, None),
    "loop": (3.5, TEXT, OBJECT, ARRAY, jnp.sin),
    "primals": (3.5, OBJECT, 7, None, TEXT),
    "ys": (3.5, TEXT, OBJECT, None, 7),
    "check": (3.5, TEXT, OBJECT, ARRAY, 7),
    "index": (3.5, TEXT, OBJECT, None, jnp.ones(3, int)),
    "pred": (TEXT, OBJECT, None, jnp.ones(3, bool), 3.5),
    "conditions": (TEXT, OBJECT, None, 3.5, [jnp.array(True)]),
    "passes": (3.5, OBJECT, 7, None, TEXT),
    "condition": (3.5, TEXT, OBJECT, ARRAY, 7),
    "report": (3.5, TEXT, OBJECT, ARRAY, 7),
    "primitive": (3.5, OBJECT, None, ARRAY, 7),
    "first": (3.5, TEXT, OBJECT, ARRAY, 1j),
    "second": (3.5, TEXT, OBJECT, ARRAY, 1j),
}
ANY = each(
    "init xs args kwargs x tree operands keywords cotangent prediction settings target",
    (),
)
# `total` of a bar is a number of steps; steps may be counted from the end.
OTHERWISE = {
    ("ProgressBar", "total"): NO_COUNTS,
    ("SlicedScan", "start"): (3.5, TEXT, OBJECT, ARRAY, True),
    ("SlicedScan", "stop"): (3.5, TEXT, OBJECT, ARRAY, True),
    ("SlicedScan", "step"): (3.5, TEXT, OBJECT, ARRAY, 0),
    ("StackedLayers.init", "key"): NO_KEYS,
    ("ClipCotangent", "log"): NO_BOOLS,
    ("ir.to_python", "constant_limit"): (3.5, TEXT, OBJECT, ARRAY, True),
    ("ir.jaxpr_to_python", "constant_limit"): (3.5, TEXT, OBJECT, ARRAY, True),
    ("Jvp.__call__", "tangents"): (3.5, OBJECT, 7, None, TEXT),
    # Numbers are conditions, as for `jax.lax.cond`; one that is any of an array's.
    ("Cond.__call__", "pred"): (TEXT, OBJECT, None, jnp.ones(3, bool), 1j),
    ("error_if", "pred"): (TEXT, OBJECT, None, {"a": 1}, 1j),
    ("breakpoint_if", "pred"): (TEXT, OBJECT, None, {"a": 1}, 1j),
}


class Spec(NamedTuple):
    """How something public is made, and called: what is needed for that."""

    settings: Mapping[str, Any] = MappingProxyType({})
    calls: Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = MappingProxyType(
        {}
    )


def step(h, x):
    return h + x, h


def halves(h):
    return h / 2


def is_large(h):
    return jnp.sum(h) > 1


def total(x):
    return jnp.sum(x**2)


class Layer(eqx.Module):
    scale: jax.Array

    def __call__(self, x):
        return self.scale * x


def make_layer(key):
    return Layer(jax.random.normal(key, (3,)))


XS = jnp.ones((4, 3))
OF_A_SCAN = {name: ((ARRAY, XS), {}) for name in ("__call__", "plan", "empty_log")}
OF_ROWS = {"__call__": ((XS,), {})}
ON_ARRAY = {"__call__": ((ARRAY,), {})}
MESH = mesh_of(data=2)
LOGGED = dict(f=step, backward=el.ClipCotangent(1.0, log=True))
JAXPR = jax.make_jaxpr(jax.jit(total))(ARRAY)
SPECS = {
    "Scan": Spec(LOGGED, OF_A_SCAN),
    "CheckpointedScan": Spec(LOGGED, OF_A_SCAN),
    "SlicedScan": Spec(LOGGED, OF_A_SCAN),
    "ScanWhile": Spec({**LOGGED, "cond": is_large, "max_steps": 4}, OF_A_SCAN),
    "ForLoop": Spec(dict(f=total), {m: ((XS,), {}) for m in ("__call__", "plan")}),
    "CheckpointedForLoop": Spec(
        dict(f=total), {m: ((XS,), {}) for m in ("__call__", "plan")}
    ),
    "WhileLoop": Spec(dict(cond=is_large, body=halves), ON_ARRAY),
    "BoundedWhileLoop": Spec(dict(cond=is_large, body=halves, max_steps=4), ON_ARRAY),
    "CheckpointedWhileLoop": Spec(dict(cond=is_large, body=halves), ON_ARRAY),
    "AssociativeScan": Spec(dict(f=jnp.add), OF_ROWS),
    "StackedLayers": Spec(
        dict(layers=Layer(XS)),
        {
            "__call__": ((ARRAY,), {}),
            "plan": ((ARRAY,), {}),
            "scan": ((ARRAY,), {}),
            "init": ((make_layer, 3), dict(key=jax.random.key(0))),
            "from_layers": (([Layer(ARRAY)] * 2,), {}),
        },
    ),
    "Reschedule": Spec(
        dict(f=total), {"__call__": ((ARRAY,), {}), "plans": ((ARRAY,), {})}
    ),
    "Fit": Spec(dict(f=total, budget="1MB"), ON_ARRAY),
    "Vmap": Spec(dict(f=total), OF_ROWS),
    "ChunkedVmap": Spec(dict(f=total, chunk_size=2), OF_ROWS),
    "Map": Spec(dict(f=total), OF_ROWS),
    "ParallelMap": Spec(dict(f=total), OF_ROWS),
    "ShardMap": Spec(
        dict(f=jnp.sin, mesh=MESH, in_specs=P("data"), out_specs=P("data")), OF_ROWS
    ),
    "Cond": Spec(
        dict(true_f=total, false_f=total), {"__call__": ((jnp.array(True), ARRAY), {})}
    ),
    "Switch": Spec(
        dict(branches=[total, total]), {"__call__": ((jnp.array(0), ARRAY), {})}
    ),
    "IfElse": Spec(
        dict(branches=[total, total]),
        {"__call__": (([jnp.array(True), jnp.array(False)], ARRAY), {})},
    ),
    **dict.fromkeys(
        ("Grad", "JacFwd", "JacRev", "Jacobian", "Hessian", "VectorGrad", "Vjp"),
        Spec(dict(f=total), ON_ARRAY),
    ),
    **dict.fromkeys(
        ("Remat", "Jit", "EvalShape", "Trace", "DebugNonFinite", "Optimize"),
        Spec(dict(f=total), ON_ARRAY),
    ),
    "Named": Spec(dict(f=total, name="a name"), ON_ARRAY),
    "ForwardGrad": Spec(
        dict(f=total), {"__call__": ((ARRAY,), dict(key=jax.random.key(0)))}
    ),
    "SofoGrad": Spec(
        dict(f=lambda x: el.losses.mean_squared(x, ARRAY)),
        {"__call__": ((ARRAY,), dict(key=jax.random.key(0)))},
    ),
    "SofoLoss": Spec(dict(f=total), ON_ARRAY),
    "Jvp": Spec(dict(f=total), {"__call__": (((ARRAY,), (ARRAY,)), {})}),
    "Binomial": Spec(dict(checkpoints=3)),
    "Recursive": Spec({}),
    "Chunked": Spec(dict(chunk_size=3)),
    "Fused": Spec({}),
    "Budget": Spec(dict(nbytes="1MB")),
    "Cast": Spec(dict(schedule=el.Chunked(2), dtype="bfloat16")),
    "Offload": Spec(dict(schedule=el.Chunked(2))),
    "Spill": Spec(dict(schedule=el.Chunked(2), directory="slots")),
    "StoreLast": Spec(dict(schedule=el.Chunked(2), steps=2)),
    "Reversible": Spec(dict(inverse=lambda h, x: h - x)),
    "Truncate": Spec(dict(every=3)),
    "ClipCotangent": Spec(dict(max_norm=3.0)),
    "ProgressBar": Spec({}),
    "Resumable": Spec(dict(f=el.Scan(step), directory="state", every=2)),
    "plans": Spec(dict(f=total)),
    "memory_profile": Spec(dict(f=total)),
    "planning_for": Spec(dict(device="h100")),
    "accumulating_in": Spec(dict(dtype="float32")),
    "measurements": Spec(dict(path=None)),
    "find_leaves": Spec(dict(tree=XS, where=jax.Array)),
    "unvmap": Spec(dict(x=jnp.array(True))),
    "name": Spec(dict(x=ARRAY, name="x")),
    "error_if": Spec(dict(x=ARRAY, pred=jnp.array(False), msg="wrong")),
    "breakpoint_if": Spec(dict(pred=jnp.array(False))),
    "policies.either": Spec(
        dict(first=el.policies.save_dots, second=el.policies.save_names("a"))
    ),
    "policies.save_names": Spec({}),
    "policies.save_any_except": Spec({}),
    "policies.offload_names": Spec({}),
    "losses.mean_squared": Spec(dict(prediction=ARRAY, target=ARRAY)),
    "ir.draw": Spec(dict(f=total)),
    "ir.to_python": Spec(dict(f=total)),
    "ir.optimize": Spec(dict(jaxpr=JAXPR)),
    "ir.inline_jit": Spec(dict(jaxpr=JAXPR)),
    "ir.constant_fold": Spec(dict(jaxpr=JAXPR)),
    "ir.eliminate_common_subexpressions": Spec(dict(jaxpr=JAXPR)),
    "ir.eliminate_dead_code": Spec(dict(jaxpr=JAXPR)),
    "ir.jaxpr_to_python": Spec(dict(jaxpr=JAXPR)),
    "ir.propagate_copies": Spec(dict(jaxpr=JAXPR)),
    "ir.simplify_algebra": Spec(dict(jaxpr=JAXPR)),
    "ir.to_dot": Spec(dict(jaxpr=JAXPR)),
    "ir.to_pydot": Spec(dict(jaxpr=JAXPR)),
    "ir.eqns_to_jaxpr": Spec(dict(eqns=JAXPR.eqns)),
    "ir.eqns_to_closed_jaxpr": Spec(dict(eqns=JAXPR.eqns, consts=())),
    "ir.register_handler": Spec(dict(primitive="nonsense", handler=str)),
}
# What users are given, or what JAX and the library call.
NOT_CALLED = {
    *(
        "MemoryProfile",
        "FitFrontier",
        "FitPlan",
        "MapPlan",
        "FittedPart",
        "ForeignLoop",
        "Layout",
        "LoopSpec",
        "Plan",
        "Pinned",
    ),
    *(
        "Traced",
        "NonFiniteError",
        "NotInKernelError",
        "StoreAll",
        "Checkpoint",
        "losses.cross_entropy",
    ),
    *("ir.Drawing", "ir.Report", "ir.Optimize", "policies.Policy", "policies.name"),
    *("policies.as_policy", "policies.save_dots", "policies.save_dots_without_batch"),
    *("policies.save_everything", "policies.save_nothing"),
}


def public(namespace: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in namespace.__all__:
        value = getattr(namespace, name)
        if isinstance(value, types.ModuleType):
            yield from public(value, f"{prefix}{name}.")
        elif callable(value) and not name.startswith("Abstract"):
            yield prefix + name, value


PUBLIC = dict(public(el))


def cases() -> Iterator[Any]:
    """What is called, where, with which parameter: made by its settings, or called."""
    for name, spec in SPECS.items():
        made = PUBLIC[name]
        maker = made.__init__ if isinstance(made, type) else made
        for p in inspect.signature(maker).parameters.values():
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                yield name, None, p.name
        for method in spec.calls:
            for p in inspect.signature(getattr(made, method)).parameters.values():
                if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                    yield name, method, p.name


# `ways` is what `Fit.plan` has decided.
CASES = [case for case in cases() if case[2] not in {*ANY, "self", "cls", "ways"}]


def test_everything_public_is_here():
    assert PUBLIC.keys() - SPECS.keys() == NOT_CALLED
    names = {parameter for _, _, parameter in CASES}
    assert names - WRONG.keys() == set()


def call(name: str, method: str | None, parameter: str, value: Any) -> None:
    spec, made = SPECS[name], PUBLIC[name]
    if method is None:
        result = made(**{**spec.settings, parameter: value})
        if isinstance(made, type):
            use(result, spec)
        elif isinstance(result, contextlib.AbstractContextManager):
            result.__enter__()
        return
    args, kwargs = spec.calls[method]
    names = list(inspect.signature(getattr(made, method)).parameters)
    names = [p for p in names if p not in ("self", "cls")]
    args = list(args)
    if parameter in names[: len(args)]:
        args[names.index(parameter)] = value
    else:
        kwargs = {**kwargs, parameter: value}
    owner = made if method in ("init", "from_layers") else made(**spec.settings)
    getattr(owner, method)(*args, **kwargs)


def use(made: Any, spec: Spec) -> None:
    if "__call__" in spec.calls:
        args, kwargs = spec.calls["__call__"]
        made(*args, **kwargs)


def problems(error: Exception, parameter: str) -> Iterator[str]:
    said = str(error)
    if type(error).__name__ not in ("TypeError", "ValueError"):
        yield f"it is a {type(error).__name__}"
    if error.__cause__ or (error.__context__ and not error.__suppress_context__):
        yield "it is one of a chain"
    if "Type-check error" in said or "typing." in said or "beartype" in said:
        yield "its words are those of beartype"
    if parameter not in said:
        yield "it does not name the parameter"
    frames = traceback.extract_tb(error.__traceback__)
    places = [f.filename.replace("\\", "/") for f in frames]
    ours = [p for p in places if "/eqloop/" in p or p == "<string>"]
    # A context is entered by Python, and says so there.
    is_context = any(p.endswith("/contextlib.py") for p in places)
    if ours and not is_context:
        yield f"{len(ours)} frames of its traceback are ours"


@pytest.mark.parametrize("case", CASES, ids=lambda c: ".".join(filter(None, c)))
def test_wrong_values(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, method, parameter = case
    where = name if method is None else f"{name}.{method}"
    found = []
    for value in OTHERWISE.get((where, parameter), WRONG[parameter]):
        try:
            call(name, method, parameter, value)
        except Exception as error:
            wrong = list(problems(error, parameter))
            if wrong:
                found.append(f"{value!r}: {', '.join(wrong)}:\n{str(error)[:300]}")
        else:
            found.append(f"{value!r}: it is accepted")
    assert not found, "\n".join(found)
