"""What this machine tells of heat, power and mains."""

from types import SimpleNamespace
from unittest import mock

import psutil

from p2pdiloco.daemon.rest.readers import Sensors, mains


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
