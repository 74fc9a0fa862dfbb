"""What attention refuses, with which error, and what it says."""

from __future__ import annotations

import pytest
import torch

from online_softmax import attention, attention_state, attention_varlen

Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8)
T, ENDS = torch.zeros(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)


def varlen(**changes):
    words = {"query": T, "key": T, "value": T, "cu_seq_q": ENDS, "cu_seq_k": ENDS}
    return attention_varlen(**{**words, "max_q": 3, "max_k": 3, **changes})


WRONG = {
    "no tensor": (TypeError, "k must be a Tensor, got list", lambda: attention(Q, [1.0], K)),
    "sparse": (NotImplementedError, "dense", lambda: attention(Q.to_sparse(), K, K)),
    "integers": (NotImplementedError, "q must be one of torch.float32",
                 lambda: attention(Q.int(), K, K)),
    "fp8": (NotImplementedError, "float8", lambda: attention(Q.to(torch.float8_e5m2), K, K)),
    "rank": (RuntimeError, r"q must be \(batch, heads", lambda: attention(Q[0], K, K)),
    "dtypes": (RuntimeError, "one dtype", lambda: attention(Q.half(), K, K)),
    "devices": (RuntimeError, "one device", lambda: attention(Q, K.to("meta"), K)),
    "batch": (RuntimeError, "the batch of q", lambda: attention(Q[:1], K, K)),
    "k and v": (RuntimeError, "k and v must have", lambda: attention(Q, K, K[:, :, :3])),
    "head_dim": (RuntimeError, "one head_dim", lambda: attention(Q[..., :4], K, K)),
    "no dim": (RuntimeError, "at least 1", lambda: attention(Q[..., :0], K[..., :0], K)),
    "heads": (RuntimeError, "must divide", lambda: attention(Q[:, :3], K, K)),
    "no heads": (RuntimeError, "must divide", lambda: attention(Q, K[:, :0], K[:, :0])),
    "causal": (ValueError, 'True, False or "top_left"', lambda: attention(Q, K, K, causal="left")),
    "causal 1": (ValueError, "got 1", lambda: attention(Q, K, K, causal=1)),
    "scale": (ValueError, "finite", lambda: attention(Q, K, K, scale=float("inf"))),
    "scale type": (TypeError, "scale must be a float", lambda: attention(Q, K, K, scale=Q)),
    "window": (ValueError, "two ints", lambda: attention(Q, K, K, window=3)),
    "window floats": (ValueError, "two ints", lambda: attention(Q, K, K, window=(1.0, 2))),
    "window below": (ValueError, "at least -1", lambda: attention(Q, K, K, window=(-2, 0))),
    "softcap": (ValueError, "above 0", lambda: attention(Q, K, K, softcap=0.0)),
    "bias": (TypeError, "bias must be a Tensor", lambda: attention(Q, K, K, bias=1.0)),
    "bias bool": (RuntimeError, "is mask, bool",
                  lambda: attention(Q, K, K, bias=torch.ones(7).bool())),
    "bias shape": (RuntimeError, r"broadcast .* \(2, 4, 5, 7\), got \(5, 6\)",
                   lambda: attention(Q, K, K, bias=torch.zeros(5, 6))),
    "bias rank": (RuntimeError, "broadcast",
                  lambda: attention(Q, K, K, bias=torch.zeros(1, 1, 1, 1, 1))),
    "bias device": (RuntimeError, "on cpu",
                    lambda: attention(Q, K, K, bias=torch.zeros(7, device="meta"))),
    "mask": (RuntimeError, "True takes part", lambda: attention(Q, K, K, mask=torch.ones(7))),
    "sinks": (RuntimeError, r"shape \(4,\)", lambda: attention(Q, K, K, sinks=torch.zeros(2))),
    "sinks type": (RuntimeError, "float type",
                   lambda: attention(Q, K, K, sinks=torch.zeros(4).int())),
    "empty": (ValueError, 'empty must be "zero"', lambda: attention(Q, K, K, empty="none")),
    "kernel": (ValueError, "there are cuda, triton, reference",
               lambda: attention(Q, K, K, kernel="fast")),
    "float64": (ValueError, "takes float32, float16 and bfloat16",
                lambda: attention(Q.double(), K.double(), K.double(), kernel="triton")),
    "wide": (ValueError, "dims up to 256; this has 300",
             lambda: attention(*[torch.zeros(1, 1, 2, 300)] * 3, kernel="triton")),
    "state": (RuntimeError, r"attention_state\(\): q must", lambda: attention_state(Q[0], K, K)),
    "packed rank": (RuntimeError, r"query must be \(tokens", lambda: varlen(query=Q)),
    "packed tokens": (RuntimeError, "key and value must have", lambda: varlen(value=T[:3])),
    "packed heads": (RuntimeError, "must divide", lambda: varlen(query=T[:, :3])),
    "ends": (TypeError, "cu_seq_k must be a Tensor", lambda: varlen(cu_seq_k=None)),
    "ends type": (RuntimeError, "int32 or int64", lambda: varlen(cu_seq_q=ENDS.float())),
    "ends count": (RuntimeError, "as many sequences", lambda: varlen(cu_seq_q=ENDS[:2])),
    "length": (TypeError, "max_q must be an int", lambda: varlen(max_q=3.0)),
    "length below": (ValueError, "at least 0", lambda: varlen(max_k=-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    error, message, call = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_a_kernel_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("online_softmax.triton.attention_launch")
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"runs on CUDA tensors; this one is on cpu.*INTERPRET"):
        attention(Q, K, K, kernel="triton")
