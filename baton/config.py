"""How a process gets its settings: flags over environment over a TOML file over defaults.

Owns the translation between text and the fields of a frozen, slotted,
keyword-only dataclass. It knows no particular setting: what a value means, and
whether two values fit together, is decided by the dataclass's __post_init__.

A field's type is str, int, float, bool, tuple[int, ...] or tuple[str, ...], or
one of these or None. For a field `max_batch` of section "router":

    flag         --max-batch 8      a bool is --x / --no-x; --unset-x means None
    environment  BATON_ROUTER_MAX_BATCH=8
    file         [router]           named by --config or BATON_CONFIG
                 max_batch = 8

In flags and variables a tuple is written 1,2,3, or as a JSON list. A field with repr=False is a secret.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from baton.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")
Scalar = str | int | float | bool
Value = Scalar | tuple[Scalar, ...] | None

_ARTICLE = {str: "a string", int: "an integer", float: "a finite number", bool: "true or false"}
_PLURAL = {str: "strings", int: "integers", float: "finite numbers", bool: "booleans"}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_CONFIG_VARIABLE = "BATON_CONFIG"
# All roles may share one file, so each must know the tables of the others: a misspelt one is an error.
SECTIONS = frozenset({"cluster", "router", "prefill", "decode", "pool"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A value and where it came from, in words."""

    value: Value
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """One field, as a user sees it."""

    name: str
    kind: type[Scalar]
    is_tuple: bool
    is_optional: bool
    default: object
    help: str
    is_secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def unset_flag(self) -> str:
        return "--unset-" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        """What may be written, in words."""
        return f"a list of {_PLURAL[self.kind]}" if self.is_tuple else _ARTICLE[self.kind]

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value."""
        return self.kind is bool and not self.is_tuple

    def parse(self, text: str, origin: str) -> _Given:
        """The value that a flag's or a variable's text stands for."""
        try:
            value = self._parse_items(text) if self.is_tuple else _parse_scalar(self.kind, text)
        except ValueError:
            raise self._refusal(text, origin) from None
        return _Given(value=value, origin=origin)

    def check(self, value: object, origin: str) -> _Given:
        """The value that a TOML value stands for."""
        try:
            if not self.is_tuple:
                return _Given(value=_check_scalar(self.kind, value), origin=origin)
            return _Given(value=self._check_items(value), origin=origin)
        except ValueError:
            raise self._refusal(value, origin) from None

    def _parse_items(self, text: str) -> tuple[Scalar, ...]:
        if text.startswith("["):
            return self._check_items(json.loads(text))
        items = text.split(",") if text else []
        return tuple(_parse_scalar(self.kind, item) for item in items)

    def _check_items(self, value: object) -> tuple[Scalar, ...]:
        if not isinstance(value, list):
            raise ValueError(value)
        return tuple(_check_scalar(self.kind, item) for item in value)

    def _refusal(self, value: object, origin: str) -> ConfigError:
        return ConfigError(f"{origin}: {value!r} is not {self.allowed}", field=self.name)


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}", field="argv")


def load_config(
    cls: type[ConfigT], *, section: str, argv: Sequence[str], environ: Mapping[str, str]
) -> ConfigT:
    """Builds a config from flags, environment, file and defaults, in this order of precedence.

    Args:
        cls: the dataclass to build.
        section: the role's name, for example "router": its TOML table and part of its variables' names.
        argv: the arguments, without the program's name.
        environ: the environment; it is only read.

    Raises:
        ConfigError: a key is unknown or missing, a value is bad, or the file cannot be read. `field`
            names the key; the message names where it was set and what is allowed.
        SystemExit: --help was given.
    """
    settings = {setting.name: setting for setting in _settings(cls)}
    given = _given(settings, section, argv, environ)
    _require_all(settings, section, given)
    try:
        return cls(**{name: item.value for name, item in given.items()})
    except ConfigError as error:
        origin = given[error.field].origin if error.field in given else "default"
        raise ConfigError(f"{error.message} ({origin})", field=error.field) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A setting and where its value comes from.

    value: None where it is unset, and where it is missing.
    source: "missing" is one that must be set and is not.
    where: the flag, the variable or file:line; "" for a default.
    """

    name: str
    value: object
    source: Literal["flag", "environment", "file", "default", "missing"]
    where: str
    is_secret: bool


def explain_config(
    cls: type[DataclassInstance], *, section: str, argv: Sequence[str], environ: Mapping[str, str]
) -> list[Origin]:
    """Where each setting comes from, in the order of the fields; arguments and errors as of load_config().

    A value is checked for itself, not against the others, and nothing need be set.
    """
    settings = {setting.name: setting for setting in _settings(cls)}
    given = _given(settings, section, argv, environ)
    return [_origin(setting, given.get(setting.name), section) for setting in settings.values()]


def _origin(setting: _Setting, given: _Given | None, section: str) -> Origin:
    if given is not None:
        source, _, where = given.origin.replace("environment variable", "environment").partition(" ")
        if source == "file":
            path, _, key = where.rpartition(f", [{section}] ")
            line = line_of(Path(path).read_text(encoding="utf-8"), section, key)
            where = path if line is None else f"{path}:{line}"
    else:
        source, where = ("missing" if setting.default is MISSING else "default"), ""
    default = None if setting.default is MISSING else setting.default
    return Origin(
        name=setting.name,
        value=default if given is None else given.value,
        source=typing.cast("Any", source),
        where=where,
        is_secret=setting.is_secret,
    )


def line_of(text: str, section: str, key: str) -> int | None:
    """Line, from 1, on which a TOML text sets the key of a table; None where it is written unusually."""
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w-]+)\s*\]", line):
            table = header[1]
        elif table == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return None


def _given(
    settings: Mapping[str, _Setting], section: str, argv: Sequence[str], environ: Mapping[str, str]
) -> dict[str, _Given]:
    """What is set at all, by the source that goes first."""
    flags, path = _from_flags(settings, section, argv)
    path = path if path is not None else environ.get(_CONFIG_VARIABLE)
    given = _from_file(settings, section, Path(path)) if path is not None else {}
    return given | _from_environ(settings, section, environ) | flags


def _settings(cls: type[DataclassInstance]) -> Iterable[_Setting]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, is_tuple, is_optional = _shape(hints[field.name])
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield _Setting(
            name=field.name,
            kind=kind,
            is_tuple=is_tuple,
            is_optional=is_optional,
            default=default,
            help=field.metadata.get("help", ""),
            is_secret=not field.repr,
        )


def _shape(hint: Any) -> tuple[type[Scalar], bool, bool]:
    """Scalar type, whether it is a tuple, whether None is allowed."""
    is_optional = False
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        is_optional = len(members) < len(typing.get_args(hint))
        hint = members[0] if len(members) == 1 else hint
    arguments = typing.get_args(hint)
    is_tuple = typing.get_origin(hint) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis
    kind = arguments[0] if is_tuple else hint
    if kind not in _ARTICLE:
        raise TypeError(f"a config field cannot have the type {hint}")
    return kind, is_tuple, is_optional


def _parse_scalar(kind: type[Scalar], text: str) -> Scalar:
    if kind is bool:
        return _parse_bool(text)
    return _check_scalar(kind, kind(text))


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError(text)
    return lowered in _TRUE


def _check_scalar(kind: type[Scalar], value: object) -> Scalar:
    if kind is float and type(value) is int:
        value = float(value)
    # bool is a subclass of int, so the exact type is compared.
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(value)
    return value


def _from_flags(
    settings: Mapping[str, _Setting], section: str, argv: Sequence[str]
) -> tuple[dict[str, _Given], str | None]:
    parser = _parser(settings.values(), section)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        known = ", ".join(setting.flag for setting in settings.values())
        message = f"command line: {unknown[0]!r} is unknown; allowed: --config, {known}"
        raise ConfigError(message, field=unknown[0].split("=")[0].lstrip("-").replace("-", "_"))
    texts = vars(namespace)
    path = texts.pop("config file", None)
    return {name: _read_flag(settings[name], text) for name, text in texts.items()}, path


def _read_flag(setting: _Setting, text: str | bool | None) -> _Given:
    if isinstance(text, str):
        return setting.parse(text, f"flag {setting.flag}")
    return _Given(value=text, origin=f"flag {setting.unset_flag if text is None else setting.flag}")


def _parser(settings: Iterable[_Setting], section: str) -> _Parser:
    parser = _Parser(prog=section, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    # A destination with a space cannot clash with a field.
    parser.add_argument("--config", dest="config file", metavar="PATH", help="TOML file with settings")
    for setting in settings:
        _add_flag(parser, setting)
    return parser


def _add_flag(parser: _Parser, setting: _Setting) -> None:
    default = "required" if setting.default is MISSING else f"default: {setting.default!r}"
    text = f"{setting.help} ({default})".strip().replace("%", "%%")
    if setting.is_switch:
        parser.add_argument(setting.flag, dest=setting.name, action=argparse.BooleanOptionalAction, help=text)
    else:
        metavar = setting.kind.__name__.upper() + (",..." if setting.is_tuple else "")
        parser.add_argument(setting.flag, dest=setting.name, metavar=metavar, help=text)
    if setting.is_optional:
        parser.add_argument(
            setting.unset_flag,
            dest=setting.name,
            action="store_const",
            const=None,
            help=argparse.SUPPRESS,
        )


def _from_environ(
    settings: Mapping[str, _Setting], section: str, environ: Mapping[str, str]
) -> dict[str, _Given]:
    prefix = _prefix(section)
    names = {
        name.removeprefix(prefix).lower(): name
        for name, value in sorted(environ.items())
        if name.startswith(prefix) and not _is_service_link(name, value)
    }
    _refuse_unknown(names, settings, lambda key: f"environment variable {prefix}{key.upper()}")
    return {
        key: settings[key].parse(environ[name], f"environment variable {name}") for key, name in names.items()
    }


def _prefix(section: str) -> str:
    return f"BATON_{section.upper()}_"


def _is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set this variable for a Service that happens to be called like a section."""
    if re.search(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$", name):
        return True
    return name.endswith("_PORT") and re.match(r"(tcp|udp|sctp)://", value) is not None


def _from_file(settings: Mapping[str, _Setting], section: str, path: Path) -> dict[str, _Given]:
    table = _read_table(path, section)
    _refuse_unknown(table, settings, lambda key: f"file {path}, [{section}] {key}")
    return {
        key: settings[key].check(value, f"file {path}, [{section}] {key}") for key, value in table.items()
    }


def _read_table(path: Path, section: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"file {path} cannot be read as TOML: {error}", field="config") from None
    for key, value in document.items():
        if not isinstance(value, dict):
            message = f"file {path}: {key} stands outside a table; put it under [{section}]"
            raise ConfigError(message, field=key)
        if key not in SECTIONS | {section}:
            message = f"file {path}: table [{key}] is unknown; allowed: {', '.join(sorted(SECTIONS))}"
            raise ConfigError(message, field=key)
    table: dict[str, Any] = document.get(section, {})
    return table


def _refuse_unknown(
    keys: Iterable[str], settings: Mapping[str, _Setting], describe: Callable[[str], str]
) -> None:
    for key in keys:
        if key not in settings:
            message = f"{describe(key)} is unknown; allowed: {', '.join(settings)}"
            raise ConfigError(message, field=key)


def _require_all(settings: Mapping[str, _Setting], section: str, given: Mapping[str, _Given]) -> None:
    for name, setting in settings.items():
        if setting.default is MISSING and name not in given:
            message = (
                f"{name} is not set; give {setting.flag}, {_prefix(section)}{name.upper()} "
                f"or {name} under [{section}] in the file: {setting.allowed}"
            )
            raise ConfigError(message, field=name)
