"""How programs are compiled, and how many have been, by JAX's own account."""

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
