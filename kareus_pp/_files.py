"""Files of kareus-pp: atomic writes, an envelope with format and version, validated reads."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kareus_pp.errors import FormatError

_PREFIX = "kareus-pp/"
ModelT = TypeVar("ModelT", bound=BaseModel)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part.

    Raises:
        FormatError: The file cannot be written.
    """
    try:
        _write_text(Path(path), text)
    except OSError as error:
        raise FormatError(
            f"cannot write the file {os.fspath(path)!r} ({error.strerror or error}); name a file "
            f"in a folder that can be written"
        ) from None


def _write_text(target: Path, text: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_document(
    path: str | os.PathLike[str], kind: str, version: int, body: Mapping[str, Any]
) -> None:
    """Write a JSON document with its envelope (`format`, `version`) atomically."""
    document = {"format": _PREFIX + kind, "version": version, **body}
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def read_document(path: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """Read a JSON document and check its envelope; returns the body without the envelope.

    Raises:
        FormatError: The file is absent, not JSON, of another format or of a newer version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise FormatError(
            f"cannot read the {kind} file {os.fspath(path)!r} ({reason}); "
            f"name an existing {kind} file"
        ) from None
    return parse_document(text, kind, version, origin=os.fspath(path))


def parse_document(text: str, kind: str, version: int, origin: str = "text") -> dict[str, Any]:
    """Parse a JSON document and check its envelope; see `read_document`."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{origin!r} is not a {kind} file: it is not valid JSON ({error}); "
            f"write it with kareus-pp"
        ) from None
    found = document.get("format") if isinstance(document, dict) else None
    if found != _PREFIX + kind:
        raise FormatError(
            f"{origin!r} is not a {kind} file: its format is {found!r} and must be "
            f"{_PREFIX + kind!r}; write it with kareus-pp"
        )
    if document.get("version") != version:
        raise FormatError(
            f"{origin!r} has {kind} version {document.get('version')!r} and this kareus-pp "
            f"reads version {version}; write it again with this version"
        )
    return {key: value for key, value in document.items() if key not in ("format", "version")}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def validated(model: type[ModelT], body: Mapping[str, Any], kind: str) -> ModelT:
    """Validate the body of a document with a pydantic model.

    Raises:
        FormatError: Naming the first offending place, its value and what is allowed.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        value = f" is {first['input']!r:.80}" if first["type"] != "missing" else ""
        raise FormatError(
            f"the {kind} is malformed: {place}{value}: {first['msg']}; "
            f"write it again with kareus-pp"
        ) from None
