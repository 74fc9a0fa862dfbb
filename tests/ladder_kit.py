"""Ladders for tests: climbed, timed as a GPU might have, and printed."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence

import pytest
import torch
from rich.console import Console

from online_softmax.catalogue import KERNELS
from online_softmax.lab import ladder, results, table
from online_softmax.lab.inputs import Matrix
from online_softmax.lab.results import Result, Run

CUDA_RUNGS = [name for name in ladder.RUNGS if KERNELS[name].backend == "cuda"]
READS = dict(zip(CUDA_RUNGS, (3, 2, 2, 2, 1, 2, 2), strict=True))
CHEAP = [*CUDA_RUNGS, "torch", "production"]  # Triton's interpreter takes milliseconds a row

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the ladder takes the GPU here")
EMPTY = results.Header("", "", "cpu", "", 1, 1, 1, "float32", (), {})


def climb(matrix: Matrix, only: Sequence[str] = (), **more: object) -> Run:
    return ladder.climb(matrix, only=only, **{"seconds": 20.0, **more})  # type: ignore[arg-type]


def by_name(run: Run) -> dict[str, Result]:
    return {result.name: result for result in run.results}


def timed(run: Run) -> Run:
    """The same run as a GPU might have timed it."""
    us = {name: 40.0 + 7 * i for i, name in enumerate(ladder.NAMES)} | {"v0_thread": 1244.0}
    copy = 35.0
    return Run(
        dataclasses.replace(
            run.header, device="NVIDIA H200", copy_us=copy, copy_gbs=3834.8, datasheet_gbs=4800.0,
            datasheet="datasheet of the H200", is_cold_l2=True, clock=ladder.CLOCK,
        ),
        tuple(
            dataclasses.replace(
                r, median_us=us[r.name], p20_us=us[r.name] - 1, p80_us=us[r.name] + 1,
                gbs=134217.7 / us[r.name], of_copy=copy / us[r.name], of_datasheet=0.5,
                of_torch=us["torch"] / us[r.name], every_us={"256": us[r.name]},
            )
            for r in run.results
        ),
    )  # fmt: skip


def printed(run: Run, width: int) -> str:
    text = io.StringIO()
    table.render(run, Console(file=text, width=width))
    return text.getvalue()
