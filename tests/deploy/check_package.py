"""What is shipped: the sdist and the wheel hold the whole package and work in an environment of their own.

Slow (it builds and installs), so it is not collected by the unit suite: `make test-deploy`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from .image import stages

ROOT = Path(__file__).parents[2]
LINKED = ("conductor", "loadtests", "policies", "router")
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "run", "*.egg-info", "__pycache__")


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output; a failure shows both streams."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing left in the tree can help; the wheel comes from the sdist."""
    source = tmp_path_factory.mktemp("source") / "kvroute"
    shutil.copytree(ROOT, source, symlinks=True, ignore=NOT_SOURCE)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, source, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("kvroute-*.whl")
    return path


def modules() -> set[str]:
    """Every source file of the package by its path in the wheel, the linked folders included."""
    src = ROOT / "src"
    found = {p.relative_to(src).as_posix() for p in (src / "kvroute").glob("*.py")}
    for name in LINKED:
        found |= {
            f"kvroute/{name}/{p.relative_to(ROOT / name).as_posix()}" for p in (ROOT / name).rglob("*.py")
        }
    return found


def test_wheel_holds_every_module_and_nothing_beside_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {n for n in names if n.endswith(".py")} == modules()
    assert {"kvroute/py.typed", "kvroute/conductor/_block_index.pyi"} <= names
    assert [n for n in names if n.endswith(".so")], "the index was not compiled from what the sdist holds"
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)
    assert {n.split("/")[0].split("-")[0] for n in names} == {"kvroute"}


def test_sdist_holds_every_module_and_the_license(dist: Path) -> None:
    (path,) = dist.glob("kvroute-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    assert {f"src/{m}" for m in modules()} <= names
    assert {"src/kvroute/py.typed", "LICENSE", "README.md", "pyproject.toml"} <= names


def test_wheel_runs_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    bin_ = tmp_path / "venv" / "bin"
    run(bin_ / "pip", "install", "--quiet", wheel, cwd=tmp_path)
    run(bin_ / "pip", "check", cwd=tmp_path)
    names = sorted(m.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for m in modules())
    imported = "\n".join(f"import {n}" for n in names if not n.endswith("__main__"))
    run(bin_ / "python", "-I", "-c", imported, cwd=tmp_path)
    assert wheel.name.split("-")[1] in run(bin_ / "kvroute", "version", cwd=tmp_path)
    assert "ttft" in run(bin_ / "kvroute", "config", cwd=tmp_path)


def test_build_stage_of_the_image(tmp_path: Path) -> None:
    """Its steps in their order, with what it copies and nothing else, in folders of this test.

    But for the compiler's installation: this machine's own is used.
    """
    build = stages()[0]
    folders = {
        name: tmp_path / name.strip("/").replace("/", "-") for name in ("/src", "/wheels", "/opt/kvroute")
    }
    source = folders["/src"]
    source.mkdir()
    for name in build.copied_from_context():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=NOT_SOURCE)
        else:
            shutil.copy(ROOT / name, source / name)
    install, *steps = build.all("RUN")
    assert install.startswith("apt-get update && apt-get install")
    for step in steps:
        command = step.replace("python -m", f"{sys.executable} -m")
        for name, folder in folders.items():
            command = command.replace(name, str(folder))
        run("sh", "-ec", command, cwd=source)
    environment = folders["/opt/kvroute"]
    assert not (environment / "bin" / "pip").exists()
    assert "ttft" in run(environment / "bin" / "kvroute", "config", cwd=tmp_path)
