"""The wheel: what is in it, and that it works away from the repository."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]

# Run by the new environment, outside of the repository.
SCRIPT = """
import sys
from pathlib import Path
import torch
import torch.nn.functional as F
import htile

assert Path(htile.__file__).is_relative_to(sys.prefix), htile.__file__

@htile.rowwise
def swiglu(gate, up):
    return F.silu(gate) * up

gate, up = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
expected = F.silu(gate.double()) * up.double()
torch.testing.assert_close(swiglu(gate, up).double(), expected, rtol=1e-6, atol=1e-6)
meta = torch.empty(4, 4096, dtype=torch.bfloat16, device="meta")
kernel = swiglu.inspect(meta, meta, arch="sm_100a")
print(kernel.resources.threads, htile.__version__)
"""


def run(command, **kwargs):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of what git tracks, so that nothing is left behind here."""
    source = tmp_path_factory.mktemp("source")
    files = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=REPO)
    parts = ("htile/", "pyproject.toml", "README.md", "LICENSE")
    for name in filter(None, files.split("\0")):
        if (REPO / name).is_file() and name.startswith(parts):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPO / name).read_bytes())
    target = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    run([*pip, "--no-build-isolation", "--no-index", "-w", target, source])
    (found,) = target.glob("htile-*.whl")
    return found


def test_the_wheel_holds_the_package_and_its_types(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {str(f.relative_to(REPO)) for f in (REPO / "htile").rglob("*.py")}
    assert expected | {"htile/py.typed"} <= names
    assert not [n for n in names if n.startswith(("tests", "benchmarks", "examples"))]


def test_an_installed_function_runs_and_compiles(wheel, tmp_path):
    """In an environment that has the requirements on its path, but not this repository."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run([python, "-c", where]).strip())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    run([*pip, "--no-deps", "--no-index", "--target", site, wheel])
    requirements = Path(sysconfig.get_path("purelib"))
    # A path in a .pth file is put on sys.path, but .pth files there are not read: the editable
    # install of this repository stays out of sight, and the path of CuTe-DSL has to be named.
    paths = [requirements, requirements / "nvidia_cutlass_dsl" / "dsl_packages"]
    (site / "requirements.pth").write_text("\n".join(map(str, paths)))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    environ = {"HTILE_CACHE_DIR": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    said = run([python, "script.py"], cwd=folder, env=environ)
    threads, version = said.split()
    assert int(threads) >= 32 and version in wheel.name
