"""override_torch where a registration had to stay, since other threads live."""

from __future__ import annotations

import threading

import torch

from online_softmax.library.override import Override
from test_override import X, _cpu, _Spy, spy  # noqa: F401, RUF100 spy is a fixture


def test_what_stayed_goes_by_the_newest(spy: _Spy) -> None:  # noqa: F811
    x, stop = X.double(), threading.Event()
    other = threading.Thread(target=stop.wait)  # keeps the registration, as a busy process does
    other.start()
    try:
        with Override("CPU", lambda name, *tensors: True):
            assert spy.of(lambda: torch.softmax(x, -1)) == ["softmax"]
        with _cpu():
            assert spy.of(lambda: torch.softmax(x, -1)) == []
    finally:
        stop.set()
        other.join()
