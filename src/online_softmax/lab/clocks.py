"""The GPU's own clocks while a cell is timed: their rate, what slows them, temperature, power.

Read through NVML (the package nvidia-ml-py) before and after a cell's rounds. What NVML counts
between the two, the time that a limit slowed the clocks, tells of a slowdown that was over when the
second reading was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

MISSING = (
    "clocks and throttling are not recorded, there is no NVML here: pip install nvidia-ml-py ({})"
)
# NVML's bits of what holds the clocks down. Idle (1) is no slowdown.
REASONS = {
    2: "application clocks",
    4: "power limit",
    8: "hardware slowdown",
    16: "sync boost",
    32: "temperature (driver)",
    64: "temperature (hardware)",
    128: "power brake",
    256: "display clocks",
}
# A card under load runs into its power limit, and a setting holds: to measure again shows the same.
LASTING = ("power limit", "application clocks", "sync boost", "display clocks")
SHARE = 0.01  # of the time between two readings: a counter that grew by more tells of a slowdown

Watch = Callable[[], "Reading | None"]


@dataclass(frozen=True)
class Reading:
    """What NVML says at one moment; None: it does not know."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    reasons: tuple[str, ...] = ()  # what holds the clocks down, of REASONS
    at_us: int | None = None  # NVML's own clock, for the counters
    power_limited_us: int | None = None  # that the power limit slowed the clocks, since the start
    heat_limited_us: int | None = None  # that the temperature did


def watcher(uuid: str) -> tuple[Watch | None, str]:
    """What reads the clocks of the GPU with that UUID; or None, and why, a sentence."""
    try:
        nvml = import_module("pynvml")
    except ImportError as error:
        return None, MISSING.format(error)
    try:
        nvml.nvmlInit()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(name.encode())
    except nvml.NVMLError as error:
        return None, MISSING.format(error)
    return (lambda: _read(nvml, handle)), ""


def _read(nvml: Any, handle: Any) -> Reading:
    def known(name: str, *more: Any) -> Any:
        """What a query gives; None where this card or driver has none."""
        try:
            return getattr(nvml, name)(handle, *more)
        except (nvml.NVMLError, AttributeError):
            return None

    bits = known("nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:  # a driver, or a package, from before its new name
        bits = known("nvmlDeviceGetCurrentClocksThrottleReasons")
    power = known("nvmlDeviceGetPowerUsage")
    by_power = known("nvmlDeviceGetViolationStatus", nvml.NVML_PERF_POLICY_POWER)
    by_heat = known("nvmlDeviceGetViolationStatus", nvml.NVML_PERF_POLICY_THERMAL)
    return Reading(
        sm_mhz=known("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        memory_mhz=known("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        temperature_c=known("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000,
        reasons=tuple(name for bit, name in REASONS.items() if (bits or 0) & bit),
        at_us=by_power.referenceTime if by_power else None,
        power_limited_us=by_power.violationTime // 1000 if by_power else None,
        heat_limited_us=by_heat.violationTime // 1000 if by_heat else None,
    )


def between(before: Reading | None, after: Reading | None) -> dict[str, Any]:
    """What a cell keeps of its two readings: both, and under "reasons" what slowed the clocks while
    it was timed; nothing where there are none."""
    if before is None or after is None:
        return {}
    # What held the clocks before the first call says nothing of the rounds, unless it lasts.
    found = dict.fromkeys(after.reasons)
    for name, which in (("power limit", "power_limited_us"), ("temperature", "heat_limited_us")):
        start, end = getattr(before, which), getattr(after, which)
        if None in (start, end, before.at_us, after.at_us):
            continue
        if end - start > SHARE * max(after.at_us - before.at_us, 1):  # type: ignore[operator]
            found[name] = None
    return {"before": asdict(before), "after": asdict(after), "reasons": tuple(found)}


def is_passing(reasons: tuple[str, ...]) -> bool:
    """Whether something slowed the clocks that may be over when the cell is measured again."""
    return any(name not in LASTING for name in reasons)


def said(clocks: dict[str, Any]) -> str:
    """What slowed a cell's clocks, for people; "": nothing did, or nobody looked."""
    reasons = clocks.get("reasons") or ()
    if not reasons:
        return ""
    rates = [(clocks.get(when) or {}).get("sm_mhz") for when in ("before", "after")]
    heat = (clocks.get("after") or {}).get("temperature_c")
    text = f"the clock was throttled: {', '.join(reasons)}"
    if None not in rates:
        text += f"; SM {rates[0]:,} MHz before, {rates[1]:,} after"
    return text + ("" if heat is None else f", {heat} °C")
