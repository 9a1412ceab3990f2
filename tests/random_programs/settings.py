"""Random settings of transforms."""

import random
import tempfile
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import eqloop as el

from .operations import TAG
from .transforms import Transform

SCHEDULES = ("StoreAll", "Recursive", "Chunked", "Binomial", "Budget")
AROUND = ("Offload", "Cast", "Spill")
POLICIES = ("save_nothing", "save_everything", "save_dots", "save_dots_without_batch")


def schedule(rng: random.Random, length: int, kind: str | None = None) -> Any:
    kind = kind or rng.choice([*SCHEDULES, *AROUND, "default"])
    if kind == "default":
        return None
    if kind == "StoreAll":
        return el.StoreAll()
    if kind == "Recursive":
        return el.Recursive(rng.randint(2, 4), batch=rng.choice([None, 1, 2, 3]))
    if kind == "Chunked":
        return el.Chunked(rng.randint(1, max(length, 1) + 1), batch=rng.randint(1, 3))
    if kind == "Binomial":
        block = rng.randint(1, max(length, 1)) if rng.random() < 0.4 else 1
        return el.Binomial(rng.randint(1, 5), block=block)
    if kind == "Budget":
        host = rng.choice([None, None, "64KiB"])
        return el.Budget(rng.choice(["64KiB", "1MiB"]), host=host)
    inner = schedule(rng, length, rng.choice(["Recursive", "Chunked", "Binomial"]))
    if kind == "Offload":
        return el.Offload(inner)
    if kind == "Spill":
        return el.Spill(inner, tempfile.gettempdir())
    # No number has more bits than this: none is rounded.
    return el.Cast(inner, "float64")


def backward(rng: random.Random, length: int) -> Any:
    if rng.random() < 0.5:
        return el.Truncate(rng.randint(1, length + 1))
    return el.ClipCotangent(rng.choice([0.3, 1.0, 5.0]))


def policy(rng: random.Random, schedule: Any = None) -> Any:
    """One of those that the loop may have which has this schedule."""
    if isinstance(schedule, el.Budget) and rng.random() < 0.5:
        return "auto"
    if rng.random() < 0.2:
        return el.policies.save_names(TAG)
    return getattr(el.policies, rng.choice(POLICIES))


def scan(rng: random.Random, length: int, names: tuple[str, ...]) -> Transform:
    """A scan of any kind, by any schedule."""
    name = rng.choice(names)
    if name == "lax.scan":
        return Transform(name, length=length)
    settings: dict[str, Any] = {}
    if "Checkpointed" in name:
        settings["base"] = rng.randint(2, 5)
    else:
        settings["schedule"] = schedule(rng, length)
    if rng.random() < 0.3:
        settings["reverse"] = True
    if rng.random() < 0.2:
        settings["unroll"] = rng.choice([2, 3, True])
    if rng.random() < 0.25:
        settings["policy"] = policy(rng, settings.get("schedule"))
    if rng.random() < 0.15:
        settings["backward"] = backward(rng, length)
    if name == "SlicedScan":
        settings["start"] = rng.choice([None, None, rng.randint(-length, length)])
        settings["stop"] = rng.choice([None, None, rng.randint(-length, length)])
        settings["step"] = rng.choice([None, 1, 2, 3])
    return Transform(name, tuple(settings.items()), length)


def plain_scan(rng: random.Random, length: int) -> Transform:
    """A scan of JAX's own."""
    settings: dict[str, Any] = {}
    if rng.random() < 0.3:
        settings["reverse"] = True
    if rng.random() < 0.2:
        settings["unroll"] = rng.choice([2, 3, True])
    return Transform("lax.scan", tuple(settings.items()), length)


def while_loop(rng: random.Random, names: tuple[str, ...], most: int = 4) -> Transform:
    name = rng.choice(names)
    settings: dict[str, Any] = {}
    if name == "BoundedWhileLoop":
        settings = {"max_steps": most, "base": rng.randint(2, 4)}
    if name == "CheckpointedWhileLoop":
        if rng.random() < 0.5:
            settings["max_steps"] = most
        if rng.random() < 0.7:
            settings["checkpoints"] = rng.randint(1, 4)
    if name == "ScanWhile":
        settings = {"max_steps": most, "schedule": schedule(rng, most)}
        if rng.random() < 0.15:
            settings["backward"] = backward(rng, most)
    return Transform(name, tuple(settings.items()), most)


def plain_while(rng: random.Random) -> Transform:
    """A loop of JAX's own which ends when it ends, within four steps."""
    name = rng.choice(["lax.while_loop", "lax.while_loop", "lax.fori_loop"])
    return Transform(name, (("is_masked", True),), 4)


def row_map(
    rng: random.Random, length: int, names: tuple[str, ...], devices: int
) -> Transform:
    name = rng.choice(names)
    if name == "ShardMap" and length % devices:
        name = "ParallelMap"  # which pads
    settings: dict[str, Any] = {}
    if name == "ChunkedVmap":
        settings["chunk_size"] = rng.randint(1, length + 1)
        if rng.random() < 0.3:
            settings["policy"] = policy(rng)
    if name == "Map" and rng.random() < 0.6:
        settings["batch_size"] = rng.randint(1, length + 1)
    if name == "CheckpointedForLoop":
        settings["base"] = rng.randint(2, 4)
    if name == "ForLoop":
        settings["schedule"] = schedule(rng, length)
    if name == "ParallelMap":
        settings["devices"] = jax.devices()[:devices]
        if rng.random() < 0.4:
            settings["chunk_size"] = rng.randint(1, length + 1)
    if name == "lax.map" and rng.random() < 0.3:
        settings["batch_size"] = rng.randint(1, length + 1)
    if name in ("ShardMap", "jax.shard_map"):
        settings = sharding(devices, PartitionSpec("rows"))
    if name == "jax.shard_map":
        settings["check_vma"] = rng.random() < 0.4
    return Transform(name, tuple(settings.items()), length)


def sharding(count: int, spec: PartitionSpec) -> dict[str, Any]:
    """The settings of a `ShardMap` over so many devices."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("rows",))
    return {"mesh": mesh, "in_specs": spec, "out_specs": spec}


def wrapper(rng: random.Random, names: tuple[str, ...], devices: int) -> Transform:
    name = rng.choice(names)
    settings: dict[str, Any] = {}
    if name == "Remat":
        settings["policy"] = policy(rng)
    if name in ("ShardMap", "jax.shard_map"):
        settings = sharding(devices, PartitionSpec())
    if name == "jax.shard_map":
        settings["check_vma"] = rng.random() < 0.6
    return Transform(name, tuple(settings.items()))
