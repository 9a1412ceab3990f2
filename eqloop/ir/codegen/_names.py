"""Names for variables and functions."""

import builtins
import itertools
import keyword
import re
import string
from collections.abc import Iterator

_IMPORTED = {"base64", "checkpoint_name", "jax", "jnp", "lax", "np", "primitives"}
# Linters reject names that look like digits.
_RESERVED = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), *_IMPORTED, *"lIO_"}


class Names:
    """The names of a module, in which each function and constant has its own."""

    # Variables are local, and named as in a printed jaxpr: `a`, `b`, and so on.

    def __init__(self) -> None:
        self._of_module = set(_RESERVED)
        self._of_variables: set[str] = set()

    def claim(self, wish: str, default: str) -> str:
        """A name for the module, much as it is wished."""
        name = candidate = identifier(wish) or default
        taken = self._of_module | self._of_variables
        count = 1
        while candidate in taken:
            count += 1
            candidate = f"{name}_{count}"
        self._of_module.add(candidate)
        return candidate

    def variables(self) -> Iterator[str]:
        """Names for the variables of one function, without end."""
        for length in itertools.count(1):
            for letters in itertools.product(string.ascii_lowercase, repeat=length):
                name = "".join(letters)
                if name not in self._of_module:
                    self._of_variables.add(name)
                    yield name


def identifier(text: str) -> str:
    """The letters and digits of a text as a name; empty if there are none.

    >>> identifier("model.layers[0]['w']")
    'model_layers_0_w'
    """
    name = re.sub(r"\W+", "_", text).strip("_")
    return f"_{name}" if name[:1].isdigit() else name
