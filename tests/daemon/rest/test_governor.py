"""Whether the learner rests: what the sources find, put together without flapping."""

from __future__ import annotations

import datetime
import itertools
import json
import os
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
from daemon_kit import at_once

from p2pdiloco.config.settings import OwnLimits, bounds_of, parse_hours
from p2pdiloco.daemon.display.snapshot import Finding, PauseReason
from p2pdiloco.daemon.owner.pauses import (
    BEGINS_AFTER_S,
    ENDS_AFTER_S,
    LEAST_S,
    LOAD_S,
    LOOK_EVERY_S,
    Governor,
    Heat,
    Idleness,
    OthersWork,
    OwnersMachine,
    Power,
    Seldom,
    Sensors,
    in_use,
    mains,
    on_battery,
    outside_hours,
)
from p2pdiloco.daemon.owner.wishes import (
    AHEAD_BYTES,
    BOOK_FILE,
    MONTHS,
    Counts,
    TransferBook,
    month_ends,
    month_of,
)
from p2pdiloco.errors import ConfigError

WALL = 1_800_000_000.0


class World:
    """A machine whose owner and state the test moves, and its governor."""

    def __init__(self):
        self.now = 0.0
        self.plugged, self.celsius, self.watts = True, 40.0, 50.0
        self.words = []
        sources = [
            partial(on_battery, lambda: self.plugged),
            Heat(lambda: (self.celsius, "GPU"), 80.0).look,
            Power(lambda: self.watts, 200.0).look,
        ]
        self.governor = Governor(sources)

    def after(self, seconds):
        """Let time pass, looking every second; the reason at its end."""
        for _ in range(int(seconds)):
            self.now += 1.0
            rest = self.governor.look(self.now, WALL + self.now, self.words)
        return rest.reason if rest is not None else None


def test_a_battery_is_a_rest_until_the_mains_have_been_back_for_a_while():
    world = World()
    assert world.after(10) is None
    world.plugged = False
    assert world.after(3) is None
    assert world.after(5) is PauseReason.BATTERY
    rest = world.governor.look(world.now, WALL + world.now)
    assert rest.since == WALL + 11 and rest.words.startswith("idle: on battery since ")
    assert rest.words.endswith(", until mains power is back")
    assert world.after(100) is PauseReason.BATTERY
    world.plugged = True
    assert world.after(ENDS_AFTER_S - 1) is PauseReason.BATTERY
    assert world.after(2) is None


def test_a_plug_that_comes_and_goes_makes_few_rests():
    world = World()
    found = []
    for second in range(600):
        world.plugged = second % 20 < 14  # off for six seconds of twenty
        found.append(world.after(1))
    changes = sum(a is not b for a, b in itertools.pairwise(found))
    assert changes == 1, "it rests once, and stays so"
    world.plugged = True
    assert world.after(LEAST_S) is None


def test_a_rest_is_not_shorter_than_what_it_costs():
    world = World()
    world.plugged = False
    assert world.after(7) is PauseReason.BATTERY
    world.plugged = True
    assert world.after(LEAST_S - 2) is PauseReason.BATTERY
    assert world.after(2) is None


def test_what_takes_a_while_to_read_is_read_seldom():
    looks = []
    source = Seldom(looks.append, at_once)
    for second in range(11):
        source.look(WALL + second)
    source.look(WALL - 86400)  # the clock is set back
    assert looks == [WALL, WALL + LOOK_EVERY_S, WALL + 2 * LOOK_EVERY_S, WALL - 86400]


def test_one_look_at_what_is_over_in_a_moment_is_no_rest():
    world = World()
    world.celsius = 81.0
    assert world.after(BEGINS_AFTER_S[PauseReason.TEMPERATURE] - 1) is None
    world.celsius = 74.0
    assert world.after(30) is None


def test_heat_and_power_are_over_when_there_is_some_room_again():
    world = World()
    world.celsius, world.watts = 85.0, 50.0
    assert world.after(20) is PauseReason.TEMPERATURE
    world.celsius = 77.0
    assert world.after(200) is PauseReason.TEMPERATURE, "within five degrees of the bound"
    world.celsius = 75.0
    assert world.after(ENDS_AFTER_S + 1) is None
    world.watts = 300.0
    assert world.after(60) is PauseReason.POWER
    world.watts = 170.0
    assert world.after(200) is PauseReason.POWER
    world.watts = 100.0
    assert world.after(120) is None


def test_a_persons_word_holds_at_once_and_comes_first():
    world = World()
    world.plugged = False
    world.after(10)
    pause = Finding(PauseReason.PAUSED, "paused by its owner", "resume")
    world.words = [pause]
    assert world.after(1) is PauseReason.PAUSED
    world.words = [pause, Finding(PauseReason.FINISHING, "finishing", "it has left")]
    assert world.after(1) is PauseReason.FINISHING
    world.words = []
    assert world.after(1) is PauseReason.BATTERY
    world.plugged = True
    assert world.after(LEAST_S) is None
    world.words = [pause]
    assert world.after(1) is PauseReason.PAUSED
    world.words = []
    assert world.after(1) is None


def test_other_bounds_hold_at_once():
    world = World()
    world.plugged = False
    assert world.after(10) is PauseReason.BATTERY
    world.governor.use([partial(on_battery, lambda: world.plugged)])
    assert world.after(1) is PauseReason.BATTERY, "without a step in between"
    world.governor.use([])
    assert world.after(1) is None


def test_hours_go_by_the_clock_on_the_wall():
    hours = partial(outside_hours, parse_hours("22-7"))
    at = lambda *when: datetime.datetime(2026, 11, 27, *when).timestamp()  # noqa: E731
    assert hours(at(23)) is None and hours(at(6, 59, 59)) is None
    found = hours(at(7))
    assert found.reason is PauseReason.HOURS
    assert (found.words, found.ends) == ("outside of its hours", "2026-11-27 22:00")
    assert hours(at(12)).ends == "22:00"


def test_a_machine_that_does_not_tell_is_refused_with_a_sentence():
    silent = SimpleNamespace(hottest_c=lambda: None, power_w=lambda: None)
    machine = OwnersMachine(lambda: None, silent, lambda: SimpleNamespace(tells=False))
    for limits, flag in [
        (OwnLimits(not_on_battery=True), "--not-on-battery"),
        (OwnLimits(when_idle="10min"), "--when-idle"),
        (OwnLimits(max_temperature=80.0), "--max-temperature"),
        (OwnLimits(max_power=200.0), "--max-power"),
    ]:
        with pytest.raises(ConfigError, match=f"{flag}: this machine does not tell"):
            machine.sources(bounds_of(limits))
    assert len(machine.sources(bounds_of(OwnLimits(hours="22-7")))) == 1


class Desk:
    """Files of a machine with a keyboard, a terminal and a desktop."""

    def __init__(self, folder):
        self.now, self.busy_s = WALL, 0.0
        self.proc, self.dev, self.sessions = (folder / name for name in ("proc", "dev", "sessions"))
        for made in (self.proc, self.dev / "pts", self.sessions):
            made.mkdir(parents=True)
        (self.proc / "stat").write_text("cpu 0")
        self.keys(1)
        self.terminal = self.dev / "pts" / "0"
        self.terminal.write_text("")
        self.types(WALL - 5000)
        where = (self.proc, self.dev, lambda: self.busy_s, 4, self.sessions)
        self.idleness = Idleness(lambda: self.now, *where)

    def keys(self, count):
        lines = "            CPU0       CPU1\n"
        lines += f"   1:   {count}   3   IO-APIC   1-edge   i8042\n  9: 5 4 acpi\n"
        (self.proc / "interrupts").write_text(lines)

    def types(self, at):
        os.utime(self.terminal, (at, at))

    def idle_after(self, seconds):
        self.now += seconds
        return self.idleness.idle_s()


def test_a_machine_is_idle_as_long_as_nobody_types_or_computes(tmp_path):
    desk = Desk(tmp_path)
    assert desk.idle_after(100) == 100, "no longer than was watched"
    desk.keys(2)
    assert desk.idle_after(10) == 0 and desk.idleness.by == "keyboard or mouse"
    assert desk.idle_after(50) == 50
    desk.types(desk.now + 20)
    assert desk.idle_after(30) == 10 and desk.idleness.by == "a key at a terminal"
    desk.busy_s += 0.2 * 4 * (LOAD_S + 200)
    assert desk.idle_after(LOAD_S + 200) > 200, "a fifth of the machine is nobody's work"
    desk.busy_s += 0.3 * 4 * LOAD_S
    assert desk.idle_after(LOAD_S) == 0 and desk.idleness.by == "other programs compute"
    (desk.sessions / "1").write_text("TYPE=x11\nACTIVE=1\nIDLE_HINT=0\nIS_DISPLAY=0\n")
    assert desk.idle_after(5) == 5, "nobody's desktop"
    session = "TYPE=wayland\nACTIVE=1\nIDLE_HINT={}\nIDLE_SINCE_HINT={}\n"
    (desk.sessions / "2").write_text(session.format(0, 0))
    assert desk.idle_after(5) == 0 and desk.idleness.by == "the desktop"
    (desk.sessions / "2").write_text(session.format(1, int(desk.now * 1e6)))
    assert desk.idle_after(60) == 60
    desk.now -= 86400  # the clock is set back
    assert desk.idleness.idle_s() == 0
    (desk.sessions / "2").unlink()
    desk.busy_s += 4 * LOAD_S
    assert desk.idle_after(LOAD_S) == 0, "and work is seen as before"


def test_the_work_of_others_is_not_ours_and_not_that_of_who_steps_back(monkeypatch):
    def process(pid, niceness, used_s):
        times = SimpleNamespace(user=used_s, system=0.0)
        return SimpleNamespace(pid=pid, nice=lambda: niceness, cpu_times=lambda: times)

    ours = [process(1, 0, 10.0), process(2, 10, 50.0)]
    me = process(0, 0, 5.0)
    me.children = lambda recursive: ours
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(user=100.0, system=20.0, nice=900.0))
    monkeypatch.setattr(psutil, "Process", lambda pid: me)
    others = OthersWork()
    assert others.seconds() == 105.0, "the kernel counts apart what steps back"
    ours.clear()
    assert others.seconds() == 105.0, "what ended did not become others'"


def test_a_machine_in_use_rests_until_it_was_quiet(tmp_path):
    desk = Desk(tmp_path)
    source = partial(in_use, desk.idleness, 600.0)
    assert source(desk.now).words == "the machine is in use (not watched for long enough yet)"
    desk.now += 599
    assert source(desk.now).ends == "nobody has used it for 10 min"
    desk.now += 1
    assert source(desk.now) is None


def test_a_reading_that_hangs_leaves_the_last_value_and_is_the_only_one():
    begun, plugged = [], [False]

    def begin(work):
        begun.append((work, Future()))
        return begun[-1][1]

    source = Seldom(partial(on_battery, lambda: plugged[0]), begin)
    assert source.look(WALL) is None and source.look(WALL + 3 * LOOK_EVERY_S) is None
    assert len(begun) == 1, "one at a time"
    work, done = begun[0]
    done.set_result(work())
    assert source.look(WALL + 3 * LOOK_EVERY_S).reason is PauseReason.BATTERY
    plugged[0] = True
    for second in range(100):  # the driver does not answer
        assert source.look(WALL + 20 + second).reason is PauseReason.BATTERY
    assert len(begun) == 2
    begun[1][1].set_exception(RuntimeError("a mistake of ours"))
    with pytest.raises(RuntimeError):
        source.look(WALL + 200)


# What this machine tells of heat, power and mains.


def chip(folder, number, name, **values):
    made = folder / f"hwmon{number}"
    made.mkdir(parents=True)
    (made / "name").write_text(f"{name}\n")
    for file, value in values.items():
        (made / file).write_text(f"{value}\n")


def test_the_hottest_of_cpu_and_gpu_is_told_and_nothing_without_sensors(tmp_path):
    nothing = Sensors(tmp_path / "nowhere", "no-such-library.so")
    assert (nothing.hottest_c(), nothing.power_w()) == (None, None)
    chip(tmp_path, 0, "k10temp", temp1_input=61250, temp2_input="N/A")
    chip(tmp_path, 1, "nvme", temp1_input=99000)
    sensors = Sensors(tmp_path, "no-such-library.so")
    assert (sensors.hottest_c(), sensors.power_w()) == ((61.25, "CPU"), None)
    chip(tmp_path, 2, "amdgpu", temp1_input=71000, power1_average=150_000_000)
    assert (sensors.hottest_c(), sensors.power_w()) == ((71.0, "GPU"), 150.0)


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


# Bytes of a month, over lives, kills and clocks that are set.

NOV, DEC = (datetime.datetime(2026, month, 28, 12).timestamp() for month in (11, 12))


@pytest.fixture
def book(tmp_path):
    """One that has begun, on a disk that writes at once."""
    made = TransferBook(tmp_path, at_once)
    made.begin()
    return made


def test_bytes_are_counted_over_lives(tmp_path):
    for life in (1, 2):
        book = TransferBook(tmp_path, at_once)
        book.begin()
        for look in range(1, 4):
            book.look((look * 1000, look * 100), float(look), NOV + look)
        assert book.month(NOV) == Counts(life * 3000, life * 300)
        book.close()
    again = TransferBook(tmp_path, at_once)
    again.begin()  # another transport counts from nothing
    again.look((5, 5), 1.0, NOV)
    assert again.month(NOV).total == 6610 and again.month(DEC).total == 0


@pytest.mark.parametrize("rate", [10_000, 5_000_000, 300_000_000])
def test_a_kill_costs_the_owner_some_bytes_and_never_gives_any(book, tmp_path, rate):
    for look in range(1, 50):
        moved = look * rate
        book.look((moved // 50, moved - moved // 50), float(look), NOV + look)
        kept = TransferBook(tmp_path, at_once).month(NOV).total  # as after SIGKILL
        assert moved <= kept <= moved + max(AHEAD_BYTES, 5 * rate)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_disk_is_written_seldom(book, tmp_path):
    book.look((1000, 1000), 1.0, NOV)
    before = (tmp_path / BOOK_FILE).stat().st_mtime_ns
    for look in range(2, 1000):
        book.look((look * 1000, look * 1000), float(look), NOV)
    assert (tmp_path / BOOK_FILE).stat().st_mtime_ns == before


def test_a_new_month_begins_with_nothing(book):
    book.look((1000, 0), 1.0, NOV)
    book.look((1500, 0), 1.0 + DEC - NOV, DEC)
    assert (book.month(NOV).sent, book.month(DEC).sent) == (1500, 500)
    assert (month_of(NOV), month_ends(NOV), month_ends(DEC)) == (
        "2026-11",
        "2026-12-01 00:00",
        "2027-01-01 00:00",
    )


def test_years_of_months_are_kept_and_no_more(tmp_path):
    book = TransferBook(tmp_path, at_once)
    for month in range(MONTHS + 5):
        wall = NOV + month * 31 * 86400
        book.look((month + 1, 0), wall, wall)
    kept = json.loads((tmp_path / BOOK_FILE).read_text())["months"]
    assert len(kept) == MONTHS and month_of(wall) in kept and month_of(NOV) not in kept


def test_a_clock_that_is_set_back_gives_no_second_budget(book, tmp_path):
    book.look((1000, 0), 1.0, DEC)
    book.look((1200, 0), 2.0, NOV)
    assert book.month(NOV).total >= 1200
    book.close()
    assert TransferBook(tmp_path, at_once).month(NOV).total >= 1200


def test_a_clock_that_was_wrong_at_first_takes_its_bytes_along(book):
    book.look((1000, 0), 1.0, 0.0)  # 1970, before it knows the time
    book.look((1100, 0), 2.0, NOV)
    assert book.month(NOV).total == 1100


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"months":{"2026-11":{"sent":-1}}}', b"\xff" * 100])
def test_a_damaged_book_is_set_aside(tmp_path, content):
    if content is None:
        (tmp_path / BOOK_FILE).mkdir()
    else:
        (tmp_path / BOOK_FILE).write_bytes(content)
    book = TransferBook(tmp_path, at_once)
    book.begin()
    book.look((10, 10), 1.0, NOV)
    assert book.month(NOV).total == 20
    assert json.loads((tmp_path / BOOK_FILE).read_text())["months"]


def test_while_a_slow_disk_writes_bytes_are_counted_and_nothing_else_is_written(tmp_path):
    begun = []

    def begin(work):
        begun.append((work, Future()))
        return begun[-1][1]

    book = TransferBook(tmp_path, begin)
    book.begin()
    for look in range(1, 30):
        book.look((look * 20_000_000, 0), float(look), NOV + look)
    assert len(begun) == 1 and book.month(NOV).sent == 29 * 20_000_000
    work, done = begun[0]
    done.set_result(work())
    book.look((600_000_000, 0), 30.0, NOV + 30)
    assert len(begun) == 2, "what came meanwhile is written next"
    begun[1][1].set_result(begun[1][0]())
    book.close()
    assert TransferBook(tmp_path, begin).month(NOV).sent == 600_000_000
