"""Every rung through its real launcher, for compute-sanitizer: `make sanitize-gpu`.

Small awkward shapes; with PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is an allocation of its own
size, so a byte outside is seen. tests/sanitize_driver.cu does the same for the CUDA rungs without
torch; this adds Triton's and v5's dependent launch.
"""

from __future__ import annotations

import os
import sys

import torch

from online_softmax.catalogue import KERNELS, problem_of
from online_softmax.lab import judge

COLS = (1, 33, 256, 1000, 4099)
PAD = 3  # elements between rows: another 16-byte phase each
V5_COLS = 20_000  # several parts a row


def main() -> int:
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1":
        sys.exit("set PYTORCH_NO_CUDA_MEMORY_CACHING=1: in torch's blocks an overrun hides")
    wrong = 0
    generator = torch.Generator().manual_seed(0)
    for record in KERNELS.values():
        if not record.rung:
            continue
        for dtype in record.dtypes:
            for cols in (*COLS, *((V5_COLS,) if record.name == "v5_split_row" else ())):
                for pad in (0, PAD):
                    base = torch.randn(3 * (cols + pad) - pad, generator=generator).to(dtype).cuda()
                    x = base.as_strided((3, cols), (cols + pad, 1))
                    y = torch.empty(3, cols, dtype=dtype, device="cuda").fill_(torch.nan)
                    record.run(x, y, record.numbers(problem_of(x)))
                    verdict = judge.check(y.cpu(), x.cpu())
                    wrong += not verdict.ok
                    if not verdict.ok:
                        print(f"{record.name} {dtype} 3 x {cols} pad {pad}: {verdict.why}")
        print(f"{record.name}: done", flush=True)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
