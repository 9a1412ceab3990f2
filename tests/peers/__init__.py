"""The loop tests of Equinox, Diffrax and JAX, with eqloop's loops in place of theirs.

`python -m tests.peers equinox` fetches their tests at the version that is installed,
and runs them with this library's loops where they call `jax.lax.scan`,
`equinox.internal.while_loop` and the like, or with our adjoint as the default of
`diffrax.diffeqsolve`. None of their code is here.
"""
