"""Readers of this machine: mains power, temperatures, the GPUs' power. None: this machine does not tell."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

HWMON = Path("/sys/class/hwmon")
CPU_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")
GPU_CHIPS = ("amdgpu", "i915", "xe", "nouveau")
NVML = "libnvidia-ml.so.1"
MAX_GPUS = 64


def mains() -> bool | None:
    """Tell whether there is mains power; None: this machine has no battery, or does not tell."""
    if not hasattr(psutil, "sensors_battery"):
        return None
    try:
        battery = psutil.sensors_battery()
    except (OSError, ValueError):
        return None
    plugged = battery.power_plugged if battery is not None else None
    return bool(plugged) if plugged is not None else None


class Sensors:
    """Sensors of CPU and GPUs, looked for once."""

    def __init__(self, hwmon: Path = HWMON, nvml: str = NVML) -> None:
        self._hwmon = hwmon
        self._nvml = _Nvml.load(nvml)

    def hottest_c(self) -> tuple[float, str] | None:
        """Find the hottest of GPU and CPU, in degrees Celsius, and which it is."""
        found = [(value, "CPU") for value in self._chips(CPU_CHIPS, "temp*_input", 1000)]
        found += [(value, "GPU") for value in self._chips(GPU_CHIPS, "temp*_input", 1000)]
        if self._nvml is not None:
            found += [(value, "GPU") for value in self._nvml.temperatures_c()]
        return max(found, default=None)

    def power_w(self) -> float | None:
        """Add up what the GPUs draw, in watts."""
        found = list(self._chips(GPU_CHIPS, "power1_average", 1e6))
        if self._nvml is not None:
            found += self._nvml.powers_w()
        return sum(found) if found else None

    def _chips(self, names: tuple[str, ...], pattern: str, scale: float) -> Iterator[float]:
        with contextlib.suppress(OSError):  # a chip that goes away, or no such folder
            for chip in sorted(self._hwmon.iterdir()):
                if _line(chip / "name") in names:
                    for path in sorted(chip.glob(pattern)):
                        with contextlib.suppress(ValueError):
                            yield float(_line(path)) / scale


def _line(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(64).strip()
    except OSError:  # a sensor that sleeps
        return ""


class _Nvml:
    """NVIDIA's management library, which comes with the driver: the few functions that are needed."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def load(cls, name: str) -> _Nvml | None:
        """Load and begin it; None: there is none, or no GPU of NVIDIA's."""
        try:
            library = ctypes.CDLL(name)
            return cls(library) if library.nvmlInit_v2() == 0 else None
        except (OSError, AttributeError):
            return None

    def temperatures_c(self) -> list[float]:
        """List the GPUs' temperatures, in degrees Celsius."""
        return [v for d in self._devices() if (v := self._number("nvmlDeviceGetTemperature", d, 0)) > 0]

    def powers_w(self) -> list[float]:
        """List what each GPU draws, in watts."""
        found = (self._number("nvmlDeviceGetPowerUsage", device) for device in self._devices())
        return [milliwatts / 1000 for milliwatts in found if milliwatts > 0]

    def _devices(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        found = []
        for index in range(min(count.value, MAX_GPUS)):
            device = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                found.append(device)
        return found

    def _number(self, function: str, device: ctypes.c_void_p, *arguments: int) -> float:
        value = ctypes.c_uint()
        call = getattr(self._library, function, None)
        if call is None or call(device, *arguments, ctypes.byref(value)) != 0:
            return 0.0
        return float(value.value)
