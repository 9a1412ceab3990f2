"""Derivatives of functions, each as a transform around its function.

This room differentiates any function, including loops. `eqloop.checkpointing` decides
how a loop is differentiated with little memory.
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
