"""What operations take in a loop, over what they take outside of one, on this machine.

    python -m tests.in_loops [--only convolution] [--rounds 7]

XLA rewrites a program before it runs it, and not all of it in the body of a loop. Each
operation runs on 16 inputs: one call for each, a `jax.lax.scan` over them, and an
`eqloop.Scan` over them; and so does its gradient. Where ours takes more than
1.5 times as long as the calls, `reasons.py` says why nothing is done about it, or it is
an error: there is something that XLA does outside of loops, and that
`eqloop/_programs/_layouts.py` should do within.
"""
