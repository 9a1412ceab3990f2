"""The suites of others: where they are, and which parts of them have loops."""

import dataclasses
from importlib.metadata import version


@dataclasses.dataclass(frozen=True)
class Suite:
    """The tests of a library that has loops.

    Attributes:
        package: The library, which is installed.
        repository: Where its tests are.
        tag: The tag of a version, with `{}` for it.
        folder: Where they are in the repository.
        files: Those that test loops, or what is built of them.
        variants: What stands in for the loops: the suite is run once for each.
        options: For pytest.
        mixed: Files in which a few tests have loops; the others are left out.
    """

    package: str
    repository: str
    tag: str
    folder: str
    files: tuple[str, ...]
    variants: tuple[str, ...]
    options: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()

    @property
    def installed_tag(self) -> str:
        """The tag of the version that is installed."""
        return self.tag.format(version(self.package))

    def only(self, file: str | None) -> "Suite":
        """With one of its files, or with all of them."""
        if file is None:
            return self
        files = tuple(name for name in self.files if name == file)
        mixed = tuple(name for name in self.mixed if name == file)
        return dataclasses.replace(self, files=files, mixed=mixed)


SUITES = {
    "equinox": Suite(
        package="equinox",
        repository="https://github.com/patrick-kidger/equinox",
        tag="v{}",
        folder="tests",
        files=("test_while_loop.py", "test_scan.py", "test_progress_meter.py"),
        variants=("recursive",),
        # Their options have jaxtyping check Equinox, which we import before it can.
        options=("-o", "addopts="),
    ),
    "diffrax": Suite(
        package="diffrax",
        repository="https://github.com/patrick-kidger/diffrax",
        tag="v{}",
        folder="test",
        files=(
            "test_adjoint.py",
            "test_brownian.py",
            "test_event.py",
            "test_global_interpolation.py",
            "test_progress_meter.py",
            "test_saveat_solution.py",
            "test_step_to.py",
            "test_vmap.py",
        ),
        variants=("recursive",),
    ),
    # The same and more on our adjoint, and beside that on their own.
    "diffrax_adjoint": Suite(
        package="diffrax",
        repository="https://github.com/patrick-kidger/diffrax",
        tag="v{}",
        folder="test",
        files=(
            "test_adaptive_stepsize_controller.py",
            "test_adjoint.py",
            "test_event.py",
            "test_global_interpolation.py",
            "test_integrate.py",
            "test_progress_meter.py",
            "test_saveat_solution.py",
            "test_sde2.py",
            "test_vmap.py",
        ),
        variants=("adjoint", "theirs"),
    ),
    "jax": Suite(
        package="jax",
        repository="https://github.com/jax-ml/jax",
        tag="jax-v{}",
        folder="tests",
        files=("lax_control_flow_test.py",),
        mixed=(
            "api_test.py",
            "checkify_test.py",
            "custom_api_test.py",
            "custom_linear_solve_test.py",
            "debugging_primitives_test.py",
            "mutable_array_test.py",
            "python_callback_test.py",
        ),
        variants=("plain", "recursive", "binomial"),
        options=("-o", "addopts=--import-mode=importlib"),
    ),
}
