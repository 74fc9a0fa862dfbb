"""Private names of torch that the library uses; a test says which is gone.

Seven more stand where they are used: `Tensor._is_zerotensor` in rowops.py, and beside it what says
that a tensor stands for a batch of gradients, `Function._backward_cls`
in eager.py, the current device and the handle of the current stream in jit.py, memory for a result
and whether torch fills it in keptcalls.py.

The three routes need them: no public name tells whether a transform, a mode or a dual level is at
work, or lets a kernel at the Autograd key go on below autograd.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._device import DeviceContext

SingleLevelFunction = _SingleLevelFunction
functorch_active = torch._C._are_functorch_transforms_active
below_autograd = torch._C._AutoDispatchBelowAutograd
after_autograd = torch._C._after_autograd_keyset
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
dispatch_key = torch._C.DispatchKey
dispatch_keys = torch._C.DispatchKeySet
without_keys = torch._C._ExcludeDispatchKeyGuard
function_mode_count = torch._C._len_torch_function_stack
function_mode_stack = torch.overrides._get_current_function_mode_stack
set_forward_mode = forward_ad._set_fwd_grad_enabled
has_computed_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
dispatch_modes = torch._C._len_torch_dispatch_stack


def is_forward_mode() -> bool:
    """Whether a forward-mode level is open (`torch.autograd.forward_ad.dual_level`)."""
    return forward_ad._current_level >= 0


def function_modes() -> bool:
    """Whether a mode must see our ops: any but `with torch.device(...)`, which sees factories."""
    return any(type(mode) is not DeviceContext for mode in function_mode_stack())
