"""How programs are compiled, what they take, and how many have been compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.monitoring

# Options for programs whose bits matter: optimised as those of users are, and not as
# little as `conftest.py` has it.
AS_USED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}

_events: list[str] = []


def _listen(event: str, seconds: float, **_: object) -> None:
    del seconds
    if event.endswith("backend_compile_duration"):
        _events.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


def programs_compiled() -> int:
    """How many there were so far, in this process."""
    return len(_events)


def temp_bytes(f: Callable[..., Any], *args: Any) -> int:
    """What XLA allocates for a function, beside its inputs and outputs.

    Arguments may be types, or the shapes of arrays of 32 bits.
    """
    is_shape = lambda x: isinstance(x, tuple) and x and {*map(type, x)} == {int}
    types = [jax.ShapeDtypeStruct(x, "float32") if is_shape(x) else x for x in args]
    return _compiled(f, *types).memory_analysis().temp_size_in_bytes


def taken_and_made(f: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Those bytes, and what the function gives: by one program."""
    program = _compiled(f, *args)
    return program.memory_analysis().temp_size_in_bytes, program(*args)


def _compiled(f: Callable[..., Any], *args: Any) -> Any:
    # A function of its own, so that nothing remembers the program of another call.
    return jax.jit(lambda *args: f(*args)).lower(*args).compile()
