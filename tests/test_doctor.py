"""Every branch of every check is tried with made-up facts, and this machine is diagnosed."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest

import htile.testing
from htile import cli
from htile.cli.doctor import examination, line, machine, packages
from htile.cli.doctor import trial as trials
from htile.cli.doctor.check import FAIL, OK, WARN, Check, dotted
from htile.cli.doctor.machine import Driver
from htile.cli.doctor.packages import DSL, LIBS, Wheels
from htile.cli.doctor.trial import Trial

REPO = Path(__file__).parents[1]
CUDA12, CUDA13 = Driver("570.86", (12, 8), 1), Driver("580.95", (13, 0), 1)
HOPPER, TURING, FUTURE = ("H200", (9, 0)), ("T4", (7, 5)), ("X", (99, 0))


class Distribution(metadata.Distribution):
    """An installed package; `files` has the hash of each of its paths."""

    def __init__(self, name, version, folder="/site", files=None):
        self.text = f"Name: {name}\nVersion: {version}\n" if name else None
        self.folder = Path(folder)
        self.owned = files or {}

    def read_text(self, filename):
        return self.text if filename == "METADATA" else None

    def locate_file(self, path):
        return self.folder / path

    @property
    def files(self):
        found = []
        for name, digest in self.owned.items():
            path = metadata.PackagePath(name)
            path.hash = metadata.FileHash(f"sha256={digest}") if digest else None
            found.append(path)
        return found


def wheels(monkeypatch, *distributions) -> Wheels:
    made = [d if isinstance(d, Distribution) else Distribution(*d) for d in distributions]
    monkeypatch.setattr(metadata, "distributions", lambda: iter(made))
    return packages.read_wheels()


def dsl(*parts, version="4.8.1"):
    """The packages of a CuTe-DSL installation with these libs."""
    return [(DSL, version), *((LIBS + part, version) for part in parts)]


def torch_like(version="2.13.0", cuda="13.0", gpus=(), hip=None, error=None):
    def properties(index):
        if error:
            raise RuntimeError(error)
        name, (major, minor) = gpus[index]
        return Namespace(name=name, major=major, minor=minor)

    calls = Namespace(
        is_available=lambda: bool(gpus),
        device_count=lambda: len(gpus),
        get_device_properties=properties,
    )
    return Namespace(__version__=version, version=Namespace(cuda=cuda, hip=hip), cuda=calls)


def expect(check, status, found="", advice=""):
    assert check.status == status, check
    assert found in check.found and advice in check.advice, check
    assert status == OK or check.advice or check.name in ("NVIDIA driver", "GPU"), "what to do"


# ------------------------------------------------------------------------------ Python and torch


def test_python():
    expect(packages.check_python((3, 12, 1, "final", 0), "/bin/python"), OK, "3.12.1 (/bin/python)")
    expect(packages.check_python((3, 9, 1), "/bin/python"), FAIL, "3.9.1", "Python 3.10 or newer")


def test_system():
    expect(packages.check_system("Linux", "aarch64"), OK, "Linux aarch64")
    expect(packages.check_system("Linux", "riscv64"), WARN, "riscv64", "x86_64 and aarch64")
    expect(packages.check_system("Windows", "AMD64"), WARN, "Windows", "WSL 2")


def test_torch():
    check = packages.check_torch
    expect(check(None, None), FAIL, "can not be imported", "pip install -U 'torch>=2.7'")
    expect(check(torch_like("2.5.1"), CUDA13), FAIL, "2.5.1", "torch>=2.7")
    expect(check(torch_like("2.13.0+cu130"), CUDA13), OK, "2.13.0+cu130, CUDA 13.0 build")
    expect(check(torch_like("2.10.0+cpu", None), None), OK, "CPU build")
    expect(check(torch_like(cuda=None), CUDA13), WARN, "CPU build", "install a CUDA build")
    expect(check(torch_like(cuda=None, hip="6.3"), None), WARN, "ROCm build", "NVIDIA GPU")


def test_a_package(monkeypatch):
    here = wheels(monkeypatch, ("networkx", "2.8"), ("apache_tvm.ffi", "0.1.15.post2"))
    expect(packages.check_package("networkx", here), FAIL, "2.8", "pip install -U 'networkx>=3'")
    expect(packages.check_package("apache-tvm-ffi", here), OK, "0.1.15.post2")
    none = wheels(monkeypatch)
    expect(packages.check_package("networkx", none), FAIL, "not installed", "networkx>=3")


def test_the_ranges_are_those_of_the_package():
    text = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    for name, least in packages.MINIMUM.items():
        assert f'"{name}>={least}"' in text
    assert f'"{DSL}>={packages.DSL_FROM},<{packages.DSL_BELOW}; sys_platform' in text
    assert f'requires-python = ">={dotted(packages.PYTHON)}"' in text


def test_versions_compare_as_numbers():
    ordered = ["0.1.9", "0.1.11", "2.6", "2.13.0+cpu", "10"]
    assert sorted(ordered[::-1], key=packages._number) == ordered
    assert packages._number("4.8.0.dev1") == packages._number("4.8") == (4, 8)
    assert packages._number("unknown") == ()


# ------------------------------------------------------------------------------------ the wheels


def test_the_dsl(monkeypatch):
    none = wheels(monkeypatch)
    expect(packages.check_dsl(none, "Linux", 13), FAIL, "not installed", "[cu13]>=4.8,<4.9'")
    expect(packages.check_dsl(none, "Darwin", 12), WARN, "not installed", "Linux only")
    for version, status in (
        ("4.8.1", OK), ("4.8.1.post1", OK), ("4.8.0.dev1", WARN), ("4.7.2", FAIL), ("4.9.0", FAIL),
    ):  # fmt: skip
        check = packages.check_dsl(wheels(monkeypatch, (DSL, version)), "Linux", 12)
        expect(check, status, version, "" if status == OK else "-dsl>=4.8,<4.9'")


def test_wheels_that_fit(monkeypatch):
    both = wheels(monkeypatch, *dsl("base", "core", "cu12", "cu13"))
    expect(packages.check_dsl_wheels(both, 13), OK, "libs-cu12 4.8.1, libs-cu13 4.8.1")
    assert both.variants() == [12, 13]


@pytest.mark.parametrize("late", ["base", "cu12", "cu13"])
def test_wheels_of_different_versions(monkeypatch, late):
    mixed = [(n, "4.7.0" if n == LIBS + late else v) for n, v in dsl("base", "cu12", "cu13")]
    check = packages.check_dsl_wheels(wheels(monkeypatch, *mixed), 13)
    expect(check, FAIL, f"not all of 4.8.1: libs-base {'4.7.0' if late == 'base' else '4.8.1'}")
    assert f"libs-{late} 4.7.0" in check.found
    assert check.advice == (
        f"pip uninstall -y {DSL} {LIBS}base {LIBS}cu12 {LIBS}cu13 && "
        f"pip install '{DSL}[cu13]>=4.8,<4.9'"
    )


def test_wheels_installed_twice_in_one_folder(monkeypatch):
    parts = dsl("base", "cu12")
    check = packages.check_dsl_wheels(wheels(monkeypatch, *parts, (LIBS + "cu12", "4.7.0")), 12)
    expect(check, FAIL, "twice in one folder: nvidia-cutlass-dsl-libs-cu12", "pip uninstall")
    elsewhere = (LIBS + "cu12", "4.7.0", "/other")  # hidden by the first: no harm
    expect(packages.check_dsl_wheels(wheels(monkeypatch, *parts, elsewhere), 12), OK)
    expect(packages.check_dsl_wheels(wheels(monkeypatch, *parts, *parts), 12), OK)


@pytest.mark.parametrize("parts", [(), ("base",), ("cu12",)])
def test_wheels_that_are_missing(monkeypatch, parts):
    check = packages.check_dsl_wheels(wheels(monkeypatch, *dsl(*parts)), 12)
    expect(check, FAIL, "incomplete: " + ("libs-" if parts else "none"), "pip install")


def test_wheels_that_hold_the_same_file(monkeypatch):
    def pair(one, other):
        return wheels(
            monkeypatch,
            (DSL, "4.8.1"),
            Distribution(LIBS + "base", "4.8.1", files={"lib/a.so": one, "RECORD": None}),
            Distribution(LIBS + "cu13", "4.8.1", files={"lib/a.so": other, "RECORD": None}),
        )

    check = packages.check_dsl_wheels(pair("x", "y"), 13)
    expect(check, FAIL, "1 files that two wheels hold with different content, such as lib/a.so")
    expect(packages.check_dsl_wheels(pair("x", "x"), 13), OK)


def test_the_old_package(monkeypatch):
    assert packages.check_old_cutlass(wheels(monkeypatch, *dsl("base", "cu12"))) is None
    old = wheels(monkeypatch, *dsl("base", "cu12"), ("nvidia-cutlass", "3.5.0"))
    expect(packages.check_old_cutlass(old), WARN, "3.5.0", "pip uninstall nvidia-cutlass")


def test_the_module_cutlass(tmp_path):
    check = packages.check_cutlass_module
    expect(check(None, 12), FAIL, "not found", ".pth")
    expect(check([str(tmp_path)], 12), FAIL, f"{tmp_path} is not CuTe-DSL", "rename that folder")
    (tmp_path / "base_dsl").mkdir()
    expect(check([str(tmp_path)], 12), OK, str(tmp_path))


def test_a_leftover_without_metadata_is_not_installed(monkeypatch):
    assert wheels(monkeypatch, (None, None), ("x", "1")).version("x") == "1"


def test_the_variant():
    check = packages.check_variant
    expect(check([12], None, None), OK, "cu12")
    expect(check([12, 13], None, None), OK, "cu12 and cu13, of which cu13 is loaded")
    expect(check([12, 13], "13.0", CUDA13), OK, "cu13 is loaded")
    expect(check([12, 13], "12.8", CUDA12), OK, "cu12 is loaded")
    expect(check([12], "12.8", CUDA13), OK, "cu12")
    expect(check([12], "13.0", CUDA13), WARN, "torch is built for CUDA 13.0", "-dsl[cu13]")
    expect(check([12, 13], "12.8", CUDA13), WARN, "built for CUDA 12.8", "a torch for CUDA 13")
    expect(check([13], "12.8", CUDA12), FAIL, "the driver supports CUDA 12.8", "-dsl>=4.8")
    old = Driver("470.1", (11, 4), 1)
    expect(check([12], None, old), FAIL, "supports CUDA 11.4", "update the NVIDIA driver")
    assert "pip" not in check([12], None, old).advice
    expect(check([12], None, Driver("580", None, 1)), OK)


# ---------------------------------------------------------------------------- the driver and GPUs


def test_the_driver():
    expect(machine.check_driver(None), WARN, "none")
    expect(machine.check_driver(CUDA13), OK, "580.95, CUDA 13.0")
    expect(machine.check_driver(Driver("580", None, 1)), OK, "CUDA version unknown")
    expect(machine.check_driver(Driver("470.1", (11, 4), 1)), FAIL, "CUDA 11.4", "525 or newer")


class Library:
    """A driver's library: each function returns `code` and answers with the given facts."""

    def __init__(self, code=0, version=b"580.95", gpus=2, cuda=13010):
        self.code, self.version, self.gpus, self.cuda = code, version, gpus, cuda

    def nvmlInit_v2(self):
        return self.code

    def nvmlShutdown(self):
        return self.code

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = self.version
        return self.code

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = self.gpus
        return self.code

    def cuDriverGetVersion(self, number):
        number._obj.value = self.cuda
        return self.code


@pytest.mark.parametrize(
    ("libraries", "driver"),
    [
        ((None, None), None),
        ((Library(), Library()), Driver("580.95", (13, 1), 2)),
        ((None, Library(cuda=12090)), Driver("of unknown version", (12, 9), 0)),
        ((Library(), None), Driver("580.95", None, 2)),
        ((Library(), Library(cuda=0)), Driver("580.95", None, 2)),
        ((Library(code=9), Library(code=34)), None),  # libraries, but no driver beneath them
    ],
)
def test_what_the_driver_says(monkeypatch, libraries, driver):
    nvml, libcuda = libraries
    answers = {"libnvidia-ml.so.1": nvml, "libcuda.so.1": libcuda}
    monkeypatch.setattr(machine, "_library", lambda linux, windows: answers[linux])
    assert machine.read_driver() == driver


def test_a_library_that_is_not_there():
    assert machine._library("libno-such-thing.so", "no-such-thing.dll") is None


def test_gpus():
    def gpus(*found):
        return machine.check_gpus(torch_like(gpus=found), CUDA13, {})

    (one,) = gpus(HOPPER)
    expect(one, OK, "H200, compute capability 9.0 (sm_90a)")
    expect(gpus(TURING)[0], FAIL, "T4, compute capability 7.5", "8.0 or newer")
    expect(gpus(FUTURE)[0], FAIL, "99.0", "please report")
    expect(gpus(TURING, HOPPER)[0], WARN, "T4")
    assert [c.name for c in gpus(TURING, HOPPER)] == ["GPU 0", "GPU 1"]
    (broken,) = machine.check_gpus(torch_like(gpus=[HOPPER], error="no\nluck"), CUDA13, {})
    expect(broken, FAIL, "torch can not use it: no", "nvidia-smi")
    assert "luck" not in broken.found


def test_no_gpu():
    def why(torch, driver, **environ):
        (check,) = machine.check_gpus(torch, driver, environ)
        return check

    expect(why(torch_like(cuda=None), None), WARN, "none: CPU tensors")
    expect(why(torch_like(), Driver("580", (13, 0), 0)), WARN, "none: CPU tensors")
    expect(why(None, CUDA13), WARN, "1 in this machine", "install a CUDA build")
    expect(why(torch_like(cuda=None), CUDA13), WARN, "torch sees none", "install a CUDA build")
    hidden = why(torch_like(), CUDA13, CUDA_VISIBLE_DEVICES="")
    expect(hidden, WARN, "torch sees none", "CUDA_VISIBLE_DEVICES='' hides them")
    expect(why(torch_like(), CUDA12), FAIL, "torch sees none", "update the driver, or install")
    expect(why(torch_like(), CUDA13), FAIL, "torch sees none", "torch.cuda.init()")


# -------------------------------------------------------------------------------------- folders


def test_the_dump_folder(tmp_path):
    assert machine.check_dump({}) is None and machine.check_dump({"HTILE_DUMP": ""}) is None
    expect(machine.check_dump({"HTILE_DUMP": str(tmp_path / "a" / "b")}), OK, "b")
    assert not list(tmp_path.iterdir()), "nothing is made"
    (tmp_path / "file").write_text("")
    below = {"HTILE_DUMP": str(tmp_path / "file" / "dump")}
    expect(machine.check_dump(below), FAIL, "can not be written", "unset")


def test_the_cache_folder(tmp_path, monkeypatch):
    here = {"HTILE_CACHE_DIR": str(tmp_path)}
    expect(machine.check_cache(here, "Linux"), OK, str(tmp_path))

    def full(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", full)
    expect(machine.check_cache(here, "Linux"), WARN, "compiles again", "HTILE_CACHE_DIR")
    off = {"HTILE_CACHE_DIR": ""}
    expect(machine.check_cache(off, "Linux"), WARN, "none: every process", "unset HTILE_CACHE_DIR")


def test_the_size_of_the_cache(tmp_path):
    folder = {"HTILE_CACHE_DIR": str(tmp_path), "HTILE_CACHE_SIZE": "foo"}
    expect(machine.check_cache(folder, "Linux"), FAIL, "HTILE_CACHE_SIZE='foo'", "unset it, or")
    expect(machine.check_cache(folder | {"HTILE_CACHE_SIZE": "2G"}, "Linux"), OK, str(tmp_path))
    expect(machine.check_cache(folder | {"HTILE_CACHE_DIR": ""}, "Linux"), WARN, "none", "unset")


def test_the_linker():
    expect(machine.check_linker("/usr/bin/ld", None), OK, "/usr/bin/ld")
    expect(machine.check_linker(None, "0.1.3"), OK, "apache-tvm-ffi-orcjit 0.1.3")
    expect(machine.check_linker(None, None), WARN, "imports CuTe-DSL", "binutils")


def test_where_the_cache_folder_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    folder = machine.cache_folder
    assert folder({}, "Linux") == Path("/home/me/.cache/htile")
    assert folder({"XDG_CACHE_HOME": "/c"}, "Linux") == Path("/c/htile")
    assert folder({"XDG_CACHE_HOME": "/c", "HTILE_CACHE_DIR": "/d"}, "Linux") == Path("/d")
    assert folder({}, "Darwin") == Path("/home/me/Library/Caches/htile")
    assert folder({"LOCALAPPDATA": "/l"}, "Windows") == Path("/l/htile/cache")
    assert folder({"HTILE_CACHE_DIR": "~/mine"}, "Linux") == Path("/home/me/mine")
    assert folder({"HTILE_CACHE_DIR": ""}, "Linux") is None, "turned off"


# --------------------------------------------------------------------------------------- a trial


def said(capsys):
    lines = capsys.readouterr().out.splitlines()
    assert all(text.startswith("htile-trial {") for text in lines)
    return [json.loads(text.removeprefix("htile-trial ")) for text in lines]


def test_the_trial_compiles_and_runs(capsys):
    trials._trial("sm_90a", "cpu")  # the reference stands for the kernel
    compiled, ran = said(capsys)
    assert 0 < compiled["seconds"] < 60 and "registers" in compiled["resources"]
    assert ran == {"ran": True}


def test_the_trial_says_what_is_wrong(capsys, monkeypatch):
    def differ(*args):
        raise AssertionError("by 3")

    monkeypatch.setattr(htile.testing, "assert_close", differ)
    trials._trial("sm_90a", "cpu")
    assert said(capsys)[1:] == [{"ran": True}, {"wrong": "by 3"}]
    trials._trial("sm_75")
    (refused,) = said(capsys)
    assert "unknown architecture 'sm_75'" in refused["error"]


def ended(monkeypatch, out="", code=0, err=""):
    """The trial that comes of a process which prints `out` and ends with `code`."""
    done = subprocess.CompletedProcess([], code, out, err)
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: calls.append((a, k)) or done)
    monkeypatch.setenv("HTILE_DUMP", "/dump")
    trial = trials.try_kernel("sm_90a", 1)
    ((command,), options), *_ = calls
    assert command[-2:] == ["sm_90a", "cuda:1"] and "HTILE_DUMP" not in options["env"]
    assert options["env"]["HTILE_CACHE_DIR"] == "", "it is to compile"
    return trial


def test_how_the_trial_ends(monkeypatch):
    good = 'noise {\nhtile-trial {"seconds": 1.5, "resources": "few"}\nhtile-trial {"ran": true}\n'
    assert ended(monkeypatch, good) == Trial("sm_90a", 1.5, "few", True)
    crashed = ended(monkeypatch, code=1, err="Traceback\n  ...\nOSError: no ptxas\n\n")
    assert crashed.error == "OSError: no ptxas"
    assert ended(monkeypatch, code=-11).error == "signal 11: exit code -11"
    told = ended(monkeypatch, 'htile-trial {"error": "why"}', code=1, err="later")
    assert told.error == "why"

    def hang(*args, **kwargs):
        raise subprocess.TimeoutExpired("python", 300)

    monkeypatch.setattr(subprocess, "run", hang)
    assert trials.try_kernel("sm_90a", None).error == "it did not end within 300 seconds"


def test_what_a_trial_means():
    def trial(**facts):
        return Trial("sm_90a", **facts)

    expect(trials.check_compile(trial(seconds=0.25, resources="few")), OK, "in 0.2 s")
    assert trials.check_compile(trial(seconds=1.0)).name == "compile for sm_90a"
    expect(trials.check_compile(trial(error="why")), FAIL, "why", "above")
    expect(trials.check_compile(trial()), FAIL, "ended early")
    expect(trials.check_run(trial(seconds=1.0, ran=True), 0), OK, "right")
    expect(trials.check_run(trial(seconds=1.0, ran=True, wrong="by 3"), 0), FAIL, "wrong: by 3")
    expect(trials.check_run(trial(seconds=1.0, error="driver"), 0), FAIL, "driver")
    expect(trials.check_run(trial(seconds=1.0), 0), FAIL, "not tried")


# ------------------------------------------------------------------------------- all in their order


def examined(monkeypatch, *packages, torch=None, driver=None, trial=None):
    tried = []

    def try_kernel(arch, device):
        tried.append((arch, device))
        return trial or Trial(arch, 1.0, "few", device is not None)

    wheels(monkeypatch, ("networkx", "3.6"), ("apache-tvm-ffi", "0.1.15"), *packages)
    monkeypatch.setattr(examination, "read_driver", lambda: driver)
    monkeypatch.setattr(examination, "import_torch", lambda: torch)
    monkeypatch.setattr(examination, "try_kernel", try_kernel)
    monkeypatch.setattr(examination.platform, "system", lambda: "Linux")
    monkeypatch.setattr(examination.platform, "machine", lambda: "x86_64")
    for name in ("HTILE_DUMP", "HTILE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return {check.name: check for check in examination.examine()}, tried


def test_a_machine_with_a_gpu(monkeypatch):
    torch = torch_like(gpus=[TURING, HOPPER])
    both = dsl("base", "core", "cu12", "cu13")
    checks, tried = examined(monkeypatch, *both, torch=torch, driver=CUDA13)
    assert tried == [("sm_90a", 1)], "the first GPU that HTile knows"
    assert list(checks) == [
        "Python", "system", "torch", "networkx", "apache-tvm-ffi", "CuTe-DSL", "CuTe-DSL wheels",
        "module cutlass", "CuTe-DSL variant", "NVIDIA driver", "GPU 0", "GPU 1", "cache folder",
        "linker", "compile for sm_90a", "run on GPU 1",
    ]  # fmt: skip
    assert {n for n, c in checks.items() if c.status != OK} <= {"GPU 0", "cache folder", "linker"}


def test_a_machine_without_the_dsl(monkeypatch):
    checks, tried = examined(monkeypatch, torch=torch_like(cuda=None))
    assert not tried and checks["CuTe-DSL"].status == FAIL
    assert "[cu13]" not in checks["CuTe-DSL"].advice
    assert not [n for n in checks if "wheels" in n or "variant" in n or "compile" in n]


def test_advice_is_for_what_the_driver_can(monkeypatch):
    torch = torch_like(cuda="13.0")
    checks, _ = examined(monkeypatch, torch=torch, driver=CUDA13)
    assert "[cu13]" in checks["CuTe-DSL"].advice
    checks, _ = examined(monkeypatch, torch=torch, driver=CUDA12)
    assert "[cu13]" not in checks["CuTe-DSL"].advice


def test_a_gpu_that_breaks_is_not_tried(monkeypatch):
    torch = torch_like(gpus=[HOPPER], error="bad")
    old = ("nvidia-cutlass", "3.5")
    monkeypatch.setenv("HTILE_CACHE_DIR", "/c")
    checks, tried = examined(monkeypatch, *dsl("base"), old, torch=torch, driver=CUDA13)
    assert tried == [("sm_90a", None)] and checks["GPU"].status == FAIL
    assert checks["CuTe-DSL wheels"].status == FAIL and "nvidia-cutlass" in checks
    assert "CuTe-DSL variant" not in checks, "there is none"


def test_a_compile_that_fails_is_not_run(monkeypatch):
    torch, trial = torch_like(gpus=[HOPPER]), Trial("sm_90a", error="why")
    checks, _ = examined(monkeypatch, *dsl("base", "cu12"), torch=torch, driver=CUDA13, trial=trial)
    assert checks["compile for sm_90a"].status == FAIL
    assert not [n for n in checks if n.startswith("run on")]


def test_torch_that_can_not_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert packages.import_torch() is None
    checks, tried = examined(monkeypatch, *dsl("base", "cu12"))
    assert checks["torch"].status == FAIL and not tried


# ------------------------------------------------------------------------------------ the command


def diagnose(monkeypatch, capsys, checks, *options):
    monkeypatch.setattr("htile.cli.doctor.examination.examine", lambda: iter(checks))
    return cli.main(["doctor", *options]), capsys.readouterr().out


GOOD, ODD, BAD = Check("a", OK, "1"), Check("b", WARN, "2", "do x"), Check("c", FAIL, "3", "do y")


def test_only_failures_fail(monkeypatch, capsys):
    code, out = diagnose(monkeypatch, capsys, [GOOD, ODD])
    assert code == 0 and re.search(r"works here: 2 checks, 0 failed, 1 warnings\n$", out)
    assert [text.split() for text in out.splitlines()[:3]] == [
        ["ok", "a", "1"], ["warn", "b", "2"], ["do", "x"]
    ]  # fmt: skip
    code, out = diagnose(monkeypatch, capsys, [GOOD, ODD, BAD])
    assert code == 1 and "does not work here: 3 checks, 1 failed, 1 warnings" in out


def test_the_diagnosis_as_json(monkeypatch, capsys):
    code, out = diagnose(monkeypatch, capsys, [GOOD, BAD], "--json")
    assert code == 1
    report = json.loads(out)
    assert report == {
        "htile": htile.__version__,
        "ok": False,
        "checks": [
            {"name": "a", "status": "ok", "found": "1", "advice": ""},
            {"name": "c", "status": "fail", "found": "3", "advice": "do y"},
        ],
    }


def test_colours_only_where_somebody_looks(monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert "\x1b" not in line(BAD)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert line(GOOD).startswith("\x1b[32mok") and "\x1b[33m" in line(ODD)
    assert line(BAD).startswith("\x1b[31mfail") and "\x1b[31mdo y" in line(BAD)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in line(BAD)


def test_long_text_wraps_beside_the_name(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = line(Check("name", FAIL, "found " * 20, "advice " * 20)).splitlines()
    assert len(lines) > 3 and all(len(text) <= 80 for text in lines)
    assert lines[0].startswith("fail  name") and all(
        text.startswith(" " * 26) for text in lines[1:]
    )


def test_this_machine(tmp_path):
    """It is started from another folder, as a user would, and compiles a real kernel."""
    environ = os.environ | {"PYTHONPATH": str(REPO), "HTILE_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "htile", "doctor", "--json"], cwd=tmp_path, env=environ,
        capture_output=True, text=True,
    )  # fmt: skip
    report = json.loads(run.stdout)
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    assert run.returncode == 0 and report["ok"] and not failed, failed
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert status["torch"] in ("ok", "warn") and status["Python"] == "ok"
    assert [n for n in status if n.startswith("compile for sm_")]
