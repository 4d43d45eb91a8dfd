"""Results as files: JSON with everything in it, and flat tables of figures as CSV or Parquet."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from kvroute.loadtests.results.rows import Row

MAX_FILE_BYTES = 256 << 20
MAX_ROWS = 10_000
STDOUT = Path("-")


class ResultsError(ValueError):
    """Results cannot be read or written; the message names the file, the field and what is expected."""


def read_results(paths: Sequence[Path]) -> list[Row]:
    """The rows of all files, in their order. ResultsError names the file and what is wrong with it."""
    rows = [row for path in paths for row in _read(path)]
    if len(rows) > MAX_ROWS:
        raise ResultsError(f"{len(rows)} rows of results; at most {MAX_ROWS} are taken")
    return rows


def _read(path: Path) -> list[Row]:
    wanted = "a file that `kvroute simulate --json` or `kvroute replay --json` wrote is expected"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}; {wanted}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ResultsError(f"{path}: more than {MAX_FILE_BYTES >> 20} MiB; {wanted}")
    try:
        rows = msgspec.json.decode(content, type=list[Row])
    except msgspec.ValidationError as error:
        raise ResultsError(f"{path}: {error}; {wanted}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ResultsError(f"{path}: no JSON: {error}; {wanted}") from None
    if not rows:
        raise ResultsError(f"{path}: an empty list; {wanted}")
    return rows


def to_json(rows: Sequence[Row]) -> bytes:
    """A list, a row on each line."""
    return b"[\n" + b",\n".join(msgspec.json.encode(row) for row in rows) + b"\n]\n"


def check_writable(json: Path | None, csv: Path | None, parquet: Path | None) -> None:
    """Before anything is computed: ResultsError if a file could not be written."""
    for option, path in (("--json", json), ("--csv", csv), ("--parquet", parquet)):
        if path is None or (option == "--json" and path == STDOUT):
            continue
        if path.is_dir():
            raise ResultsError(f"{option}: {path} is a directory; the path of a file is expected")
        place = path if path.exists() else path.parent
        if not os.access(place, os.W_OK):
            what = "cannot be written" if place.exists() else "does not exist"
            raise ResultsError(f"{option}: {path}: {place} {what}; the path of a file is expected")
    if parquet is not None and find_spec("pyarrow") is None:
        raise ResultsError(
            "--parquet: pyarrow is not installed; `pip install kvroute[parquet]`, or use --csv"
        )


def write_results(
    rows: Sequence[Row], json: Path | None = None, csv: Path | None = None, parquet: Path | None = None
) -> None:
    """Into every file that is named; "-" is standard output, for JSON. ResultsError when that fails."""
    if json == STDOUT:
        try:
            sys.stdout.write(to_json(rows).decode())
            sys.stdout.flush()
        except OSError as error:
            raise ResultsError(f"--json: standard output: {error.strerror}; it was not written") from None
    for path, write in ((json, _write_json), (csv, _write_csv), (parquet, _write_parquet)):
        if path is None or (path == STDOUT and path is json):
            continue
        try:
            write(path, rows)
        except OSError as error:
            raise ResultsError(f"{path}: {error.strerror or error}; it was not written") from None


def flat(row: Row) -> dict[str, Any]:
    """A table's line: every figure under its name, with its interval as `.low` and `.high`; no series."""
    options, setting = (msgspec.json.encode(part).decode() for part in (row.options, row.setting))
    line: dict[str, Any] = {
        **{"policy": row.policy, "options": options, "speed": row.speed, "workers": str(row.workers)},
        **{"trace": row.trace, "source": row.source, "seeds": row.seeds, "setting": setting},
        "warm_up": row.warm_up,
    }
    for name, bounds in row.ci95.items():
        line[name] = row.figure(name)
        line[f"{name}.low"], line[f"{name}.high"] = bounds or (None, None)
    return line


def _write_json(path: Path, rows: Sequence[Row]) -> None:
    path.write_bytes(to_json(rows))


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    lines = [flat(row) for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for line in lines for name in line)))
        writer.writeheader()
        writer.writerows(lines)


def _write_parquet(path: Path, rows: Sequence[Row]) -> None:
    pyarrow: Any = import_module("pyarrow")
    table = pyarrow.Table.from_pylist([flat(row) for row in rows])
    import_module("pyarrow.parquet").write_table(table, path)
