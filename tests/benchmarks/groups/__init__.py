"""The comparisons, a family of them a file. No measuring happens here."""

from collections.abc import Callable, Mapping, Sequence

from .._comparison import Comparison
from ._budget import budget, million
from ._debug import debug
from ._maps import maps
from ._progress import progress
from ._recurrent import batched, compilation, heavy, modes, recurrent, scaling
from ._sliced import sliced
from ._stacked_layers import stacked_layers
from ._while import whiles

GROUPS: Mapping[str, Callable[[], Sequence[Comparison]]] = {
    "recurrent": recurrent,
    "scaling": scaling,
    "compilation": compilation,
    "batched": batched,
    "modes": modes,
    "heavy": heavy,
    "budget": budget,
    "million": million,
    "maps": maps,
    "while": whiles,
    "sliced": sliced,
    "layers": stacked_layers,
    "progress": progress,
    "debug": debug,
}
