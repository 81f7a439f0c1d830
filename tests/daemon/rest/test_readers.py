"""What this machine tells of heat, power and mains."""

from types import SimpleNamespace
from unittest import mock

import psutil

from p2pdiloco.daemon.owner.pauses import Sensors, mains


def chip(folder, number, name, **values):
    made = folder / f"hwmon{number}"
    made.mkdir(parents=True)
    (made / "name").write_text(f"{name}\n")
    for file, value in values.items():
        (made / file).write_text(f"{value}\n")


def test_the_hottest_of_cpu_and_gpu(tmp_path):
    chip(tmp_path, 0, "k10temp", temp1_input=61250, temp2_input="N/A")
    chip(tmp_path, 1, "nvme", temp1_input=99000)
    sensors = Sensors(tmp_path, "no-such-library.so")
    assert (sensors.hottest_c(), sensors.power_w()) == ((61.25, "CPU"), None)
    chip(tmp_path, 2, "amdgpu", temp1_input=71000, power1_average=150_000_000)
    assert (sensors.hottest_c(), sensors.power_w()) == ((71.0, "GPU"), 150.0)


def test_a_machine_without_sensors_tells_nothing(tmp_path):
    sensors = Sensors(tmp_path / "nowhere", "no-such-library.so")
    assert (sensors.hottest_c(), sensors.power_w()) == (None, None)


def test_mains_are_told_where_there_is_a_battery():
    for battery, told in [
        (None, None),
        (SimpleNamespace(power_plugged=None), None),
        (SimpleNamespace(power_plugged=True), True),
        (SimpleNamespace(power_plugged=False), False),
    ]:
        with mock.patch.object(psutil, "sensors_battery", lambda found=battery: found, create=True):
            assert mains() is told


class FakeDriver:
    """NVIDIA's library with two GPUs, the second of which tells no power."""

    def __init__(self):
        self.begun = 0

    def nvmlInit_v2(self):
        self.begun += 1
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        device._obj.value = 100 + index
        return 0

    def nvmlDeviceGetTemperature(self, device, sensor, value):
        assert sensor == 0
        value._obj.value = device.value - 30
        return 0

    def nvmlDeviceGetPowerUsage(self, device, value):
        value._obj.value = 210_500
        return 0 if device.value == 100 else 3


def test_nvidias_driver_is_asked_where_it_is(tmp_path):
    driver = FakeDriver()
    with mock.patch("ctypes.CDLL", lambda name: driver):
        sensors = Sensors(tmp_path)
    assert (sensors.hottest_c(), sensors.power_w(), driver.begun) == ((71.0, "GPU"), 210.5, 1)
    driver.nvmlDeviceGetCount_v2 = lambda count: 999  # the driver is gone, or is being replaced
    assert (sensors.hottest_c(), sensors.power_w()) == (None, None)
