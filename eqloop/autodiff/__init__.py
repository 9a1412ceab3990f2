"""Derivatives of functions, each as a transform around its function.

How a loop is differentiated within little memory is in `eqloop.checkpointing`; what is
here differentiates any function, loops among them.
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
