"""How torch sees us: schemas, fakes, autograd, autocast, vmap. No other code names torch.library
or autograd.

`routes` is the way in; `eager` and `traced` are the two routes that know about gradients, both made
from the records of `operations`, whose derivatives are in `calculus`. `override` puts our kernels
beneath torch's own functions. `private` has the private names of torch.
"""

from online_softmax.library.override import Override, override_torch
from online_softmax.library.routes import again, along, logsumexp

__all__ = ["Override", "again", "along", "logsumexp", "override_torch"]
