"""What can be told of the image without building it; check_package.py runs the steps of its build stage."""

from __future__ import annotations

import json
import tomllib

from typer.main import get_command

from kvroute.cli import app
from kvroute.config import Config

from .image import ROOT, stages

BUILD, RUNTIME = stages()


def test_what_is_copied_exists_and_is_all_that_the_context_holds() -> None:
    sources = BUILD.copied_from_context()
    assert [s for s in sources if not (ROOT / s).exists()] == []
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    assert sorted(sources) == sorted(line[1:] for line in ignore if line.startswith("!"))


def test_every_linked_folder_is_copied() -> None:
    linked = {
        p.resolve().relative_to(ROOT).as_posix()
        for p in (ROOT / "src" / "kvroute").iterdir()
        if p.is_symlink()
    }
    assert linked
    assert linked <= set(BUILD.copied_from_context())


def test_both_stages_have_one_interpreter() -> None:
    """The environment's python is a link to the base image's, so the second stage must be the same image."""
    assert BUILD.base.split()[0] == RUNTIME.base
    assert RUNTIME.copied_from_context() == []


def test_runs_without_root_and_without_a_shell() -> None:
    user, group = RUNTIME.last("USER").split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert RUNTIME.exec_form("ENTRYPOINT") == ["kvroute"]
    assert RUNTIME.all("RUN") == []
    assert "PYTHONDONTWRITEBYTECODE=1" in RUNTIME.last("ENV")


def test_command_is_one_of_ours_and_serves_the_port_that_is_exposed() -> None:
    name, *arguments = RUNTIME.exec_form("CMD")
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    given = command.make_context(name, arguments, resilient_parsing=False).params
    assert given["host"] == "0.0.0.0"
    assert given["port"] == Config().port == int(RUNTIME.last("EXPOSE"))


def test_health_is_asked_on_that_port_of_the_path_that_needs_no_worker() -> None:
    _, _, command = RUNTIME.last("HEALTHCHECK").partition("CMD ")
    program, flag, source = json.loads(command)
    assert (program, flag) == ("python", "-c")
    assert f"http://127.0.0.1:{RUNTIME.last('EXPOSE')}/livez" in source
    compile(source, "healthcheck", "exec")


def test_labels_say_what_the_package_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = RUNTIME.last("LABEL")
    assert f'org.opencontainers.image.version="{project["version"]}"' in labels
    assert f'org.opencontainers.image.licenses="{project["license"]}"' in labels
