"""How torch sees us: schemas, fakes, autograd, autocast, vmap. No other code names torch.library
or autograd.

`routes` is the way in; `eager` and `traced` are the two routes that know about gradients, both made
from the records of `operations`, whose derivatives are in `calculus`. Cross-entropy, of several
tensors, has the same four beside them: `loss_routes`, `loss_eager`, `loss_traced`, `loss_calculus`;
`linear_routes` and `linear_traced` are linear_cross_entropy's; `stats`, `stats_traced` and
`stats_calculus` token_stats's; `attention`, `attention_routes` and `attention_second` attention's.
`merges` merges states and pairs; `second` is a gradient's gradient.
`override` puts our kernels beneath torch's own functions. `private` has the private names of torch.
"""

from online_softmax.library.attention_routes import again as attention_again
from online_softmax.library.attention_routes import attention
from online_softmax.library.linear_routes import of_linear
from online_softmax.library.loss_calculus import LossOptions
from online_softmax.library.loss_routes import again as loss_again
from online_softmax.library.loss_routes import of_classes, of_probabilities
from online_softmax.library.merges import merge_pairs, merge_states
from online_softmax.library.override import Override, override_torch
from online_softmax.library.routes import again, along, logsumexp
from online_softmax.library.stats import TokenStats, token_stats

__all__ = [
    "LossOptions",
    "Override",
    "TokenStats",
    "again",
    "along",
    "attention",
    "attention_again",
    "logsumexp",
    "loss_again",
    "merge_pairs",
    "merge_states",
    "of_classes",
    "of_linear",
    "of_probabilities",
    "override_torch",
    "token_stats",
]
