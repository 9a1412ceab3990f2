# ruff: noqa: E501  (a case is a line)
"""Products, convolutions, factorisations and transforms."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..case import Case
from ..values import ALL, COMPLEX, mixed, plain


def cases() -> Iterator[Case]:
    yield from _products()
    yield from _convolutions()
    yield from _factors()
    yield from _transforms()


def _products() -> Iterator[Case]:
    for dtype in ALL:
        f = lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ())))
        yield Case("dot_general", "", f, [plain(dtype, 2, 3), plain(dtype, 3, 2)])
        yield Case(
            "dot_general", "special", f, [mixed(dtype, 2, 3), plain(dtype, 3, 2)]
        )
    shapes = {
        "vectors": ((3,), (3,), (((0,), (0,)), ((), ()))),
        "outer": ((2,), (3,), (((), ()), ((), ()))),
        "left": ((3, 2), (3, 2), (((0,), (0,)), ((), ()))),
        "right": ((2, 3), (2, 3), (((1,), (1,)), ((), ()))),
        "batch": ((2, 3, 2), (2, 2, 4), (((2,), (1,)), ((0,), (0,)))),
        "batch last": ((3, 2, 2), (2, 4, 2), (((1,), (0,)), ((2,), (2,)))),
        "two": ((2, 3, 4), (3, 4, 2), (((1, 2), (0, 1)), ((), ()))),
        "two, turned": ((2, 3, 4), (4, 3, 2), (((2, 1), (0, 1)), ((), ()))),
        "two batches": ((2, 3, 4), (3, 2, 4), (((2,), (2,)), ((0, 1), (1, 0)))),
        "nothing": ((2, 0), (0, 3), (((1,), (0,)), ((), ()))),
    }
    for label, (a, b, numbers) in shapes.items():
        f = functools.partial(lax.dot_general, dimension_numbers=numbers)
        yield Case(
            "dot_general", label, f, [plain("float32", *a), plain("float32", *b)]
        )
    numbers = (((1,), (0,)), ((), ()))
    for dtype, out in (
        ("bfloat16", "float32"), ("int8", "int32"), ("float16", "float32"),
        ("float32", "float64"), ("uint8", "uint32"), ("bfloat16", "bfloat16"), ("int8", "float32"),
    ):  # fmt: skip
        f = functools.partial(
            lax.dot_general, dimension_numbers=numbers, preferred_element_type=out
        )
        args = [plain(dtype, 2, 3), plain(dtype, 3, 2)]
        yield Case("dot_general", f"preferred_element_type={out}", f, args)
    for precision in (
        lax.Precision.HIGHEST,
        lax.Precision.DEFAULT,
        (lax.Precision.HIGH, lax.Precision.DEFAULT),
        lax.DotAlgorithmPreset.F32_F32_F32,
    ):
        f = functools.partial(
            lax.dot_general, dimension_numbers=numbers, precision=precision
        )
        args = [plain("float32", 2, 3), plain("float32", 3, 2)]
        yield Case("dot_general", f"{precision}", f, args)
    for dtypes in (("float32", "bfloat16"), ("int8", "uint8"), ("float32", "int32")):
        f = functools.partial(
            lax.dot_general,
            dimension_numbers=numbers,
            preferred_element_type="float32" if "float32" in dtypes else "int32",
        )
        args = [plain(dtypes[0], 2, 3), plain(dtypes[1], 3, 2)]
        yield Case("dot_general", "two types", f, args)
    sizes = np.tile(np.array([1, 2], "int32"), (6, 1))
    for out in (None, "float32"):
        f = functools.partial(lax.ragged_dot, preferred_element_type=out)
        args = [
            plain("bfloat16" if out else "float32", 3, 2),
            plain("bfloat16" if out else "float32", 2, 2, 3),
            sizes,
        ]
        yield Case("ragged_dot_general", f"preferred_element_type={out}", f, args)
    f = functools.partial(lax.ragged_dot, precision=lax.Precision.HIGHEST)
    yield Case(
        "ragged_dot_general",
        "precision",
        f,
        [plain("float32", 3, 2), plain("float32", 2, 2, 3), sizes],
    )
    ragged = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    f = functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=ragged)
    yield Case(
        "ragged_dot_general",
        "contracted",
        f,
        [plain("float32", 3, 2), plain("float32", 3, 4), sizes],
    )


def _convolutions() -> Iterator[Case]:
    conv = lax.conv_general_dilated
    x, w = plain("float32", 2, 4, 5), plain("float32", 3, 4, 2)
    base = dict(window_strides=(1,), padding=[(0, 0)])
    many: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "": (x, w, {}),
        "strides": (x, w, {"window_strides": (2,)}),
        "padding": (x, w, {"padding": [(2, 1)]}),
        "negative padding": (x, w, {"padding": [(-1, 1)]}),
        "lhs_dilation": (x, w, {"lhs_dilation": (2,)}),
        "rhs_dilation": (x, w, {"rhs_dilation": (2,)}),
        "features": (x, plain("float32", 4, 2, 2), {"feature_group_count": 2}),
        "batches": (x, plain("float32", 4, 4, 2), {"batch_group_count": 2}),
        "last": (
            plain("float32", 2, 5, 4),
            plain("float32", 2, 4, 3),
            {"dimension_numbers": ("NWC", "WIO", "NWC")},
        ),
        "first": (
            plain("float32", 5, 2, 4),
            plain("float32", 2, 4, 3),
            {"dimension_numbers": ("WNC", "WIO", "CNW")},
        ),
        "precision": (x, w, {"precision": lax.Precision.HIGHEST}),
        "bfloat16": (
            plain("bfloat16", 2, 4, 5),
            plain("bfloat16", 3, 4, 2),
            {"preferred_element_type": "float32"},
        ),
        "int8": (
            plain("int8", 2, 4, 5),
            plain("int8", 3, 4, 2),
            {"preferred_element_type": "int32"},
        ),
        "complex": (plain("complex64", 2, 4, 5), plain("complex64", 3, 4, 2), {}),
    }
    for label, (a, b, more) in many.items():
        given = base | more
        given.setdefault("dimension_numbers", ("NCW", "OIW", "NCW"))
        f = functools.partial(conv, **given)
        yield Case("conv_general_dilated", label, f, [a, b])


def _square(dtype: str, n: int = 3) -> Any:
    """Well-conditioned matrices, one a row."""
    x = plain(dtype, n, n)
    eye = np.eye(n)
    return (x @ np.swapaxes(x.conj(), -1, -2) + 3 * eye).astype(dtype)


def _factors() -> Iterator[Case]:
    linalg = lax.linalg
    for dtype in ("float32", "float64", *COMPLEX):
        a = _square(dtype)
        for symmetrize in (True, False):
            f = functools.partial(linalg.cholesky, symmetrize_input=symmetrize)
            yield Case("cholesky", f"{symmetrize}", f, [a], 64)
        yield Case("lu", "", lambda a: linalg.lu(a)[0], [a], 64)
        taus = plain(dtype, 3) / 4
        f = linalg.householder_product
        yield Case("householder_product", "", f, [a, taus], 64, has_slope=False)
        for left, turn in itertools.product((True, False), (True, False)):
            f = functools.partial(linalg.ormqr, left=left, transpose=turn)
            yield Case("ormqr", f"{left} {turn}", f, [a, taus, plain(dtype, 3, 3)], 64)
        f = linalg.cholesky_update
        yield Case("cholesky_update", "", f, [np.triu(a), plain(dtype, 3)], 64)
        f = lambda a: linalg.qr(a, pivoting=True)
        yield Case("qr", "pivoting", f, [a], 256, has_slope=False)
        for lower, left in itertools.product((True, False), (True, False)):
            for change in (
                {},
                {"transpose_a": True},
                {"conjugate_a": True, "transpose_a": True},
                {"unit_diagonal": True},
            ):
                f = lambda a, b, c=change, low=lower, s=left: linalg.triangular_solve(
                    a, b, left_side=s, lower=low, **c
                )
                b = plain(dtype, *((3, 2) if left else (2, 3)))
                yield Case(
                    "triangular_solve", f"{lower} {left} {change}", f, [a, b], 64
                )
        for full in (True, False):
            b = plain(dtype, 3, 2)
            f = lambda a, full=full: linalg.qr(a, full_matrices=full)
            yield Case("qr", f"{full}", f, [b], 64, has_slope=not full)
            for uv in (True, False):
                f = lambda a, full=full, uv=uv: linalg.svd(
                    a, full_matrices=full, compute_uv=uv
                )
                yield Case("svd", f"{full} {uv}", f, [b], 256, has_slope=not uv)
        f = lambda a: linalg.svd(a, compute_uv=False, subset_by_index=(0, 3))
        yield Case("svd", "subset", f, [a], 256)
        for algorithm in linalg.SvdAlgorithm:
            f = lambda a, g=algorithm: linalg.svd(a, compute_uv=False, algorithm=g)
            yield Case("svd", f"{algorithm}", f, [a], 256)
        for lower, order in itertools.product((True, False), (True, False)):
            f = lambda a, low=lower, o=order: linalg.eigh(
                a, lower=low, symmetrize_input=False, sort_eigenvalues=o
            )[1]
            yield Case("eigh", f"{lower} {order}", f, [a], 256, has_slope=False)
        f = lambda a: linalg.eigh(a, subset_by_index=(0, 3))[1]
        yield Case("eigh", "subset", f, [a], 256)
        for algorithm in getattr(linalg, "EighImplementation", ()):
            f = lambda a, g=algorithm: linalg.eigh(a, implementation=g)[1]
            yield Case("eigh", f"{algorithm}", f, [a], 256)
        f = lambda a: linalg.eig(
            a, compute_left_eigenvectors=False, compute_right_eigenvectors=False
        )
        yield Case("eig", "", f, [a], 1024)
        f = lambda a: jnp.abs(
            linalg.eig(
                a, compute_left_eigenvectors=True, compute_right_eigenvectors=True
            )[1]
        )
        yield Case("eig", "vectors", f, [a], 4096, has_slope=False)
        for algorithm in getattr(linalg, "EigImplementation", ()):
            f = lambda a, g=algorithm: linalg.eig(
                a,
                compute_left_eigenvectors=False,
                compute_right_eigenvectors=False,
                implementation=g,
            )
            yield Case("eig", f"{algorithm}", f, [a], 1024)
        yield Case("hessenberg", "", linalg.hessenberg, [a], 64)
        for lower in (True, False):
            f = functools.partial(linalg.tridiagonal, lower=lower)
            yield Case("tridiagonal", f"{lower}", f, [a], 64)
        for vectors, order in itertools.product((True, False), (True, False)):
            choose = (lambda x: x > 0) if dtype[0] == "f" else (lambda x: x.real > 0)
            f = lambda a, v=vectors, o=order, c=choose: linalg.schur(
                a,
                compute_schur_vectors=v,
                sort_eig_vals=o,
                select_callable=c if o else None,
            )
            yield Case("schur", f"{vectors} {order}", f, [a], 1024)
        thirds = [plain(dtype, 3) for _ in range(3)]
        f = lambda a, d, u, b: linalg.tridiagonal_solve(
            a.at[0].set(0), d + 4, u.at[-1].set(0), b
        )
        yield Case("tridiagonal_solve", "", f, [*thirds, plain(dtype, 3, 2)], 64)
        f = functools.partial(linalg.tridiagonal_solve, perturb_singular=True)
        args = [*thirds, plain(dtype, 3, 2)]
        yield Case("tridiagonal_solve", "perturb_singular", f, args, 64)
        for name in ("symmetric_product",):
            if hasattr(linalg, name):
                for alpha, beta in ((1.0, 0.0), (0.5, 2.0)):
                    of = functools.partial(
                        linalg.symmetric_product, alpha=alpha, beta=beta
                    )
                    yield Case(name, f"{alpha} {beta}", of, [a, a], 64)
    f = lambda a: linalg.lu_pivots_to_permutation(linalg.lu(a)[1], 3)
    yield Case("lu_pivots_to_permutation", "3", f, [_square("float32")])
    f = lambda a: linalg.lu_pivots_to_permutation(linalg.lu(a)[1], 4)
    yield Case("lu_pivots_to_permutation", "4", f, [_square("float32")])


def _transforms() -> Iterator[Case]:
    for kind, lengths, dtype in (
        ("FFT", (4,), "complex64"), ("FFT", (2, 4), "complex64"), ("IFFT", (4,), "complex128"),
        ("RFFT", (4,), "float32"), ("RFFT", (2, 4), "float64"), ("IRFFT", (6,), "complex64"),
    ):  # fmt: skip
        f = functools.partial(lax.fft, fft_type=kind, fft_lengths=lengths)
        yield Case("fft", f"{kind} {lengths}", f, [plain(dtype, 2, 4)], 32)
