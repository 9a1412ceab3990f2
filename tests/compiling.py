"""How many programs have been compiled, by JAX's own account."""

import jax.monitoring

_events: list[str] = []


def _listen(event: str, seconds: float, **_: object) -> None:
    del seconds
    if event.endswith("backend_compile_duration"):
        _events.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


def programs_compiled() -> int:
    """How many there were so far, in this process."""
    return len(_events)
