"""Derivatives of functions, each as a transform around its function.

This room differentiates any function, including loops. `eqloop.checkpointing` decides
how a loop is differentiated with little memory.

- **The transforms**: `_grad.py` has gradients, `_jacobian.py` and `_hessian.py` whole
  derivatives, `_products.py` products with them. `_forward_grad.py` and `_sofo.py` need
  no backward pass; `_losses.py` has the losses for the second, made by `_sofo_loss.py`.
- **What they share**: `_derivative.py` has their settings, `_argnums.py` and
  `_counts.py` check these, and `_call.py` opens a call. `_complex.py` says which
  derivatives complex arrays have.
- **What they compute with**: `_blocks.py` has the blocks of a Jacobian, and
  `_directions.py` random directions.
"""

from . import _losses as losses
from ._forward_grad import ForwardGrad
from ._grad import Grad, VectorGrad
from ._hessian import Hessian
from ._jacobian import JacFwd, Jacobian, JacRev
from ._products import Jvp, Vjp
from ._sofo import SofoGrad
from ._sofo_loss import SofoLoss

__all__ = [
    "ForwardGrad",
    "Grad",
    "Hessian",
    "JacFwd",
    "JacRev",
    "Jacobian",
    "Jvp",
    "SofoGrad",
    "SofoLoss",
    "VectorGrad",
    "Vjp",
    "losses",
]
